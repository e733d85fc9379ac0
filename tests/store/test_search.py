"""Search: the trigram index, LIKE for short words, other scripts, and what must not be found."""

from __future__ import annotations

import pytest


@pytest.fixture
def words(talk):
    session = talk.start(system="System words")
    talk.turn(session, "What did we decide about the page size?", "We settled on 16 tokens.")
    talk.turn(session, "Größe und Ä", "日本語のテキスト")
    talk.turn(session, "100% of a_b and C:\\path", 'he said "so what" AND left')
    return talk.store


@pytest.mark.parametrize(
    ("query", "excerpts"),
    [
        ("page size", ["What did we decide about the page size?"]),
        ("size PAGE", ["What did we decide about the page size?"]),
        ("settled", ["We settled on 16 tokens."]),
        ("16", ["We settled on 16 tokens."]),
        ("16 tokens", ["We settled on 16 tokens."]),
        ("16 pages", []),
        ("größe", ["Größe und Ä"]),
        ("ä", ["Größe und Ä"]),
        ("日本", ["日本語のテキスト"]),
        ("テキスト", ["日本語のテキスト"]),
        ("0%", ["100% of a_b and C:\\path"]),
        ("a_", ["100% of a_b and C:\\path"]),
        ("c:\\path", ["100% of a_b and C:\\path"]),
        (":\\", ["100% of a_b and C:\\path"]),
        ('"so', ['he said "so what" AND left']),
        ("AND left", ['he said "so what" AND left']),
        ("system", ["System words"]),
        ("x_b", []),
        ("", []),
        (" \0 ", []),
        ("page NOT size", []),
        ("sett* OR page", []),
    ],
)
def test_every_word_has_to_occur(words, query, excerpts):
    assert [match.excerpt for match in words.search(query)] == excerpts


def test_newest_first_and_limited(words):
    matches = words.search("e")
    assert [match.message_id for match in matches] == sorted(
        (match.message_id for match in matches), reverse=True
    )
    assert len(words.search("e", limit=2)) == 2


def test_the_excerpt_shows_the_hit(talk):
    session = talk.start()
    turn = talk.turn(session, "x" * 500 + " Needle\n" + "y" * 500, "ok")
    (match,) = talk.store.search("needle")
    assert (match.session_id, match.turn_id, match.number, match.role) == (session, turn, 1, "user")
    assert len(match.excerpt) == 160
    start, stop = match.span
    assert match.excerpt[start:stop] == "Needle"


def test_an_edited_reply_is_found_by_its_last_words_only(memory):
    row = memory.create_session()
    begun = memory.begin_turn(row.id, row.head_turn_id, row.head_turn_id, "go", {})
    memory.save_partial(begun.turn_id, "alpha beta", b"f" * 32, [1], ((0, 1),))
    memory.finish_turn(begun.turn_id, "done", "gamma delta", b"f" * 32, [1], ((0, 1),))
    assert memory.search("alpha") == []
    assert len(memory.search("gamma")) == 1


def test_a_redacted_turn_is_not_found(talk):
    session = talk.start()
    turn = talk.turn(session, "secret thing", "ok")
    talk.store._db.execute("UPDATE turns SET redacted_at = 1 WHERE id = ?", (turn,))
    assert talk.store.search("secret") == []
