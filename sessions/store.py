"""`chat.db`: conversations, the truth. Every write is one transaction, committed when it returns.

Knows sessions: making, finding, forking (T7) and deleting (T8) them. The tree of turns is in
`turns.py` and `tree.py`, marks on turns in `forgets.py`, the file in `storefile.py`, the list in
`listing.py`. Knows nothing of pages and of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sessions import listing, removal, tree
from sessions import search as words
from sessions.columns import dump_json, load_object
from sessions.forgets import ForgetStore
from sessions.records import Match, PurgeRow, SessionRow, SessionSummary
from sessions.storefile import MEMORY

__all__ = ["MEMORY", "ChatStore"]


class ChatStore(ForgetStore):
    """Conversations in one SQLite file. Safe to use from several threads; a context manager.

    A folder or file that cannot be written, and a store of a newer chatkv, are opened for reading:
    `read_only` then says why, and every write raises it.

    Args:
        path: The file; made (0600, its folder 0700) if missing. `:memory:` keeps nothing.
        read_only: Open for reading, whatever the file allows.

    Raises:
        StoreError: Damaged, no store of ours, owned or writable by others, or cannot be made.
        StoreBusy: Another process holds the lock longer than five seconds.
    """

    def sessions(
        self,
        *,
        trash: bool = False,
        limit: int | None = None,
        query: str | None = None,
        sort: listing.Sort = "updated",
    ) -> list[SessionSummary]:
        """The list of conversations, each fork a line of its own.

        Args:
            trash: Those in the trash instead.
            limit: At most so many.
            query: Only those with these words in the title or in a message of theirs.
            sort: `updated` (newest first), `size` or `name`.
        """
        with self._reading():
            if not query or not query.strip():
                return listing.summaries(self._db, trash=trash, limit=limit, sort=sort)
            hits = words.newest_hits(self._db, query, limit=1000, trash=trash)
            named = self._named(query)
            among = named | hits.keys()
            rows = listing.summaries(self._db, trash=trash, limit=limit, sort=sort, among=among)
            texts = words.excerpts(self._db, query, [hits[r.id] for r in rows if r.id in hits])
            return [replace(row, match=texts.get(hits.get(row.id, 0), "")) for row in rows]

    def turn_usage(self) -> list[tuple[int, dict[str, Any]]]:
        """When each turn of all conversations began, in Unix milliseconds, and its numbers.

        Copies behind a summary are left out: what they cost was counted once.
        """
        with self._reading():
            rows = self._db.execute(
                "SELECT id, created_at, usage FROM turns"
                " WHERE depth > 0 AND json_extract(usage, '$.copy') IS NULL"
            )
            return [(at, load_object(usage, f"turn {row}")) for row, at, usage in rows.fetchall()]

    def _named(self, query: str) -> set[str]:
        """Ids of sessions with all these words in their name."""
        every = {head.id: head for head in listing.heads(self._db)}
        wanted = query.casefold().split()
        return {
            head.id
            for head in every.values()
            if all(
                word in f"{listing.chat_title(head, every)} {head.title}".casefold()
                for word in wanted
            )
        }

    def find(self, ref: str, *, trash: bool = False) -> SessionRow:
        """What `ref` means: `@last`, an id, a unique prefix of one, a name, or `name:fork`.

        Raises:
            UnknownSession: None, or more than one.
        """
        with self._reading():
            return listing.find_session(self._db, ref, trash=trash)

    def session(self, session_id: str) -> SessionRow:
        """The row of that id. Raises UnknownSession."""
        with self._reading():
            return tree.get_session(self._db, session_id)

    def family(self, session_id: str) -> list[SessionRow]:
        """The chat a session is part of: its first session and every fork, parents first."""
        with self._reading():
            return tree.family(self._db, session_id)

    def search(self, query: str, *, limit: int = 50) -> list[Match]:
        """Messages that hold every word of `query`, newest first; the trash is left out."""
        with self._reading():
            return words.search(self._db, query, limit=limit)

    def create_session(
        self, title: str = "", system: str = "", settings: Mapping[str, Any] | None = None
    ) -> SessionRow:
        """A new conversation. Its head is turn 0, which holds the system prompt, empty or not."""
        with self._writing():
            session_id = tree.add_session(self._db, title=title, settings=settings or {})
            turn_id = tree.add_turn(
                self._db, session_id=session_id, parent=None, state="done", sampling={}, usage={}
            )
            tree.put_message(
                self._db,
                turn_id=turn_id,
                seq=0,
                role="system",
                content=system,
                state="done",
                render=None,
            )
            self._db.execute(
                "UPDATE sessions SET head_turn_id = ? WHERE id = ?", (turn_id, session_id)
            )
            return tree.get_session(self._db, session_id)

    def fork(self, session_id: str, at_turn_id: int | None = None, title: str = "") -> SessionRow:
        """A conversation that shares everything up to a turn, the head by default (T7).

        Args:
            session_id: What is forked; settings are taken over.
            at_turn_id: The new head.
            title: Name of the fork; one that is free if empty.
        """
        with self._writing():
            row = tree.get_session(self._db, session_id)
            head = row.head_turn_id if at_turn_id is None else at_turn_id
            if head is not None:
                tree.get_turn(self._db, head)
            fork_id = tree.add_session(
                self._db,
                title=title or tree.free_fork_title(self._db, session_id),
                settings=row.settings,
                forked_from=session_id,
                head=head,
            )
            return tree.get_session(self._db, fork_id)

    def rename(self, session_id: str, title: str) -> None:
        """Set the name of a chat, or of a fork if `session_id` is one."""
        self._update_session(session_id, "title", tree.clean_title(title))

    def set_settings(self, session_id: str, settings: Mapping[str, Any]) -> None:
        """Replace the settings of a session: model, policy, sampling."""
        self._update_session(session_id, "settings", dump_json(settings))

    def set_pending_ops(self, session_id: str, ops: Sequence[Mapping[str, Any]]) -> None:
        """Replace what waits to be committed with the next turn as forget records.

        Args:
            session_id: Whose next turn.
            ops: Each with `policy`, `reason`, `op`, `num_tokens` and, for a recall, `cancels`.
        """
        self._update_session(session_id, "pending_ops", dump_json(ops))

    def trash(self, session_id: str) -> None:
        """Hide a session from the list. Its next turn, or `restore`, brings it back."""
        self._update_session(session_id, "trashed_at", tree.now_ms())

    def restore(self, session_id: str) -> None:
        """Take a session out of the trash."""
        self._update_session(session_id, "trashed_at", None)

    def _update_session(self, session_id: str, column: str, value: str | int | None) -> None:
        with self._writing():
            tree.get_session(self._db, session_id)
            self._db.execute(f"UPDATE sessions SET {column} = ? WHERE id = ?", (value, session_id))

    def delete(self, session_id: str) -> int:
        """Delete a session for good (T8): shared turns stay with those who share them.

        Returns the number of paths whose pages must still go: see `purges`.
        """
        with self._writing():
            tree.get_session(self._db, session_id)
            count = removal.remove_session(self._db, session_id)
            if count == 0:
                removal.rebuild_index(self._db)
            return count

    def purges(self) -> list[PurgeRow]:
        """Paths of deleted conversations whose pages may still be in `kv.db`, oldest first."""
        with self._reading():
            rows = self._db.execute(
                "SELECT id, tok_fp, token_ids, keep_tokens, ops, created_at FROM purges ORDER BY id"
            )
            return [PurgeRow.of(row) for row in rows.fetchall()]

    def purge_done(self, purge_id: int) -> None:
        """Forget a purge whose pages are gone; the last one also makes the search index anew."""
        with self._writing():
            self._db.execute("DELETE FROM purges WHERE id = ?", (purge_id,))
            if self._db.execute("SELECT 1 FROM purges LIMIT 1").fetchone() is None:
                removal.rebuild_index(self._db)
