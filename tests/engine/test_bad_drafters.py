"""Drafters that break every rule, on an engine: the text stays, the others go on, it is told."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.sampling import SamplingParams
from chatkv.spec import drafters
from chatkv.spec.drafters.random import RandomDrafter
from chatkv.spec.tree import DraftTree
from chatkv.spec.view import TokenView

PROMPT = [259, *b"the cat sat on the mat, the cat sat on the mat, the ", 258]
COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}


class Bad(RandomDrafter):
    """Does one thing at each place where it can."""

    name = "bad"

    def __init__(self, place: str, deed: Callable[..., object]) -> None:
        super().__init__(260)
        self.place, self.deed = place, deed

    def follow(self, seq_id, tokens):
        if self.place == "follow":
            self.deed(tokens)

    def propose(self, contexts, max_rows):
        if self.place == "propose":
            self.deed(contexts[-1].tokens)
        if self.place == "tree":
            return [self.deed(int(context.tokens[-1])) for context in contexts]
        return super().propose(contexts, max_rows)

    def observe(self, seq_id, accepted):
        if self.place == "observe":
            self.deed(accepted.tokens)


def raw(root: int, **more) -> DraftTree:
    parts = {
        "tokens": np.array([root, 2], np.int32),
        "parents": np.zeros(2, np.int32),
        "chance": np.array([1, 0.5], np.float32),
        "bins": np.ones((2, 1), np.uint8),
        "sources": ("bad",),
    }
    return DraftTree(**{**parts, **more})


def fail(tokens) -> None:
    raise RuntimeError("first line\n" + "and more " * 1000)


def say_nothing(tokens) -> None:
    raise AssertionError


DEEDS = {
    **{f"raises in {place}": (place, fail) for place in ("follow", "propose", "observe")},
    "raises without a word": ("propose", say_nothing),
    "takes a token away": ("propose", lambda tokens: tokens.pop()),
    "changes the root": ("propose", lambda tokens: tokens.__setitem__(-1, 7)),
    "empties what it follows": ("follow", lambda tokens: tokens.clear()),
    "adds to what was accepted": ("observe", lambda tokens: tokens.append(7)),
    "no tree": ("tree", lambda root: None),
    "10,000 nodes": ("tree", lambda root: DraftTree.of([root] * 10_000, [0] * 10_000)),
    "a cycle": ("tree", lambda root: DraftTree.of([root, 1, 2], [0, 2, 1])),
    "another root": ("tree", lambda root: DraftTree.of([(root + 1) % 256, 1], [0, 0])),
    "a chance that is none": ("tree", lambda root: DraftTree.of([root, 1], [0, 0], [1, np.nan])),
    "a negative token": ("tree", lambda root: DraftTree.of([root, -1], [0, 0])),
    "chances of another type": ("tree", lambda root: raw(root, chance=np.array([1, 0.5]))),
    "bins of another type": ("tree", lambda root: raw(root, bins=np.full((2, 1), np.nan))),
    "no names": ("tree", lambda root: raw(root, sources=(5,))),
    "names that are lists": ("tree", lambda root: raw(root, sources=([],))),
}
HARMLESS = {"tokens of no vocabulary": ("tree", lambda root: DraftTree.of([root, 10**6], [0, 0]))}


def replies(spec: str, *, bad: Bad | None = None) -> tuple[list[list[int]], Engine]:
    """Of two conversations at once."""
    names = ("ngram",) if bad is None else ("bad", "ngram")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(drafters.DRAFTERS, "bad", lambda means: bad)
        config = EngineConfig(spec=spec, drafters=names)
        on = Engine(TinyModel(), config, costs=COSTS, guard=False)
    seqs = []
    for seed in range(2):
        params = SamplingParams(seed=seed, max_tokens=60, temperature=0.7)
        seqs.append(on.add(PROMPT, [False] * len(PROMPT), params))
        for _ in on.prefill(seqs[-1]):
            pass
    while going := [seq for seq in seqs if not seq.finished]:
        on.step(going)
    for seq in seqs:
        on.finish(seq)
    return [seq.tokens for seq in seqs], on


@pytest.mark.parametrize("what", [*DEEDS, *HARMLESS])
def test_the_text_stays_and_one_line_says_why(what):
    bad = Bad(*{**DEEDS, **HARMLESS}[what])
    (expected, _), (found, on) = replies("none"), replies("tree:9", bad=bad)
    assert found == expected
    failures = on.drafting.drafters.failures
    if what in HARMLESS:
        assert not failures
        return
    assert failures
    for told in failures:
        assert told.startswith("bad is off for this conversation: ")
        assert not told.endswith(": ")
        assert len(told) < 300
        assert "\n" not in told
    stats = on.drafting.controller.stats
    assert stats.accepted.get(("ngram", 1), 0) > 0  # the other one went on


def test_ids_can_be_looked_at_and_not_changed():
    ids = [3, 1, 4]
    view = TokenView(ids)
    ids.append(1)
    assert list(view) == [*view[:]] == [view[i] for i in range(len(view))] == ids
    assert (view[-1], view[1:3], view.index(4), view.count(1)) == (1, [1, 4], 2, 2)
    assert not hasattr(view, "append")
    with pytest.raises(TypeError):
        view[0] = 1
