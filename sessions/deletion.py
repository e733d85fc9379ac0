"""Deleting conversations for good: first what `chat.db` and the token logs hold, then the pages.

Knows both stores by their methods. What cannot be removed from `kv.db` now stays written down in
`chat.db` (`purges`) and is worked off by whoever comes next: a deletion, `kv gc`, an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from chatkv.errors import StoreError
from sessions.pages import SqlitePageStore, open_page_store
from sessions.store import ChatStore

Purge = Callable[[Sequence[int], int], int]
"""Ids of a path and how many of them others still need, to the number of pages removed."""


def delete_forever(
    store: ChatStore, session_ids: Sequence[str], kv_path: Path, *, limit_bytes: int | None = None
) -> int:
    """Delete sessions with their pages. What forks share stays with them.

    Args:
        store: Where they are.
        session_ids: Which; deleted one by one, each in one transaction.
        kv_path: `kv.db`.
        limit_bytes: The budget of that file.

    Returns:
        The pages removed.

    Raises:
        UnknownSession: One of them is gone already.
        StoreError: They cannot be deleted; or they are, and their pages stay for now.
    """
    for session_id in session_ids:
        store.delete(session_id)
    try:
        return purge_pages(store, kv_path, limit_bytes=limit_bytes)
    except StoreError as error:
        raise StoreError(
            f"The chats are deleted, but not their pages: {error.message}",
            hint="`chatkv kv gc` removes them, and so does the next start of a model.",
        ) from error


def purge_pages(store: ChatStore, kv_path: Path, *, limit_bytes: int | None = None) -> int:
    """Remove the pages of conversations that were deleted. Returns how many. Raises StoreError."""
    if not store.purges():
        return 0
    if not kv_path.exists():
        with suppress(OSError):
            kv_path.with_name(f"{kv_path.name}.damaged").unlink(missing_ok=True)
        return work_off(store, lambda _ids, _keep: 0)
    opened = open_page_store(kv_path, limit_bytes=limit_bytes)
    if opened.store is None:
        raise StoreError(opened.notice)
    with closing(opened.store) as pages:
        return work_off(store, pages.purge)


def work_off(store: ChatStore, purge: Purge) -> int:
    """Do every purge that is written down, and cross it out. Returns the pages removed."""
    gone = 0
    for row in store.purges():
        gone += purge(row.token_ids, row.keep_tokens)
        store.purge_done(row.id)
    return gone


def work_off_at_start(chat_db: Path, pages: SqlitePageStore) -> None:
    """What an engine does before its first request. Without a word: a later start tries again."""
    with suppress(StoreError):
        with ChatStore(chat_db, read_only=True) as store:
            if not store.purges():
                return
        with ChatStore(chat_db) as store:
            work_off(store, pages.purge)
