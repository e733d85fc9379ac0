"""Turns of `chat.db`: the tree, and the transactions T1 to T3 that add to it.

Knows when a prompt is safe and when a reply is closed. Knows nothing of the list of conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from chatkv.errors import StoreError
from sessions import tree
from sessions.columns import Spans, dump_json
from sessions.records import BegunTurn, Render, SessionRow, TurnPath, TurnRow
from sessions.storefile import StoreFile

USER, REPLY = 0, 1
"""`seq` of the two messages of a turn without tools."""


class TurnStore(StoreFile):
    """The turns of all conversations, as one tree."""

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        super().__init__(path, read_only=read_only)
        if self.read_only is None:
            with suppress(StoreError):  # busy or full: reading goes on, the next open tries again
                self.mark_interrupted()

    def path(self, session_id: str, turn_id: int | None = None) -> list[TurnPath]:
        """Turns from the root to the head of the session, or to `turn_id`. Raises UnknownSession.

        The first holds the system prompt. The same for every reader, wherever it came from.
        """
        with self._reading():
            row = tree.get_session(self._db, session_id)
            end = row.head_turn_id if turn_id is None else turn_id
            if end is None:
                return []
            tree.get_turn(self._db, end)
            return tree.load_turns(self._db, tree.path_ids(self._db, end))

    def turns(self, turn_ids: Sequence[int]) -> list[TurnPath]:
        """These turns, wherever they are in the tree. Raises UnknownSession."""
        with self._reading():
            for turn_id in turn_ids:
                tree.get_turn(self._db, turn_id)
            return tree.load_turns(self._db, turn_ids)

    def tree(
        self, session_id: str, *, path_only: bool = False
    ) -> tuple[list[SessionRow], list[TurnPath]]:
        """A whole chat: its sessions and turns, parents first. Raises UnknownSession.

        Args:
            session_id: Any session of the chat.
            path_only: This session alone, with its path.
        """
        with self._reading():
            row = tree.get_session(self._db, session_id)
            sessions = [row] if path_only else tree.family(self._db, session_id)
            heads = [session.head_turn_id for session in sessions]
            owners = [] if path_only else [session.id for session in sessions]
            ids = tree.closure(self._db, owners, [head for head in heads if head is not None])
            return sessions, tree.load_turns(self._db, ids)

    def siblings(self, turn_id: int) -> list[TurnRow]:
        """The turns with the same parent, oldest first, this one among them."""
        with self._reading():
            turn = tree.get_turn(self._db, turn_id)
            if turn.parent_id is None:
                return [turn]
            rows = self._db.execute(
                f"SELECT {tree.TURN} FROM turns WHERE parent_id = ? ORDER BY id", (turn.parent_id,)
            )
            return [TurnRow.of(row) for row in rows.fetchall()]

    def newest_leaf(self, turn_id: int) -> int:
        """Down from a turn, each time to its newest child: where switching to it leads."""
        with self._reading():
            turn_id = tree.get_turn(self._db, turn_id).id
            while True:
                child = self._db.execute(
                    "SELECT max(id) FROM turns WHERE parent_id = ?", (turn_id,)
                ).fetchone()[0]
                if child is None:
                    return turn_id
                turn_id = child

    def begin_turn(
        self,
        session_id: str,
        expected_head: int | None,
        parent_turn_id: int,
        user_text: str,
        sampling: Mapping[str, Any],
        *,
        render: Render | None = None,
        ops: Sequence[Mapping[str, Any]] | None = None,
    ) -> BegunTurn:
        """Commit a prompt (T1). When this returns, nothing can lose it.

        Args:
            session_id: Where.
            expected_head: The head the caller has on its screen. If the session has another by now,
                the turn is saved as the head of a new fork, and `forked` says so.
            parent_turn_id: The turn to answer after: the head, or another for a sibling.
            user_text: The prompt.
            sampling: Settings and seed, enough to replay.
            render: Its ids, if the tokenizer is ready; else `set_render` before generating.
            ops: Forget records of the turn, as `pending_ops` has them; None takes those.

        Raises:
            UnknownSession: The session or the parent is gone.
            StoreError: Not saved; the caller still has the text.
        """
        with self._writing():
            row = tree.get_session(self._db, session_id)
            parent = tree.get_turn(self._db, parent_turn_id)
            forked = row.head_turn_id != expected_head
            if forked:
                session_id = tree.add_session(
                    self._db,
                    title=tree.free_fork_title(self._db, session_id),
                    settings=row.settings,
                    forked_from=session_id,
                )
            turn_id = tree.add_turn(
                self._db,
                session_id=session_id,
                parent=parent,
                state="open",
                sampling=sampling,
                usage={"writer": self._writer_id()},
            )
            message_id = tree.put_message(
                self._db,
                turn_id=turn_id,
                seq=USER,
                role="user",
                content=user_text,
                state="done",
                render=render,
            )
            if ops is not None or not forked:
                tree.add_forgets(self._db, turn_id, row.pending_ops if ops is None else ops)
            moved = self._db.execute(
                "UPDATE sessions SET head_turn_id = ?, updated_at = ?, trashed_at = NULL,"
                " pending_ops = '[]' WHERE id = ? AND head_turn_id IS ?",
                (
                    turn_id,
                    tree.next_update(self._db),
                    session_id,
                    None if forked else expected_head,
                ),
            )
            assert moved.rowcount == 1, (session_id, expected_head)
            return BegunTurn(turn_id, message_id, session_id, forked, parent.depth + 1)

    def set_render(
        self, message_id: int, tok_fp: bytes, ids: Sequence[int], sampled: Spans = ()
    ) -> None:
        """Store the ids of a message under one tokenizer and template."""
        with self._writing():
            tree.put_render(self._db, message_id, Render(tok_fp, ids, sampled))

    def save_partial(
        self, turn_id: int, text: str, tok_fp: bytes, ids: Sequence[int], sampled: Spans
    ) -> None:
        """Store what a reply has so far (T2): at its first token, then about once a second."""
        with self._writing():
            self._expect_open(turn_id)
            self._put_reply(turn_id, text, "partial", Render(tok_fp, ids, sampled))
            # Someone may have taken us for dead: on a file system without locks, for one.
            self._db.execute(
                "UPDATE turns SET state = 'open', usage = ? WHERE id = ? AND state = 'interrupted'",
                (dump_json({"writer": self._writer_id()}), turn_id),
            )

    def finish_turn(
        self,
        turn_id: int,
        state: Literal["done", "interrupted", "error"],
        text: str = "",
        tok_fp: bytes | None = None,
        ids: Sequence[int] = (),
        sampled: Spans = (),
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        """Close a turn (T3): reply, ids, states and usage in one commit.

        Args:
            turn_id: An open turn, or one that another process took for interrupted.
            state: How it ended. Without text and ids a reply that never began is not stored.
            text: The whole reply.
            tok_fp: Under which `ids` are stored; None stores text alone.
            ids: All ids of the reply, closing ids included.
            sampled: Those the model chose.
            usage: JSON: what the reply cost, and its finish reason.

        Raises:
            StoreError: The turn was finished before.
        """
        with self._writing():
            self._expect_open(turn_id)
            if text or ids or state == "done" or self._has_reply(turn_id):
                render = None if tok_fp is None else Render(tok_fp, ids, sampled)
                self._put_reply(turn_id, text, state, render)
            self._db.execute(
                "UPDATE turns SET state = ?, usage = ? WHERE id = ?",
                (state, dump_json(usage or {}), turn_id),
            )
            self._db.execute(
                "UPDATE sessions SET updated_at = ? WHERE id ="
                " (SELECT session_id FROM turns WHERE id = ?)",
                (tree.next_update(self._db), turn_id),
            )

    def _expect_open(self, turn_id: int) -> None:
        turn = tree.get_turn(self._db, turn_id)
        if turn.state == "done":
            raise StoreError(
                f"Turn {turn_id} is finished already.", hint="Add a new turn beside or below it."
            )

    def _has_reply(self, turn_id: int) -> bool:
        found = self._db.execute(
            "SELECT 1 FROM messages WHERE turn_id = ? AND seq = ?", (turn_id, REPLY)
        )
        return found.fetchone() is not None

    def _put_reply(self, turn_id: int, text: str, state: str, render: Render | None) -> None:
        tree.put_message(
            self._db,
            turn_id=turn_id,
            seq=REPLY,
            role="assistant",
            content=text,
            state=state,
            render=render,
        )

    def set_head(self, session_id: str, turn_id: int, expected: int | None) -> bool:
        """Make a turn the head (switching to a sibling). False if the head had moved meanwhile."""
        with self._writing():
            tree.get_session(self._db, session_id)
            tree.get_turn(self._db, turn_id)
            moved = self._db.execute(
                "UPDATE sessions SET head_turn_id = ? WHERE id = ? AND head_turn_id IS ?",
                (turn_id, session_id, expected),
            )
            return moved.rowcount == 1

    def mark_interrupted(self) -> int:
        """Close the turns whose process died; what they had is kept. Returns how many.

        Done at every open. A turn that is still being written elsewhere is left alone.
        """
        with self._reading():
            open_turns = self._db.execute(
                "SELECT id, usage FROM turns WHERE state = 'open'"
            ).fetchall()
        dead = [turn for turn in open_turns if not self._is_alive(turn[1])]
        if not dead:
            return 0
        with self._writing():
            for turn_id, usage in dead:
                # The usage tells that it is still the turn we looked at.
                if self._db.execute(
                    "UPDATE turns SET state = 'interrupted', usage = '{}'"
                    " WHERE id = ? AND state = 'open' AND usage = ?",
                    (turn_id, usage),
                ).rowcount:
                    self._db.execute(
                        "UPDATE messages SET state = 'interrupted'"
                        " WHERE turn_id = ? AND state = 'partial'",
                        (turn_id,),
                    )
        return len(dead)
