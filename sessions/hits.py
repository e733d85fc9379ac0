"""Why a turn found little of what was there, in one sentence for whoever reads the reply."""

from __future__ import annotations

from sessions.divergence import Decoder, Side
from sessions.explain import explain_last
from sessions.port import EnginePort
from sessions.store import ChatStore

SHOWN = 24
"""Characters of each side of a difference."""


class EngineWords:
    """The part of a tokenizer that shows ids, asked of the engine: this process has none.

    Args:
        engine: Between two replies.
        tok_fp: Of its tokenizer.
    """

    def __init__(self, engine: EnginePort, tok_fp: bytes) -> None:
        self._engine, self._tok_fp = engine, tok_fp
        self._known: dict[int, str] = {}

    def tok_fp(self) -> bytes:
        return self._tok_fp

    def token_bytes(self, token: int) -> bytes:
        return (self.token_text(token) or "").encode()

    def token_text(self, token: int) -> str | None:
        if token not in self._known:
            (self._known[token],) = self._engine.call("texts", ids=[token])["texts"]
        return self._known[token]


def low_hit(store: ChatStore, session_id: str, hit_rate: float, words: Decoder) -> str:
    """`hit 41 %: ...` about the last turn of a conversation, which is stored already."""
    report = explain_last(store, session_id, words)
    why = [report.reason or "not counted"]
    if report.note:
        why.append(report.note)
    if (found := report.divergence) is not None:
        sides = f"{_shown(found.stored)} / {_shown(found.now)}"
        why = [f"differs at token {found.position} ({sides}) in the {found.cause}", *why]
    return f"hit {100 * hit_rate:.0f} %: {'; '.join(why)}."


def _shown(side: Side) -> str:
    text = str(side.ids) if side.text is None else side.text
    return f'"{text[:SHOWN]}"'
