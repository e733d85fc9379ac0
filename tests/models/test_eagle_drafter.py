"""An eagle head in the engine: its trees are those of its modules, its memory holds chosen rows
only, and a resume gives the trees of a chat that never quit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.models import weights
from chatkv.models.catalog import ModelFile
from chatkv.models.decoder import Decoder
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.control import Controller
from chatkv.spec.drafters import heads as heads_drafter
from chatkv.spec.drafters.eagle import EagleDrafter, Held, _usable
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.heads import cpu_eagle, cpu_parts
from chatkv.spec.heads.cpu_eagle import CpuEagle
from chatkv.spec.heads.file import HeadFile, save, target_of
from chatkv.spec.heads.grow import EagleCell, Growth, Vocabulary, grow
from chatkv.spec.heads.modules import EagleHead, angles_of, new_head
from chatkv.spec.heads.shape import shape_for
from chatkv.spec.tree import DraftTree
from chatkv.tokenizer import Tokenizer
from sessions.pages import SqlitePageStore

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
DRAFT_IDS = 160


@pytest.fixture
def decoder(make_gguf, cache, tmp_path) -> Decoder:
    model = weights.load(ModelFile("model", make_gguf(tmp_path / "model.gguf", seed=5)))
    return Decoder(model, Tokenizer.from_file(model.folder / "tokenizer.json"))


@pytest.fixture
def file(decoder, tmp_path, monkeypatch) -> HeadFile:
    """A random head, which the engine finds as one that ships."""
    torch.manual_seed(1)
    head = new_head(shape_for("eagle", decoder.spec, draft_ids=DRAFT_IDS)).requires_grad_(False)
    head.gamma.mul_(4)  # sure of itself, so that trees are deep
    target = target_of(decoder.spec, decoder.tokenizer.tok_fp())
    made = HeadFile(head, torch.arange(DRAFT_IDS) + 3, target)
    monkeypatch.setattr(heads_drafter, "WEIGHTS", tmp_path / "shipped")
    save(tmp_path / "shipped" / "eagle.safetensors", made)
    return made


def engine(decoder: Decoder, spec: str = "tree:5", store=None) -> Engine:
    config = EngineConfig(spec=spec, drafters=("heads",) if spec != "none" else ())
    salt = b"" if store is None else store.salt
    return Engine(decoder, config, store=store, salt=salt, costs=COSTS, guard=False)


def drafter_of(on: Engine) -> EagleDrafter:
    (drafter,) = on.drafting.drafters.drafters
    assert isinstance(drafter, EagleDrafter)
    return drafter


def some_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


def turn(on: Engine, tokens: list[int], sampled: list[bool], seed: int = 2, length: int = 12):
    """Play one reply with a controller that knows nothing; (ids, flags, the trees that ran)."""
    mode = on.drafting.controller.mode
    on.drafting.controller = Controller(COSTS, mode, guard=False)
    trees: list[tuple[list[int], list[int]]] = []
    real = on.drafting.propose

    def watched(seqs):
        found = real(seqs)
        trees.extend((tree.tokens.tolist(), tree.parents.tolist()) for tree in found)
        return found

    on.drafting.propose = watched  # type: ignore[method-assign]
    seq = on.add(tokens, sampled, SamplingParams(temperature=0.8, seed=seed, max_tokens=length))
    for _ in on.prefill(seq):
        pass
    while not seq.finished:
        on.step([seq])
        for held in drafter_of(on).held.values() if mode != "none" else ():
            check(held, seq.tokens)
    on.finish(seq)
    on.drafting.propose = real  # type: ignore[method-assign]
    assert not on.drafting.drafters.failures
    return seq.tokens, seq.sampled, trees


def check(held: Held, tokens: list[int]) -> None:
    """Rows of chosen ids, in one piece up to the newest row in place."""
    at = held.stop
    assert 0 <= held.first <= held.stop
    for start, features in held.waiting:
        assert start == at
        at += len(features)
    assert at == len(tokens) - 1
    assert list(held.ids) == tokens


@pytest.mark.parametrize("rows", [6, 40])
@pytest.mark.parametrize(("temperature", "source"), [(0.0, "chatkv"), (0.8, "eagle3")])
def test_a_tree_is_that_of_the_modules(decoder, file, monkeypatch, rows, temperature, source):
    """Packed products lose what Q8_0 loses. What lies behind the window is not seen."""
    monkeypatch.setattr(cpu_parts, "CODES", "q8")
    monkeypatch.setattr(cpu_parts, "LEAST_CHANCE", 0.2)
    monkeypatch.setattr(cpu_eagle, "WINDOW", 32)
    if source == "eagle3":  # imported: taps as they are, rows of its own, another residual
        torch.manual_seed(1)
        shape = replace(
            file.head.shape, source="eagle3", norms_residual=True, eps=1e-3,
            rope_factors=(2.0,) * 16,
        )  # fmt: skip
        head = EagleHead(shape).requires_grad_(False)
        head.gamma.mul_(4)
        file = replace(file, head=head)
    head = file.head
    assert isinstance(head, EagleHead)
    grower = CpuEagle(file, decoder, depth=3, children=3)
    taps = torch.from_numpy(
        np.random.default_rng(0).standard_normal((rows, 3, decoder.spec.hidden_size))
    ).float()
    ids = some_ids(rows + 1)
    memory = grower.new_memory()
    for start, stop in ((0, 4), (4, rows - 1), (rows - 1, rows)):
        part: np.ndarray = taps[start:stop].numpy()
        grower.store(memory, start, part, ids[start + 1 : stop + 1])  # type: ignore[arg-type]
    first = max(0, rows - 32)
    tokens, parents, chance = grower.grow(
        memory, (first, rows), ids[-1], temperature=temperature, seed=5, max_rows=10
    )
    table = torch.from_numpy(
        decoder.vocabulary_rows(np.arange(decoder.spec.vocab_size), of_head=False)
    )
    keys, values = head.stored(
        head.features(taps), table[ids[1:]], angles_of(head.shape, torch.arange(rows))
    )

    def look(q):
        own_k, own_v = keys[None, first:], values[None, first:]
        scores = torch.einsum("nwhgd,nshd->nwhgs", q, own_k)
        return scores, lambda shares: torch.einsum("nwhgs,nshd->nwhgd", shares, own_v)

    sampler = Sampler(SamplingParams(temperature=temperature, seed=5))
    draft_ids = file.draft_ids.numpy()
    noise = np.stack([sampler.noise(rows + 1 + depth, draft_ids) for depth in range(3)])
    expected = grow(
        head,
        EagleCell(head, head.features(taps[-1:]), torch.tensor([rows - 1]), look),
        replace(
            Vocabulary.of(file.draft_ids, table, table),
            draft_rows=table[file.draft_ids] if head.rows is None else head.rows,
        ),
        torch.tensor([ids[-1]]),
        Growth(rows=DRAFT_IDS, depth=3, width=12, children=12),
        inverse_t=torch.tensor([1 / temperature if temperature else 1.0]),
        noise=torch.from_numpy(noise)[None],
    )
    paths = {}
    for row in range(DRAFT_IDS):
        above = int(expected.parents[0, row])
        token = int(expected.tokens[0, row])
        paths[row] = (*paths[above], token) if row else (token,)
    chances = {path: float(expected.chance[0, row]) for row, path in paths.items()}
    own: dict[int, tuple[int, ...]] = {0: (tokens[0],)}
    assert len(tokens) > 4
    for row in range(1, len(tokens)):
        own[row] = (*own[parents[row]], tokens[row])
        assert chance[row] == pytest.approx(chances[own[row]], rel=0.25)


@pytest.mark.parametrize("rows", [20, 60])
def test_rows_before_the_first_are_not_seen(decoder, file, monkeypatch, rows):
    """Stored or not, and also where newer ones have taken some of their places."""
    monkeypatch.setattr(cpu_eagle, "WINDOW", 48)
    grower = CpuEagle(file, decoder)
    shape = (rows, 3, decoder.spec.hidden_size)
    taps: np.ndarray = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    ids = some_ids(rows + 1)

    def tree(start: int, first: int):
        memory = grower.new_memory()
        grower.store(memory, start, taps[start:], ids[start + 1 :])  # type: ignore[arg-type]
        return grower.grow(memory, (first, rows), ids[-1], temperature=0, seed=1, max_rows=10)

    first = rows - 10
    assert tree(0, first) == tree(first, first)
    assert tree(0, first) != tree(0, max(0, rows - 48))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafted_is_plain(decoder, file, temperature):
    prompt = some_ids(20)
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=24)
    replies = []
    for spec in ("none", "tree:5"):
        on = engine(decoder, spec)
        seq = on.add(prompt, [False] * 20, params)
        for _ in on.prefill(seq):
            pass
        while not seq.finished:
            on.step([seq])
        on.finish(seq)
        replies.append(seq.tokens)
    assert replies[0] == replies[1]
    stats = on.drafting.controller.stats
    assert stats.plain_steps <= 1
    assert sum(stats.offered.values()) > 9


@pytest.mark.parametrize(
    ("how", "long"), [("kept", True), ("stored", True), ("lost", True), ("lost", False)]
)
def test_trees_after_a_resume_are_those_of_a_chat_that_never_quit(
    decoder, file, monkeypatch, tmp_path, how, long
):
    """`kept`: the same process. `stored`: another one finds the pages. `lost`: it finds none."""
    monkeypatch.setattr(CpuEagle, "reads_again", True)
    monkeypatch.setattr(cpu_eagle, "WINDOW", 24)
    store = SqlitePageStore(tmp_path / "kv.db", decoder.identity(16), limit_bytes=1 << 30)
    first = engine(decoder, store=store)
    tokens, sampled, _ = turn(first, some_ids(70 if long else 9), [False] * (70 if long else 9))
    given = [2, 5, *some_ids(6, 1)]
    tokens, sampled = [*tokens, *given], [*sampled, *[False] * len(given)]
    whole = engine(decoder)
    expected = turn(whole, tokens, sampled, seed=7)
    assert max(len(tree[0]) for tree in expected[2]) > 2
    if how == "kept":
        again = first
    else:
        first.close()
        again = engine(decoder, store=store if how == "stored" else None)
    assert turn(again, tokens, sampled, seed=7) == expected


def test_plain_steps_store_nothing_until_a_guess_is_asked_for(decoder, file):
    on = engine(decoder)
    seq = on.add(some_ids(30), [False] * 30, SamplingParams(temperature=0, max_tokens=30))
    for _ in on.prefill(seq):
        pass
    on.drafting.set_mode("none")
    for _ in range(9):
        on.step([seq])
    (held,) = drafter_of(on).held.values()
    assert held.stop == 0
    check(held, seq.tokens)
    on.drafting.set_mode("tree:5")
    on.step([seq])
    assert (held.first, held.stop) == (
        0,
        len(seq.tokens) - 1 - sum(len(f) for _, f in held.waiting),
    )


@pytest.mark.parametrize("pieces", [0, 1, 99])
@pytest.mark.parametrize("length", [70, 20])
def test_what_a_cpu_reads_in_idle_time_makes_up_for_a_restart(
    decoder, file, monkeypatch, tmp_path, length, pieces
):
    """All of it, the trees of a chat that never quit; some of it, the newest rows."""
    monkeypatch.setattr(cpu_eagle, "WINDOW", 40)
    store = SqlitePageStore(tmp_path / "kv.db", decoder.identity(16), limit_bytes=1 << 30)
    first = engine(decoder, store=store)
    tokens, sampled, _ = turn(first, some_ids(length), [False] * length)
    path = ([*tokens, 2], [*sampled, False])
    given = [5, *some_ids(6, 1)]
    prompt = ([*path[0], *given], [*path[1], *[False] * len(given)])
    first.close()
    never = engine(decoder)
    assert turn(never, some_ids(length), [False] * length)[0] == tokens
    expected = turn(never, *prompt, seed=7)
    again = engine(decoder, store=store)
    work = again.expect(*path)
    done = 0
    while done <= pieces and next(work, 0) is None:
        done += 1
    work.close()
    assert not again._live
    assert again.pool.used == again.prefix.stats().pages, "nothing is held"
    if done > 1:
        (left,) = drafter_of(again).left
        assert left.stop == len(tokens) - 1
        whole = max(0, left.stop - 40)
        assert left.first == (whole if pieces == 99 else left.stop - 8)
    reply = turn(again, *prompt, seed=7)
    assert reply[:2] == expected[:2]
    if pieces == 99:
        assert reply[2] == expected[2]
        assert max(len(tree[0]) for tree in expected[2]) > 2
    elif pieces == 0:
        assert reply[2] != expected[2], "or this test shows nothing"
    before = [(held.first, held.stop, len(held.waiting)) for held in drafter_of(again).left]
    owed = watch_owed(again)
    list(again.expect(reply[0], reply[1]))
    assert not owed or pieces < 99, "read once"
    assert len(drafter_of(again).left) <= len(before) + 1


def test_what_was_read_in_part_is_read_to_the_end(decoder, file, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_eagle, "WINDOW", 40)
    store = SqlitePageStore(tmp_path / "kv.db", decoder.identity(16), limit_bytes=1 << 30)
    first = engine(decoder, store=store)
    tokens, sampled, _ = turn(first, some_ids(70), [False] * 70)
    first.close()
    again = engine(decoder, store=store)
    owed = watch_owed(again)
    for pieces in (2, 99):
        work = again.expect(tokens, sampled)
        for _ in zip(range(pieces), work, strict=False):
            pass
        work.close()
    (left,) = drafter_of(again).left
    end = len(tokens) - 1
    assert (left.first, left.stop) == (end - 40, end)
    assert owed == [(end - start - 8, end - start) for start in range(0, 40, 8)]
    again.drafting.drafters.clear()
    assert not drafter_of(again).left


def test_nothing_is_prepared_where_nothing_is_owed(decoder, file, monkeypatch):
    on = engine(decoder)
    tokens, sampled, _ = turn(on, some_ids(70), [False] * 70)
    owed = watch_owed(on)
    assert len(list(on.expect(tokens, sampled))) == 1, "it is looked up"
    assert not owed
    assert len(drafter_of(on).left) == 1
    monkeypatch.setattr(drafter_of(on), "reads_late", False)
    assert not list(on.expect(tokens, sampled))
    monkeypatch.undo()
    assert not list(engine(decoder, "none").expect(tokens, sampled))


def watch_owed(on: Engine) -> list[tuple[int, int]]:
    """Rows that were in place and were computed again, from now on."""
    asked: list[tuple[int, int]] = []
    real = on.prompts.look_again

    def watched(seq, start, stop):
        asked.append((start, stop))
        real(seq, start, stop)

    on.drafting._look_again = watched
    return asked


def test_rows_of_plain_steps_are_computed_together_where_they_can_be_had_again(
    decoder, file, monkeypatch
):
    """On a device one that is held while a step runs would have to be copied."""
    found: list[tuple[list[Any], list[tuple[int, int]]]] = []
    for again in (False, True):
        monkeypatch.setattr(CpuEagle, "reads_again", again)
        on = engine(decoder)
        on.drafting.set_mode("none")
        owed, trees, held = watch_owed(on), list[Any](), list[int]()
        seq = on.add(some_ids(30), [False] * 30, SamplingParams(temperature=0, max_tokens=30))
        for _ in on.prefill(seq):
            pass
        step = decoder.step

        def watched(*args: Any, step=step, on=on, held=held) -> Any:
            (own,) = drafter_of(on).held.values()
            held.append(sum(start >= 30 for start, _ in own.waiting))
            return step(*args)

        with monkeypatch.context() as patch:
            patch.setattr(decoder, "step", watched)
            for _ in range(9):
                on.step([seq])
        assert held == ([0] * 9 if again else list(range(9)))
        on.drafting.set_mode("tree:5")
        real = on.drafting.propose

        def proposed(seqs, real=real, trees=trees):
            trees.append(real(seqs))
            return trees[-1]

        monkeypatch.setattr(on.drafting, "propose", proposed)
        while not seq.finished:
            on.step([seq])
        assert not on.drafting.drafters.failures
        found.append(([tree.tokens.tolist() for (tree,) in trees], owed))
    assert found[0][0] == found[1][0]
    assert max(map(len, found[0][0])) > 2
    assert (found[0][1], found[1][1]) == ([], [(30, 38)])


def test_a_cpu_computes_no_row_again_and_guesses_from_those_it_is_shown(decoder, file, tmp_path):
    store = SqlitePageStore(tmp_path / "kv.db", decoder.identity(16), limit_bytes=1 << 30)
    first = engine(decoder, store=store)
    tokens, sampled, _ = turn(first, some_ids(70), [False] * 70)
    tokens, sampled = [*tokens, 2, 5, *some_ids(6, 1)], [*sampled, *[False] * 8]
    first.close()
    again = engine(decoder, store=store)
    owed = watch_owed(again)
    reply = turn(again, tokens, sampled, length=20)
    assert reply[:2] == turn(engine(decoder, "none"), tokens, sampled, length=20)[:2]
    assert not owed
    assert max(len(tree[0]) for tree in reply[2]) > 2
    (left,) = drafter_of(again).left
    assert left.first >= 64, "nothing of what the pages gave"
    tokens, sampled = [*reply[0], 2, 5], [*reply[1], False, False]
    turn(again, tokens, sampled, seed=3)
    assert not owed
    assert drafter_of(again).left[-1].first == left.first, "what was shown is kept"


@pytest.mark.parametrize("length", [3, 20])
def test_rows_that_nobody_asked_for_are_not_owed_in_the_next_turn(
    decoder, file, monkeypatch, length
):
    """On a CPU, where a row that is held is a copy already."""
    monkeypatch.setattr(cpu_eagle, "WINDOW", 24)
    on, owed = engine(decoder), None
    tokens, sampled = some_ids(40), [False] * 40
    for number in range(3):
        on.drafting.set_mode("tree:5" if number == 2 else "none")
        owed = owed or watch_owed(on)
        tokens, sampled, trees = turn(on, tokens, sampled, seed=number, length=length)
        before = len(tokens) - length
        tokens, sampled = [*tokens, 2, 5], [*sampled, False, False]
    assert not owed
    fresh = engine(decoder)
    assert trees == turn(fresh, tokens[:before], sampled[:before], seed=2, length=length)[2]
    assert len(trees) > 1
    assert max(len(tree[0]) for tree in trees) > 2


@pytest.mark.parametrize("seed", range(4))
def test_turns_forks_and_plain_replies_in_any_order_guess_as_a_new_engine_does(
    decoder, file, monkeypatch, seed
):
    monkeypatch.setattr(CpuEagle, "reads_again", True)
    monkeypatch.setattr(cpu_eagle, "WINDOW", 24)
    rng = np.random.default_rng(seed)
    on = engine(decoder)
    chats = [(some_ids(40), [False] * 40)]
    for number in range(8):
        tokens, sampled = chats[rng.integers(len(chats))]
        cut = len(tokens) if rng.random() < 0.6 else int(rng.integers(20, len(tokens)))
        given = some_ids(int(rng.integers(1, 9)), 100 + number)
        tokens, sampled = [*tokens[:cut], *given], [*sampled[:cut], *[False] * len(given)]
        plain, length = rng.random() < 0.5, int(rng.integers(2, 30))
        on.drafting.set_mode("none" if plain else "tree:5")
        reply = turn(on, tokens, sampled, seed=number, length=length)
        if not plain:
            assert reply == turn(engine(decoder), tokens, sampled, seed=number, length=length)
        chats.append(reply[:2])


@pytest.mark.parametrize(("end", "owed", "kept"), [(55, (44, 48), 3), (52, (28, 48), 1)])
def test_rows_behind_a_gap_are_owed_from_where_the_window_is_whole(
    decoder, file, monkeypatch, end, owed, kept
):
    """Of parts that were read together all rows must be those of the sequence."""
    monkeypatch.setattr(CpuEagle, "reads_again", True)
    monkeypatch.setattr(cpu_eagle, "WINDOW", 24)
    drafter = EagleDrafter(CpuEagle(file, decoder), (1, 2, 3))

    def read(seq_id: int, *places: int) -> None:
        for start, stop in pairwise(places):
            rows: np.ndarray = np.ones((stop - start, 3, decoder.spec.hidden_size), np.float32)
            drafter.read(seq_id, start, rows)  # type: ignore[arg-type]

    ids = some_ids(54)
    read(1, 30, 36, 44, 50, 53)
    drafter.follow(1, ids)
    drafter.drop(1)
    fork = [*ids[:49], *some_ids(end - 48, 1)]
    read(2, 48, end)
    drafter.follow(2, fork)
    assert drafter.missing(2) == owed
    assert len(drafter.held[2].waiting) == kept
    assert drafter.missing(2) is None, "said once"
    read(2, *owed)
    drafter.catch_up(2, fork)
    assert (drafter.held[2].first, drafter.held[2].stop) == (end - 24, end)


def test_edits_and_forks_go_on_from_what_they_share(decoder, file, monkeypatch):
    monkeypatch.setattr(CpuEagle, "reads_again", True)
    monkeypatch.setattr(cpu_eagle, "WINDOW", 24)
    on = engine(decoder)
    tokens, sampled, _ = turn(on, some_ids(40), [False] * 40, length=20)
    other = [*tokens[:44], *some_ids(7, 3)]
    flags = [*sampled[:44], *[False] * 7]
    asked = watch_owed(on)
    trees = turn(on, other, flags)[2]
    # The fork's window begins where the memory of what it shares is gone.
    assert asked == [(27, 44)]
    assert trees == turn(engine(decoder), other, flags)[2]


def test_what_is_remembered_is_bounded_and_found_by_its_ids(decoder, file):
    drafter = EagleDrafter(CpuEagle(file, decoder), (1, 2, 3))
    for seq_id in range(20):
        ids = [seq_id, *range(50)]
        features: np.ndarray = np.ones((50, 3, decoder.spec.hidden_size), np.float32)
        drafter.read(seq_id, 0, features)  # type: ignore[arg-type]
        drafter.follow(seq_id, ids)
        drafter._store(drafter.held[seq_id], ids)
        drafter.drop(seq_id)
    assert len(drafter.left) == 8
    assert not drafter.held
    assert _usable(drafter.left[-1], [19, *range(30), 99]) == 30
    assert _usable(drafter.left[-1], [18, *range(50)]) == 0
    drafter.follow(50, [19, *range(30), 99])
    assert (drafter.held[50].first, drafter.held[50].stop) == (0, 30)


class Knows:
    """Guesses what is known to come, beside something else."""

    name = "knows"

    def __init__(self, known: list[int]) -> None:
        self.known = known

    def follow(self, seq_id, tokens): ...
    def observe(self, seq_id, accepted): ...
    def drop(self, seq_id): ...

    def propose(self, contexts, max_rows):
        return [self.tree(list(context.tokens)) for context in contexts]

    def tree(self, tokens: list[int]) -> DraftTree:
        right = self.known[len(tokens) : len(tokens) + 3]
        other = [3 + (right[0] == 3)] if right else []
        parents = [0, 0, 0, 2, 3][: 1 + len(other) + len(right)]
        return DraftTree.of([tokens[-1], *other, *right], parents, source=self.name)


def test_what_is_stored_are_the_rows_that_stayed_each_with_the_id_behind_it(
    decoder, file, monkeypatch
):
    """Rows of trees have the bits that the same ids have in a prompt."""

    def reply(ids: list[int], length: int, known: list[int]):
        on = engine(decoder, "tree:6")
        drafter, rows = drafter_of(on), dict[int, tuple[bytes, int]]()
        both: Any = [Knows(known), drafter]
        on.drafting.drafters = GuardedDrafters(both, vocab_size=decoder.spec.vocab_size)
        store = drafter.grower.store

        def watched(memory, start, features, tokens):
            for row, token in enumerate(tokens):
                rows[start + row] = np.asarray(features)[row].tobytes(), token
            store(memory, start, features, tokens)

        monkeypatch.setattr(drafter.grower, "store", watched)
        params = SamplingParams(temperature=0.8, seed=2, max_tokens=length)
        seq = on.add(ids, [False] * len(ids), params)
        for _ in on.prefill(seq):
            pass
        while not seq.finished:
            on.step([seq])
        on.finish(seq)
        assert not on.drafting.drafters.failures
        return seq.tokens, rows, on.drafting.controller.stats.tau

    tokens, _, _ = reply(some_ids(20), 24, [])
    same, drafted, tau = reply(some_ids(20), 24, tokens)
    assert same == tokens
    assert tau is not None
    assert tau > 2, "guesses were right, so rows moved"
    _, prompt, _ = reply(tokens, 3, [])
    assert len(drafted) > 30
    assert {place: token for place, (_, token) in drafted.items()} == {
        place: tokens[place + 1] for place in drafted
    }
    assert {place: prompt[place] for place in drafted} == drafted


def test_sequences_that_begin_alike_share_no_memory(decoder, file):
    drafter = EagleDrafter(CpuEagle(file, decoder), (1, 2, 3))
    rng = np.random.default_rng(0)

    def read(seq_id: int, start: int, ids: list[int]) -> None:
        rows: np.ndarray = rng.random((len(ids) - 1 - start, 3, decoder.spec.hidden_size))
        drafter.read(seq_id, start, rows.astype(np.float32))  # type: ignore[arg-type]

    ids = some_ids(30)
    read(1, 0, ids)
    drafter.follow(1, ids)
    drafter.catch_up(1, ids)
    drafter.drop(1)
    (left,) = drafter.left
    before = left.memory.keys.copy()
    for seq_id in (2, 3):
        longer = [*ids, *some_ids(12, seq_id)]
        read(seq_id, 29, longer)
        drafter.follow(seq_id, longer)
        drafter.catch_up(seq_id, longer)
        assert (drafter.held[seq_id].first, drafter.held[seq_id].stop) == (0, 41)
    one, other = drafter.held[2].memory.keys, drafter.held[3].memory.keys
    assert np.array_equal(one[..., :29], other[..., :29])
    assert not np.array_equal(one, other)
    assert np.array_equal(left.memory.keys, before)
