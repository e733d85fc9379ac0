"""Markdown there and back: each message comes back as it was, whatever is in it."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.exchange_files import LIMITS, BadFile, Limits
from sessions.exchange_formats import WRITERS, read_chats
from sessions.exchange_import import ImportStore
from sessions.store import MEMORY

MARK = "<!-- chatkv turn 1 user -->"
FRONT = '---\ntitle: "t"\n---'
LINES = st.sampled_from(
    ["a", "", " b ", MARK, f"\\{MARK}", f"\\\\{MARK}", f"x {MARK}", "---", FRONT,
     f"\\{FRONT}", "\r", "é\u2028"]
)  # fmt: skip
TEXTS = st.lists(LINES, min_size=1, max_size=6).map("\n".join).filter(bool)


def markdown(title, talk) -> str:
    with ImportStore(MEMORY) as store:
        row = store.create_session(title, talk[0][1] if talk[0][0] == "system" else "")
        said = [text for role, text in talk if role != "system"]
        for prompt, reply in zip(said[::2], said[1::2], strict=True):
            head = store.session(row.id).head_turn_id
            begun = store.begin_turn(row.id, head, head, prompt, {})
            store.finish_turn(begun.turn_id, "done", reply)
        return "".join(f"{line}\n" for line in WRITERS["markdown"](title, store.path(row.id)))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), min_size=1, max_size=3))
def test_every_message_comes_back_as_it_was(chats):
    talks = [
        [
            ("system", "be"),
            *((r, t) for pair in chat for r, t in zip(("user", "assistant"), pair, strict=True)),
        ]
        for chat in chats
    ]
    whole = "".join(markdown(f"n {place}", talk) for place, talk in enumerate(talks))
    found = list(read_chats(io.BytesIO(whole.encode()), "auto", LIMITS))
    assert [chat.talk for chat in found] == talks
    assert [chat.sessions[0].title for chat in found] == [f"n {i}" for i in range(len(talks))]
    assert [whole.split("\n")[chat.line - 1] for chat in found] == ["---"] * len(talks)


def test_what_was_imported_is_known_again():
    text = markdown("ada", [("user", "hi"), ("assistant", "ho")])
    with ImportStore(MEMORY) as store:
        (made,) = store.read(io.BytesIO(text.encode()))
        assert (made.name, made.turns, made.skipped) == ("ada", 1, False)
        assert next(store.read(io.BytesIO(text.encode()))).skipped
        assert list(WRITERS["markdown"]("ada", store.path(made.session))) == text[:-1].split("\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# A heading", "no front matter"),
        (f"words\n{MARK}\n\nx", "no front matter"),
        ("---\ntitle: x\n---\n", "no front matter"),
        ("<!-- chatkv turn 1 tool -->\n\nx", "role 'tool'"),
        ("<!-- chatkv turn 1 assistant -->\n\nx", "answers nothing"),
        (f"{MARK}\n\nlong words", "10 characters; the most is 9"),
        (f"{MARK}\n\n" + "x" * 100, "more than 100 bytes"),
    ],
)
def test_what_is_refused_is_named(text, says):
    limits = Limits(line_bytes=100, text_chars=9)
    errors = []
    try:
        errors = list(read_chats(io.BytesIO(text.encode()), "markdown", limits))
    except BadFile as error:
        errors = [error]
    assert says in errors[0].message


def test_a_mark_needs_no_front_matter_and_bytes_must_be_text():
    (chat,) = read_chats(io.BytesIO(f"{MARK}\nhi".encode()), "auto", LIMITS)
    assert (chat.talk, chat.sessions[0].title) == ([("user", "hi")], "")
    with pytest.raises(BadFile, match=r"Line 2: no UTF-8"):
        list(read_chats(io.BytesIO(f"{MARK}\n\xff".encode("latin-1")), "auto", LIMITS))
