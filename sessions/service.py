"""Answers requests with an engine: ids from the template, text from ids. No database but the page
store.

Runs where the engine runs: in the child process, or in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from chatkv.engine import Engine
from chatkv.errors import ChatKVError, ContextFull, OutOfPages, StoreBusy, StoreError, UsageError
from chatkv.events import (
    Delta,
    Done,
    Event,
    Failed,
    MessageIds,
    Prefill,
    Ready,
    Rendered,
    TokenLogprob,
    Usage,
)
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams
from chatkv.sequence import ReplyText, Sequence, spans_of
from chatkv.spec.stats import DraftStats
from sessions.counters import Window
from sessions.pages import SqlitePageStore
from sessions.port import PathMessage, Request
from sessions.token_log import StoredLog
from sessions.trusted import take_pages

RESERVE_TOKENS = 1024
"""Longest reply when nobody says: this or a quarter of the context, whichever is less."""
PURGE_S = 5.0
"""How long a purge waits for pages that are on their way to the disk."""

DEAD_END = "The grammar let nothing follow here, so the reply ends before it is whole."


class EngineService:
    """One engine and its tokenizer.

    Args:
        engine: Computes.
        pages: The store behind the engine's saver, or None.
        log: What the drafter `history` reads, or None.
        notice: One sentence the user should see once.
    """

    def __init__(
        self,
        engine: Engine,
        pages: SqlitePageStore | None = None,
        log: StoredLog | None = None,
        *,
        notice: str = "",
    ) -> None:
        self.engine = engine
        self.tokenizer = engine.model.tokenizer
        self.pages = pages
        self.log = log
        self.notice = notice
        self._said = ""
        self.window = Window()
        """What the cache was worth lately."""

    def ready(self) -> Ready:
        """What a front needs to know before its first request."""
        model = self.engine.model
        return Ready(
            model=model.spec.name,
            device=model.device,
            backend=model.backend.name,
            mode=model.backend.mode,
            context_limit=self.engine.context_limit,
            drafting=self.engine.config.spec,
            tok_fp=self.tokenizer.tok_fp().hex(),
            notice=self.notice,
        )

    def generate(self, request: Request, cancelled: Callable[[], bool]) -> Iterator[Event]:
        """Yield Rendered, Prefill, Delta, then Done; Failed in place of an error."""
        try:
            yield from self._generate(request, cancelled)
        except ChatKVError as error:
            yield Failed(error.code, error.exit_code, error.message, error.hint)
        except torch.OutOfMemoryError:
            # What was stored stays stored; the next request begins with what is left.
            device = self.engine.model.device
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(device)[0] / 2**30
            yield Failed(
                "out_of_memory",
                4,
                f"The memory of {device} is full: {free:.1f} GiB are free.",
                "Close what else uses the device, or use a smaller --context.",
            )

    def call(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Small questions: `texts`, `kv_stats`, `explain_drafting`, `set_spec`, `purge`."""
        match name:
            case "texts":
                return {"texts": [self._text(int(token)) for token in args["ids"]]}
            case "kv_stats":
                return self._kv_stats()
            case "explain_drafting":
                return {"text": self.engine.drafting.explain()}
            case "set_spec":
                self.engine.drafting.set_mode(str(args["mode"]))
                return {"text": self.engine.drafting.explain()}
            case "purge":
                return {"pages": self._purge(list(args["ids"]), int(args["keep_tokens"]))}
            case "preview":
                messages = [path_message(message) for message in args["messages"]]
                return self._preview(messages, args["salt"])
            case "take_pages":
                return self._take_pages(**args)
            case _:
                raise UsageError(f"The engine knows no {name!r}.")

    def close(self) -> None:
        self.engine.close()
        if self.log is not None:
            self.log.close()

    def _generate(self, request: Request, cancelled: Callable[[], bool]) -> Iterator[Event]:
        rendered, tokens, sampled = self._render(request.messages)
        params = self._params(request)
        if len(tokens) + 1 > self.engine.context_limit:
            new = len(rendered[-1].ids) if rendered else 0
            raise ContextFull(
                used=len(tokens) - new, needed=new + 1, limit=self.engine.context_limit
            )
        # A grammar that does not compile is refused before anything is stored for this turn.
        seq = self.engine.add(
            tokens,
            sampled,
            params,
            reply=ReplyText(self.tokenizer.stream(), params.stop),
            salt=None if request.salt is None else bytes.fromhex(request.salt),
        )
        if rendered:
            yield Rendered(tuple(rendered))
        if self.log is not None:
            self.log.poke()  # the turn before this one is stored by now
        self.engine.drafting.set_mode(request.spec or self.engine.config.spec)
        report = PrefillReport(known=computed_before(request.messages))
        yield from self._reply(seq, report, cancelled)

    def _reply(
        self, seq: Sequence, report: PrefillReport, cancelled: Callable[[], bool]
    ) -> Iterator[Event]:
        assert seq.reply is not None
        engine = self.engine
        begun = perf_counter()
        total = seq.prompt_tokens
        decode_ms = prompt_ms = 0.0
        try:
            for done in engine.prefill(seq, report):
                if cancelled():
                    seq.finish_reason = "cancelled"
                    break
                yield Prefill(report.reused, done, total)
            prompt_ms = 1000 * (perf_counter() - begun)
            if seq.num_generated:
                yield Delta(seq.reply.take(), tuple(seq.tokens[total:]), self._logprobs(seq, 1))
            while not seq.finished:
                started = perf_counter()
                (tokens,) = engine.step([seq])
                decode_ms += 1000 * (perf_counter() - started)
                if cancelled() and not seq.finished:
                    seq.finish_reason = "cancelled"
                yield Delta(seq.reply.take(), tokens, self._logprobs(seq, len(tokens)))
        except OutOfPages:
            if not seq.num_generated:
                raise
            seq.finish_reason = "context_full"
        finally:
            stats = engine.finish(seq)
            if engine.saver is not None and self.pages is not None:
                engine.saver.after_pages(self.pages.end_turn)
        yield self._done(seq, report, stats, prompt_ms, decode_ms)

    def _done(
        self,
        seq: Sequence,
        report: PrefillReport,
        stats: DraftStats,
        prompt_ms: float,
        decode_ms: float,
    ) -> Done:
        assert seq.reply is not None
        assert seq.finish_reason is not None
        seq.reply.finish()
        ids = seq.tokens[seq.prompt_tokens :]
        # A reply that never began is none: there is nothing to close.
        closing = self.tokenizer.closing_ids(ids[-1] in self.tokenizer.eos_ids) if ids else ()
        usage = Usage(
            prompt_tokens=seq.prompt_tokens,
            cached_tokens=report.reused,
            prompt_n=report.computed,
            reusable_tokens=min(report.known, report.reused + report.computed),
            prompt_ms=prompt_ms,
            predicted_n=len(ids),
            predicted_ms=decode_ms,
            steps=stats.steps + 1 if ids else 0,
            draft_n=stats.rows - stats.steps,
            draft_n_accepted=stats.tokens - stats.steps,
            restore_ms=report.restore_ms,
            restored_pages=report.restored_pages,
            host_pages=report.host_pages,
            reuse_reason=report.reason,
            reuse_detail=report.detail,
            verified=report.verified,
            context_limit=self.engine.context_limit,
            context_used=len(seq.tokens) + len(closing),
            pages_used=self.engine.pool.used,
            pages_total=self.engine.pool.num_pages,
        )
        self.window.add(usage)
        return Done(
            finish_reason=seq.finish_reason,
            text=seq.reply.text,
            ids=(*ids, *closing),
            sampled=spans_of(seq.sampled, seq.prompt_tokens),
            usage=usage,
            notice=self._notice(DEAD_END if seq.finish_reason == "dead_end" else ""),
        )

    def _logprobs(self, seq: Sequence, count: int) -> tuple[TokenLogprob, ...]:
        """Those of the last tokens, if the request asks for them."""
        return tuple(
            TokenLogprob(
                found.token,
                self._text(found.token),
                found.logprob,
                tuple(TokenLogprob(token, self._text(token), value) for token, value in found.top),
            )
            for found in seq.logprobs[-count:]
        )

    def _text(self, token: int) -> str:
        """What one token stands for; special ones as they are written."""
        known = self.tokenizer.token_bytes(token)
        return known.decode("utf-8", "replace") or self.tokenizer.token_text(token) or ""

    def _notice(self, about_reply: str) -> str:
        """What has to be said once: about this reply, pages not saved or damaged, a log anew."""
        said = [about_reply] if about_reply else []
        said += [] if self.pages is None else self.pages.take_notices()
        said += [] if self.log is None else self.log.take_notices()
        if self.engine.saver is not None and self.engine.saver.notice != self._said:
            self._said = self.engine.saver.notice
            if self._said not in said:  # the store may have said it itself
                said.append(self._said)
        return " ".join(said)

    def _params(self, request: Request) -> SamplingParams:
        settings = dict(request.sampling)
        settings["stop"] = tuple(settings.get("stop", ()))
        if settings.get("max_tokens") is None:
            settings["max_tokens"] = min(RESERVE_TOKENS, max(1, self.engine.context_limit // 4))
        return SamplingParams(**settings)

    def _render(
        self, messages: list[PathMessage] | tuple[PathMessage, ...] | Any
    ) -> tuple[list[MessageIds], list[int], list[bool]]:
        """Ids of the whole path, and those that had to be made for it."""
        made: list[MessageIds] = []
        tokens: list[int] = []
        sampled: list[bool] = []
        system = messages[0].content if messages and messages[0].role == "system" else ""
        for index, message in enumerate(messages):
            ids, spans = self._message(index, message, system)
            if message.ids is None or ids != tuple(message.ids):
                made.append(MessageIds(index, ids, spans))
            flags = [False] * len(ids)
            for start, stop in spans:
                flags[start:stop] = [True] * (stop - start)
            tokens += ids
            sampled += flags
        return made, tokens, sampled

    def _message(
        self, index: int, message: PathMessage, system: str
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Ids of one message, made if it has none, closed if it is a reply that was cut."""
        tokenizer = self.tokenizer
        if message.ids and max(message.ids) >= self.engine.model.spec.vocab_size:
            message = replace(message, ids=None, sampled=())  # imported, and of no token here
        if message.role == "system":
            ids = message.ids if message.ids is not None else tokenizer.head_ids(system or None)
            return tuple(ids), ()
        if message.role == "user":
            if message.ids is not None:
                return tuple(message.ids), ()
            return tuple(tokenizer.user_ids(message.content, index <= 1, system or None)), ()
        ids = message.ids
        if ids is None:
            ids = tokenizer.encode(message.content, special=False)
            return (*ids, *tokenizer.closing_ids(False)), ()
        if not ids or (message.sampled and message.sampled[-1][1] == len(ids)):
            ended = bool(ids) and ids[-1] in tokenizer.eos_ids
            return (*ids, *tokenizer.closing_ids(ended)), message.sampled
        return tuple(ids), message.sampled

    def _purge(self, ids: list[int], keep_tokens: int) -> int:
        """Remove the pages of a deleted or redacted path, those in memory too. Returns how many
        were stored; 0 without a store. Raises StoreError."""
        pages, saver = self.pages, self.engine.saver
        self.engine.prefix.clear()
        self.engine.tiers.host.clear()
        self.engine.pool.clear_free()
        if self.log is not None:
            self.log.poke()
        if pages is None or saver is None:
            return 0
        if not saver.flush(PURGE_S):
            raise StoreBusy(
                "Pages still wait for the disk, so those that must go cannot be removed now.",
                hint="They are removed at the next start.",
            )
        return pages.purge(ids, keep_tokens)

    def _preview(self, messages: list[PathMessage], salt: str | None) -> dict[str, Any]:
        """The fields of a `Preview`."""
        _, tokens, sampled = self._render(messages)
        found = self.engine.preview(tokens, sampled, None if salt is None else bytes.fromhex(salt))
        return asdict(found)

    def _take_pages(self, path: str, jsonl: str, max_bytes: int) -> dict[str, Any]:
        """Pages from a file that the user trusts. Raises BadPages."""
        if self.pages is None or self.engine.saver is None or not self.pages.saving:
            raise StoreError("Pages are not kept in this run.", hint="Import without --trust-kv.")
        self.engine.saver.flush(5.0)
        count, salt = take_pages(Path(path), jsonl, self.engine, self.pages, max_bytes=max_bytes)
        return {"pages": count, "salt": salt.hex()}

    def _kv_stats(self) -> dict[str, Any]:
        pool, prefix = self.engine.pool, self.engine.prefix.stats()
        return {
            "pages_total": pool.num_pages,
            "pages_used": pool.used,
            "page_tokens": pool.page_size,
            "page_bytes": pool.payload_bytes(pool.page_size),
            "cached_pages": prefix.pages,
            "evicted_pages": prefix.evicted,
            **asdict(self.engine.gauges()),
            "window": self.window.sums().to_json(),
            "host": asdict(self.engine.tiers.host.stats()),
            "rates": self.engine.tiers.rates.to_json(),
            "disk": None if self.pages is None else asdict(self.pages.stats()),
        }


def path_message(data: dict[str, Any]) -> PathMessage:
    """A message as JSON has it."""
    return PathMessage(
        role=data["role"],
        content=data["content"],
        ids=None if data["ids"] is None else tuple(data["ids"]),
        sampled=tuple((a, b) for a, b in data["sampled"]),
    )


def computed_before(messages: SequenceOf[PathMessage]) -> int:
    """Tokens from the first on that had rows once: all up to the last id that a model chose."""
    known = length = 0
    for message in messages:
        if message.ids is None:
            break
        if message.sampled:
            known = length + message.sampled[-1][1] - 1
        length += len(message.ids)
    return known
