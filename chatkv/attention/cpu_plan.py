"""What all layers of one step share on the CPU: who sees which slots, and who works on what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatkv.attention.call import AttentionCall
from chatkv.attention.cpu_math import SPLIT, TILE
from chatkv.attention.jit import njit

NO_WORDS = np.zeros((0, 0), np.int64)
NO_RANGES = np.zeros((0, 0, 2), np.int32)
NO_POSITIONS = np.zeros((0, 0), np.int32)
NO_LANES = np.zeros((0, 0), np.int64)
NO_PLACES = np.zeros(0, np.int64)
SERIAL_COST = 2500
"""Work, in keys times rows, below which a second thread costs more than it brings."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """The arguments of the kernel after lse; numpy arrays only."""

    arguments: tuple[Any, ...]
    num_workers: int
    values: tuple[Any, ...] = ()
    """Quantised pages only: room for the values of a split, see `cpu_quantised`."""


class Planner:
    """Makes plans, and keeps the scratch memory that they share."""

    def __init__(self) -> None:
        self._scratch: dict[str, NDArray[np.float32]] = {}

    def plan(
        self,
        call: AttentionCall,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        threads: int,
        columns: int | None = None,
    ) -> CpuPlan:
        """Lay out one call for every layer of a step.

        Args:
            columns: Of a row of codes, if the pages are quantised.
        """
        starts = np.array(call.q_start_host, np.int64)
        lengths = np.array(call.kv_len_host, np.int64)
        rows, num_rows, longest = np.diff(starts), call.num_rows, int(lengths.max(initial=0))
        most_rows, group = int(rows.max(initial=0)), num_query_heads // num_kv_heads
        pieces, splits = -(-(SPLIT + most_rows) // SPLIT), -(-longest // SPLIT)
        num_tasks = int(((lengths - rows) // SPLIT + 1)[rows > 0].sum()) * num_kv_heads
        tasks, costs = np.empty((num_tasks, 3), np.int64), np.empty(num_tasks, np.int64)
        has_gaps = call.valid is not None or call.window is not None
        lists = (
            np.empty((len(lengths), 4), np.int64),
            np.empty(int(lengths.sum()), np.int64),
            np.empty((num_rows, most_rows), np.int64),
            np.empty(num_rows * most_rows, np.int64),
            np.empty((num_rows, pieces + 1), np.int64),
            np.empty(num_rows, np.int64),
            np.empty((num_rows, splits * SPLIT), np.int64) if has_gaps else NO_LANES,
            np.empty(num_rows * splits * SPLIT, np.int64) if has_gaps else NO_PLACES,
            np.zeros((num_rows, splits), np.int64) if has_gaps else NO_LANES,
            np.empty(num_rows, np.int64) if call.window is not None else NO_PLACES,
        )
        num_tasks = lay_out(
            starts,
            lengths,
            call.page_table.contiguous().numpy(),
            NO_WORDS if call.ancestors is None else call.ancestors.contiguous().numpy(),
            NO_RANGES if call.valid is None else call.valid.contiguous().numpy(),
            _positions(call),
            call.window or 0,
            page_size,
            num_kv_heads,
            head_dim if columns is None else columns,
            lists,
            tasks,
            costs,
        )
        tasks, costs = tasks[:num_tasks], costs[:num_tasks]
        workers = threads if costs.sum() > SERIAL_COST else 1
        shares = share_out(tasks, costs, workers)
        lines, width = max(1, most_rows * group), -(-(SPLIT + most_rows) // TILE) * TILE
        room = (
            self._floats("tiles", workers, head_dim * TILE),
            self._floats("queries", workers, lines * head_dim),
            self._floats("scores", workers, max(lines * width, splits)),
            self._floats("weights", workers, lines * pieces * SPLIT),
            np.arange(head_dim) * TILE,
            np.arange(splits) * head_dim,
        )
        parts = (
            self._floats("sums", num_kv_heads, num_rows * group, splits, 2),
            self._floats("outs", num_query_heads * num_rows * splits * head_dim),
        )
        # The kernel works in base 2.
        scale = call.score_scale(head_dim) * math.log2(math.e)
        arguments = (scale, tasks, shares, lists, room, parts)
        if columns is None:
            return CpuPlan(arguments, workers)
        keys = SPLIT + most_rows
        values = (
            self._floats("values", workers, keys * head_dim),
            np.empty((workers, keys), np.int64),
            np.arange(keys) * head_dim,
        )
        return CpuPlan(arguments, workers, values)

    def _floats(self, name: str, *shape: int) -> NDArray[np.float32]:
        size = math.prod(shape)
        if name not in self._scratch or self._scratch[name].size < size:
            # Lanes without a key are computed too, and what lies there must not be so small that
            # the processor takes a hundred times longer for it.
            self._scratch[name] = np.zeros(size, np.float32)
        return self._scratch[name][:size].reshape(shape)


def _positions(call: AttentionCall) -> NDArray[np.int32]:
    """[1 + N, :]: positions of rows, then of each sequence's entries; empty without a window."""
    if call.window is None or call.q_pos is None or call.page_pos is None:
        return NO_POSITIONS
    rows, entries = call.q_pos.shape[0], call.page_pos.shape[1]
    positions = np.zeros((1 + call.num_sequences, max(rows, entries)), np.int32)
    positions[0, :rows] = call.q_pos.numpy()
    positions[1:, :entries] = call.page_pos.numpy()
    return positions


@njit
def lay_out(
    q_start, kv_len, table, words, valid, positions, window,
    page_size, num_kv_heads, dim, lists, tasks, costs,
):  # fmt: skip
    """Work out who sees what, and cut the work into tasks.

    Args:
        words, valid, positions: As in the call; of length 0 for chains, without holes, without a
            window.
        lists: To fill, int64. A place is where the key of a slot under head 0 lies in flat pages.
            seqs [N, 4]: first row, rows, stored slots, and where its slots begin in `slots`.
            slots [sum of kv_len]: the place of every slot.
            own [T, R], places [T * R]: new rows that a row sees, by depth, and their places.
            cuts [T, C + 1]: own[cuts[c]:cuts[c + 1]] lie in split c, counted from the one that
                the new slots begin in.
            limits [T]: logical length of a row, itself included.
            lanes [T, X * SPLIT], stays [T * X * SPLIT], counts [T, X]: with holes or a window only.
                Of each split, the stored slots that a row sees, counted from the split's start,
                their places, and how many they are.
            begins [T]: with a window only, the first split that any row of its sequence sees.
        tasks: [K, 3] to fill: sequence, kv head, split; whole splits first.
        costs: [K] to fill, in keys times rows.

    Returns:
        How many tasks there are: none for splits that a window hides from all rows.
    """
    seqs, slots, own, places, cuts, limits, lanes, stays, counts, begins = lists
    base = 0
    for n in range(kv_len.shape[0]):
        first, rows = q_start[n], q_start[n + 1] - q_start[n]
        stored = kv_len[n] - rows
        seqs[n, 0], seqs[n, 1], seqs[n, 2], seqs[n, 3] = first, rows, stored, base
        for slot in range(0, kv_len[n] if rows > 0 else 0, page_size):
            place = np.int64(table[n, slot // page_size]) * 2 * num_kv_heads * page_size * dim
            for i in range(min(page_size, kv_len[n] - slot)):
                slots[base + slot + i] = place + i * dim
        begin = 0
        if window > 0 and rows > 0:
            # The first row is the oldest: what it does not see nobody sees.
            oldest = positions[0, first] - window + 1
            while (begin + 1) * SPLIT <= stored:
                entry = ((begin + 1) * SPLIT - 1) // page_size
                if positions[1 + n, entry] + page_size > oldest:
                    break
                begin += 1
            begins[first : first + rows] = begin
        for row in range(first, first + rows):
            depth, at, piece = 0, 0, 0
            cuts[row, 0] = 0
            for i in range(row - first + 1):
                if words.shape[0] > 0 and not (words[row, i // 64] >> (i % 64)) & 1:
                    continue
                while (stored % SPLIT + depth) // SPLIT > piece:
                    piece += 1
                    cuts[row, piece] = at
                depth += 1
                if window > 0 and positions[0, first + i] <= positions[0, row] - window:
                    continue
                own[row, at] = i
                places[row * own.shape[1] + at] = slots[base + stored + i]
                at += 1
            cuts[row, piece + 1 :] = at
            limits[row] = stored + depth
            for slot in range(begin * SPLIT, stored if counts.shape[0] > 0 else 0):
                entry, offset, split = slot // page_size, slot % page_size, slot // SPLIT
                if valid.shape[0] > 0 and not valid[n, entry, 0] <= offset < valid[n, entry, 1]:
                    continue
                if window > 0 and positions[1 + n, entry] + offset <= positions[0, row] - window:
                    continue
                lane = split * SPLIT + counts[row, split]
                lanes[row, lane] = slot % SPLIT
                stays[row * lanes.shape[1] + lane] = slots[base + slot]
                counts[row, split] += 1
        base += kv_len[n]
    num = 0
    for is_last in range(2):
        for n in range(kv_len.shape[0]):
            rows, stored = seqs[n, 1], seqs[n, 2]
            whole, begin = stored // SPLIT, 0
            if window > 0 and rows > 0:
                begin = begins[seqs[n, 0]]
            for split in range(whole if is_last else begin, whole + 1 if is_last else whole):
                for head in range(num_kv_heads if rows > 0 else 0):
                    tasks[num, 0], tasks[num, 1], tasks[num, 2] = n, head, split
                    keys = stored % SPLIT + rows if is_last else SPLIT
                    costs[num] = (keys + TILE) * (rows + 1)
                    num += 1
    return num


@njit("int64[::1](int64[:,::1], int64[::1], int64)")
def share_out(tasks, costs, num_workers):
    """Give each task to the worker with the least to do, and sort the tasks by worker.

    Returns:
        [num_workers + 1]: where the tasks of each worker begin.
    """
    num = costs.shape[0]
    loads, owner = np.zeros(num_workers, np.int64), np.empty(num, np.int64)
    shares = np.zeros(num_workers + 1, np.int64)
    for t in range(num):
        owner[t] = np.argmin(loads)
        loads[owner[t]] += costs[t]
        shares[owner[t] + 1] += 1
    for w in range(num_workers):
        shares[w + 1] += shares[w]
    given, unsorted = shares.copy(), tasks.copy()
    for t in range(num):
        tasks[given[owner[t]]] = unsorted[t]
        given[owner[t]] += 1
    return shares
