"""The list of conversations, names, forks and the trash."""

from __future__ import annotations

import pytest

from chatkv.errors import UnknownSession
from sessions.columns import new_id


def test_summaries_count_turns_and_tokens_of_the_path(talk, memory):
    session = talk.start("ada", system="abc", model="SmolLM2")
    root = memory.session(session).head_turn_id
    talk.turn(session, "  \nfirst line\nsecond", "xy")
    talk.turn(session, "other\n", "z", parent=root)
    (row,) = memory.sessions()
    assert (row.id, row.title, row.fork, row.turns, row.tokens, row.model) == (
        session,
        "ada",
        "main",
        1,
        len("abcother\nz"),
        "SmolLM2",
    )
    assert (row.first_line, row.forked_from, row.forked_at) == ("", None, None)
    memory.rename(session, "")
    (row,) = memory.sessions()
    assert (row.title, row.first_line) == ("", "other")  # what an untitled chat is called
    # Two tokenizers do not make a message count twice.
    user = memory.path(session)[-1].messages[0].row
    memory.set_render(user.id, b"u" * 32, list(range(10)), ())
    assert memory.sessions()[0].tokens == len("abcz") + 10


def test_a_session_without_turns_is_listed_too(memory):
    row = memory.create_session()
    (summary,) = memory.sessions()
    assert (summary.id, summary.turns, summary.tokens, summary.first_line) == (row.id, 0, 0, "")


def test_forks_share_turns_and_say_where(talk, memory):
    session = talk.start("ada")
    one = talk.turn(session, "one", "1")
    talk.turn(session, "two", "2")
    before = memory.path(session)
    fork = memory.fork(session, one, "short")
    assert memory.path(fork.id) == before[:2]
    talk.turn(fork.id, "deux", "II")
    nested = memory.fork(fork.id)
    talk.turn(nested.id, "trois", "III")
    assert memory.path(session) == before
    rows = {row.id: row for row in memory.sessions()}
    assert [(rows[i].title, rows[i].fork, rows[i].forked_at, rows[i].turns) for i in rows] == [
        ("ada", "fork-2", 2, 3),
        ("ada", "short", 1, 2),
        ("ada", "main", None, 2),
    ]
    assert [row.id for row in memory.family(nested.id)] == [session, fork.id, nested.id]
    assert memory.find("ada:short").id == memory.find("short").id == fork.id
    assert memory.find("ada:main").id == memory.find("ada").id == session


def test_names_ids_and_prefixes(talk, memory):
    first = talk.start("ada")
    second = talk.start("time: 10:30")
    talk.turn(first, "x", "y")
    assert memory.find("@last").id == first
    assert memory.find(second).id == second
    assert memory.find(second[:6]).id == second
    assert memory.find("time: 10:30").id == second
    for ref in ("", "nobody", second[:3], "ada:nothing", "ADA"):
        with pytest.raises(UnknownSession, match="no conversation"):
            memory.find(ref)
    third = talk.start("ada")
    with pytest.raises(UnknownSession, match="2 conversations") as caught:
        memory.find("ada")
    assert third[:8] in caught.value.message
    memory.rename(third, "  new\n name ")
    assert memory.find("new name").id == third


def test_an_untitled_chat_goes_by_the_name_that_is_shown(talk, memory):
    session, other = talk.start(), talk.start()
    talk.turn(session, "List the fruits\nplease", "apples")
    talk.turn(other, "And trees", "oaks")
    assert memory.find("List the fruits").id == session
    fork = memory.fork(session, title="red")
    assert memory.find("List the fruits").id == session
    assert memory.find("List the fruits:red").id == memory.find("red").id == fork.id
    for ref in ("List the", "list the fruits", "List the fruits:blue"):
        with pytest.raises(UnknownSession, match="no conversation"):
            memory.find(ref)
    memory.rename(other, "List the fruits")
    assert memory.find("List the fruits").id == other  # a name that was given comes first
    memory.trash(fork.id)
    with pytest.raises(UnknownSession) as caught:
        memory.find(fork.id[:6])
    assert "It is in the trash" in (caught.value.hint or "")


def test_a_prefix_of_several_ids_is_refused(memory, monkeypatch):
    monkeypatch.setattr("sessions.tree.new_id", lambda: "abcd" + new_id()[4:])
    memory.create_session()
    memory.create_session()
    with pytest.raises(UnknownSession, match="'abcd' is the name of 2"):
        memory.find("abcd")


def test_an_empty_store_has_no_last_conversation(memory):
    with pytest.raises(UnknownSession, match="no conversation yet"):
        memory.find("@last")


def test_trash_hides_until_restored_or_used(talk, memory):
    session, other = talk.start("ada"), talk.start("bob")
    talk.turn(session, "where are you", "here")
    memory.trash(session)
    assert [row.id for row in memory.sessions()] == [other]
    assert [row.id for row in memory.sessions(trash=True)] == [session]
    assert memory.search("where") == []
    assert [row.id for row in memory.sessions(trash=True, query="where")] == [session]
    with pytest.raises(UnknownSession) as caught:
        memory.find("ada")
    assert caught.value.hint == f"It is in the trash, as {session}: restore it first."
    assert memory.find("ada", trash=True).id == session
    memory.restore(session)
    assert memory.find("ada").id == session
    memory.trash(session)
    talk.turn(session, "back", "again")
    assert memory.find("@last").id == session


def test_order_limit_and_query(talk, memory):
    small = talk.start("small")
    large = talk.start("Large")
    untitled = talk.start()
    talk.turn(large, "long " * 50, "yes")
    talk.turn(untitled, "Middle of things, nothing more", "no")
    talk.turn(small, "short", "the needle is here")
    assert [row.id for row in memory.sessions()] == [small, untitled, large]
    assert [row.id for row in memory.sessions(sort="size")] == [large, untitled, small]
    assert [row.id for row in memory.sessions(sort="name")] == [large, untitled, small]
    assert [row.id for row in memory.sessions(limit=2)] == [small, untitled]
    (found,) = memory.sessions(query="needle")
    assert (found.id, found.match) == (small, "the needle is here")
    assert [row.id for row in memory.sessions(query="LARGE")] == [large]
    assert memory.sessions(query="nothing of that") == []


def test_settings_are_replaced_whole(memory):
    row = memory.create_session(settings={"model": "m", "temperature": 0.5})
    memory.set_settings(row.id, {"model": "n"})
    assert memory.session(row.id).settings == {"model": "n"}
    with pytest.raises(UnknownSession):
        memory.set_settings("nobody", {})


def test_ids_are_128_random_bits():
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(i) == 26 and set(i) <= set("abcdefghijklmnopqrstuvwxyz234567") for i in ids)


def test_tokens_are_counted_again_when_ids_go(talk, memory):
    session = talk.start("ada", system="abc")
    talk.turn(session, "first", "xy")
    (message,) = memory.path(session)[0].messages
    memory.set_render(message.row.id, b"u" * 32, range(10), ())
    assert memory.sessions()[0].tokens == len("firstxy") + 10  # the longest of both tokenizers
    memory._db.execute("DELETE FROM renders WHERE tok_fp = ?", (b"u" * 32,))
    assert memory.sessions()[0].tokens == len("abcfirstxy")
