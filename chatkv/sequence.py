"""One conversation on an engine: its ids, its page table and where it must stop. Memory only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from chatkv.forget import ForgetPlan, Limits, Slide
from chatkv.kv.chain import Chain
from chatkv.kv.ops import Op, joined, live_ranges
from chatkv.kv.table import PageTable
from chatkv.sampling import Logprobs, Sampler

if TYPE_CHECKING:
    from chatkv.models.logits import KeptRow

Spans = tuple[tuple[int, int], ...]


class PieceStream(Protocol):
    """Ids in, whole code points out; `chatkv.tokenizer.TextStream` is one."""

    def push(self, ids: Iterable[int]) -> str: ...
    def flush(self) -> str: ...


class ReplyText:
    """The text of one reply as it grows, cut at the earliest stop string.

    Args:
        stream: A fresh decoder.
        stops: Texts that end the reply and are not part of it.
    """

    def __init__(self, stream: PieceStream, stops: tuple[str, ...] = ()) -> None:
        self._stream = stream
        self._stops = tuple(stop for stop in stops if stop)
        self._holdback = max((len(stop) for stop in self._stops), default=1) - 1
        self._text = ""
        self._given = 0
        self._ended = False

    def push(self, token: int) -> bool:
        """Add one id; True if a stop string is complete with it."""
        seen = max(0, len(self._text) - self._holdback)
        self._text += self._stream.push((token,))
        found = [at for stop in self._stops if (at := self._text.find(stop, seen)) >= 0]
        if found:
            self._text, self._ended = self._text[: min(found)], True
        return bool(found)

    def take(self) -> str:
        """The text that is certain and was not taken yet. What may begin a stop string waits."""
        hold = 0 if self._ended else self._possible_stop()
        text = self._text[self._given : len(self._text) - hold]
        self._given += len(text)
        return text

    def finish(self) -> str:
        """The rest; U+FFFD for a code point that was never completed."""
        if not self._ended:
            self._text, self._ended = self._text + self._stream.flush(), True
        return self.take()

    @property
    def text(self) -> str:
        """All of it so far."""
        return self._text

    def _possible_stop(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        tail = self._text[len(self._text) - self._holdback :] if self._holdback else ""
        for start in range(len(tail)):
            if any(stop.startswith(tail[start:]) for stop in self._stops):
                return len(tail) - start
        return 0


@dataclass(slots=True)
class Sequence:
    """Token ids that grow on one engine.

    `tokens[:table.num_tokens]` were computed; the ids after that are still to be. After the first
    pick exactly one id is: the last one chosen, the root of the next tree.
    """

    id: int
    tokens: list[int]
    sampled: list[bool]
    """One flag an id: True where the model chose it, False where it was given."""
    table: PageTable
    sampler: Sampler
    chain: Chain
    """Keys of its pages."""
    eos_ids: Collection[int]
    max_tokens: int
    limits: Limits
    ops: list[Op] = field(default_factory=list[Op])
    """What it forgot, or will when it comes to their places, in order."""
    slide: Slide | None = None
    """How it forgets by itself while the reply grows; None where a full context ends the reply."""
    forgot: list[ForgetPlan] = field(default_factory=list[ForgetPlan])
    """What it forgot by itself. Whoever tells the user takes it from here."""
    reply: ReplyText | None = None
    """Text of what is generated, for stop strings; None where nobody reads text."""
    prompt_tokens: int = 0
    num_forgotten: int = 0
    """Ids that the ops come to so far have put out of sight."""
    finish_reason: str | None = None
    unsaved: set[int] = field(default_factory=set[int])
    """First places of pages the disk queue had no room for; offered again at the end."""
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    """One for each id that was chosen, if the settings ask for them."""
    last_logits: KeptRow | None = None
    """[V] logits of the last row in place, once a step has run; what a witness is made of."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def push(self, token: int) -> bool:
        """Append one chosen id; True if it is the last. The only place where a reply ends by
        itself.

        An id after the end is never appended: the caller cuts the step there.
        """
        self.tokens.append(token)
        self.sampled.append(True)
        stopped = self.reply is not None and self.reply.push(token)
        if stopped:
            self.finish_reason = "stop"
        elif token in self.eos_ids:
            whole = self.sampler.may_end(self.tokens[:-1])
            self.finish_reason = "stop" if whole else "dead_end"
        elif self.num_generated >= self.max_tokens:
            self.finish_reason = "length"
        elif self.slide is None and self.room <= 0:
            self.finish_reason = "context_full"
        return self.finished

    @property
    def num_live(self) -> int:
        """Ids that the model sees when it computes the one behind the last."""
        return self.table.num_live + len(self.tokens) - self.table.num_tokens

    @property
    def room(self) -> int:
        """How many ids can follow before the context is full, or before something has to go."""
        waiting = len(self.tokens) - self.table.num_tokens
        live, position = self.table.num_live, self.table.position
        if self.slide is not None:
            return self.slide.room(live, position) - waiting
        return self.limits.room(live, position) - waiting

    @property
    def max_depth(self) -> int:
        """Guesses on one path that are of use: a step never passes the end, or a forget."""
        return min(self.max_tokens - self.num_generated - 1, self.free_depth)

    @property
    def free_depth(self) -> int:
        """Guesses on one path that there is a place for, of use or not."""
        return self.room if self.slide is not None else self.room - 1

    @property
    def ops_done(self) -> int:
        """How many of `ops` the table has come to."""
        return self.table.stage.ops

    @property
    def next_op(self) -> Op | None:
        """The op that comes next in ids that are known already."""
        return self.ops[self.ops_done] if self.ops_done < len(self.ops) else None

    def expect_seen(self) -> None:
        """`expect_whole` by its numbers, for every step."""
        ids, seen, told = self.table.num_tokens, self.table.num_live, self.num_forgotten
        assert seen + told == ids, f"of {ids} ids {seen} are seen and {told} forgotten"

    def expect_whole(self) -> None:
        """The one rule: what the model does not see is what an op says, and nothing else."""
        self.num_forgotten = sum(op.num_tokens for op in self.ops[: self.ops_done])
        spans = self.table.spans()
        seen = joined([(span.first + span.lo, span.first + span.hi) for span in spans])
        told = joined(live_ranges(self.ops[: self.ops_done], self.table.num_tokens))
        assert seen == told, f"the model sees {seen}, its ops say {told}"


def spans_of(sampled: list[bool], start: int = 0) -> Spans:
    """Half-open spans of True in `sampled[start:]`, counted from `start`."""
    spans: list[tuple[int, int]] = []
    begin: int | None = None
    for i, flag in enumerate([*sampled[start:], False]):
        if flag and begin is None:
            begin = i
        elif not flag and begin is not None:
            spans.append((begin, i))
            begin = None
    return tuple(spans)
