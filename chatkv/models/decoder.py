"""The model: token ids in, float32 logits out, keys and values into pages.

Knows the Llama family's forward pass on a CPU. Knows no sequence, no sampling and no text.

A row's logits and K/V have the bits of plain decoding, whatever rows are beside it: in a tree,
among other sequences, or in a chunk of a prompt. All rows go through the same kernels, and none is
padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chatkv.attention.call import AttentionCall
from chatkv.attention.cpu import NO_LSE, CpuBackend
from chatkv.attention.cpu_plan import CpuPlan
from chatkv.attention.jit import set_threads
from chatkv.errors import BackendUnavailable
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.kv.pool import PagePool
from chatkv.kv.table import Holes
from chatkv.models import block, weights
from chatkv.models.catalog import ModelFile
from chatkv.models.layers import rotary_tables
from chatkv.models.linear import NUMERICS, describe
from chatkv.models.logits import Features, HostLogits
from chatkv.models.model import ForwardBatch
from chatkv.models.spec import ModelSpec
from chatkv.models.weights import Weights
from chatkv.tokenizer import Tokenizer

__all__ = ["Decoder", "ForwardBatch", "ModelSpec"]

Progress = Callable[[str, int, int], None]
Stored = tuple[np.ndarray, np.ndarray | None]
"""Rows of one layer as the kernels take them: bfloat16 bits, or codes and the bits of scales."""


class Decoder:
    """A loaded model with its tokenizer and attention backend. One thread uses it at a time."""

    device = "cpu"
    max_step_rows = 64
    chunk_tokens = 128
    """Rows of a prompt that are run at once. Chosen for speed: it changes no bit."""
    page_size = 16

    def __init__(self, model: Weights, tokenizer: Tokenizer, *, threads: int | None = None) -> None:
        self.threads = threads or torch.get_num_threads()
        set_threads(self.threads)
        spec = replace(model.spec, numerics=NUMERICS)
        self.spec = spec
        self.tokenizer = tokenizer
        self.backend = CpuBackend(self.threads)
        self._weights = model
        self._table = np.array(
            [[describe(layer[part]) for part in block.PARTS] for layer in model.layers], np.int64
        )
        self._vocabulary = np.array(describe(model.vocabulary), np.int64)
        self._head = np.array(describe(model.head), np.int64)
        self._norms = np.ascontiguousarray(model.norms)
        self._eps = np.float32(spec.norm_eps)
        self._rotary = rotary_tables(spec.head_dim, spec.rope_theta, spec.rope_factors, 0, 1024)
        rows = max(self.max_step_rows, self.chunk_tokens)
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._hidden = np.zeros((rows, spec.hidden_size), np.float32)
        self._qkv = np.zeros((rows, (heads + 2 * kv_heads) * dim), np.float32)
        self._q = np.zeros((rows, heads, dim), np.uint16)
        self._attended = np.zeros((rows, heads, dim), np.uint16)
        self._pairs = np.zeros((rows, 2 * spec.intermediate_size), np.float32)
        self._normed = _rows(rows, spec.hidden_size)
        self._joined = _rows(rows, heads * dim)
        self._acts = _rows(rows, spec.intermediate_size)
        self._room = np.empty((0, spec.vocab_size), np.float32)
        self._taps: tuple[int, ...] = ()
        self._tapped = np.empty((0, rows, spec.hidden_size), np.float32)
        self._nowhere = np.full(rows, -1, np.int64)
        # No queries and no pages: quantised layers rotate and store by themselves.
        self._nothing = (
            np.zeros((rows, 0, dim), np.uint16),
            np.zeros((0, 2, kv_heads, self.page_size, dim), np.uint16),
        )
        self._stored: tuple[PagePool | None, list[Stored]] = (None, [])

    @classmethod
    def load(
        cls, file: ModelFile, *, threads: int | None = None, progress: Progress | None = None
    ) -> Decoder:
        """Read a model file, converted on first use.

        Args:
            threads: CPU threads; None is every core this process may use.
            progress: Called with (what, done, total).

        Raises:
            BadWeights: The file cannot be used; says why.
        """
        model = weights.load(file, progress)
        tokenizer = Tokenizer.from_file(model.folder / "tokenizer.json")
        return cls(model, tokenizer, threads=threads)

    @property
    def backend_name(self) -> str:
        """Attention backend, mode and numerics version, and those of the linear layers."""
        backend = self.backend
        return f"{backend.name}/{backend.mode}/{backend.numerics}/{self.spec.numerics}"

    def identity(self, page_tokens: int, kv: KVFormat = PLAIN) -> dict[str, object]:
        """Everything that changes the bits of a page, for the fingerprint."""
        self._expect_format(kv)
        return kv.identity(self.spec.identity(page_tokens, self.backend_name), 2)

    def pool_tokens(self, context_limit: int, kv: KVFormat = PLAIN) -> int:
        """Two contexts: the system gives memory only to pages that are used."""
        return 2 * context_limit

    def new_pool(self, num_tokens: int, kv: KVFormat = PLAIN) -> PagePool:
        """A pool for at least so many tokens of this model.

        Raises:
            BackendUnavailable: The CPU has no such pages.
        """
        self._expect_format(kv)
        spec = self.spec
        return PagePool(
            num_pages=-(-num_tokens // self.page_size),
            page_size=self.page_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            kv=kv,
        )

    def _expect_format(self, kv: KVFormat) -> None:
        dim = self.spec.head_dim
        if kv.name == "fp8":
            raise BackendUnavailable(
                "The CPU has no fp8 K/V pages.", hint="Use --kv-dtype int8, which is as small."
            )
        if kv.name == "int4" and dim % 64:
            raise BackendUnavailable(
                f"int4 K/V pages need heads of 64 n channels; {self.spec.name} has {dim}.",
                hint="Use --kv-dtype int8.",
            )

    def chunk(self, offset: int) -> tuple[int, int]:
        """(first, rows) of the prompt chunk that holds the given id `offset` ids into its run."""
        return offset // self.chunk_tokens * self.chunk_tokens, self.chunk_tokens

    @property
    def embedding(self) -> tuple[np.ndarray, np.ndarray]:
        """The packed weights, and what `layers.embed_row` takes of the embedding's matrix."""
        return self._weights.data, self._vocabulary

    def vocabulary_rows(
        self, ids: npt.NDArray[np.int64], *, of_head: bool
    ) -> npt.NDArray[np.float32]:
        """[len(ids), H] the rows of the head at these ids, or of the embedding."""
        rows = np.empty((len(ids), self.spec.hidden_size), np.float32)
        matrix = self._head if of_head else self._vocabulary
        block.embed(self._weights.data, matrix, ids.astype(np.int32), rows)
        return rows

    def tap(self, layers: Sequence[int], prompt_rows: int = 1) -> None:
        """Keep the residual behind these layers, counted from 1. Raises ValueError."""
        del prompt_rows  # there is room for all rows of a chunk
        if not all(1 <= layer <= self.spec.num_layers for layer in layers):
            raise ValueError(f"Layers {list(layers)} of {self.spec.num_layers}.")
        self._taps = tuple(layers)
        self._tapped = np.zeros((len(layers), *self._tapped.shape[1:]), np.float32)

    def step(self, batch: ForwardBatch, pool: PagePool) -> HostLogits:
        """Run new rows through the model and store their keys and values.

        Returns:
            The logits of the wanted rows, float32, good until the next call.

        Raises:
            ValueError: More rows than `max_step_rows`, or arrays of other lengths.
        """
        rows = len(batch.tokens)
        if not 1 <= rows <= self.max_step_rows:
            raise ValueError(f"A step of {rows} rows; 1 to {self.max_step_rows} can be run.")
        if len(batch.positions) != rows or len(batch.slots) != rows or batch.call.num_rows != rows:
            raise ValueError(f"{rows} tokens, but other numbers of positions, slots or call rows.")
        logits = self._forward(
            batch.tokens, batch.positions, batch.slots, batch.call, pool, batch.logit_rows,
            batch.tapped,
        )  # fmt: skip
        return HostLogits(logits, batch, self._tapped if self._taps else None)

    def prefill(
        self,
        tokens: Sequence[int],
        start: int,
        known: int,
        slots: np.ndarray,
        entries: np.ndarray,
        pool: PagePool,
        *,
        chunk_rows: int,
        want_logits: bool,
        tapped: int = 0,
        holes: Holes | None = None,
    ) -> np.ndarray | None:
        """Run the given ids of one chunk behind `known` stored slots, with the bits of `step`.

        Args:
            tokens: The new ids; with what is known of the chunk at most `chunk_rows`.
            start: Slot of the chunk's first row.
            known: Slot of the first new id, `start` or more.
            slots: [len(tokens)] int64, page * page_size + offset of each new id.
            entries: int32 page ids of the sequence.
            pool: Where keys and values are.
            chunk_rows: Rows of the whole chunk, as `chunk` said. Only checked: here a row's bits
                do not depend on the shape of its chunk.
            want_logits: Whether the last id's logits are needed.
            tapped: Last ids whose tapped residuals are wanted.
            holes: Of the entries, if something was forgotten; positions are slots else.

        Returns:
            logits [V] float32 of the last id, good until the next call, or None.
        """
        rows, first = len(tokens), known - start
        if rows < 1 or first < 0 or first + rows > chunk_rows or len(slots) != rows:
            raise ValueError(f"{rows} tokens at row {first} of a chunk of {chunk_rows} rows.")
        if rows > self.chunk_tokens:
            raise ValueError(f"A chunk of {rows} tokens; {self.chunk_tokens} can be run.")
        table = torch.from_numpy(np.ascontiguousarray(entries, np.int32))
        call = AttentionCall.of(
            table[None],
            [rows],
            [known + rows],
            valid=None if holes is None else torch.from_numpy(holes.valid)[None],
            page_pos=None if holes is None else torch.from_numpy(holes.page_pos)[None],
        )
        positions = np.arange(known, known + rows) + (0 if holes is None else holes.ahead)
        wanted = np.array([rows - 1] if want_logits else [], np.int32)
        ids = np.array(tokens, np.int32)
        logits = self._forward(ids, positions, slots, call, pool, wanted, tapped)
        return logits[0] if want_logits else None

    def prompt_features(self, count: int) -> Features:
        """Of the last rows of the chunk that ran last, as many as were `tapped`. A copy."""
        kept: Any = self._tapped[:, :count].swapaxes(0, 1).copy()
        return kept

    def _forward(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        call: AttentionCall,
        pool: PagePool,
        wanted: np.ndarray | None,
        tapped: int = 0,
    ) -> np.ndarray:
        """[wanted rows, V] float32 logits of any rows, whose keys and values are stored.

        The first rows of the tapped residuals are those of all rows if all are wanted, else of the
        last `tapped`.
        """
        spec, rows = self.spec, len(tokens)
        stored = self._stored_in(pool)
        plans = self._plans(call, positions, pool)
        self._start(tokens)
        cos, sin = self._angles(positions)
        slots = np.ascontiguousarray(slots, np.int64)
        q, attended = self._q[:rows], self._attended[:rows]
        last = spec.num_layers - 1
        if pool.scales is None and len(plans) == 1:
            self._run_layers(last, rows, cos, sin, slots, q, pool, attended, *plans.values())
        else:
            for layer in range(last):
                self._before(layer, rows, cos, sin, slots, q, stored[layer])
                self._attend(plans, layer, q, stored[layer], attended)
                self._after(layer, rows, attended)
                self._keep_tap(layer + 1, rows)
        self._before(last, rows, cos, sin, slots, q, stored[last])
        if wanted is not None and not len(wanted) and not tapped:
            return self._logits(0)
        self._attend(plans, last, q, stored[last], attended)
        if wanted is not None:
            # Keys and values are stored; only rows that something is wanted of have more to do.
            kept = wanted if not tapped else np.arange(rows - tapped, rows)
            wanted = np.searchsorted(kept, wanted)
            rows, attended = len(kept), attended[kept]
            self._hidden[:rows] = self._hidden[kept]
            self._tapped[:, :rows] = self._tapped[:, kept]
        self._after(last, rows, attended)
        self._keep_tap(last + 1, rows)
        if wanted is not None and len(wanted) < rows:
            rows = len(wanted)
            self._hidden[:rows] = self._hidden[wanted]
        return self._logits(rows)

    def _stored_in(self, pool: PagePool) -> list[Stored]:
        """The layers of a pool, looked up once."""
        if self._stored[0] is not pool:
            layers: list[Stored] = [
                (rows.view(torch.uint16).numpy(), None)
                if scales is None
                else (rows.numpy(), scales.view(torch.uint16).numpy())
                for rows, scales in pool.layers
            ]
            self._stored = (pool, layers)
        return self._stored[1]

    def _plans(
        self, call: AttentionCall, positions: np.ndarray, pool: PagePool
    ) -> dict[tuple[int, int | None], CpuPlan]:
        """A plan by the columns of a row, 0 for rows that are stored plain, and the window."""
        spec, kv = self.spec, pool.kv
        windows = set(spec.windows) or {None}
        if windows != {None}:
            call = call.with_positions(positions, pool.page_size)
        kinds = {0} if pool.scales is None else {kv.code_columns(spec.head_dim)}
        if kv.keep_layers:
            kinds.add(0)
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, pool.page_size)
        return {
            (columns, window): self.backend.plan(call.within(window), *shape, columns or None)
            for columns in kinds
            for window in windows
        }

    def _attend(
        self, plans: dict[tuple[int, int | None], CpuPlan], layer: int, q: np.ndarray,
        stored: Stored, out: np.ndarray,
    ) -> None:  # fmt: skip
        pages, scales = stored
        plan = plans[0 if scales is None else pages.shape[-1], self.spec.window(layer)]
        self.backend.attend_rows(plan, q, pages, out, scales=scales)

    def _run_layers(
        self, count: int, rows: int, cos: np.ndarray, sin: np.ndarray, slots: np.ndarray,
        q: np.ndarray, pool: PagePool, attended: np.ndarray, plan: CpuPlan,
    ) -> None:  # fmt: skip
        """What the loop over layers does, in one call."""
        block.run_layers(
            count, rows, self.threads, self._weights.data, self._table, self._norms, self._eps,
            self._hidden, self._normed, self._qkv, cos, sin, slots, q,
            pool.data.view(torch.uint16).numpy(), attended, NO_LSE, plan.arguments, self._joined,
            self._pairs, self._acts, np.array(self._taps, np.int64), self._tapped,
        )  # fmt: skip
        self.backend.calls += count

    def _keep_tap(self, layer: int, rows: int) -> None:
        for place, tap in enumerate(self._taps):  # a model of few layers has one more than once
            if tap == layer:
                self._tapped[place, :rows] = self._hidden[:rows]

    def _start(self, tokens: np.ndarray) -> None:
        if min(tokens) < 0 or max(tokens) >= self.spec.vocab_size:
            raise ValueError(f"A token id is outside 0 to {self.spec.vocab_size - 1}.")
        ids = np.ascontiguousarray(tokens, np.int32)
        block.embed(self._weights.data, self._vocabulary, ids, self._hidden)

    def _angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin [T, D / 2] of positions; the tables double when one lies behind them."""
        known, needed = len(self._rotary[0]), int(max(positions)) + 1
        if needed > known:
            spec, stop = self.spec, max(needed, 2 * known)
            more = rotary_tables(spec.head_dim, spec.rope_theta, spec.rope_factors, known, stop)
            self._rotary = tuple(
                np.concatenate(pair) for pair in zip(self._rotary, more, strict=True)
            )
        cos, sin = self._rotary
        return cos[positions], sin[positions]

    def _before(
        self,
        layer: int,
        rows: int,
        cos: np.ndarray,
        sin: np.ndarray,
        slots: np.ndarray,
        q: np.ndarray,
        stored: Stored,
    ) -> None:
        pages, scales = stored
        places = (slots, q, pages) if scales is None else (self._nowhere[:rows], *self._nothing)
        block.before_attention(
            layer, rows, self.threads, self._weights.data, self._table, self._norms, self._eps,
            self._hidden, *self._normed, self._qkv, cos, sin, *places,
        )  # fmt: skip
        if scales is not None:
            # Imported here: compiled for those who have such pages.
            from chatkv.models.codes import store_codes

            store_codes(rows, self._qkv, cos, sin, slots, q, pages, scales)

    def _after(self, layer: int, rows: int, attended: np.ndarray) -> None:
        block.after_attention(
            layer, rows, self.threads, self._weights.data, self._table, self._norms, self._eps,
            self._hidden, *self._normed, attended.reshape(len(attended), -1), *self._joined,
            self._pairs, *self._acts,
        )  # fmt: skip

    def _logits(self, rows: int) -> np.ndarray:
        """[rows, V] float32 of the first rows of the residual stream."""
        logits = self._logits_room(rows)
        if rows:
            block.head(
                rows, self.threads, self._weights.data, self._head, self._norms[-1], self._eps,
                self._hidden, *self._normed, logits,
            )  # fmt: skip
        return logits

    def _logits_room(self, rows: int) -> np.ndarray:
        # Kept between calls: fresh memory of this size costs a page fault every 4 KB.
        if len(self._room) < rows:
            self._room = np.empty((rows, self.spec.vocab_size), np.float32)
        return self._room[:rows]


def _rows(rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Room for rows as float32, as codes, and for their scales."""
    return (
        np.zeros((rows, width), np.float32),
        np.zeros((rows, width), np.int16),
        np.zeros((rows, width // 32, 2), np.float32),
    )
