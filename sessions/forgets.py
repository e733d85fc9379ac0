"""What the model does not see of `chat.db`, or must: forget records, pinned and redacted turns.

Knows rows and their transactions. Knows no token budget; the SQL of redacting is in `redaction.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chatkv.errors import UsageError
from sessions import branches, redaction, removal, tree
from sessions.branches import SummaryTurn
from sessions.records import SessionRow
from sessions.turns import TurnStore


class ForgetStore(TurnStore):
    """Marks on turns. A mark belongs to the turn: every fork that shares the turn has it."""

    def pin(self, turn_ids: Sequence[int], *, pinned: bool = True) -> None:
        """Keep turns in every context from now on, or no longer. Raises UnknownSession."""
        with self._writing():
            for turn_id in turn_ids:
                tree.get_turn(self._db, turn_id)
                self._db.execute("UPDATE turns SET pinned = ? WHERE id = ?", (int(pinned), turn_id))

    def add_forget(
        self, turn_id: int, policy: str, reason: str, op: Mapping[str, Any], num_tokens: int
    ) -> None:
        """Record what a policy put out of sight with that turn (T6). Append-only."""
        record = {"policy": policy, "reason": reason, "op": op, "num_tokens": num_tokens}
        with self._writing():
            tree.get_turn(self._db, turn_id)
            tree.add_forgets(self._db, turn_id, [record])

    def forget_counts(self) -> dict[str, dict[str, int]]:
        """`times` and `tokens` that left the model's sight, by policy, over all conversations."""
        with self._reading():
            rows = self._db.execute(
                "SELECT policy, count(*), sum(num_tokens) FROM forgets WHERE cancels IS NULL"
                " GROUP BY policy ORDER BY policy"
            )
            return {policy: {"times": n, "tokens": size} for policy, n, size in rows.fetchall()}

    def branch(self, session_id: str, made: SummaryTurn) -> int:
        """Put a summary in place of turns, on a branch that becomes the session's path.

        Returns the id of the turn to be answered, which has moved there. Raises StoreError if it
        has been answered meanwhile.
        """
        with self._writing():
            self._expect_open(made.kept[-1])
            return branches.add_branch(self._db, session_id, made)

    def versions(self, turn_ids: Sequence[int]) -> list[int]:
        """What is redacted together: turns, those beside them with the same prompt, their copies
        behind a summary, and summaries of them."""
        with self._reading():
            return redaction.versions(self._db, turn_ids)

    def sharers(self, turn_ids: Sequence[int], *, but: str) -> list[SessionRow]:
        """The sessions other than `but` whose path goes through one of these turns."""
        with self._reading():
            return redaction.sharers(self._db, turn_ids, but=but)

    def redact(self, turn_ids: Sequence[int], *, purge: bool = False) -> None:
        """Take turns from the model for good. `purges` then says which pages must go.

        Args:
            turn_ids: Which; their other versions go with them (see `versions`).
            purge: Blank their text and ids as well. What is written in `purges` keeps the ids until
                the pages are gone.

        Raises:
            UnknownSession: One of them is gone.
            UsageError: One holds the system prompt, or is being answered.
            StoreError: They cannot be redacted; nothing has changed.
        """
        with self._writing():
            every = redaction.versions(self._db, turn_ids)
            for turn_id in every:
                turn = tree.get_turn(self._db, turn_id)
                if turn.depth == 0:
                    raise UsageError(
                        "The system prompt cannot be redacted.", hint="Start a chat without it."
                    )
                if turn.state == "open":
                    raise UsageError(
                        f"Turn {turn.depth} is being answered.", hint="Stop the reply, then redact."
                    )
            redaction.redact(self._db, every, purge=purge)
            removal.rebuild_index(self._db)
