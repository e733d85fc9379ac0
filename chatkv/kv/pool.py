"""The K/V tensors of all sequences: which pages are free and how many hold each of the others.

Knows no sequence, no key and no file. Not thread-safe: one engine thread owns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from chatkv.attention.store import compact, copy_page
from chatkv.errors import ModelError, OutOfPages
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.kv.staging import Pending, Staging

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
"""How a quantised format is held; int4 has two codes a byte."""


class PagePool:
    """Pages of `page_size` slots across all layers, counted by reference.

    Args:
        num_pages: P, pages in all.
        page_size: S, slots a page; a power of two.
        num_layers: L.
        num_kv_heads: HK.
        head_dim: D.
        dtype: Of keys and values that are stored plain.
        kv: Which layers hold codes instead, and which codes.
        device: Where they live.

    Raises:
        ModelError: The device has no room for them; says how much is missing.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        kv: KVFormat = PLAIN,
        device: str | torch.device = "cpu",
    ) -> None:
        if num_pages < 1 or page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"{num_pages} pages of {page_size} slots (S is a power of two).")
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv = kv
        plain = kv.plain_layers(num_layers)
        shape = (num_pages, 2, num_kv_heads, page_size)
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = []
        if kv.is_quantised:
            coded = (num_layers - len(plain), *shape)
            kinds.append(((*coded, kv.code_columns(head_dim)), CODES[kv.name]))
            kinds.append(((*coded, kv.scale_columns(head_dim)), torch.float16))
        if plain:
            kinds.append(((len(plain), *shape, head_dim), dtype))
        try:
            # Not cleared: the system then gives memory only to pages that are really used.
            self.tensors = [torch.empty(size, dtype=kind, device=device) for size, kind in kinds]
        except torch.OutOfMemoryError as error:
            needed = sum(math.prod(size) * kind.itemsize for size, kind in kinds)
            raise _no_room(needed, num_pages * page_size, page_size, device) from error
        """All that a page owns, each [L', P, 2, HK, S, ...]: codes and their scales, then the rows
        of layers that are stored plain. What no sequence has written may be anything, NaN too."""
        self.data: Tensor = self.tensors[0]
        """[L', P, 2, HK, S, D or D / 2] codes if the pool is quantised, else all rows."""
        self.scales: Tensor | None = self.tensors[1] if kv.is_quantised else None
        """[L', P, 2, HK, S, C] float16 beside codes."""
        self.layers = self._by_layer(num_layers, plain)
        """(rows or codes, scales or None) of each layer of the model."""
        self.reclaim: Callable[[int], int] | None = None
        """Called by `take` with the pages it misses; gives back what it can and says how many.
        The owner of both sets it to `PrefixCache.reclaim`."""
        self.token_bytes = kv.token_bytes(num_layers, num_kv_heads, head_dim, dtype.itemsize)
        """What the rows of one token take."""
        self._staging = Staging(self.data.device)
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._touched = 0
        """Pages from here on were never taken."""

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody holds, if only the prefix cache."""
        return self.num_pages - len(self._free)

    def refs(self, page: int) -> int:
        """How many hold this page. Over one, it must not be written."""
        return self._refs[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` slots need."""
        return -(-num_tokens // self.page_size)

    def payload_bytes(self, num_tokens: int) -> int:
        """Length of the image of a page with `num_tokens` rows."""
        return num_tokens * self.token_bytes

    def take(self, n: int = 1) -> list[int]:
        """Take `n` free pages with one reference each, after asking `reclaim` if too few are free.

        Raises:
            OutOfPages: Still too few. None is taken then.
        """
        if n > len(self._free) and self.reclaim is not None:
            self.reclaim(n - len(self._free))
        if n > len(self._free):
            raise OutOfPages(needed=n, free=len(self._free), page_size=self.page_size)
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            assert self._refs[page] == 0, f"free page {page} has {self._refs[page]} holders"
            self._refs[page] = 1
            self._touched = max(self._touched, page + 1)
        return pages

    def share(self, page: int) -> int:
        """Hold a page that somebody holds already, and return it."""
        assert self._refs[page] > 0, f"page {page} is free and cannot be shared"
        self._refs[page] += 1
        return page

    def release(self, page: int) -> None:
        """Let go of a page; the last holder frees it. Its rows are not cleared."""
        assert self._refs[page] > 0, f"page {page} is released twice"
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)

    def clear_free(self) -> int:
        """Overwrite the rows of all pages that nobody holds. Returns how many were ever written."""
        pages = [page for page in self._free if page < self._touched]
        for page in pages:
            for tensor in self.tensors:
                tensor[:, page] = 0
        return len(pages)

    def copy(self, src: int) -> int:
        """Take a page and copy all rows of `src` into it: what a holder does before it writes.

        Raises:
            OutOfPages: Nothing is taken then.
        """
        self.share(src)  # or taking the copy could reclaim the original
        try:
            (page,) = self.take()
        finally:
            self.release(src)
        self.copy_into(src, page)
        return page

    def copy_into(self, src: int, dst: int) -> None:
        """Copy all rows of a page, in all layers, into a page that one holder has."""
        assert self._refs[dst] == 1, f"page {dst} has {self._refs[dst]} holders, is not to write"
        for tensor in self.tensors:
            copy_page(tensor, None, src, dst)

    def compact(self, src: Tensor, dst: Tensor) -> None:
        """Move rows of all layers to other slots, bit for bit.

        Args:
            src, dst: [R] int64 physical slots, rising in logical order; no target above its source.
        """
        for tensor in self.tensors:
            compact(tensor, None, src, dst)

    def row(self, slot: int) -> Tensor:
        """One row of all layers as bytes, [token_bytes] uint8."""
        page, offset = divmod(slot, self.page_size)
        rows = [t.view(torch.uint8)[:, page, :, :, offset].flatten() for t in self.tensors]
        return torch.cat(rows)

    def image(self, page: int, num_tokens: int) -> bytes:
        """The first rows of a page as stored on disk: of each of `tensors`, one behind the other,
        [L', 2, HK, num_tokens, ...], little-endian."""
        return self.read(page, num_tokens)()

    def read(self, page: int, num_tokens: int) -> Pending:
        """As `image`, but the bytes are waited for by whoever calls the result, in any thread.

        The page may be written again at once.
        """
        return self._staging.read(self._rows(page, num_tokens))

    def load(self, page: int, payload: bytes | memoryview, num_tokens: int) -> None:
        """Write an image into a page that one holder has. Rows behind it are left as they are.

        Raises:
            ValueError: `payload` is not of the size of that many rows. Nothing is written.
        """
        rows = self._rows(page, num_tokens)
        if len(payload) != self.payload_bytes(num_tokens):
            raise ValueError(
                f"{len(payload)} bytes for {num_tokens} tokens of {self.token_bytes} bytes."
            )
        assert self._refs[page] == 1, f"page {page} has {self._refs[page]} holders, is not to write"
        self._staging.write(payload, rows)

    def are_numbers(self, page: int, num_tokens: int) -> bool:
        """Whether the first rows of a page, or their scales, hold neither NaN nor infinity."""
        return all(
            bool(t[:, page, :, :, :num_tokens].isfinite().all())
            for t in self.tensors
            if t.dtype.itemsize > 1  # any code is a number
        )

    def _rows(self, page: int, num_tokens: int) -> list[Tensor]:
        """Views of the first rows of a page as bytes: [L', 2, HK, num_tokens, bytes] each."""
        if not 1 <= num_tokens <= self.page_size:
            raise ValueError(f"{num_tokens} tokens in a page of {self.page_size}.")
        assert self._refs[page] > 0, f"page {page} is free"
        return [t.view(torch.uint8)[:, page, :, :, :num_tokens] for t in self.tensors]

    def _by_layer(
        self, num_layers: int, plain: tuple[int, ...]
    ) -> list[tuple[Tensor, Tensor | None]]:
        found: list[tuple[Tensor, Tensor | None]] = []
        coded = kept = 0
        for layer in range(num_layers):
            if layer in plain:
                found.append((self.tensors[-1][kept], None))
                kept += 1
            else:
                found.append((self.tensors[0][coded], self.tensors[1][coded]))
                coded += 1
        return found


def _no_room(needed: int, tokens: int, page_size: int, device: str | torch.device) -> ModelError:
    free = torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else 0
    fits = int(tokens * 0.9 * free / needed) // page_size * page_size
    return ModelError(
        f"Pages for {tokens:,} tokens need {needed / 2**30:.1f} GiB on {device}, "
        f"but {free / 2**30:.1f} GiB are free beside the model.",
        hint=f"About {fits:,} tokens fit: --context {fits}." if fits else "Use a smaller model.",
    )
