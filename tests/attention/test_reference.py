"""The reference against dense attention of torch, and what a call refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention.cases import chain, make_case

from chatkv.attention.call import AttentionCall
from chatkv.attention.reference import (
    ancestor_words,
    attend,
    causal_ancestors,
    paged_attention,
    visible_slots,
)
from chatkv.attention.store import quantise, write_rows


def dense(case, mask):
    """Attention of sequence 0 over contiguous float64 keys, with a [rows, slots] mask."""
    slots = torch.arange(case.call.kv_len_host[0])
    page = case.call.page_table[0][slots // 16].long()
    keys, values = case.pages.double()[page, :, :, slots % 16].unbind(1)
    q = case.q.double()[: case.call.num_rows].transpose(0, 1)
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).transpose(0, 1)


def test_chain_is_dense_causal_attention():
    case = make_case([chain(5)], [40])
    out, lse = attend(case.call, case.q.double(), case.pages.double(), None)
    torch.testing.assert_close(out[:5], dense(case, torch.ones(5, 45).tril(40).bool()))
    assert lse.dtype == torch.float64


def test_tree_is_dense_attention_with_its_mask():
    case = make_case([[-1, 0, 0, 1, 2]], [20])
    new = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    )
    mask = torch.cat([torch.ones(5, 20), new], dim=1).bool()
    out, _ = attend(case.call, case.q.double(), case.pages.double(), None)
    torch.testing.assert_close(out[:5], dense(case, mask))


def test_lse_is_the_natural_log_of_the_sum():
    case = make_case([[-1]], [2])
    keys = case.pages[case.call.page_table[0, 0], 0, 0, :3].double()
    _, lse = attend(case.call, case.q.double(), case.pages.double(), None)
    expected = (keys @ case.q[0, 0].double() / 8).exp().sum().log()
    torch.testing.assert_close(lse[0, 0], expected)


def test_the_function_form_is_the_call():
    case = make_case([[-1, 0, 0], chain(2)], [20, 50], holes=True, window=30)
    call = case.call
    out, lse = paged_attention(
        case.q, case.pages, call.page_table, call.q_start, call.kv_len, ancestors=call.ancestors,
        valid=call.valid, q_pos=call.q_pos, page_pos=call.page_pos, window=call.window,
    )  # fmt: skip
    expected = attend(call, case.q, case.pages, None)
    assert out.dtype == case.q.dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out[:5], expected[0][:5])
    assert torch.equal(lse[:5], expected[1][:5])


def test_words_of_a_chain_change_nothing():
    case = make_case([chain(70)], [10])
    words = replace(case.call, ancestors=causal_ancestors(70))
    for a, b in zip(
        attend(case.call, case.q, case.pages, None),
        attend(words, case.q, case.pages, None),
        strict=True,
    ):
        assert torch.equal(a[:70], b[:70])


def test_ancestor_words_use_every_bit():
    words = causal_ancestors(130)
    assert words.shape == (130, 3)
    assert words[63].tolist() == [-1, 0, 0]
    assert words[64].tolist() == [-1, 1, 0]
    assert ancestor_words([-1, 0, 0, 1])[:, 0].tolist() == [0b1, 0b11, 0b101, 0b1011]
    with pytest.raises(ValueError, match="does not come before"):
        ancestor_words([-1, 1])


def test_windows_look_at_positions_and_ranges_at_offsets():
    call = AttentionCall(
        page_table=torch.tensor([[4, 2]], dtype=torch.int32),
        q_start=torch.tensor([0, 2], dtype=torch.int32),
        kv_len=torch.tensor([20], dtype=torch.int32),
        valid=torch.tensor([[[10, 14], [1, 16]]], dtype=torch.int32),
        q_pos=torch.tensor([118, 119], dtype=torch.int32),
        page_pos=torch.tensor([[-5, 100]], dtype=torch.int32),
        window=200,
    )
    assert visible_slots(call, 0, 1, 16).tolist() == [10, 11, 12, 13, 17, 18, 19]
    assert visible_slots(replace(call, window=111), 0, 1, 16).tolist() == [17, 18, 19]
    assert visible_slots(replace(call, window=112), 0, 0, 16).tolist() == [12, 13, 17, 18]
    assert visible_slots(replace(call, window=1), 0, 1, 16).tolist() == [19]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_quantised_pages_are_codes_times_scales(dtype):
    case = make_case([[-1, 0, 0, 1]], [40], dtype=torch.float32, poison=0.0, holes=True)
    pages, scales = new_pages(case.pages, dtype)
    actual = paged_attention_of(case, case.q, pages, scales)
    plain = values_of(case.pages, dtype)
    expected = paged_attention_of(case, case.q, plain, None)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a[:4], b[:4], rtol=0, atol=0)


def new_pages(pages, dtype):
    """The same rows, written through `write_rows` into quantised pages full of poison."""
    width = pages.shape[-1] // 2 if dtype == torch.uint8 else pages.shape[-1]
    codes = torch.full((*pages.shape[:-1], width), 7).to(dtype)
    scales = torch.full((*pages.shape[:-1], 2 if dtype == torch.uint8 else 1), torch.nan).half()
    rows = pages.permute(0, 3, 1, 2, 4).flatten(0, 1)
    write_rows(rows[:, 0], rows[:, 1], codes, scales, torch.arange(rows.shape[0]))
    return codes, scales


def values_of(pages, dtype):
    """What the quantised rows mean, worked out channel by channel."""
    codes, scales = quantise(pages, dtype)
    codes, scales = codes.double(), scales.double()
    if dtype != torch.uint8:
        return (codes * scales).float()
    low, high = codes % 16 - 8, codes // 16 - 8
    return torch.cat([low * scales[..., :1], high * scales[..., 1:]], dim=-1).float()


def paged_attention_of(case, q, pages, scales):
    call = case.call
    return paged_attention(
        q, pages, call.page_table, call.q_start, call.kv_len,
        ancestors=call.ancestors, valid=call.valid, scales=scales,
    )  # fmt: skip


INT32 = torch.int32


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"page_table": torch.zeros(1, 4, dtype=torch.int64)}, "page_table is torch.int64"),
        ({"page_table": torch.zeros(2, 4, dtype=INT32)}, r"page_table is torch.int32 \(2, 4\)"),
        ({"q_start_host": (0, 3)}, "kv_len 2 is below its 3 new rows"),
        ({"q_start_host": (1, 2)}, "does not fit 1 sequences"),
        ({"q_start_host": (0, 1, 2)}, "does not fit 1 sequences"),
        ({"ancestors": torch.ones(1, 1, dtype=torch.int64)}, "does not fit 2 rows"),
        ({"ancestors": torch.ones(2, 0, dtype=torch.int64)}, "2 in one sequence"),
        ({"valid": torch.zeros(1, 3, 2, dtype=INT32)}, "valid is"),
        ({"window": 5}, "a window needs positions"),
        ({"window": 0}, "window is 0"),
        ({"q_pos": torch.zeros(1, dtype=INT32)}, "q_pos"),
        ({"page_pos": torch.zeros(1, 4)}, "page_pos is torch.float32"),
    ],
)
def test_a_call_that_breaks_the_contract_is_refused(change, problem):
    call = AttentionCall.of(torch.zeros(1, 4, dtype=INT32), [2], [2])
    with pytest.raises(ValueError, match=problem):
        replace(call, **change)


PAGES = torch.zeros(1, 2, 3, 16, 64)
Q = torch.zeros(2, 9, 64)


@pytest.mark.parametrize(
    ("q", "pages", "scales", "problem"),
    [
        (Q[:1], PAGES, None, "q has 1 rows for 2"),
        (Q[:, :8], PAGES, None, "3 kv heads do not divide 8"),
        (Q, PAGES[..., :32], None, "32 columns do not fit head size 64"),
        (Q, PAGES[:, :, :, :8], None, "page size 8"),
        (Q.half(), PAGES, None, "pages are torch.float32, q is torch.float16"),
        (Q.int(), PAGES, None, "q is torch.int32"),
        (Q, PAGES.transpose(3, 4), None, "page size 64|columns|contiguous"),
        (Q, PAGES, PAGES[..., :1], "take no scales"),
        (Q, PAGES.to(torch.int8), None, "scales do not fit"),
        (Q, PAGES.to(torch.int8), PAGES[..., :2].half(), "scales do not fit"),
        (Q, PAGES[..., :32].to(torch.uint8), PAGES[..., :1].half(), "scales do not fit"),
        (Q.to("meta"), PAGES, None, "tensors on"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(q, pages, scales, problem):
    call = AttentionCall.of(torch.zeros(1, 4, dtype=INT32), [2], [2])
    with pytest.raises(ValueError, match=problem):
        call.check(q, pages, scales)


def test_a_sequence_longer_than_its_table_is_refused():
    call = AttentionCall.of(torch.zeros(1, 2, dtype=INT32), [2], [33])
    with pytest.raises(ValueError, match="kv_len 33 in 2 pages of 16"):
        call.check(Q, PAGES)
