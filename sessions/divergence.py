"""Where a prompt left what was stored before it, and both sides as text.

Knows turns and the ids of their messages. Knows no engine; a tokenizer only to show ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chatkv.forget import TurnSpan
from chatkv.kv.ops import live_ranges
from sessions.context import spans_of_path, standing, to_ops
from sessions.records import TurnPath
from sessions.store import ChatStore

AROUND = 8
"""Tokens shown on each side of the first one that differs."""
OTHER_CHATS = 32
"""Chats that a first prompt is compared with, the newest ones."""


class Decoder(Protocol):
    """The part of a tokenizer that shows ids."""

    def tok_fp(self) -> bytes: ...
    def token_bytes(self, token: int) -> bytes: ...
    def token_text(self, token: int) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a divergence."""

    turn_id: int
    """Whose ids these are."""
    ids: tuple[int, ...]
    """The differing id, with up to 8 before and 8 behind."""
    before: str | None
    """Text of the ids before the differing one; None if no tokenizer here knows these ids."""
    text: str | None
    """Text of the differing id and those behind it."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left what was stored before it."""

    position: int
    """Of the first differing token in the prompt as the model sees it."""
    cause: str
    """`edit`, `fork`, `template` or `system prompt`."""
    stored: Side
    now: Side


class Prompt:
    """The prompt of one turn, and what was stored when it came.

    Args:
        store: Where else to look.
        path: Turns up to this one.
        tokenizer: To show ids.
    """

    def __init__(
        self, store: ChatStore, path: Sequence[TurnPath], tokenizer: Decoder | None
    ) -> None:
        self.path = [*(turn for turn in path[:-1] if turn.shown), path[-1]]
        """What the model was shown: turns that were never answered are left out."""
        self.turn, self.parent = path[-1], self.path[-2]
        self.left_out = path[-2] is not self.parent
        """Whether the turn before it is one of those."""
        self.tok_fp = tok_fp_of(self.turn)
        self.ids = prompt_ids(self.turn, self.tok_fp)
        """Of the user's message; None if it was never rendered."""
        self.total = count(self.turn.turn.usage, "prompt_tokens")
        """Tokens of the whole prompt; None if nobody counted them."""
        self._store, self._tokenizer = store, tokenizer
        self._records = [one.to_json() for one in standing(path)]
        row = self.turn.turn
        older = [other.id for other in store.siblings(row.id) if other.id < row.id]
        self._older = store.turns(older)

    @property
    def is_again(self) -> bool:
        """Whether a turn that was there before has the same prompt after the same path."""
        return self.ids is not None and any(
            prompt_ids(other, self.tok_fp) == self.ids for other in self._older
        )

    def divergence(self) -> Divergence | None:
        """Where it left the turn it shares most with; None if it only adds to what was there."""
        if self.ids is None or self.is_again:
            return None
        return (
            self._from_siblings(self.ids)
            or self._from_template(self.ids)
            or self._from_other_chats()
        )

    def _from_siblings(self, mine: tuple[int, ...]) -> Divergence | None:
        """Against the turn beside this one that it shares most with: an edit, or a fork."""
        best: tuple[int, TurnPath, tuple[int, ...]] | None = None
        for sibling in self._older:
            theirs = ids_of(sibling, self.tok_fp)
            shared = _common(mine, theirs)
            if shared < min(len(mine), len(theirs)) and (best is None or shared >= best[0]):
                best = shared, sibling, theirs
        start = self._start(len(mine))
        if best is None or start is None:
            return None
        shared, sibling, theirs = best
        cause = "edit" if sibling.turn.session_id == self.turn.turn.session_id else "fork"
        before = self._before(self.tok_fp)
        place = len(before) + shared
        return Divergence(
            start + shared,
            cause,
            self._side([*before, *theirs], place, sibling, self.tok_fp),
            self._side([*before, *mine], place, self.turn, self.tok_fp),
        )

    def _from_template(self, mine: tuple[int, ...]) -> Divergence | None:
        """Against the same path as another template, or tokenizer, put it before the model."""
        other = tok_fp_of(self.parent)
        if other is None or other == self.tok_fp:
            return None
        now, then = [*self._before(self.tok_fp), *mine], self._before(other)
        place = _common(now, then)
        if place == min(len(now), len(then)):
            return None
        seen = self._seen(place)
        return Divergence(
            place if seen is None else seen,
            "template",
            self._side(then, place, self.parent, other),
            self._side(now, place, self.turn, self.tok_fp),
        )

    def _from_other_chats(self) -> Divergence | None:
        """A first prompt against the chats before it: where their system prompts part."""
        head = self.path[0]
        if len(self.path) > 2 or self._older:
            return None
        mine = ids_of(head, self.tok_fp)
        best: tuple[int, TurnPath, tuple[int, ...]] | None = None
        for row in self._store.sessions(limit=OTHER_CHATS):
            other = next(iter(self._store.path(row.id)), head)
            theirs = ids_of(other, self.tok_fp)
            if other.turn.id == head.turn.id or other.turn.id > self.turn.turn.id:
                continue
            shared = _common(mine, theirs)
            if shared == len(mine) == len(theirs):
                return None
            # A few tokens are only what every prompt begins with.
            if AROUND <= shared < min(len(mine), len(theirs)) and (
                best is None or shared > best[0]
            ):
                best = shared, other, theirs
        if best is None:
            return None
        shared, other, theirs = best
        return Divergence(
            shared,
            "system prompt",
            self._side(theirs, shared, other, self.tok_fp),
            self._side(mine, shared, head, self.tok_fp),
        )

    def _start(self, num_ids: int) -> int | None:
        """Position of the prompt's first own id."""
        seen = self._seen()
        return self.total - num_ids if seen is None and self.total is not None else seen

    def _seen(self, place: int | None = None) -> int | None:
        """How many of the ids before a place, that of the prompt if none is named, the model sees
        when the prompt comes; None where some were never stored."""
        spans = None if self.tok_fp is None else spans_of_path(self.path[:-1], self.tok_fp)
        if spans is None or self.tok_fp is None:
            return None
        start = spans[-1].stop
        spans.append(TurnSpan(self.turn.turn.depth, start, start + 1))
        place = start if place is None else place
        ops = to_ops(self._records, spans, self.tok_fp.hex())
        live = live_ranges([op for op in ops if op.at <= start], max(start, place))
        return sum(max(0, min(stop, place) - first) for first, stop in live)

    def _before(self, tok_fp: bytes | None) -> list[int]:
        """Ids of the path up to this turn, as far as they are stored."""
        return [token for turn in self.path[:-1] for token in ids_of(turn, tok_fp)]

    def _side(self, ids: Sequence[int], place: int, turn: TurnPath, tok_fp: bytes | None) -> Side:
        before, behind = ids[max(0, place - AROUND) : place], ids[place : place + AROUND + 1]
        shows = self._tokenizer is not None and self._spells(turn, tok_fp)
        return Side(
            turn.turn.id,
            (*before, *behind),
            self._text(before) if shows else None,
            self._text(behind) if shows else None,
        )

    def _spells(self, turn: TurnPath, tok_fp: bytes | None) -> bool:
        """Whether our tokenizer is the one behind these ids, or has the same words."""
        assert self._tokenizer is not None
        if self._tokenizer.tok_fp() == tok_fp:
            return True
        text = next((m.row.content.strip() for m in turn.messages if m.row.content.strip()), "")
        return bool(text) and text in self._text(ids_of(turn, tok_fp))

    def _text(self, ids: Sequence[int]) -> str:
        """Ids as text, special ones as the tokenizer's file writes them."""
        assert self._tokenizer is not None
        pieces = (
            self._tokenizer.token_bytes(token) or (self._tokenizer.token_text(token) or "").encode()
            for token in ids
        )
        return b"".join(pieces).decode("utf-8", "replace")


def tok_fp_of(turn: TurnPath) -> bytes | None:
    """The tokenizer a turn was answered with: the one under which its reply was chosen."""
    renders = [render for message in turn.messages[::-1] for render in message.renders]
    chosen = [render for render in renders if render.sampled]
    return next((render.tok_fp for render in (*chosen, *renders)), None)


def _renders(turn: TurnPath, tok_fp: bytes | None) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    for message in turn.messages:
        render = None if tok_fp is None else message.render(tok_fp)
        yield message.row.role, None if render is None else render.token_ids


def ids_of(turn: TurnPath, tok_fp: bytes | None) -> tuple[int, ...]:
    """All ids of a turn, up to the first message that has none."""
    found: list[int] = []
    for _, ids in _renders(turn, tok_fp):
        if ids is None:
            break
        found += ids
    return tuple(found)


def prompt_ids(turn: TurnPath, tok_fp: bytes | None) -> tuple[int, ...] | None:
    return next((ids for role, ids in _renders(turn, tok_fp) if role == "user"), None)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (mine, other) in enumerate(zip(left, right, strict=False)):
        if mine != other:
            return index
    return min(len(left), len(right))


def count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) else None
