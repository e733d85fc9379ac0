"""Nothing that moves a cursor, hides or reorders comes through, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from data.escape_corpus import CORPUS, KEPT
from hypothesis import given, settings
from hypothesis import strategies as st

from tui.safe_text import MAX_LINE_CELLS, MAX_MARKS, SafeStream, pasted, safe_line, safe_text

FORBIDDEN = {
    *map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *map(chr, range(0xD800, 0xE000)),
    *"\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068"
    "\u2069\ufeff\U000e0041\U000e007f",
} - {"\n", "\t"}  # fmt: skip

text = st.text(
    st.one_of(
        st.characters(exclude_categories=[]),
        st.sampled_from("\x1b\x9b\n\t\u0301\ufe0f\u200d\u202e\ud83da"),
    ),
    max_size=200,
)


@pytest.mark.parametrize("name", CORPUS)
def test_corpus_is_harmless_and_whole(name: str) -> None:
    safe = safe_text(CORPUS[name])
    assert not FORBIDDEN & set(safe)
    assert safe  # shown, not dropped


@pytest.mark.parametrize("name", [name for name in CORPUS if name != "long_line"])
def test_corpus_cut_anywhere(name: str) -> None:
    whole = safe_text(CORPUS[name])
    for cut in range(len(CORPUS[name]) + 1):
        assert _in_pieces(CORPUS[name], [cut]) == whole


@pytest.mark.parametrize("kept", KEPT)
def test_scripts_and_emoji_stay(kept: str) -> None:
    assert safe_text(kept) == kept


@given(text, st.lists(st.integers(0, 200), max_size=6))
def test_any_cuts_give_the_same(whole: str, cuts: list[int]) -> None:
    assert _in_pieces(whole, cuts) == safe_text(whole)


@given(text)
def test_result_is_safe_and_stays_as_it_is(whole: str) -> None:
    safe = safe_text(whole)
    assert not FORBIDDEN & set(safe)
    assert safe_text(safe) == safe


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["a" * 6_000, "한" * 4_000, "\n", "b"]), max_size=12))
def test_long_lines_fold_the_same_in_pieces(pieces: list[str]) -> None:
    stream = SafeStream()
    joined = "".join(stream.push(piece) for piece in pieces) + stream.flush()
    assert joined == safe_text("".join(pieces))
    cells = (sum(1 + (char > "\x7f") for char in line) for line in joined.split("\n"))
    assert all(count <= MAX_LINE_CELLS for count in cells)
    assert joined.replace("\n", "") == "".join(pieces).replace("\n", "")


def test_marks_past_the_limit_are_counted() -> None:
    assert safe_text("a" + "\u0301" * 200) == "a" + "\u0301" * MAX_MARKS + "‹+192 marks›"
    assert safe_text("a" + "\u0301" * 8) == "a" + "\u0301" * 8


def test_lines_of_a_paste_and_of_a_title() -> None:
    assert pasted("a\r\nb\rc\n") == "a\nb\nc\n"
    assert safe_line("a\n b\t\x1b[2J ") == "a b ␛[2J"


def _in_pieces(whole: str, cuts: list[int]) -> str:
    stream = SafeStream()
    places = [0, *sorted(cuts), len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(places)]
    return "".join([*(stream.push(piece) for piece in pieces), stream.flush()])
