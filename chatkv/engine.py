"""Turns sequences into tokens: prompt, then draft, verify, keep. Knows pages and drafts; no text,
no file, no screen.

A row's bits depend on its own history alone, so what is reused, how rows are batched and what was
guessed can change the time and nothing else.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from functools import partial
from time import perf_counter

from chatkv.batch import run_on_batch, tree_batch
from chatkv.config import EngineConfig
from chatkv.errors import ConfigError, UsageError
from chatkv.forget import Limits, Slide, expect_fits, reserve_tokens
from chatkv.grammar import Grammars
from chatkv.kv.chain import Chain
from chatkv.kv.format import KVFormat
from chatkv.kv.gauges import Gauges, gauges
from chatkv.kv.keys import fingerprint, root_key
from chatkv.kv.layout import stages
from chatkv.kv.ops import Op
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.price import Preview, Price, Pricer
from chatkv.kv.saver import PageSaver
from chatkv.kv.store import PageStore
from chatkv.kv.swap import HostPages
from chatkv.kv.table import PageTable, Reservation
from chatkv.kv.tiers import Tiers
from chatkv.models.logits import StepLogits
from chatkv.models.model import Model, RunsOn
from chatkv.models.tree_rows import TreeRows
from chatkv.prefill import Logits, PrefillReport, Prompts
from chatkv.sampling import Sampler, SamplingParams, logprobs
from chatkv.sequence import ReplyText, Sequence
from chatkv.spec.drafters import DraftMeans, create_drafters
from chatkv.spec.drafting import Drafting
from chatkv.spec.memory import DraftMemory
from chatkv.spec.proposal import Proposal, StaleTree, ran, settled, walked
from chatkv.spec.stats import DraftStats, StepRecord
from chatkv.spec.token_log import TokenLog
from chatkv.spec.verify import Accepted
from chatkv.step_costs import known_costs

QUEUE_BYTES, DEVICE_QUEUE_BYTES = 64 << 20, 512 << 20
"""Page rows that may wait for the disk; a device fills pages faster than a disk takes them."""


class Engine:
    """One model, one pool of pages, any number of sequences. One thread owns it.

    Args:
        model: The decoder.
        config: Settings.
        store: Where pages outlive the process, or None.
        salt: Value of the store that keeps its keys apart from those of others.
        token_log: Other conversations, for the drafter `history`.
        draft: A smaller model with the same tokenizer, for the drafter `draft_model`.
        costs: Rows -> milliseconds of a step, measured before; None measures them now.
        memory: Where what the controller learns outlives the process, or None.
        guard: Whether drafting that turns out slow switches itself off.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        store: PageStore | None = None,
        salt: bytes = b"",
        token_log: TokenLog | None = None,
        draft: Model | None = None,
        costs: Mapping[int, float] | None = None,
        memory: DraftMemory | None = None,
        guard: bool = True,
    ) -> None:
        self.model = model
        self._runner = model if isinstance(model, RunsOn) else None
        self.config = config = config or EngineConfig()
        spec = model.spec
        self.context_limit = min(config.context_limit or spec.context_limit, spec.context_limit)
        kv = KVFormat(config.kv_dtype, config.keep_layers)
        pool_tokens = config.pool_tokens or model.pool_tokens(self.context_limit, kv)
        self.pool = model.new_pool(pool_tokens, kv)
        self.prefix = PrefixCache(self.pool)
        self.pool.reclaim = self.prefix.reclaim
        queue_bytes = QUEUE_BYTES if model.device == "cpu" else DEVICE_QUEUE_BYTES
        self.saver = PageSaver(store, queue_bytes=queue_bytes) if store is not None else None
        host = HostPages(config.host_bytes)
        token_bytes = self.pool.payload_bytes(1)
        exact = model.backend.mode == "exact"
        self.tiers = Tiers(host, store, token_bytes, restore=config.restore, exact=exact)
        if config.host_bytes:
            self.prefix.spill = partial(self.tiers.spill, self.pool)
        self.prompts = Prompts(model, self.pool, self.prefix, self.saver, self.tiers)
        self.identity = model.identity(self.pool.page_size, kv)
        self.fingerprint = fingerprint(self.identity)
        self.root_key = root_key(self.fingerprint, salt)
        means = DraftMeans(spec.vocab_size, token_log, draft, self.context_limit, model)
        drafters = create_drafters(config.drafters, means)
        if (reader := drafters.reader) is not None:
            model.tap(reader.taps, reader.tap_rows)
        self.grammars = Grammars(model.tokenizer, spec.vocab_size, spec.eos_ids)
        self.memory = memory
        known = memory.load() if memory is not None else {}
        self.costs = dict(costs) if costs is not None else known_costs(model, self.pool, known)
        self.drafting = Drafting(
            drafters, self.costs, config.spec, guard=guard, look_again=self.prompts.look_again
        )
        self.drafting.controller.recall(known)
        self.prompts.tap_rows, self.prompts.read = self.drafting.tap_rows, self.drafting.read
        self._next_id = 0
        self._live: dict[int, Sequence] = {}

    def add(
        self,
        tokens: Seq[int],
        sampled: Seq[bool],
        params: SamplingParams,
        *,
        reply: ReplyText | None = None,
        salt: bytes | None = None,
        ops: Seq[Op] = (),
        slide: Slide | None = None,
    ) -> Sequence:
        """A sequence that goes on from `tokens`; nothing is computed yet.

        Args:
            tokens: All ids of the path, what it forgot too.
            sampled: One flag an id: true where the model chose it.
            params: Of the reply.
            reply: Its text, for stop strings.
            salt: Keeps its pages apart from those of other sequences; None shares them.
            ops: What the path forgot and where, in order. Without restarts: see `flatten`.
            slide: Lets the reply forget as it grows; None ends it where the context is full.

        Raises:
            UsageError: No tokens, or ops that do not fit them.
            ContextFull: Not even one more token fits, or positions passed those the model knows.
            ConfigError: A bias for a token that the model lacks, a grammar that does not compile,
                or an op that moves positions where the model cannot.
        """
        if not tokens:
            raise UsageError("There is nothing to answer.", hint="Give at least one token.")
        limits = self.limits(params.max_tokens)
        expect_fits(ops, len(tokens), limits)
        vocab_size = self.model.spec.vocab_size
        if params.logit_bias and params.logit_bias[-1][0] >= vocab_size:
            raise ConfigError(
                f"logit_bias names token {params.logit_bias[-1][0]}.",
                hint=f"The last one of this model is {vocab_size - 1}.",
            )
        grammar = None if params.grammar is None else self.grammars.matcher(params.grammar)
        self._next_id += 1
        ids, flags = list(tokens), list(sampled)
        seq = self._live[self._next_id] = Sequence(
            id=self._next_id,
            tokens=ids,
            sampled=flags,
            table=PageTable(self.pool, self.model.spec.widest_window),
            sampler=Sampler(params, tokens, grammar),
            chain=self._chain(ids, flags, ops, salt),
            eos_ids=self.model.spec.eos_ids,
            max_tokens=params.max_tokens or self.context_limit,
            limits=limits,
            ops=list(ops),
            slide=slide,
            reply=reply,
        )
        return seq

    def preview(
        self, tokens: Seq[int], sampled: Seq[bool], salt: bytes | None = None, ops: Seq[Op] = ()
    ) -> Preview:
        """What a prompt of these tokens would cost now. Looks only; arguments as of `add`.

        Raises StoreError.
        """
        return self._pricer(tokens, sampled, ops, salt).preview(stages(ops, self.pool.page_size))

    def price(
        self, tokens: Seq[int], sampled: Seq[bool], ops: Seq[Op] = (), salt: bytes | None = None
    ) -> Price:
        """The same in tokens: what it would take to come to the end of a path."""
        return self._pricer(tokens, sampled, ops, salt).price(stages(ops, self.pool.page_size))

    def _pricer(
        self, tokens: Seq[int], sampled: Seq[bool], ops: Seq[Op], salt: bytes | None
    ) -> Pricer:
        chain = self._chain(list(tokens), list(sampled), ops, salt)
        return Pricer(self.prefix, self.tiers, chain, self.model.spec.widest_window)

    def _chain(self, ids: list[int], flags: list[bool], ops: Seq[Op], salt: bytes | None) -> Chain:
        """The keys of a path; it follows the lists as they grow."""
        root = self.root_key if salt is None else root_key(self.fingerprint, salt)
        chain = Chain(root, self.pool.page_size, ids, flags)
        for op in ops:
            chain.add(op)
        return chain

    def limits(self, max_tokens: int | None = None) -> Limits:
        """What a path has to fit here, for a reply of so many tokens."""
        spec, tokenizer = self.model.spec, self.model.tokenizer
        closing = max(len(tokenizer.closing_ids(ended)) for ended in (False, True))
        return Limits(
            context=self.context_limit,
            reserve=reserve_tokens(self.context_limit, max_tokens) + closing,
            trained=spec.context_limit,
            page_tokens=self.pool.page_size,
            no_rebase=spec.no_rebase,
            parameters=spec.parameters,
            closing=closing,
        )

    def prefill(self, seq: Sequence, report: PrefillReport | None = None) -> Iterator[int]:
        """Put the prompt in place and choose the first token. Yields the tokens in place so far.

        Raises:
            OutOfPages: The pool cannot hold the prompt. What is in place stays in place.
        """
        if self.saver is not None:
            self.saver.hold()
        logits: Logits | None = None
        for part in self.prompts.fill(seq, report or PrefillReport()):
            logits = part
            yield seq.table.num_tokens
        assert logits is not None, "the last id of a prompt is always computed"
        token = seq.sampler.pick(logits, seq.tokens, len(seq.tokens)).token
        seq.push(token)
        if (top := seq.sampler.params.logprobs) is not None:
            seq.logprobs.append(logprobs(logits, token, top))
        self.drafting.follow(seq)

    def expect(
        self, tokens: Seq[int], sampled: Seq[bool], ops: Seq[Op] = (), salt: bytes | None = None
    ) -> Generator[None]:
        """Get ready, piece by piece, for a prompt that goes on from these tokens: what drafters
        need of a conversation that was last computed elsewhere. For idle time: the text and the
        pages are the same without it, and what was done is of use whenever the iterator is closed.

        Raises:
            UsageError: Ops that do not fit the tokens.
            ContextFull: Nothing can follow them.
            OutOfPages: The pool cannot hold them.
        """
        if not self.drafting.reads_late:
            return
        seq = self.add(tokens, sampled, SamplingParams(), ops=ops, salt=salt)
        try:
            self.prompts.take_up(seq)
            yield
            yield from self.drafting.read_late(seq)
        finally:
            del self._live[seq.id]
            seq.table.release()

    def step(self, seqs: Seq[Sequence]) -> list[tuple[int, ...]]:
        """Draft, run one forward pass over all rows, keep what the model itself would pick.

        Returns:
            The tokens each sequence gained: one or more.
        """
        try:
            return self._step(seqs)
        except StaleTree as error:
            # Nothing was kept of it. A drafter may cost time, and nothing else.
            for seq in seqs:
                self.drafting.drafters.give_up(seq.id, error)
            return self._step(seqs)

    def _step(self, seqs: Seq[Sequence]) -> list[tuple[int, ...]]:
        self.drafting.prepare(seqs)
        begun = perf_counter()
        for seq in seqs:
            self._slide(seq)
            seq.expect_seen()
        trees = self.drafting.propose(seqs)
        drafted = perf_counter()
        accepted: list[Accepted] = []
        with ExitStack() as stack:
            spare = 0
            if self._runner is not None and len(seqs) == 1:
                spare = self.drafting.spare(seqs[0], trees[0])
            rows = [
                stack.enter_context(seq.table.reserve(len(tree), spare))
                for seq, tree in zip(seqs, trees, strict=True)
            ]
            batch = tree_batch(
                [seq.table for seq in seqs], trees, [reserved.slots for reserved in rows]
            )
            started = perf_counter()
            for seq in seqs:
                # A row that nobody holds when its step runs again need not be copied.
                seq.last_logits = None
            result = self.model.step(batch, self.pool)
            had_begun = self._runner is not None and self._runner.was_begun
            run_on = partial(self._run_on, seqs[0], rows[0], spare) if spare else None
            result.sample([seq.sampler for seq in seqs], self.drafting.behind(seqs, run_on))
            verified = perf_counter()
            first = 0
            for place, (seq, tree, reserved) in enumerate(zip(seqs, trees, rows, strict=True)):
                accepted.append(self._accept(seq, tree, result, first))
                reserved.keep(accepted[-1].rows, moved=result.has_moved(place))
                first += len(tree)
        for seq, gained in zip(seqs, accepted, strict=True):
            self.prompts.keeper.remember(seq, seq.table.num_tokens - len(gained.rows))
        ended, ahead = perf_counter(), self.drafting.has_begun

        def record() -> StepRecord:
            return StepRecord.of(
                [ran(tree) for tree in trees],
                accepted,
                rows=sum(map(len, trees)),
                draft_ms=1000 * (drafted - begun),
                verify_ms=1000 * (verified - started),
                accept_ms=1000 * (ended - verified),
                host_ms=1000 * (started - drafted),
                hidden_ms=1000 * ((started - begun) * had_begun + (ended - verified) * ahead),
                had_begun=had_begun,
            )

        self.drafting.observe(seqs, accepted, record)
        return [gained.tokens for gained in accepted]

    def gauges(self) -> Gauges:
        """Who holds the pool's bytes right now."""
        return gauges(self.pool, [seq.table for seq in self._live.values()])

    def finish(self, seq: Sequence) -> DraftStats:
        """Keep what can be used again, on disk too, and give the sequence's pages back."""
        self._live.pop(seq.id, None)
        self.prompts.keeper.finish(seq)
        if self.saver is not None and not self._live:
            self.saver.release()
        seq.table.release()
        stats = self.drafting.drop(seq)
        if self.memory is not None:
            self.memory.save(self.drafting.controller.to_json)
        return stats

    def generate(self, seqs: Seq[Sequence]) -> None:
        """Run these sequences to their end, together."""
        for seq in seqs:
            for _ in self.prefill(seq):
                pass
        while running := [seq for seq in seqs if not seq.finished]:
            self.step(running)

    def close(self) -> None:
        """Let queued pages reach the disk, two seconds at most, and keep what was learnt."""
        if self.memory is not None:
            self.memory.save(self.drafting.controller.to_json, now=True)
        if self.saver is not None:
            self.saver.close()
        self.tiers.host.clear()

    def _slide(self, seq: Sequence) -> None:
        """Forget what has to go before the next row, if the sequence may by itself.

        The place of an op is a matter of ids alone: no step reaches past it, however many rows were
        guessed.
        """
        slide, table = seq.slide, seq.table
        if slide is None or slide.room(table.num_live, table.position) > 0:
            return
        plan = slide.next(seq.ops, table.num_tokens, table.spans())
        seq.ops.append(plan.op)
        seq.chain.add(plan.op)
        self.prompts.forget(seq)
        self.drafting.void(seq)
        seq.forgot.append(plan)

    def _run_on(self, seq: Sequence, reserved: Reservation, spare: int, rows: TreeRows) -> None:
        """Begin the next step of a sequence behind the one that runs, whose tokens nobody knows."""
        if len(reserved.reach) == len(reserved.slots) + spare:
            assert self._runner is not None
            self._runner.run_on(run_on_batch(seq.table, rows, reserved.reach), self.pool)

    def _accept(self, seq: Sequence, tree: Proposal, result: StepLogits, first: int) -> Accepted:
        """Walk down the tree with the sequence's own sampler; its stop machine cuts the walk."""
        params, edits_rows = seq.sampler.params, seq.sampler.edits_rows

        def pick(row: int, path: tuple[int, ...]) -> int:
            return result.pick(first + row, [*seq.tokens, *path] if edits_rows else ())

        gained = walked(tree, pick)
        if self.drafting.wants_picks:
            gained = gained.with_all_picks(settled(tree), pick)
        gained = gained.until(seq.push)
        if params.logprobs is not None:
            seq.logprobs += [
                logprobs(result.row(first + row), token, params.logprobs)
                for row, token in zip(gained.rows, gained.tokens, strict=True)
            ]
        seq.last_logits = result.keep(first + gained.rows[-1])
        if self.drafting.wants_rows(seq.id):
            rows = [first + row for row in gained.rows[-self.drafting.tap_rows :]]
            start = seq.table.num_tokens + len(gained.rows) - len(rows)
            self.drafting.read(seq.id, start, result.features(rows))
        return gained
