"""How the Triton kernels divide a call: what decides bits, and what does not. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass

RESIDENT = 264
"""Programs that run at once on an H200: two on each of 132 processors."""


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


@dataclass(frozen=True, slots=True)
class Launch:
    """How a call is put on the device. Changes no bits, but for quantised pages: see `of`."""

    block_m: int
    """Rows of one program, in (row, query head of the group) pairs: 16, 32, 64 or 128."""
    whole_group: bool
    """A program owns all leaves of a group, not one leaf."""
    num_warps: int = 4
    num_stages: int = 3
    """Tiles in shared memory."""
    nodes: int = 1
    """Rows of one merging program."""
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
        pdl: bool,
    ) -> Launch:
        """The rule, fitted to timings on an H200: it decides speed alone.

        Args:
            rows: (row, query head) pairs of the longest sequence under one kv head.
            row_bytes: Of a row of q under one head.
            length: Slots of the longest sequence.
            quantised: Codes are converted on their way into a product. The compiler groups the keys
                of that product by the tile's shape, so block_m and nodes are fixed for them.
            pdl: The device can.
        """
        block_m = 64 if quantised else min(64, max(16, 1 << (rows - 1).bit_length()))
        blocks = sequences * num_kv_heads * -(-rows // block_m)
        tiles = -(-length // partition.tile)
        # Microseconds: reading all keys once, and turns of a program one after another.
        reading = sequences * num_kv_heads * length * row_bytes * 2 / 4.5e6
        partial = sequences * num_kv_heads * rows * row_bytes * 4 / 2.4e6

        def cost(parts: int) -> float:
            turns = -(-tiles // parts) * -(-blocks * parts // RESIDENT)
            return max(reading, 0.8 * turns) + partial * parts

        leaves = partition.groups * partition.leaves
        whole_group = cost(partition.groups) <= cost(leaves) + 1.9
        return cls(
            block_m=block_m,
            whole_group=whole_group,
            num_warps=4 if row_bytes <= 256 else 8,
            num_stages=3 if row_bytes <= 256 else 2,
            nodes=1 if whole_group or quantised else 2,
            pdl=pdl,
        )
