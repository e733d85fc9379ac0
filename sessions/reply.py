"""A reply on its way into `chat.db`: at its first token, then once a second, then whole.

Knows the store and events. No engine.
"""

from __future__ import annotations

from dataclasses import asdict
from time import monotonic
from typing import Any

from chatkv.events import Delta, Done, Event, ForgetEvent
from sessions.records import BegunTurn
from sessions.store import ChatStore

PARTIAL_S = 1.0
"""Seconds between two commits of a reply that is growing."""


class StoredReply:
    """A reply on its way into the store."""

    def __init__(self, store: ChatStore, begun: BegunTurn) -> None:
        self._store = store
        self.turn_id = begun.turn_id
        self.tok_fp: bytes | None = None
        self.model = ""
        self.text = ""
        self.ids: list[int] = []
        self.heard = False
        """Whether the engine took the prompt: then the turn stays, with or without a reply."""
        self.closed = False
        self._saved_at: float | None = None

    def take(self, event: Event) -> None:
        match event:
            case Delta(text, ids):
                self.text += text
                self.ids += ids
                self._save()
            case Done():
                state = "interrupted" if event.finish_reason == "cancelled" else "done"
                usage = {**asdict(event.usage), "finish_reason": event.finish_reason}
                usage["model"] = self.model
                self._store.finish_turn(
                    self.turn_id, state, event.text, self.tok_fp, event.ids, event.sampled, usage
                )
                self.closed = True
            case _:
                pass

    def close(self, state: Any) -> None:
        """End with what there is: no closing ids, they are made when the conversation goes on."""
        self.closed = True
        spans = ((0, len(self.ids)),) if self.ids else ()
        self._store.finish_turn(self.turn_id, state, self.text, self.tok_fp, self.ids, spans)

    def forget(self, event: ForgetEvent) -> None:
        """Record what a policy put out of sight (T6), behind the ids that came before it."""
        if self.ids:
            self._save(now=True)
        self._store.add_forget(self.turn_id, event.policy, event.reason, event.op, event.num_tokens)

    def _save(self, *, now: bool = False) -> None:
        since = None if self._saved_at is None else monotonic() - self._saved_at
        if self.tok_fp is not None and (now or since is None or since >= PARTIAL_S):
            spans = ((0, len(self.ids)),)
            self._store.save_partial(self.turn_id, self.text, self.tok_fp, self.ids, spans)
            self._saved_at = monotonic()
