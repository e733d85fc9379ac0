"""Answers requests with an engine: ids from the template, text from ids. No database but the page
store.

Runs where the engine runs: in the child process, or in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from chatkv import forget
from chatkv.engine import Engine
from chatkv.errors import ChatKVError, ContextFull, OutOfPages, StoreBusy, StoreError, UsageError
from chatkv.events import (
    Delta,
    Done,
    Event,
    Failed,
    Prefill,
    Ready,
    Rendered,
    TokenLogprob,
    Usage,
)
from chatkv.kv.ops import num_live
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams
from chatkv.sequence import ReplyText, Sequence, spans_of
from chatkv.spec.stats import DraftStats
from sessions.context import SUMMARIZE
from sessions.counters import Window
from sessions.idle import IdleWork
from sessions.pages import SqlitePageStore
from sessions.planning import in_sight, sight_of, slid
from sessions.rendering import RenderedPath, render
from sessions.request import Request, computed_before
from sessions.token_log import StoredLog
from sessions.trusted import take_pages

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
        self.idle = IdleWork()
        """Preparing for the next turn of the chat that is open."""
        self.window = Window()
        """What the cache was worth lately."""

    def ready(self) -> Ready:
        """What a front needs to know before its first request."""
        model, limits = self.engine.model, self.engine.limits()
        return Ready(
            model=model.spec.name,
            device=model.device,
            backend=model.backend.name,
            mode=model.backend.mode,
            context_limit=self.engine.context_limit,
            drafting=self.engine.config.spec,
            tok_fp=self.tokenizer.tok_fp().hex(),
            notice=self.notice,
            trained_limit=limits.trained,
            page_tokens=limits.page_tokens,
            no_rebase=limits.no_rebase,
            closing_tokens=limits.closing,
            parameters=model.spec.parameters,
        )

    def generate(self, request: Request, cancelled: Callable[[], bool]) -> Iterator[Event]:
        """Yield Rendered, Prefill, Delta, then Done; Failed in place of an error."""
        self.idle.stop()
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
        """Small questions: `prompt_tokens`, `texts`, `kv_stats`, `explain_drafting`, `set_spec`,
        `plan_forget`, `price`, `preview`, `expect`, `purge`."""
        match name:
            case "prompt_tokens":
                return {"tokens": len(self.tokenizer.user_ids(str(args["text"]), False, None))}
            case "texts":
                return {"texts": [self._text(int(token)) for token in args["ids"]]}
            case "kv_stats":
                return self._kv_stats()
            case "explain_drafting":
                return {"text": self.engine.drafting.explain()}
            case "set_spec":
                self.engine.drafting.set_mode(str(args["mode"]))
                return {"text": self.engine.drafting.explain()}
            case "plan_forget":
                return self._plan_forget(Request.from_json(args["request"]))
            case "price":
                return self._price(Request.from_json(args["request"]))
            case "expect":
                return self._expect(Request.from_json(args["request"]))
            case "purge":
                return {"pages": self._purge(list(args["ids"]), int(args["keep_tokens"]))}
            case "preview":
                return self._preview(Request.from_json(args["request"]))
            case "take_pages":
                return self._take_pages(**args)
            case _:
                raise UsageError(f"The engine knows no {name!r}.")

    def close(self) -> None:
        self.idle.stop()
        self.engine.close()
        if self.log is not None:
            self.log.close()

    def _generate(self, request: Request, cancelled: Callable[[], bool]) -> Iterator[Event]:
        path = self._path(request)
        params = self._params(request)
        limits = self._limits(params)
        sight = sight_of(request, path, limits, self.tokenizer.tok_fp().hex())
        if any(one.policy == SUMMARIZE for one in sight.plans):
            raise UsageError(
                "A summary is written by the chat that forgets, not with a request.",
                hint="Send the prompt through sessions.chat, or use turns.",
            )
        tokens, sampled, ops = forget.flatten(path.tokens, path.sampled, sight.ops)
        # A grammar that does not compile is refused before anything is stored for this turn.
        seq = self.engine.add(
            tokens,
            sampled,
            params,
            reply=ReplyText(self.tokenizer.stream(), params.stop),
            salt=None if request.salt is None else bytes.fromhex(request.salt),
            ops=ops,
            slide=sight.slide,
        )
        if path.made:
            yield Rendered(tuple(path.made))
        yield from sight.events
        if self.log is not None:
            self.log.poke()  # the turn before this one is stored by now
        self.engine.drafting.set_mode(request.spec or self.engine.config.spec)
        left_out = len(path.tokens) - len(tokens)
        report = PrefillReport(known=max(0, computed_before(request.messages) - left_out))
        yield from self._reply(seq, report, left_out, cancelled)

    def _reply(
        self,
        seq: Sequence,
        report: PrefillReport,
        left_out: int,
        cancelled: Callable[[], bool],
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
                yield from self._slid(seq)
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
                yield from self._slid(seq)
                yield Delta(seq.reply.take(), tokens, self._logprobs(seq, len(tokens)))
        except OutOfPages:
            if not seq.num_generated:
                raise
            seq.finish_reason = "context_full"
        finally:
            stats = engine.finish(seq)
            if engine.saver is not None and self.pages is not None:
                engine.saver.after_pages(self.pages.end_turn)
        yield self._done(seq, left_out, report, stats, prompt_ms, decode_ms)

    def _done(
        self,
        seq: Sequence,
        left_out: int,
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
        live = num_live(seq.ops, len(seq.tokens))
        usage = Usage(
            prompt_tokens=report.reused + report.computed,
            cached_tokens=report.reused,
            host_tokens=report.host_tokens,
            disk_tokens=report.disk_tokens,
            token_bytes=self.engine.pool.payload_bytes(1),
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
            context_used=live + len(closing),
            context_reserved=self._limits(seq.sampler.params).reserve,
            forgotten_tokens=left_out + len(seq.tokens) - live,
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

    def _slid(self, seq: Sequence) -> Iterator[Event]:
        """What the reply itself has put out of sight since the last time, before its tokens."""
        plans, seq.forgot = seq.forgot, []
        for one in plans:
            yield slid(one, self.tokenizer.tok_fp().hex())

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
            settings["max_tokens"] = forget.reserve_tokens(self.engine.context_limit)
        return SamplingParams(**settings)

    def _limits(self, params: SamplingParams) -> forget.Limits:
        """What a path has to fit. At most half of the context is kept for the reply: one that may
        be longer would have every turn forget all the others."""
        return self.engine.limits(min(params.max_tokens or 0, self.engine.context_limit // 2))

    def _path(self, request: Request) -> RenderedPath:
        return render(request.messages, self.tokenizer, self.engine.model.spec.vocab_size)

    def _plan_forget(self, request: Request) -> dict[str, Any]:
        """What a request would put out of sight. Computes nothing."""
        limits = self._limits(self._params(request))
        try:
            sight = sight_of(request, self._path(request), limits, self.tokenizer.tok_fp().hex())
        except ContextFull as full:
            return {"plans": [], "error": full.to_json()}
        return {"plans": [one.to_json() for one in sight.plans], "error": None}

    def _price(self, request: Request) -> dict[str, Any]:
        """The fields of a `Price`."""
        if self.engine.saver is not None:
            self.engine.saver.flush(1.0)
        return asdict(self.engine.price(**self._as_it_stands(request)))

    def _preview(self, request: Request) -> dict[str, Any]:
        """The fields of a `Preview`."""
        return asdict(self.engine.preview(**self._as_it_stands(request)))

    def _expect(self, request: Request) -> dict[str, Any]:
        """The chat that is open now: `idle` prepares for a turn that goes on from there."""
        self.idle.begin(self.engine.expect(**self._as_it_stands(request)))
        return {}

    def _as_it_stands(self, request: Request) -> dict[str, Any]:
        """The path of a request that no reply is wanted for, and what its next turn forgets."""
        path = self._path(request)
        ops = in_sight(request, path, self.tokenizer.tok_fp().hex()) if path.spans else []
        tokens, sampled, ops = forget.flatten(path.tokens, path.sampled, ops)
        salt = None if request.salt is None else bytes.fromhex(request.salt)
        return {"tokens": tokens, "sampled": sampled, "ops": ops, "salt": salt}

    def _purge(self, ids: list[int], keep_tokens: int) -> int:
        """Remove the pages of a deleted or redacted path, those in memory too. Returns how many
        were stored; 0 without a store. Raises StoreError."""
        pages, saver = self.pages, self.engine.saver
        self.idle.stop()
        self.engine.drafting.drafters.clear()
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
            "preparing": self.idle.is_left,
            "host": asdict(self.engine.tiers.host.stats()),
            "rates": self.engine.tiers.rates.to_json(),
            "disk": None if self.pages is None else asdict(self.pages.stats()),
        }
