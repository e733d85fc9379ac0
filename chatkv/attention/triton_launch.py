"""How the Triton kernels divide a call: what decides bits, and what does not. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RESIDENT = 264
"""Programs of `attend_past` that run at once on an H200: two on each of 132 processors."""
WIDE_RESIDENT = 132
WIDE_ROWS = 128
"""(row, query head) pairs of one program of `attend_wide`."""
MANY_ROWS = 64
"""More pairs of a row and a query head are for `attend_wide`: see `pays_wide`."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How the keys of a row are divided among sums: the same numbers, the same bits."""

    tile: int
    """Keys of one tile."""
    groups: int
    """Tile j belongs to group j % groups; groups are folded in ascending order."""
    leaves: int
    """And to leaf j // groups % leaves of it; a leaf is one online softmax."""
    depth: int = 16
    """Rows from root to leaf of the deepest tree."""
    unit: int = 16
    """Where a row's own keys begin, in slots: a multiple of this."""

    @classmethod
    def of(cls, num_kv_heads: int) -> Partition:
        """The partition of a model: so many leaves that its kv heads fill a device.

        `TritonBackend.numerics` names this rule.
        """
        return cls(64, 4, 4) if num_kv_heads > 5 else cls(64, 8, 4)

    def __str__(self) -> str:
        return f"{self.tile}x{self.groups}x{self.leaves}-{self.depth}-{self.unit}"


Owner = Literal["leaf", "group", "either"]


@dataclass(frozen=True, slots=True)
class Launch:
    """How a call is put on the device. Changes no bits, but for quantised pages: see `of`."""

    block_m: int
    """Rows of one program, in (row, query head of the group) pairs: 16, 32, 64 or 128."""
    owner: Owner
    """What a program owns: a leaf, all leaves of a group, or of each sequence what balances them
    (see `triton_plan.first_by_leaf`)."""
    num_warps: int = 4
    num_stages: int = 3
    """Tiles in shared memory."""
    nodes: int = 1
    """Rows of one merging program."""
    wide: bool = False
    """`attend_wide` reads the tiles, 128 rows at a time: block_m, num_warps and num_stages are not
    used."""
    pdl: bool = False
    """A kernel starts before the one it depends on has ended (programmatic dependent launch)."""

    @classmethod
    def of(
        cls,
        rows: int,
        sequences: int,
        num_kv_heads: int,
        row_bytes: int,
        length: int,
        partition: Partition,
        *,
        quantised: bool,
        in_pairs: bool = False,
        is_mixed: bool,
        can_be_wide: bool,
        pdl: bool,
    ) -> Launch:
        """The rule, fitted to timings on an H200: it decides speed alone.

        Args:
            rows: (row, query head) pairs of the longest sequence under one kv head.
            row_bytes: Of a row of q under one head.
            length: Slots of the longest sequence.
            quantised: The pages hold codes.
            in_pairs: int8 or fp8, see `triton_tiles.codes_of`: a product of 16 rows converts each
                code once, one of 64 does through shared memory, those between more than once. int4
                is converted in registers; the compiler groups the keys of that product by the
                tile's shape, so block_m and nodes are fixed for it.
            is_mixed: `TritonPlan.is_mixed`.
            can_be_wide, pdl: The device can.
        """
        block_m = min(64, max(16, 1 << (rows - 1).bit_length()))
        if quantised:
            block_m = 16 if in_pairs and rows <= 16 else 64
        wide = can_be_wide and pays_wide(rows, row_bytes)
        resident = WIDE_RESIDENT if wide else RESIDENT
        if in_pairs:
            resident = 2 * RESIDENT  # tiles of half the bytes
        blocks = sequences * num_kv_heads * -(-rows // (WIDE_ROWS if wide else block_m))
        tiles = -(-length // partition.tile)
        # Microseconds: reading all keys once, and turns of a program one after another.
        reading = sequences * num_kv_heads * length * row_bytes * 2 / 4.5e6
        turn, start = (0.9, 3.0) if wide else (2.0 if in_pairs else 0.8, 0.0)
        partial = sequences * num_kv_heads * rows * row_bytes * 4 / (1.6e6 if wide else 2.4e6)

        def cost(parts: int) -> float:
            rounds = -(-blocks * parts // resident)
            return max(reading, rounds * (turn * -(-tiles // parts) + start)) + partial * parts

        leaves = partition.groups * partition.leaves
        owner: Owner = "group" if cost(partition.groups) <= cost(leaves) + 1.9 else "leaf"
        if is_mixed and partition.leaves > 1:
            owner = "either"
        return cls(
            block_m=block_m,
            owner=owner,
            num_warps=4 if row_bytes <= 256 else 8,
            num_stages=3 if row_bytes <= 256 else 2,
            wide=wide,
            nodes=1 if owner == "group" or quantised else 2,
            pdl=pdl,
        )


def pays_wide(rows: int, row_bytes: int) -> bool:
    """Whether `attend_wide` was faster when measured. Heads of less than 128 were not."""
    return rows > MANY_ROWS and row_bytes >= 256


def balance(
    rows: int, num_kv_heads: int, head_dim: int, partition: Partition, *, wide: bool
) -> tuple[float, float, float, float]:
    """What `triton_plan.first_by_leaf` weighs, in microseconds: see `triton_plan.plan_rows`.

    Args:
        rows: (row, query head) pairs of the longest sequence under one kv head.
        wide: `attend_wide` will serve the call.
    """
    programs = num_kv_heads * partition.groups * -(-rows // (WIDE_ROWS if wide else 64))
    reading = partition.tile * head_dim * 4 / 4.5e6
    partials = (partition.leaves - 1) * partition.groups * num_kv_heads * rows * head_dim * 8
    if wide:
        return 0.95, programs * max(reading, 1 / WIDE_RESIDENT), partials / 1.6e6, 5.0
    return 0.95, programs * reading, partials / 2.4e6, 1.9
