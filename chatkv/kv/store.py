"""What the engine asks of a page store on disk: the protocol and its records.

Knows no file and no tensor. The store is a cache: what it cannot prove right it does not return,
so no caller checks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from chatkv.kv.chain import Link
from chatkv.kv.keys import KEY_BYTES, page_key

Origin = Literal["step", "chunk", "mixed"]


@dataclass(frozen=True, slots=True)
class PageHead:
    """All that is known of a stored page but its rows."""

    key: bytes
    """32 bytes: the page's name."""
    parent_key: bytes
    """32 bytes: the page, op or root before it."""
    chain_index: int
    """Links of the chain before this one, the root not counted."""
    first_position: int
    """Position of its first token."""
    token_ids: tuple[int, ...]
    """One to page_tokens ids; fewer than page_tokens is a tail."""
    sampled: tuple[bool, ...]
    """One for each id: true where the model chose it."""
    origin: Origin
    """Which path computed the rows: steps, prefill chunks, or both."""

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.parent_key) != KEY_BYTES:
            raise ValueError(f"Keys of {len(self.key)} and {len(self.parent_key)} bytes.")
        if not self.token_ids or len(self.token_ids) != len(self.sampled):
            raise ValueError(f"{len(self.sampled)} sampled bits, {len(self.token_ids)} ids.")
        if self.chain_index < 0 or self.first_position < 0:
            raise ValueError(f"Page {self.chain_index} at position {self.first_position}.")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def key_fits(self) -> bool:
        """Whether the key is the one that parent, ids and sampled bits make."""
        return self.key == page_key(self.parent_key, self.token_ids, self.sampled)


@dataclass(frozen=True, slots=True)
class PageImage(PageHead):
    """A page with its rows. Owns all per-token state that the pool holds."""

    payload: bytes
    """[layers, 2, kv_heads, num_tokens, head_dim], the pool's own bytes."""

    @classmethod
    def of(cls, head: PageHead, payload: bytes) -> PageImage:
        """A page and its rows."""
        return cls(
            head.key,
            head.parent_key,
            head.chain_index,
            head.first_position,
            head.token_ids,
            head.sampled,
            head.origin,
            payload,
        )

    @property
    def head(self) -> PageHead:
        """The same page without its rows, for whoever has to remember many."""
        return PageHead(
            self.key,
            self.parent_key,
            self.chain_index,
            self.first_position,
            self.token_ids,
            self.sampled,
            self.origin,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The end of a turn: its last stored row, and a witness of the logits that row gives."""

    head_key: bytes
    """32 bytes: key of the last page, a tail more often than not."""
    num_tokens: int
    """Tokens of the whole chain up to and with that page."""
    logits_hash: bytes
    """16 bytes: BLAKE2b of the row's float32 logits."""
    top_ids: tuple[int, ...]
    """The 8 best ids, best first."""
    top_values: tuple[float, ...]
    """Their logits; float32 values."""
    backend: str
    """Name, mode and versions of what computed it."""

    def __post_init__(self) -> None:
        if len(self.head_key) != KEY_BYTES or len(self.logits_hash) != 16:
            raise ValueError(f"{len(self.head_key)} and {len(self.logits_hash)} bytes.")
        if len(self.top_ids) != 8 or len(self.top_values) != 8:
            raise ValueError(f"{len(self.top_ids)} ids, {len(self.top_values)} values, not 8.")
        if self.num_tokens < 1:
            raise ValueError(f"A snapshot of {self.num_tokens} tokens.")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a page store holds, of all models, and what this run did to it."""

    pages: int
    """Pages held, tails and quarantined ones included."""
    tokens: int
    """Tokens in them."""
    payload_bytes: int
    """Bytes of their rows."""
    file_bytes: int
    """Bytes of the file and its journal."""
    limit_bytes: int
    """The budget for `payload_bytes`."""
    snapshots: int
    quarantined: int
    """Pages held that failed a check and are never returned."""
    written_pages: int
    """By this run."""
    written_bytes: int
    """Payload bytes, by this run."""
    read_pages: int
    """By this run; pages that failed are not counted."""
    evicted_pages: int
    """By this run, to stay in the budget."""


class Readable(Protocol):
    """The reading half of a store."""

    def find(self, keys: Sequence[bytes]) -> Mapping[bytes, PageHead]:
        """Those of `keys` that are held and not quarantined."""
        ...

    def children(self, parent: bytes) -> Sequence[PageHead]:
        """Pages whose parent key is `parent`, quarantined ones left out."""
        ...

    def read(self, keys: Sequence[bytes]) -> Iterator[PageImage]:
        """Pages in the order of `keys`; stops before the first that is missing or fails a check.

        Checked: payload size, key against parent, ids and sampled bits, the model, the checksum. A
        page that fails is quarantined. Values are not looked at: the caller checks imported ones.
        """
        ...


class PageStore(Readable, Protocol):
    """Pages of one model, by key. One thread at a time; not the one that decodes."""

    def write(self, images: Iterable[PageImage]) -> int:
        """Store pages in one commit and return how many were new.

        A key that is held is left alone, a quarantined one replaced; a tail goes once its full
        successor is stored. May evict first, to stay in the budget.

        Raises:
            StoreError: Full, read-only, busy or damaged. None of the pages is stored then.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages, and their rows from the file. Returns how many were held."""
        ...

    def shrink(self, limit_bytes: int) -> int:
        """Evict, leaf first, until payloads fit in `limit_bytes`. Returns the pages evicted."""
        ...

    def stats(self) -> StoreStats: ...

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Store or replace the snapshot of `snapshot.head_key`."""
        ...

    def save_link(self, link: Link) -> None:
        """Store an op that pages stand behind; one that is held is left alone."""
        ...

    def snapshot(self, head_key: bytes) -> Snapshot | None:
        """The witness at that page, or None."""
        ...

    def quarantined(self, parent: bytes) -> str:
        """Which check a page behind `parent` failed that is not returned any more, or nothing."""
        ...

    def other_models(self, ids: Sequence[int], sampled: Sequence[bool]) -> Sequence[str]:
        """Where the first page of these ids is held for a model of another identity: the fields of
        the identity that differ, of the one that differs least. Empty if it is held for none."""
        ...

    def kept_rates(self) -> Mapping[str, object]:
        """What `keep_rates` kept last, also in another process."""
        ...

    def keep_rates(self, rates: Mapping[str, float | None]) -> None:
        """Remember what was measured. Raises StoreError."""
        ...

    def quarantine(self, key: bytes, reason: str, *, descendants: bool = False) -> int:
        """Never return that page again. Returns the pages newly quarantined.

        Args:
            key: Of a page; one that is not held is no error.
            reason: Which check failed; shown by `explain`.
            descendants: All pages behind it too: they may be built on it.
        """
        ...
