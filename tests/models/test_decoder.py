"""The whole forward pass: right against transformers, exact against itself."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.attention.call import AttentionCall
from chatkv.attention.jit import set_threads
from chatkv.kv.pool import PagePool
from chatkv.models import weights
from chatkv.models.catalog import ModelFile
from chatkv.models.decoder import Decoder
from chatkv.models.model import ForwardBatch
from chatkv.tokenizer import Tokenizer

HUGE = 0x7F7F  # bfloat16 bits of 3.4e38
NAN = 0x7FC0


class Run:
    """One sequence on pages of its own: scattered ids, poison in every slot it has not written."""

    def __init__(self, model: Decoder, tokens: int = 256, seed: int = 0, poison: int = NAN):
        self.model = model
        self.pool: PagePool = model.new_pool(tokens + 64)
        self.pool.data.view(torch.uint16).fill_(poison)
        pages = self.pool.take(self.pool.num_pages)
        self.pages = np.random.default_rng(seed).permutation(pages).astype(np.int32)

    def slots(self, start: int, stop: int) -> np.ndarray:
        at = np.arange(start, stop)
        return self.pages[at // 16].astype(np.int64) * 16 + at % 16

    def step(
        self, tokens, start: int, depths=None, ancestors=None, rows=None, tapped: int = 0
    ) -> np.ndarray:
        count = len(tokens)
        table = torch.from_numpy(self.pages[None])
        call = AttentionCall.of(table, [count], [start + count], ancestors=ancestors)
        positions = start + np.arange(count) if depths is None else start + np.asarray(depths)
        batch = ForwardBatch(
            tokens=np.array(tokens, np.int32),
            positions=positions.astype(np.int32),
            slots=self.slots(start, start + count),
            call=call,
            logit_rows=rows,
            tapped=tapped,
        )
        self.last = self.model.step(batch, self.pool)
        return self.last.logits.copy()

    def prefill(self, tokens, start: int, known: int | None = None, tapped: int = 0) -> np.ndarray:
        known = start if known is None else known
        logits = self.model.prefill(
            tokens, start, known, self.slots(known, known + len(tokens)), self.pages, self.pool,
            chunk_rows=self.model.chunk_tokens, want_logits=True, tapped=tapped,
        )  # fmt: skip
        assert logits is not None
        return logits.copy()

    def rows(self, start: int, stop: int) -> np.ndarray:
        """K/V bits of slots: [L, 2, HK, stop - start, D]."""
        data = self.pool.data.view(torch.uint16).numpy()
        page, offset = np.divmod(self.slots(start, stop), 16)
        return data[:, page, :, :, offset].copy()


def some_tokens(model: Decoder, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.spec.vocab_size, count).tolist()


def expected_logits(oracle, tokens) -> np.ndarray:
    with torch.inference_mode():
        return oracle(torch.tensor([tokens])).logits[0].float().numpy()


def errors(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """(largest, root mean square)."""
    wrong = actual - expected
    return float(np.abs(wrong).max()), float(np.sqrt((wrong**2).mean()))


@pytest.mark.parametrize(
    ("linear", "tied"), [("Q4_1", True), ("Q4_0", False), ("Q8_0", True)], ids=str
)
def test_logits_match_transformers(make_gguf, make_oracle, cache, tmp_path, linear, tied):
    """Our K/V, queries and attention outputs are bfloat16, all else is finer: so we stay well
    inside what transformers itself loses in bfloat16. Measured on six such models: largest error
    0.09 to 0.14 against 0.24 to 0.32, root mean square 0.015 to 0.018 against 0.042 to 0.050,
    logits to 6.
    """
    path = make_gguf(tmp_path / "model.gguf", linear=linear, tied=tied, seed=5)
    model = weights.load(ModelFile("model", path))
    decoder = Decoder(model, Tokenizer.from_file(model.folder / "tokenizer.json"))
    oracle = make_oracle(model)
    tokens = some_tokens(decoder, 60)
    exact = expected_logits(oracle, tokens)
    largest, mean = errors(expected_logits(oracle.bfloat16(), tokens), exact)
    stepped = Run(decoder).step(tokens, 0)
    assert errors(stepped, exact) < (largest, mean)
    assert errors(stepped, exact)[1] < mean / 2
    assert errors(Run(decoder).prefill(tokens, 0), exact[-1]) < (largest, mean)
    assert (stepped.argmax(-1) == exact.argmax(-1)).mean() > 0.95


def test_decoding_one_by_one_has_the_bits_of_one_chain(tiny):
    tokens = some_tokens(tiny, 40)
    whole, single = Run(tiny), Run(tiny, seed=1, poison=HUGE)
    together = whole.step(tokens, 0)
    alone = [single.step([token], i)[0] for i, token in enumerate(tokens)]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(whole.rows(0, 40), single.rows(0, 40))


@settings(max_examples=15)
@given(data=st.data())
def test_a_tree_row_has_the_bits_of_its_path(tiny, data):
    history = data.draw(st.sampled_from([1, 15, 16, 17, 100]))
    parents = [-1]
    for row in range(1, data.draw(st.integers(1, 20))):
        parents.append(data.draw(st.integers(0, row - 1)))
    paths = [[0]]
    for row, parent in enumerate(parents[1:], 1):
        paths.append([*paths[parent], row])
    if max(map(len, paths)) > tiny.backend.max_depth:
        return
    words = torch.tensor([[sum(1 << j for j in path)] for path in paths], dtype=torch.int64)
    tokens = some_tokens(tiny, history + len(parents), seed=history)
    prompt, nodes = tokens[:history], tokens[history:]
    tree = Run(tiny)
    tree.prefill(prompt, 0)
    depths = [len(path) - 1 for path in paths]
    logits = tree.step(nodes, history, depths=depths, ancestors=words)
    stored = tree.rows(history, history + len(nodes))
    row = data.draw(st.integers(0, len(nodes) - 1))
    chain = Run(tiny, seed=2, poison=HUGE)
    chain.prefill(prompt, 0)
    for depth, node in enumerate(paths[row]):
        alone = chain.step([nodes[node]], history + depth)[0]
        np.testing.assert_array_equal(logits[node], alone)
    np.testing.assert_array_equal(
        stored[paths[row]], chain.rows(history, history + len(paths[row]))
    )


def test_sequences_in_one_step_do_not_see_each_other(tiny):
    run = Run(tiny)
    first, second = some_tokens(tiny, 20), some_tokens(tiny, 9, seed=1)
    table = np.stack([run.pages[:4], run.pages[4:8]])
    slots = [table[n][np.arange(c) // 16] * 16 + np.arange(c) % 16 for n, c in ((0, 20), (1, 9))]
    batch = ForwardBatch(
        tokens=np.array(first + second, np.int32),
        positions=np.array([*range(20), *range(9)], np.int32),
        slots=np.concatenate(slots).astype(np.int64),
        call=AttentionCall.of(torch.from_numpy(table), [20, 9], [20, 9]),
    )
    logits = tiny.step(batch, run.pool).logits.copy()
    np.testing.assert_array_equal(logits[:20], Run(tiny).step(first, 0))
    np.testing.assert_array_equal(logits[20:], Run(tiny).step(second, 0))


def test_wanted_rows_come_in_the_order_asked_for(tiny):
    tokens = some_tokens(tiny, 12)
    every = Run(tiny).step(tokens, 0)
    picked = np.array([7, 0, 7], np.int32)
    np.testing.assert_array_equal(Run(tiny).step(tokens, 0, rows=picked), every[picked])
    assert Run(tiny).step(tokens, 0, rows=np.array([], np.int32)).shape == (0, every.shape[1])


def test_a_chunk_has_the_same_bits_whatever_follows_and_wherever_it_lies(tiny):
    tokens = some_tokens(tiny, 200)
    whole = Run(tiny)
    whole.prefill(tokens[:128], 0)
    last = whole.prefill(tokens[128:], 128)
    for cut in (1, 16, 77, 128):
        part = Run(tiny, seed=3, poison=HUGE)
        part.prefill(tokens[:cut], 0)
        np.testing.assert_array_equal(part.rows(0, cut), whole.rows(0, cut))
        if cut < 128:
            part.prefill(tokens[cut:128], 0, known=cut)
        np.testing.assert_array_equal(part.rows(0, 128), whole.rows(0, 128))
        np.testing.assert_array_equal(part.prefill(tokens[128:], 128), last)
        np.testing.assert_array_equal(part.rows(0, 200), whole.rows(0, 200))


def test_a_prompt_has_the_bits_of_decoding(tiny):
    tokens = some_tokens(tiny, 150)
    chunks, chain = Run(tiny), Run(tiny, seed=4, poison=HUGE)
    chunks.prefill(tokens[:128], 0)
    last = chunks.prefill(tokens[128:], 128)
    for position, token in enumerate(tokens):
        logits = chain.step([token], position)
    np.testing.assert_array_equal(last, logits[0])
    np.testing.assert_array_equal(chunks.rows(0, 150), chain.rows(0, 150))


def test_only_the_given_slots_are_written(tiny):
    run = Run(tiny, poison=HUGE)
    run.prefill(some_tokens(tiny, 20), 0)
    run.step(some_tokens(tiny, 3), 20)
    data = run.pool.data.view(torch.uint16).numpy()
    page, offset = np.divmod(run.slots(0, 23), 16)
    assert not (data[:, page, :, :, offset] == HUGE).all(axis=(1, 2, 3, 4)).any()
    data[:, page, :, :, offset] = HUGE
    assert (data == HUGE).all()


def test_so_many_threads_also_where_numba_starts_its_own_only_now():
    script = (
        "import torch; from chatkv.attention.jit import set_threads\n"
        "set_threads(1); print(torch.get_num_threads())"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "1\n", ran.stderr


def test_threads_do_not_change_bits(tiny):
    tokens, before = some_tokens(tiny, 30), torch.get_num_threads()
    outs = []
    for count in {1, 2, before}:
        set_threads(count)
        run = Run(tiny)
        outs.append((run.prefill(tokens, 0), run.step([5, 6, 7], 30), run.rows(0, 33)))
    set_threads(before)
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_positions_past_the_first_tables(tiny):
    run = Run(tiny)
    slots, table = run.slots(0, 1), torch.from_numpy(run.pages[None])
    outs = []
    for position in (5000, 5000):
        call = AttentionCall.of(table, [1], [1])
        batch = ForwardBatch(np.array([7], np.int32), np.array([position], np.int32), slots, call)
        tiny.step(batch, run.pool)
        outs.append(run.rows(0, 1))
    np.testing.assert_array_equal(*outs)


def test_what_cannot_be_run_is_refused(tiny):
    run = Run(tiny)
    with pytest.raises(ValueError, match="65 rows"):
        run.step([5] * 65, 0)
    with pytest.raises(ValueError, match="outside"):
        run.step([tiny.spec.vocab_size], 0)
    with pytest.raises(ValueError, match="outside"):
        run.prefill([-1], 0)
    with pytest.raises(ValueError, match="chunk"):
        run.prefill([5] * 129, 0)
    call = AttentionCall.of(torch.from_numpy(run.pages[None]), [1], [1])
    one = np.array([1], np.int32)
    batch = ForwardBatch(one, one, np.array([1, 2]), call)
    with pytest.raises(ValueError, match="other numbers"):
        tiny.step(batch, run.pool)


def test_identity_names_what_changes_bits(tiny, make_gguf, cache, tmp_path):
    about = tiny.identity(16)
    assert about["weights"] == tiny.spec.weights_digest
    assert (about["page_tokens"], about["pool_dtype"]) == (16, "bfloat16")
    assert tiny.backend.numerics in str(about["backend"])
    other = weights.load(ModelFile("tiny", make_gguf(tmp_path / "other.gguf", seed=9)))
    assert other.spec.weights_digest != tiny.spec.weights_digest


def test_tapped_residuals_are_those_of_the_layers(make_gguf, make_oracle, cache, tmp_path):
    model = weights.load(ModelFile("model", make_gguf(tmp_path / "model.gguf", seed=5)))
    decoder = Decoder(model, Tokenizer.from_file(model.folder / "tokenizer.json"))
    tokens = some_tokens(decoder, 20)
    untapped = Run(decoder).step(tokens, 0)
    decoder.tap((1, 3))
    run = Run(decoder)
    np.testing.assert_array_equal(run.step(tokens, 0), untapped)
    with torch.inference_mode():
        hidden = make_oracle(model)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    features = np.asarray(run.last.features(range(20)))
    expected = hidden[1][0].float().numpy()
    for row in range(20):
        assert features[row].shape == (2, decoder.spec.hidden_size)
        assert errors(features[row][0], expected[row]) < (0.1, 0.03)
    # A row has the same bits alone, and when others are not wanted.
    alone = Run(decoder)
    alone.step(tokens[:19], 0)
    alone.step([tokens[19]], 19)
    np.testing.assert_array_equal(alone.last.features([0])[0], features[19])
    some = Run(decoder)
    for rows, tapped in (([19], 3), ([], 5), ([4, 17], 0)):
        logits = some.step(tokens, 0, rows=np.array(rows, np.int32), tapped=tapped)
        np.testing.assert_array_equal(logits, untapped[rows])
        if tapped:
            kept = some.last.features(range(20 - tapped, 20))
            np.testing.assert_array_equal(kept, features[20 - tapped :])
    # So it has in a chunk of a prompt.
    chunk = Run(decoder)
    np.testing.assert_array_equal(chunk.prefill(tokens, 0, tapped=7), untapped[19])
    np.testing.assert_array_equal(decoder.prompt_features(7), features[13:])
    with pytest.raises(ValueError, match="Layers"):
        decoder.tap((0,))
