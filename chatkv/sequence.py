"""One conversation on an engine: its ids, its page table and where it must stop. Memory only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from chatkv.kv.keys import page_key
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

    `tokens[:table.length]` have their K/V in pages; the ids after that are still to be computed.
    After the first pick exactly one id is: the last one chosen, the root of the next tree.
    """

    id: int
    tokens: list[int]
    sampled: list[bool]
    """One flag an id: True where the model chose it, False where it was given."""
    table: PageTable
    sampler: Sampler
    root_key: bytes
    """Key of the empty prefix: the model's fingerprint and the store's salt."""
    eos_ids: Collection[int]
    max_tokens: int
    context_limit: int
    reply: ReplyText | None = None
    """Text of what is generated, for stop strings; None where nobody reads text."""
    prompt_tokens: int = 0
    finish_reason: str | None = None
    page_keys: list[bytes] = field(default_factory=list[bytes])
    """Keys of the pages that are complete and known so far."""
    unsaved: set[int] = field(default_factory=set[int])
    """Pages the disk queue had no room for; offered again at the end."""
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
        elif len(self.tokens) >= self.context_limit:
            self.finish_reason = "context_full"
        return self.finished

    def key_at(self, num_tokens: int) -> bytes:
        """The chain key of the first `num_tokens` ids; keys of whole pages are kept."""
        size = self.table.pool.page_size
        while len(self.page_keys) < num_tokens // size:
            start = len(self.page_keys) * size
            self.page_keys.append(self._key(start, start + size))
        whole = num_tokens // size
        if num_tokens % size == 0:
            return self.page_keys[whole - 1] if whole else self.root_key
        return self._key(whole * size, num_tokens)

    def parent_key(self, page_index: int) -> bytes:
        """The key of everything before that page."""
        return self.page_keys[page_index - 1] if page_index else self.root_key

    def _key(self, start: int, stop: int) -> bytes:
        parent = self.parent_key(start // self.table.pool.page_size)
        return page_key(parent, self.tokens[start:stop], self.sampled[start:stop])


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
