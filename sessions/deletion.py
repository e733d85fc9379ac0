"""Deleting conversations and redacting turns for good: first `chat.db` and the token logs, then
the pages.

Knows both stores by their methods. What cannot be removed from `kv.db` now stays written down in
`chat.db` (`purges`) and is worked off by whoever comes next: a deletion, `kv gc`, an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from chatkv.errors import ChatKVError, StoreError
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


@dataclass(frozen=True, slots=True)
class Redacted:
    """What `redact` removed."""

    turns: tuple[int, ...]
    """Ids of the turns: those asked for, and their other versions."""
    pages: int
    """Stored pages that had seen them."""
    files: tuple[str, ...] = ()
    """Copies of the store that a purge deleted."""


def redact(
    store: ChatStore, turn_ids: Sequence[int], *, purge: bool, remove: Callable[[], int]
) -> Redacted:
    """Take turns from the model and from every stored page, at a purge from the store as well.

    Args:
        store: Where they are.
        turn_ids: Which. Other versions with the same prompt go with them, in every fork.
        purge: Blank text and ids too, and delete the copies that migrations made of the store.
        remove: Removes the pages that `store.purges` names, and says how many.

    Raises:
        UnknownSession: One of them is gone.
        UsageError: One holds the system prompt, or is being answered.
        StoreError: They cannot be redacted; or they are, and their pages stay for now.
    """
    every = store.versions(turn_ids)
    store.redact(every, purge=purge)
    try:
        pages = remove()
    except ChatKVError as error:
        raise StoreError(
            f"Redacted, but stored pages that saw it are still there: {error.message}",
            hint="`chatkv kv gc` removes them, and so does the next start of a model.",
        ) from error
    files: list[str] = []
    if purge:
        if store.file is not None:
            for copy in sorted(store.file.parent.glob(f"{store.file.name}.bak-*")):
                copy.unlink(missing_ok=True)
                files.append(str(copy))
        store.compact()
    return Redacted(tuple(every), pages, tuple(files))


def shared_with(store: ChatStore, session_id: str, turn_ids: Sequence[int]) -> tuple[str, ...]:
    """Names of the other chats and forks whose path goes through one of these turns."""
    names: list[str] = []
    for row in store.sharers(turn_ids, but=session_id):
        first = store.family(row.id)[0]
        name = first.title or first.id[:12]
        names.append(name if row.forked_from is None else f"{name}:{row.title}")
    return tuple(names)


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
