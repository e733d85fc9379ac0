"""An engine that computes nothing: it plans as the real one and tells which ids it was shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from fakes import VOCAB, ByteTokenizer

from chatkv.errors import ChatKVError
from chatkv.events import Delta, Done, Event, Failed, Ready, Rendered, Usage
from chatkv.forget import Limits, reserve_tokens
from chatkv.kv.ops import live_ranges, num_live
from sessions.planning import in_sight, sight_of
from sessions.port import EngineState, Price
from sessions.rendering import RenderedPath, render
from sessions.request import Request


class SeeingEngine:
    """Implements `sessions.port.EnginePort`. Replies `ok N` to the N-th request.

    Args:
        limit: Tokens of the context.
        trained: Positions of the model; as many as one likes by default.
    """

    def __init__(self, limit: int, trained: int = 1 << 20, no_rebase: str = "") -> None:
        self.tokenizer: Any = ByteTokenizer()
        self.limit, self.trained, self.no_rebase = limit, trained, no_rebase
        self.seen: list[list[int]] = []
        """Ids in sight at the first token of each reply."""
        self.requests: list[Request] = []

    @property
    def state(self) -> EngineState:
        return EngineState("ready", ready=self.wait_ready())

    def wait_ready(self, timeout_s: float | None = None) -> Ready:
        fp = self.tokenizer.tok_fp().hex()
        return Ready(
            "seeing", "cpu", "none", "exact", self.limit, "none", fp,
            trained_limit=self.trained, page_tokens=16, no_rebase=self.no_rebase,
        )  # fmt: skip

    def start(self) -> None: ...
    def watch(self, callback: Callable[[EngineState], None]) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...

    def generate(self, request: Request) -> Iterator[Event]:
        self.requests.append(request)
        path = render(request.messages, self.tokenizer, VOCAB)
        try:
            sight = sight_of(request, path, self._limits(request), self._fp)
        except ChatKVError as error:
            yield Failed(error.code, error.exit_code, error.message, error.hint)
            return
        if path.made:
            yield Rendered(tuple(path.made))
        yield from sight.events
        live = live_ranges(sight.ops, len(path.tokens))
        self.seen.append([token for start, stop in live for token in path.tokens[start:stop]])
        assert num_live(sight.ops, len(path.tokens)) == len(self.seen[-1])
        text = f"ok {len(self.seen)}"
        ids = tuple(self.tokenizer.encode(text))
        yield Delta(text, ids)
        closing = tuple(self.tokenizer.closing_ids(False))
        used = len(self.seen[-1]) + len(ids) + len(closing)
        usage = Usage(
            prompt_tokens=len(path.tokens), predicted_n=len(ids), context_limit=self.limit,
            context_used=used,
        )  # fmt: skip
        yield Done("stop", text, (*ids, *closing), ((0, len(ids)),), usage)

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        if op == "purge":
            return {"pages": 0}
        if op == "prompt_tokens":
            return {"tokens": len(self.tokenizer.user_ids(args["text"], False))}
        request = Request.from_json(args["request"])
        path = render(request.messages, self.tokenizer, VOCAB)
        if op == "price":
            ops = in_sight(request, path, self._fp)
            live = num_live(ops, len(path.tokens))
            return asdict(Price(0, 0, live, live))
        assert op == "plan_forget"
        try:
            sight = sight_of(request, path, self._limits(request), self._fp)
        except ChatKVError as error:
            return {"plans": [], "error": error.to_json()}
        return {"plans": [one.to_json() for one in sight.plans], "error": None}

    @property
    def _fp(self) -> str:
        return self.tokenizer.tok_fp().hex()

    def _limits(self, request: Request) -> Limits:
        reserve = reserve_tokens(self.limit, request.sampling.get("max_tokens"))
        return Limits(self.limit, reserve, self.trained, 16, self.no_rebase)

    def path(self, request: Request) -> RenderedPath:
        """The ids of a request."""
        return render(request.messages, self.tokenizer, VOCAB)
