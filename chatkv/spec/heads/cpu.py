"""A recurrent head on a CPU: its matrices as Q8_0 tiles, through the decoder's own products.

Knows numbers and one row of taps; no sequence and no tree. The target's noise is added to the
likeliest guesses only: others rarely win, and noise for all of them would cost what a depth does.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

from chatkv.errors import HeadsMismatch
from chatkv.models.decoder import Decoder
from chatkv.models.layers import quantise_row
from chatkv.models.linear import describe, linear
from chatkv.models.logits import KeptRow
from chatkv.models.model import Model
from chatkv.models.packing import pack
from chatkv.models.weights import Matrix
from chatkv.noise import gumbel
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.modules import RecurrentHead

Floats = npt.NDArray[np.float32]
CONSIDERED = 128
"""Guesses of a depth that get noise."""
LEAST_CHANCE = 0.2
"""A path less likely than this gets no children: the next depth costs a tenth of a step."""


@dataclass(slots=True)
class _Product:
    """A packed matrix [N, K] and room for one row."""

    data: npt.NDArray[np.uint8]
    about: npt.NDArray[np.int64]
    codes: npt.NDArray[np.int16]
    scales: npt.NDArray[np.float32]
    out: Floats

    @classmethod
    def of(cls, weight: Floats) -> _Product:
        outputs, inputs = weight.shape
        raw = gguf.quants.quantize(np.ascontiguousarray(weight), gguf.GGMLQuantizationType.Q8_0)
        packed = pack("Q8_0", raw).reshape(-1)
        # The kernels read whole cache lines.
        room = np.empty(len(packed) + 64, np.uint8)
        start = -room.ctypes.data % 64
        data = room[start : start + len(packed)]
        data[:] = packed
        return cls(
            data,
            np.array(describe(Matrix("q8", 0, outputs, inputs)), np.int64),
            np.zeros((1, inputs), np.int16),
            np.zeros((1, inputs // 32, 2), np.float32),
            np.zeros((1, outputs), np.float32),
        )

    def __call__(self, row: Floats, threads: int) -> Floats:
        """[N] of a row [K], good until the next call."""
        quantise_row(row, self.codes[0], self.scales[0])
        linear(self.data, self.about, threads, self.codes, self.scales, 1, self.out)
        return self.out[0]


class CpuGrower:
    """Guesses below a root, from the taps of the row that chose it.

    Args:
        file: A recurrent head.
        model: Its target, which lends the rows of its vocabulary.
        depth: Guesses on a path.
        children: Guesses that are looked at behind one row.
    """

    def __init__(
        self, file: HeadFile, model: Decoder, *, depth: int = 3, children: int = 4
    ) -> None:
        head = file.head
        assert isinstance(head, RecurrentHead), "grower_of looks before"
        self.depth, self.children = depth, children
        self._model = model
        self._ids = file.draft_ids.numpy().astype(np.int64)
        self._fuse = _Product.of(head.fuse.detach().float().numpy())
        both = np.concatenate(
            [head.gate.detach().float().numpy(), head.up.detach().float().numpy()]
        )
        self._gates = _Product.of(both)
        self._down = _Product.of(head.down.detach().float().numpy())
        self._guess = _Product.of(model.vocabulary_rows(self._ids, of_head=True))
        self._gamma = head.gamma.detach().float().numpy()

    def grow(
        self,
        taps: KeptRow,
        root: int,
        position: int,
        *,
        temperature: float,
        seed: int,
        max_rows: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of a tree, its root first.

        Args:
            taps: [taps, H] of the row that chose the root.
            position: Of the token behind the root.
        """
        threads = self._model.threads
        tokens, parents, chance = [root], [0], [1.0]
        row = 0
        state = self._fuse(_rms(np.asarray(taps)).reshape(-1), threads).copy()
        for step in range(min(self.depth, max_rows - 1)):
            if chance[row] < LEAST_CHANCE:
                break
            token = np.array([tokens[row]], np.int64)
            embedded = self._model.vocabulary_rows(token, of_head=False)[0]
            z = np.concatenate([_rms(state), _rms(embedded)])
            gates, ups = np.split(self._gates(z, threads), 2)
            inner = (gates / (1 + np.exp(-gates)) * ups).astype(np.float32)
            state = state + self._down(inner, threads)
            logits = self._guess(_rms(state) * self._gamma, threads)
            parent, best = row, 0.0
            for token_id, share in self._likely(logits, position + step, temperature, seed):
                if len(tokens) == max_rows:
                    break
                if share > best:
                    best, row = share, len(tokens)
                tokens.append(token_id)
                parents.append(parent)
                chance.append(chance[parent] * share)
            if row == parent:
                break
        return tokens, parents, chance

    def _likely(
        self, logits: Floats, position: int, temperature: float, seed: int
    ) -> list[tuple[int, float]]:
        """The best guesses of one row, and their shares by score."""
        likely = np.argpartition(logits, -CONSIDERED)[-CONSIDERED:]
        scores = logits[likely]
        if temperature > 0:
            scores = scores * np.float32(1 / temperature)
            scores = scores + gumbel(seed, position, self._ids[likely])
        order = np.argsort(scores)[::-1][: self.children]
        weights = np.exp(scores - scores.max())
        shares = weights[order] / weights.sum()
        return list(zip(self._ids[likely[order]].tolist(), shares.tolist(), strict=True))


def _rms(x: Floats) -> Floats:
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    return (x / np.sqrt(mean + np.float32(1e-6))).astype(np.float32)


def grower_of(file: HeadFile, model: Model) -> CpuGrower:
    """The head of a file on its target. Raises HeadsMismatch for a kind that does not run here."""
    if not isinstance(file.head, RecurrentHead) or not isinstance(model, Decoder):
        raise HeadsMismatch(
            f"Heads of kind {file.head.shape.kind} do not run on {model.device}.",
            hint="Recurrent ones do.",
        )
    shape = file.head.shape
    if shape.inner % 32 or shape.draft_ids % 16:
        raise HeadsMismatch(
            f"Heads with {shape.inner} inner channels and {shape.draft_ids} draft ids do not run "
            "on the CPU.",
            hint="They are packed in blocks of 32 channels and 16 ids.",
        )
    return CpuGrower(file, model)
