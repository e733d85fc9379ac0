"""What heads of all kinds share on a CPU: products of Q8_0 tiles, and how a tree grows.

Knows numbers; no sequence and no `DraftTree`. The target's noise is added to the likeliest guesses
only: others rarely win, and noise for all of them would cost what a depth does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt

from chatkv.errors import HeadsMismatch
from chatkv.models.decoder import Decoder
from chatkv.models.linear import describe
from chatkv.models.packing import pack
from chatkv.models.weights import Matrix
from chatkv.spec.heads import cpu_kernels as kernels
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.modules import Head

Floats = npt.NDArray[np.float32]
FAR = 9.0
"""Guesses whose logit over the temperature is so far below the best one get no noise: each of them
wins less than once in eight thousand times."""
CODES: Literal["q8", "q4"] = "q4"
"""Codes of the rows that guess, and of an eagle head's layer: a depth takes as long as its bytes do
from memory, and in four bits guesses are as often right."""
LEAST_CHANCE = 0.5
"""A path less likely than this gets no children: the next depth costs a twentieth of a step or
more, and what comes behind the path's siblings is lost in any case."""


class Product:
    """A packed matrix [N, K], and room for rows.

    Args:
        weight: [N, K].
        rows: At once.
        kind: Of its codes: `q8` or `q4`.
    """

    def __init__(self, weight: Floats, rows: int = 1, kind: Literal["q8", "q4"] = "q8") -> None:
        outputs, inputs = weight.shape
        name = {"q8": "Q8_0", "q4": "Q4_1"}[kind]
        codes_of = gguf.GGMLQuantizationType[name]
        raw = gguf.quants.quantize(np.ascontiguousarray(weight), codes_of)
        packed = pack(name, raw).reshape(-1)
        # The kernels read whole cache lines.
        room = np.empty(len(packed) + 64, np.uint8)
        start = -room.ctypes.data % 64
        data = room[start : start + len(packed)]
        data[:] = packed
        about = np.array(describe(Matrix(kind, 0, outputs, inputs)), np.int64)
        codes = np.zeros((rows, inputs), np.int16)
        scales = np.zeros((rows, inputs // 32, 2), np.float32)
        self.x = np.zeros((rows, inputs), np.float32)
        """[rows, K], to be written before a call."""
        self.out = np.zeros((rows, outputs), np.float32)
        self.arrays = (data, about, self.x, codes, scales, self.out)
        """What the kernels take."""

    def __call__(self, threads: int) -> Floats:
        """[N] of the first row, good until the next call; `out` has all of them."""
        kernels.project_one(self.arrays, threads)
        return self.out[0]


MOST_IDS = 8192
"""Draft ids that are looked at. Twice as many gain four percent of tokens and cost a third of a
depth's time; on a GPU they cost next to nothing."""


class CpuGuesses:
    """What all kinds share: from states to trees.

    Args:
        file: The head.
        model: Its target, which lends the rows of its vocabulary.
        depth: Guesses on a path.
        children: Guesses that are looked at behind one row.
    """

    def __init__(self, file: HeadFile, model: Decoder, depth: int, children: int) -> None:
        self.depth, self.children = depth, children
        self.model = model
        own = getattr(file.head, "rows", None)
        # The most frequent ones come first, where the rows are the target's.
        self._ids = file.draft_ids.numpy().astype(np.int64)[: MOST_IDS if own is None else None]
        rows = model.vocabulary_rows(self._ids, of_head=True) if own is None else numbers(own)
        self._guess = Product(rows, kind=CODES)
        self.eps = np.float32(file.head.shape.eps)
        self._gamma = numbers(file.head.gamma)
        self._near = np.zeros(len(self._ids), np.int64)
        self._room = np.zeros((2, len(self._ids)), np.float32)
        self._best = np.zeros(children, np.int64)
        self._shares = np.zeros(children, np.float32)

    def embedded(self, tokens: list[int]) -> Floats:
        """[len(tokens), H] of the target's embedding."""
        return self.model.vocabulary_rows(np.array(tokens, np.int64), of_head=False)

    def tree(
        self,
        advance: Callable[[int, int], Floats],
        root: int,
        position: int,
        *,
        temperature: float,
        seed: int,
        max_rows: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances: the best path, and at each of its rows the next best.

        Args:
            advance: (token, guesses before it) -> [H] the state behind it; called along the path.
            position: Of the token behind the root.
        """
        tokens, parents, chance = [root], [0], [1.0]
        row = 0
        for step in range(min(self.depth, max_rows - 1)):
            if chance[row] < LEAST_CHANCE:
                break
            state = advance(tokens[row], step)
            parent, best = row, 0.0
            for token, share in self._likely(state, position + step, temperature, seed):
                if len(tokens) == max_rows:
                    break
                if share > best:
                    best, row = share, len(tokens)
                tokens.append(token)
                parents.append(parent)
                chance.append(chance[parent] * share)
            if row == parent:
                break
        return tokens, parents, chance

    def _likely(
        self, state: Floats, position: int, temperature: float, seed: int
    ) -> list[tuple[int, float]]:
        """The best guesses behind a state, and their shares by score."""
        heat = temperature if temperature > 0 else 1.0
        sharpness = np.float32(1 / heat if temperature > 0 else 0.0)
        count = kernels.guess(
            state, self._gamma, self.eps, self._guess.arrays, self.model.threads, self._ids,
            np.float32(FAR * heat), sharpness, position, seed, self._near, self._room, self._best,
            self._shares,
        )  # fmt: skip
        return list(zip(self._best[:count].tolist(), self._shares[:count].tolist(), strict=True))


def norm_taps(taps: Floats, eps: np.float32, out: Floats) -> None:
    """out [taps H] = each tap [taps, H] normed."""
    one = np.ones(taps.shape[1], np.float32)
    for tap, place in zip(taps, out.reshape(taps.shape), strict=True):
        kernels.norm(np.ascontiguousarray(tap), one, eps, place)


def numbers(weight: object) -> Floats:
    """A weight as numpy has it, float32."""
    return weight.detach().float().numpy()  # type: ignore[attr-defined]


def interleaved(gate: object, up: object) -> Floats:
    """[2 I, K]: 32 rows of one, 32 of the other, as `layers.gate_row` takes them."""
    pair = np.stack([numbers(gate), numbers(up)])
    return pair.reshape(2, -1, 32, pair.shape[2]).swapaxes(0, 1).reshape(-1, pair.shape[2])


def expect_packable(head: Head, *widths: int) -> None:
    """Raise HeadsMismatch if a head's matrices do not fit packed tiles."""
    shape = head.shape
    if any(width % 32 for width in (shape.hidden, shape.inner, *widths)) or shape.draft_ids % 16:
        raise HeadsMismatch(
            f"Heads with {shape.inner} inner channels and {shape.draft_ids} draft ids do not run "
            "on the CPU.",
            hint="They are packed in blocks of 32 channels and 16 ids.",
        )
