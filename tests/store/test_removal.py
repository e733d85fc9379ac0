"""T8: deleting a session takes what only it needs, and says what kv.db has to forget."""

from __future__ import annotations

import pytest

from chatkv.errors import UnknownSession
from sessions.records import Render


def test_deleting_the_only_session_leaves_nothing(talk, memory):
    session = talk.start("ada", system="sys")
    talk.turn(session, "unique words", "of a reply")
    assert memory.delete(session) == 1
    (purge,) = memory.purges()
    assert purge.tok_fp == talk.FP
    assert purge.token_ids == tuple(talk.ids("sysunique wordsof a reply"))
    assert (purge.keep_tokens, purge.ops) == (0, [])
    assert memory.sessions() == []
    assert memory.search("unique") == []
    for table in ("sessions", "turns", "messages", "renders"):
        assert memory._db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    memory.purge_done(purge.id)
    assert memory.purges() == []
    with pytest.raises(UnknownSession):
        memory.delete(session)


def test_shared_turns_move_to_a_surviving_fork(talk, memory):
    session = talk.start("ada", system="s")
    one = talk.turn(session, "one", "1")
    two = talk.turn(session, "two", "2")
    fork = memory.fork(session, one, "f").id
    three = talk.turn(fork, "three", "3")
    nested = memory.fork(fork, title="n").id
    kept = memory.path(nested)
    assert memory.delete(session) == 1
    (purge,) = memory.purges()
    assert purge.token_ids == tuple(talk.ids("sone1two2"))
    assert purge.keep_tokens == len("sone1t")  # "three" begins like "two"
    after = memory.path(nested)
    assert [t.messages for t in after] == [t.messages for t in kept]
    # The smallest of those who need the turn, as the statement says.
    assert {t.turn.session_id for t in after[:2]} == {min(fork, nested)}
    assert after[2].turn.id == three
    assert memory.session(fork).forked_from is None
    assert [row.id for row in memory.family(nested)] == [fork, nested]
    with pytest.raises(UnknownSession):
        memory.turns([two])
    assert memory.check() == []


def test_a_fork_of_a_deleted_fork_stays_in_its_chat(talk, memory):
    session = talk.start("ada")
    talk.turn(session, "one", "1")
    fork = memory.fork(session, title="f").id
    nested = memory.fork(fork, title="n").id
    assert memory.delete(fork) == 0
    assert memory.purges() == []
    assert memory.find("ada:n").id == nested
    assert memory.session(nested).forked_from == session


def test_every_removed_branch_is_purged_past_what_others_keep(talk, memory):
    session = talk.start(system="s")
    root = memory.session(session).head_turn_id
    talk.turn(session, "a", "1")
    talk.turn(session, "b", "2", parent=root)
    talk.turn(session, "c", "3")
    # Another chat with the same beginning, half of the prompt included.
    other = talk.start(system="s")
    talk.turn(other, "b", "2")
    talk.turn(other, "cd", "9")
    assert memory.delete(session) == 2
    assert [("".join(map(chr, p.token_ids)), p.keep_tokens) for p in memory.purges()] == [
        ("sa1", 1),
        ("sb2c3", 4),
    ]


@pytest.mark.parametrize("longest_first", [True, False])
def test_the_longest_common_beginning_counts(talk, memory, longest_first):
    others = ["hello there", "hell"] if longest_first else ["hell", "hello there"]
    first = talk.start(system="s")
    talk.turn(first, others[0], "ok")
    session = talk.start(system="s")
    talk.turn(session, "hello world", "ok")
    second = talk.start(system="s")
    talk.turn(second, others[1], "ok")
    memory.delete(session)
    assert [p.keep_tokens for p in memory.purges()] == [len("shello ")]


def test_words_of_a_deleted_message_do_not_stick_to_its_successor(talk, memory):
    keep, gone = talk.start(), talk.start()
    talk.turn(gone, "vanished", "words")
    last = memory.path(gone)[-1].messages[-1].row.id
    memory.delete(gone)
    talk.turn(keep, "other", "text")
    assert memory.path(keep)[-1].messages[-1].row.id <= last  # the id is used again
    assert memory.search("vanished") == memory.search("words") == []
    assert len(memory.search("other")) == 1


def test_a_twin_elsewhere_leaves_nothing_to_purge(talk, memory):
    session, twin = talk.start(), talk.start()
    for one in (session, twin):
        talk.turn(one, "same", "words")
    assert memory.delete(session) == 0
    assert talk.texts(twin)[1:] == ["same", "words"]
    assert len(memory.search("same")) == 1


def test_ids_of_each_tokenizer_are_purged(talk, memory):
    session = talk.start(system="s")
    turn = talk.turn(session, "p", "r")
    for message in memory.turns([turn])[0].messages:
        memory.set_render(message.row.id, b"u" * 32, [9], ())
    # Without the system prompt nothing was ever computed under the second one.
    memory.delete(session)
    assert [(p.tok_fp, p.token_ids) for p in memory.purges()] == [(talk.FP, tuple(talk.ids("spr")))]


def test_the_last_purge_makes_the_index_anew(talk, store, talk_on):
    talk = talk_on(store)
    keep, gone = talk.start(), talk.start(system="other")
    talk.turn(keep, "kept words", "k")
    talk.turn(gone, "vanished xylophone", "g")
    assert store.delete(gone) == 1
    (purge,) = store.purges()
    store.purge_done(purge.id)
    assert store.file is not None
    raw = store.file.read_bytes()
    # secure_delete and the rebuilt index: not even a trigram that only the deleted words had.
    assert b"vanished" not in raw
    assert b"xyl" not in raw
    assert b"kept words" in raw
    assert len(store.search("kept")) == 1


def test_a_turn_without_a_reply_is_a_path_of_its_own(talk, memory):
    """The turns behind it never saw it, so its pages hang on no path of theirs."""
    session = talk.start(system="s")
    root = memory.session(session).head_turn_id
    render = Render(talk.FP, talk.ids("lost"))
    memory.finish_turn(
        memory.begin_turn(session, root, root, "lost", {}, render=render).turn_id, "interrupted"
    )
    talk.turn(session, "two", "2")
    other = talk.start(system="s")
    begun = memory.begin_turn(
        other, memory.session(other).head_turn_id, memory.session(other).head_turn_id, "x", {}
    )
    memory.finish_turn(begun.turn_id, "interrupted")
    talk.turn(other, "twin", "9")
    memory.delete(session)
    assert [("".join(map(chr, p.token_ids)), p.keep_tokens) for p in memory.purges()] == [
        ("slost", 1),
        ("stwo2", 3),  # the other chat shows "s" and "tw" too, whatever stands between
    ]
