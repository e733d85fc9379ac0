"""A toy model with a cache that is really read, so that a wrong row changes the text.

Logits depend on the last three ids, and a row reads those ids from cache slots: the ones before the
step, and the rows of the tree that its ancestor bits name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from taught import PROMPTS

from chatkv.grammar import Grammars
from chatkv.models.random_model import random_weights
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec import verify as verify_module
from chatkv.spec.drafter import DraftContext, Drafter
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.stats import StepRecord
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted

settings.register_profile("spec", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("spec")

PROMPT = (3, 1, 2, 0, 3, 1)
END = 5


class ToyModel:
    """float32 logits by the last three ids."""

    def __init__(self, vocab_size: int = 12, seed: int = 0, scale: float = 2.0) -> None:
        self.vocab_size = vocab_size
        rng = np.random.default_rng(seed)
        shape = (vocab_size, vocab_size, vocab_size, vocab_size)
        self.table = (rng.normal(size=shape) * scale).astype(np.float32)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        a, b, c = ids[-3:]
        return self.table[a, b, c]


class ToyCache:
    """One id a slot stands for its K/V."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.slots = list(ids)
        self.length = len(ids)

    def write(self, ids: Sequence[int]) -> None:
        self.slots[self.length :] = ids

    def read(self, mask: int) -> list[int]:
        """The newest ids that a row sees; older ones cannot matter to the toy."""
        rows = [row for row in range(63) if mask >> row & 1]
        newest = self.slots[max(0, self.length - 3) : self.length]
        return newest + [self.slots[self.length + row] for row in rows]

    def keep(self, rows: Sequence[int]) -> None:
        kept = [self.slots[self.length + row] for row in rows]
        self.slots[self.length :] = kept
        self.length += len(kept)


@dataclass
class Picker:
    """`pick` of `verify`: (row, path) -> token, with the logits at hand for mutants."""

    tree: DraftTree
    rows: list[np.ndarray]
    sampler: Sampler
    root_position: int
    history: list[int]

    def position(self, row: int) -> int:
        return self.root_position + 1 + self.tree.depths[row]

    def __call__(self, row: int, path: tuple[int, ...]) -> int:
        history = [*self.history, *path]
        return self.sampler.pick(self.rows[row], history, self.position(row)).token


class ToyTokenizer:
    """A letter for each id."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == END else bytes([ord("a") + token])

    def token_text(self, token: int) -> str | None:
        return "<end>" if token == END else chr(ord("a") + token)


def sampler_of(
    model: ToyModel, params: SamplingParams, ends: Sequence[int] = (END,), *, plain: bool = False
) -> Sampler:
    """A sampler of a reply to PROMPT, its grammar compiled."""
    grammar = None
    if params.grammar is not None:
        grammars = Grammars(ToyTokenizer(), model.vocab_size, ends or (END,))
        grammar = grammars.matcher(params.grammar)
    return Sampler(params, PROMPT, grammar, plain=plain)


@dataclass
class ToyRun:
    """What a run left behind."""

    ids: list[int]
    cache: list[int]
    steps: list[StepRecord] = field(default_factory=list)
    trees: list[DraftTree] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return sum(step.tokens for step in self.steps) / len(self.steps)


def plain(
    model: ToyModel, params: SamplingParams, ends: Sequence[int] = (), *, fast: bool = False
) -> ToyRun:
    """The definition: one token after the other, no cache, no tree."""
    sampler, ids = sampler_of(model, params, ends, plain=not fast), list(PROMPT)
    for _ in range(params.max_tokens or 0):
        ids.append(sampler.pick(model.logits(ids), ids, len(ids)).token)
        if ids[-1] in ends:
            break
    return ToyRun(ids, ids[:-1])


def drafted(
    model: ToyModel,
    params: SamplingParams,
    drafters: Sequence[Drafter],
    ends: Sequence[int] = (),
    max_rows: int = 24,
    prune: Callable[[DraftTree], DraftTree] = lambda tree: tree,
) -> ToyRun:
    """The loop of an engine: draft, one pass over the rows, verify, cut, keep."""
    guard = GuardedDrafters(drafters, vocab_size=model.vocab_size)
    sampler, limit = sampler_of(model, params, ends), params.max_tokens or 0
    ids = list(PROMPT)
    cache = ToyCache(ids)
    ids.append(sampler.pick(model.logits(ids), ids, len(ids)).token)
    run = ToyRun(ids, cache.slots)
    guard.follow(0, ids)
    made = 1

    def is_last(token: int) -> bool:
        nonlocal made
        made += 1
        return token in ends or made >= limit

    while ids[-1] not in ends and made < limit:
        tree = prune(guard.propose([DraftContext(0, ids, sampler)], [max_rows])[0])
        cache.write(tree.tokens.tolist())
        rows = [model.logits(cache.read(mask)) for mask in tree.ancestors().tolist()]
        pick = Picker(tree, rows, sampler, len(ids) - 1, ids)
        accepted: Accepted = verify_module.verify(tree, pick).until(is_last)
        if guard.wants_picks:
            accepted = accepted.with_all_picks(tree, pick)
        cache.keep(accepted.rows)
        ids.extend(accepted.tokens)
        guard.observe(0, accepted)
        run.steps.append(StepRecord.of([tree], [accepted], verify_ms=1.0))
        run.trees.append(tree)
    del cache.slots[cache.length :]
    return run


class TreeDrafter:
    """Random trees from a list of seeds; half of the guesses are the right ones of the model."""

    name = "trees"

    def __init__(self, model: ToyModel, seed: int, right: float = 0.5, depth: int = 6) -> None:
        self.model, self.seed, self.right, self.depth = model, seed, right, depth

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None: ...
    def observe(self, seq_id: int, accepted: Accepted) -> None: ...
    def drop(self, seq_id: int) -> None: ...

    def propose(self, contexts, max_rows):
        return [self._tree(c, rows) for c, rows in zip(contexts, max_rows, strict=True)]

    def _tree(self, context: DraftContext, max_rows: int) -> DraftTree:
        rng = np.random.default_rng([self.seed, len(context.tokens)])
        ids, parents, depths = [context.tokens[-1]], [0], [0]
        paths = [tuple(context.tokens)]
        seen = set()
        for _ in range(int(rng.integers(0, max_rows))):
            parent = int(rng.integers(0, len(ids)))
            if depths[parent] == self.depth:
                continue
            path = paths[parent]
            if rng.random() < self.right:
                token = context.sampler.pick(self.model.logits(path), path, len(path)).token
            else:
                token = int(rng.integers(0, self.model.vocab_size))
            if (parent, token) in seen:
                continue
            seen.add((parent, token))
            ids.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            paths.append((*path, token))
        return DraftTree.of(ids, parents, source=self.name)


class ChainDrafter(TreeDrafter):
    """A chain that is always right (`offset` 0) or always wrong."""

    name = "chain"

    def __init__(self, model: ToyModel, depth: int, offset: int = 0) -> None:
        super().__init__(model, 0, depth=depth)
        self.offset = offset

    def _tree(self, context: DraftContext, max_rows: int) -> DraftTree:
        ids = list(context.tokens)
        for _ in range(min(self.depth, max_rows - 1)):
            token = context.sampler.pick(self.model.logits(ids), ids, len(ids)).token
            ids.append((token + self.offset) % self.model.vocab_size)
        chain = ids[len(context.tokens) - 1 :]
        return DraftTree.of(chain, [0, *range(len(chain) - 1)], source=self.name)


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The toy world by name."""
    return SimpleNamespace(
        ChainDrafter=ChainDrafter,
        Cache=ToyCache,
        END=END,
        Model=ToyModel,
        PROMPT=PROMPT,
        Picker=Picker,
        TreeDrafter=TreeDrafter,
        drafted=drafted,
        Tokenizer=ToyTokenizer,
        plain=plain,
        sampler_of=sampler_of,
        verify_module=verify_module,
    )


@pytest.fixture(scope="module")
def weights():
    return random_weights("random:tiny", torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def talker(weights):
    """The same model, but it stops more often: so it makes up whole prompts."""
    head = weights.head.clone()
    head[256] *= 2
    return replace(weights, head=head)


@pytest.fixture
def prompts(tmp_path) -> Path:
    folder = tmp_path / "prompts"
    folder.mkdir()
    lines = [f'{{"turns": {turns}}}'.replace("'", '"') for turns in PROMPTS]
    (folder / "some.jsonl").write_text("\n".join(lines) + "\n")
    return folder
