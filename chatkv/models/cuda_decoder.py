"""The model on a CUDA device: token ids in, logits that stay there, keys and values into pages.

Knows how a model comes to a device and what it promises the engine; the pass is in
`cuda_layers.py`, the captured steps in `step_graphs.py`. Knows no sequence, no sampling, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from chatkv.attention.triton_tree import TritonBackend
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.kv.pool import CODES, PagePool
from chatkv.kv.table import Holes
from chatkv.models.catalog import ModelFile
from chatkv.models.chunk_graphs import ChunkGraphs
from chatkv.models.cuda_layers import CONTEXT_LIMIT, PAGE_SIZE, Layers, Linear
from chatkv.models.cuda_load import (
    expect_exact_attention,
    expect_format,
    load_weights,
    numerics_of,
)
from chatkv.models.cuda_logits import DeviceLogits
from chatkv.models.dense import HEADROOM_BYTES, DenseWeights
from chatkv.models.device_rows import DeviceRows
from chatkv.models.graphs import ROWS
from chatkv.models.model import ForwardBatch
from chatkv.models.row_check import check_rows, expect_exact_heads
from chatkv.models.spec import ModelSpec
from chatkv.models.step_graphs import StepGraphs
from chatkv.tokenizer import Tokenizer

CHECKED_ROWS = ROWS[:3]
"""Row counts whose bits are compared at load; larger steps are multiples of the same blocks."""
Progress = Callable[[str, int, int], None]


class CudaDecoder:
    """A loaded model with its tokenizer and attention backend. One thread uses it at a time.

    Args:
        weights: On the device.
        tokenizer: The model's own.
        linear: Which products a step uses: our own kernels, or the library's.
        capture: Replay steps as CUDA graphs.
        checked: Look at attention and at every product for row independence now.

    Raises:
        BackendUnavailable: The device cannot run this, or does not keep bits; says why.
    """

    page_size = PAGE_SIZE
    max_step_rows = 64

    def __init__(
        self,
        weights: DenseWeights,
        tokenizer: Tokenizer,
        *,
        linear: Linear = "triton",
        capture: bool = True,
        checked: bool = True,
    ) -> None:
        spec = weights.spec
        limit = min(spec.context_limit, CONTEXT_LIMIT)
        spec = replace(spec, context_limit=limit, numerics=numerics_of(weights, linear))
        self.spec: ModelSpec = spec
        self.tokenizer = tokenizer
        self.backend = TritonBackend()
        self.layers = Layers(replace(weights, spec=spec), self.backend, linear)
        self.graphs = StepGraphs(self.layers, capture=capture)
        self.chunks = ChunkGraphs(self.layers, capture=capture)
        self._checked = checked
        if checked:
            expect_exact_attention(self.backend, spec, weights)
            self.layers.pieces = check_rows(self.layers, CHECKED_ROWS)

    @classmethod
    def load(
        cls,
        file: ModelFile,
        device: torch.device,
        *,
        linear: Linear = "triton",
        capture: bool = True,
        progress: Progress | None = None,
    ) -> CudaDecoder:
        """Load a model onto a device that `devices.expect_cuda` found fit.

        Args:
            progress: Called with (what, done, total).

        Raises:
            UnknownModel: No random model of that name.
            BadWeights: The files cannot be used; says why.
            ModelError: The device has no room; says how much is missing.
            BackendUnavailable: The device cannot run this.
        """
        # Sums rounded to bfloat16 between pieces would depend on how a library cut them.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_tf32 = False
        weights, tokenizer = load_weights(file, device, torch.bfloat16, progress)
        return cls(weights, tokenizer, linear=linear, capture=capture)

    @property
    def device(self) -> str:
        """As torch spells it."""
        return str(self.layers.device)

    @property
    def backend_name(self) -> str:
        """Attention backend, mode and numerics version, and those of the linear layers."""
        backend = self.backend
        return f"{backend.name}/{backend.mode}/{backend.numerics}/{self.spec.numerics}"

    def identity(self, page_tokens: int, kv: KVFormat = PLAIN) -> dict[str, object]:
        """Everything that changes the bits of a page, for the fingerprint."""
        expect_format(kv, self.spec, self.layers.device)
        dtype = self.layers.weights.dtype
        about: dict[str, object] = dict(self.spec.identity(page_tokens, self.backend_name))
        about["pool_dtype"] = str(dtype).removeprefix("torch.")
        return kv.identity(about, dtype.itemsize)

    def pool_tokens(self, context_limit: int, kv: KVFormat = PLAIN) -> int:
        """Two contexts, or one where the device has less room."""
        spec, itemsize = self.spec, self.layers.weights.dtype.itemsize
        shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        token_bytes = kv.token_bytes(*shape, itemsize)
        if self.layers.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.layers.device)[0] - HEADROOM_BYTES
            if 2 * context_limit * token_bytes > free:
                return context_limit
        return 2 * context_limit

    def new_pool(self, num_tokens: int, kv: KVFormat = PLAIN) -> PagePool:
        """A pool on the device for at least so many tokens of this model.

        Raises:
            BackendUnavailable: The device has no such pages, or does not keep bits with them.
        """
        spec = self.spec
        expect_format(kv, spec, self.layers.device)
        if kv.is_quantised and self._checked:
            expect_exact_attention(self.backend, spec, self.layers.weights, CODES[kv.name])
            expect_exact_heads(self.layers, CHECKED_ROWS)
        return PagePool(
            num_pages=-(-num_tokens // self.page_size),
            page_size=self.page_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.layers.weights.dtype,
            kv=kv,
            device=self.layers.device,
        )

    def chunk(self, offset: int) -> tuple[int, int]:
        """(first, rows) of the prompt chunk that holds the given id `offset` ids into its run."""
        return self.chunks.chunking.chunk_of(offset)

    def tap(self, layers: Sequence[int], prompt_rows: int = 1) -> None:
        """Keep the residual behind these layers, counted from 1, and of the last rows of a chunk.
        Raises ValueError."""
        if not all(1 <= layer <= self.spec.num_layers for layer in layers):
            raise ValueError(f"Layers {list(layers)} of {self.spec.num_layers}.")
        self.graphs.tap(tuple(layers))
        self.chunks.tap(prompt_rows)

    def step(self, batch: ForwardBatch, pool: PagePool) -> DeviceLogits:
        """Run new rows through the model and store their keys and values.

        Returns:
            Logits on the device, good until the next call. The device may still be at work.

        Raises:
            ValueError: More rows than can be run, arrays of other lengths, or ids out of range.
        """
        rows = len(batch.tokens)
        if len(batch.positions) != rows or len(batch.slots) != rows or batch.call.num_rows != rows:
            raise ValueError(f"{rows} tokens, but other numbers of positions, slots or call rows.")
        if batch.grown is None:
            self._expect_ids(batch.tokens)
        return DeviceLogits(self.graphs.run(batch, pool), batch)

    def run_on(self, batch: ForwardBatch, pool: PagePool) -> None:
        """Begin the next step; see `model.RunsOn`."""
        self.graphs.run_on(batch, pool)

    @property
    def was_begun(self) -> bool:
        """Whether the step that was asked for last had begun."""
        return self.graphs.was_begun

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
        """Run the given ids of one chunk behind `known` stored slots. See `model.Model.prefill`."""
        del tapped  # what a chunk leaves does not depend on it
        first, stop = known - start, known - start + len(tokens)
        if not tokens or first < 0 or stop > chunk_rows or len(slots) != len(tokens):
            raise ValueError(
                f"{len(tokens)} tokens at row {first} of a chunk of {chunk_rows} rows."
            )
        ids = np.array(tokens, np.int32)
        self._expect_ids(ids)
        self.chunks.run(chunk_rows, ids, slots, entries, start, known, pool, holes)
        return self.chunks.logits() if want_logits else None

    def prompt_features(self, count: int) -> DeviceRows:
        """Of the last rows of the chunk that ran last. A copy."""
        return self.chunks.features(count)

    def _expect_ids(self, tokens: np.ndarray) -> None:
        # As unsigned numbers, negative ones are too large.
        if not len(tokens) or tokens.view(np.uint32).max() >= self.spec.vocab_size:
            raise ValueError(f"No tokens, or an id outside 0 to {self.spec.vocab_size - 1}.")
