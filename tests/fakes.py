"""Fakes that tests share: a tiny model that really reads its K/V through pages, and its tokenizer.

A page bug changes the text here as it would with a real model. The prompt path computes with other
sums than the step path, as on real hardware, so a row from the wrong path shows as well.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chatkv.attention.cpu import CpuBackend
from chatkv.attention.reference import dequantise
from chatkv.attention.store import write_rows_plain
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.kv.pool import PagePool
from chatkv.kv.table import Holes
from chatkv.models.logits import HostLogits

EOS, USER, REPLY, SYSTEM = 256, 257, 258, 259
VOCAB = 260


class ByteTokenizer:
    """One id a byte, and four marks."""

    eos_ids = (EOS,)
    vocab_size = VOCAB

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def token_text(self, token: int) -> str | None:
        return {EOS: "<eos>", USER: "<user>", REPLY: "<reply>", SYSTEM: "<system>"}.get(token)

    def stream(self) -> ByteStream:
        return ByteStream()

    def tok_fp(self) -> bytes:
        return hashlib.blake2b(b"bytes", digest_size=32).digest()

    def head_ids(self, system: str | None = None) -> list[int]:
        return [SYSTEM, *self.encode(system or "sys")]

    def user_ids(self, text: str, first: bool, system: str | None = None) -> list[int]:
        return [USER, *self.encode(text), REPLY]

    def closing_ids(self, ended_by_eos: bool) -> list[int]:
        return [10] if ended_by_eos else [EOS, 10]


class ByteStream:
    """Whole code points out of bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(i for i in ids if i < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True)
class TinySpec:
    """Shape of the tiny model."""

    name: str = "tiny"
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    vocab_size: int = VOCAB
    context_limit: int = 512
    eos_ids: tuple[int, ...] = (EOS,)
    weights_digest: str = "tiny"
    no_rebase: str = "learned positions"
    parameters: int = 0
    windows: tuple[int | None, ...] = ()

    @property
    def widest_window(self) -> int | None:
        known = [window for window in self.windows if window is not None]
        return max(known) if known and len(known) == len(self.windows) else None


class TinyModel:
    """Two layers of random weights behind the interface of `chatkv.models.decoder.Decoder`.

    Args:
        seed: Of the weights; another seed is another model.
        repeat: How strongly the model copies what followed the same byte before: text that drafts
            can guess.
    """

    device = "cpu"
    max_step_rows = 16
    page_size = 16
    chunk_rows = 8
    backend_name = "cpu exact tiny"

    def __init__(self, seed: int = 0, repeat: float = 4.0, **spec: Any) -> None:
        self.spec = TinySpec(**spec)
        self.backend = CpuBackend()
        self.tokenizer = ByteTokenizer()
        self.seed = seed
        self.steps = 0
        self.taps: tuple[int, ...] = ()
        self.rows: list[int] = []
        """Rows of each step so far."""
        s = self.spec
        random = np.random.default_rng(seed)
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim

        def matrix(rows: int, columns: int) -> np.ndarray:
            return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

        self.embed = matrix(s.vocab_size, s.hidden_size) * 8
        self.qkv = [matrix(width, s.hidden_size) for _ in range(s.num_layers)]
        self.out = [matrix(s.hidden_size, s.num_heads * s.head_dim) for _ in range(s.num_layers)]
        self.head = (matrix(s.vocab_size, s.hidden_size) * repeat).astype(np.float32)

    def identity(self, page_tokens: int, kv: KVFormat = PLAIN) -> dict[str, Any]:
        s = self.spec
        about = {
            "weights": f"{s.weights_digest} {self.seed}",
            "page_tokens": page_tokens,
            "layers": s.num_layers,
            "kv_heads": s.num_kv_heads,
            "head_dim": s.head_dim,
            "pool_dtype": "float32",
            **({"windows": list(s.windows)} if s.windows else {}),
        }
        return kv.identity(about, 4)

    def pool_tokens(self, context_limit: int, kv: KVFormat = PLAIN) -> int:
        return 2 * context_limit

    def new_pool(self, num_tokens: int, kv: KVFormat = PLAIN) -> PagePool:
        s = self.spec
        pool = PagePool(
            num_pages=-(-num_tokens // self.page_size) + 2,
            page_size=self.page_size,
            num_layers=s.num_layers,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            dtype=torch.float32,
            kv=kv,
        )
        for tensor in pool.tensors[1 if kv.is_quantised else 0 :]:
            tensor.fill_(float("nan"))  # what nobody wrote must reach nobody
        return pool

    def tap(self, layers: Sequence[int], prompt_rows: int = 1) -> None:
        self.taps = tuple(layers)

    def prompt_features(self, count: int) -> np.ndarray:
        return self.tapped[:, -count:].swapaxes(0, 1).copy()

    def chunk(self, offset: int) -> tuple[int, int]:
        return offset // self.chunk_rows * self.chunk_rows, self.chunk_rows

    def step(self, batch: Any, pool: PagePool) -> HostLogits:
        self.steps += 1
        self.rows.append(len(batch.tokens))
        x = self.embed[batch.tokens] + self._where(batch.positions)
        call, outs = batch.call, []
        if self.spec.windows:
            call = call.with_positions(batch.positions, pool.page_size)
        for layer in range(self.spec.num_layers):
            if self.spec.windows:
                call = call.within(self.spec.windows[layer])
            q, k, v = self._split(_by_row(self.qkv[layer], x))
            self._write(pool, layer, batch.slots, k, v)
            pages, scales = pool.layers[layer]
            out, _ = self.backend.attend(call, torch.from_numpy(q), pages, scales=scales)
            x = x + np.tanh(_by_row(self.out[layer], out.numpy().reshape(len(x), -1)))
            outs.append(x)
        tapped = self._tapped(outs)
        if batch.tapped:
            tapped = tapped[:, -batch.tapped :]
        rows = range(len(x)) if batch.logit_rows is None else batch.logit_rows
        return HostLogits(_by_row(self.head, x[list(rows)]), batch, tapped)

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
        first, stop = known - start, known - start + len(tokens)
        assert first >= 0
        assert stop <= chunk_rows
        s = self.spec
        positions = np.arange(known, known + len(tokens)) + (holes.ahead if holes else 0)
        x = self.embed[list(tokens)] + self._where(positions)
        q = torch.zeros(chunk_rows, s.num_heads, s.head_dim)
        outs = []
        for layer in range(s.num_layers):
            own_q, k, v = self._split(_by_row(self.qkv[layer], x))
            q[first:stop] = torch.from_numpy(own_q)
            self._write(pool, layer, slots, k, v)
            pages, scales = pool.layers[layer]
            used = torch.from_numpy(entries[: pool.pages_for(start + stop)]).long()
            values = dequantise(
                pages[used], None if scales is None else scales[used], torch.float32
            )
            kv = torch.zeros(2, chunk_rows, s.num_kv_heads, s.head_dim)
            for row in range(stop):
                page, offset = divmod(start + row, pool.page_size)
                kv[:, row] = values[page, :, :, offset]
            window = s.windows[layer] if s.windows else None
            out = _chunk(q, kv[0], kv[1], values, start, holes, window, known)
            rows = out[first:stop].contiguous().numpy().reshape(len(x), -1)
            x = x + np.tanh(_by_row(self.out[layer], rows))
            outs.append(x)
        self.tapped = self._tapped(outs)
        return _by_row(self.head, x[-1:])[0] if want_logits else None

    def _tapped(self, outs: list[np.ndarray]) -> np.ndarray:
        """[taps, rows, H]."""
        shape = (0, len(outs[0]), self.spec.hidden_size)
        return np.stack([outs[tap - 1] for tap in self.taps]) if self.taps else np.zeros(shape)

    def _where(self, positions: np.ndarray) -> np.ndarray:
        turns = np.outer(positions, 1 / (1 + np.arange(self.spec.hidden_size)))
        return np.sin(turns).astype(np.float32) / 4

    def _split(self, qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        s = self.spec
        heads = qkv.reshape(len(qkv), -1, s.head_dim)
        q, k, v = np.split(heads, [s.num_heads, s.num_heads + s.num_kv_heads], axis=1)
        return np.ascontiguousarray(q), np.ascontiguousarray(k), np.ascontiguousarray(v)

    def _write(
        self, pool: PagePool, layer: int, slots: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> None:
        for slot in slots.tolist():
            if slot >= 0:
                page = slot // pool.page_size
                assert pool.refs(page) == 1, f"page {page} is shared and was written"
        rows = (torch.from_numpy(k), torch.from_numpy(v))
        write_rows_plain(*rows, *pool.layers[layer], torch.from_numpy(slots))


def _is_seen(slot: int, page_size: int, valid: np.ndarray) -> bool:
    entry, offset = divmod(slot, page_size)
    return bool(valid[entry, 0] <= offset < valid[entry, 1])


def _by_row(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[T, N] each row alone, so that no row depends on its neighbours."""
    if len(x) == 0:
        return np.zeros((0, len(weight)), np.float32)
    return np.stack([weight @ row for row in x])


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    holes: Holes | None,
    window: int | None,
    known: int,
) -> torch.Tensor:
    """[C, HQ, D] attention of one chunk by a library, whose bits depend on the chunk's shape."""
    where = np.arange(start + len(q))
    if holes is not None:
        past = np.arange(start)
        past = holes.page_pos[past // pages.shape[3]] + past % pages.shape[3]
        where = np.concatenate([past, where[start:] + holes.ahead])
    own = where[start:, None]
    new = where[known] if known < len(where) else 0
    count, group = -(-start // pages.shape[3]), q.shape[1] // k.shape[1]
    history = pages[:count].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :start]
    if holes is not None:
        size, valid = pages.shape[3], holes.valid
        seen = [slot for slot in range(start) if _is_seen(slot, size, valid)]
        history, where = history[:, :, seen], np.concatenate([where[seen], where[start:]])
        start = len(seen)
    keys, values = torch.cat([history, torch.stack([k, v]).transpose(1, 2)], dim=2)
    mask = torch.ones(len(q), start + len(q), dtype=torch.bool).tril(start)
    if window is not None:
        mask &= torch.from_numpy(where[None] > own - window)
        hidden = torch.from_numpy(where <= new - window)  # of pages that were let go of
        keys, values = keys.clone(), values.clone()
        keys[:, hidden], values[:, hidden] = 0, 0
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.repeat_interleave(group, 0)[None],
        values.repeat_interleave(group, 0)[None],
        attn_mask=mask,
    )
    return out[0].transpose(0, 1)
