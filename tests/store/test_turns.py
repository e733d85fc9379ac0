"""T1 to T3: what is committed when, and what a reader finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatkv.errors import StoreError, UnknownSession
from sessions.records import Render
from sessions.store import ChatStore

FP = b"f" * 32


def begin(store: ChatStore, session: str, text: str = "hello", **more):
    head = store.session(session).head_turn_id
    assert head is not None
    return store.begin_turn(session, head, head, text, {"seed": 3}, **more)


def test_a_new_session_begins_with_its_system_prompt(memory):
    row = memory.create_session("ada", "be nice", {"model": "m"})
    (turn,) = memory.path(row.id)
    assert (turn.turn.depth, turn.turn.state, turn.turn.parent_id) == (0, "done", None)
    assert [(m.row.role, m.row.content) for m in turn.messages] == [("system", "be nice")]
    assert row.settings == {"model": "m"}


def test_prompt_is_on_disk_when_begin_returns(store, path):
    row = store.create_session()
    begun = begin(store, row.id, "Grüße\x00!", render=Render(FP, [1, 2, 3]))
    with ChatStore(path, read_only=True) as other:
        turn = other.path(row.id)[-1]
    assert (turn.turn.id, turn.turn.state, turn.turn.sampling) == (
        begun.turn_id,
        "open",
        {"seed": 3},
    )
    (message,) = turn.messages
    assert message.row.content == "Grüße\x00!"
    render = message.render(FP)
    assert render is not None
    assert (render.token_ids, render.sampled) == ((1, 2, 3), ())
    assert message.render(b"g" * 32) is None


def test_text_first_and_ids_when_the_tokenizer_is_ready(memory):
    row = memory.create_session()
    begun = begin(memory, row.id)
    assert memory.path(row.id)[-1].messages[0].renders == ()
    memory.set_render(begun.message_id, FP, [5, 6], ())
    memory.set_render(begun.message_id, b"g" * 32, [7], ())
    renders = memory.path(row.id)[-1].messages[0].renders
    assert [(r.tok_fp, r.token_ids) for r in renders] == [(FP, (5, 6)), (b"g" * 32, (7,))]


def test_partial_then_whole_reply(memory):
    row = memory.create_session()
    begun = begin(memory, row.id)
    memory.save_partial(begun.turn_id, "Hi", FP, [1], ((0, 1),))
    memory.save_partial(begun.turn_id, "Hi th", FP, [1, 2], ((0, 2),))
    reply = memory.path(row.id)[-1].message("assistant")
    assert reply is not None
    assert (reply.row.state, reply.row.content) == ("partial", "Hi th")
    memory.finish_turn(
        begun.turn_id, "done", "Hi there", FP, [1, 2, 9], ((0, 2),), {"predicted_n": 2}
    )
    turn = memory.path(row.id)[-1]
    reply = turn.message("assistant")
    assert reply is not None
    assert (turn.turn.state, turn.turn.usage) == ("done", {"predicted_n": 2})
    assert (reply.row.state, reply.row.content) == ("done", "Hi there")
    assert [(r.token_ids, r.sampled) for r in reply.renders] == [((1, 2, 9), ((0, 2),))]
    assert [match.role for match in memory.search("Hi th")] == ["assistant"]


def test_a_reply_that_never_began_leaves_no_message(memory):
    row = memory.create_session()
    begun = begin(memory, row.id)
    memory.finish_turn(begun.turn_id, "error")
    turn = memory.path(row.id)[-1]
    assert turn.turn.state == "error"
    assert [m.row.role for m in turn.messages] == ["user"]


def test_a_finished_turn_is_never_overwritten(memory):
    row = memory.create_session()
    begun = begin(memory, row.id)
    memory.finish_turn(begun.turn_id, "done", "first", FP, [1], ((0, 1),))
    with pytest.raises(StoreError, match="finished already"):
        memory.finish_turn(begun.turn_id, "done", "second", FP, [2], ())
    with pytest.raises(StoreError, match="finished already"):
        memory.save_partial(begun.turn_id, "second", FP, [2], ())
    reply = memory.path(row.id)[-1].message("assistant")
    assert reply is not None
    assert reply.row.content == "first"


def test_the_loser_of_a_race_becomes_a_fork(memory):
    row = memory.create_session("ada", settings={"model": "m"})
    head = row.head_turn_id
    first = memory.begin_turn(row.id, head, head, "mine", {})
    second = memory.begin_turn(row.id, head, head, "yours", {})
    assert (first.forked, first.session_id) == (False, row.id)
    assert second.forked
    assert memory.session(row.id).head_turn_id == first.turn_id
    fork = memory.session(second.session_id)
    assert (fork.head_turn_id, fork.forked_from, fork.title) == (second.turn_id, row.id, "fork-2")
    assert fork.settings == {"model": "m"}
    assert [turn.messages[0].row.content for turn in memory.path(fork.id)] == ["", "yours"]
    assert [turn.id for turn in memory.siblings(first.turn_id)] == [first.turn_id, second.turn_id]
    third = memory.begin_turn(row.id, head, head, "theirs", {})
    assert memory.session(third.session_id).title == "fork-3"


def test_pending_ops_become_forget_records_of_the_turn(memory):
    row = memory.create_session()
    op = {"policy": "user", "reason": "/forget 1", "op": {"drop": [[3, 9]]}, "num_tokens": 6}
    memory.set_pending_ops(row.id, [op])
    begun = begin(memory, row.id)
    (forget,) = memory.path(row.id)[-1].forgets
    assert (forget.at_turn_id, forget.policy, forget.op, forget.num_tokens, forget.cancels) == (
        begun.turn_id,
        "user",
        {"drop": [[3, 9]]},
        6,
        None,
    )
    memory.set_pending_ops(row.id, [{**op, "cancels": forget.id}])
    begin(memory, row.id)
    assert memory.path(row.id)[-1].forgets[0].cancels == forget.id
    assert memory.session(row.id).pending_ops == []


def test_siblings_heads_and_leaves(talk, memory):
    session = talk.start()
    root = memory.session(session).head_turn_id
    one = talk.turn(session, "one", "1")
    two = talk.turn(session, "two", "2")
    other = talk.turn(session, "uno", "I", parent=root)
    assert [turn.id for turn in memory.siblings(one)] == [one, other]
    assert [turn.id for turn in memory.siblings(root)] == [root]
    assert memory.newest_leaf(one) == two
    assert memory.newest_leaf(root) == other
    assert not memory.set_head(session, two, expected=two)
    assert memory.set_head(session, two, expected=other)
    assert talk.texts(session) == ["be brief", "one", "1", "two", "2"]


def test_lone_surrogates_are_stored_as_replacement_characters(memory):
    row = memory.create_session("a\udcff", "b\ud83d")
    begin(memory, row.id, "c\udc00d")
    path = memory.path(row.id)
    assert memory.session(row.id).title == "a\ufffd"
    assert [turn.messages[0].row.content for turn in path] == ["b\ufffd", "c\ufffdd"]


def test_nothing_of_a_failed_turn_stays(memory):
    row = memory.create_session()
    with pytest.raises(ValueError, match="Token id -1"):
        begin(memory, row.id, render=Render(FP, [-1]))
    with pytest.raises(ValueError, match="spans"):
        begin(memory, row.id, render=Render(FP, [1], ((0, 2),)))
    with pytest.raises(ValueError, match="not JSON compliant"):
        memory.begin_turn(row.id, row.head_turn_id, row.head_turn_id, "x", {"p": float("nan")})
    with pytest.raises(UnknownSession):
        memory.begin_turn(row.id, row.head_turn_id, 999, "x", {})
    with pytest.raises(UnknownSession):
        memory.begin_turn("nobody", 1, 1, "x", {})
    assert memory.session(row.id) == row
    assert memory.search("hello") == []


DYING = """
    import sys
    from sessions.store import ChatStore
    store = ChatStore(sys.argv[1])
    row = store.create_session("dying")
    begun = store.begin_turn(row.id, row.head_turn_id, row.head_turn_id, "hello", {})
    store.save_partial(begun.turn_id, "half a", b"f" * 32, [1, 2], ((0, 2),))
    print(row.id, flush=True)
    sys.stdin.read()
"""


def test_an_open_turn_is_closed_when_its_writer_is_dead(path, start_child):
    child = start_child(DYING, path)
    session = child.stdout.readline().strip()
    with ChatStore(path) as store:
        assert store.path(session)[-1].turn.state == "open"
        assert len(list((path.parent / "chat.db-writers").iterdir())) == 1
    child.kill()
    child.wait()
    with ChatStore(path) as store:
        turn = store.path(session)[-1]
        reply = turn.message("assistant")
        assert reply is not None
        assert (turn.turn.state, turn.turn.usage) == ("interrupted", {})
        assert (reply.row.state, reply.row.content) == ("interrupted", "half a")
        assert [r.token_ids for r in reply.renders] == [(1, 2)]
    assert list((path.parent / "chat.db-writers").iterdir()) == []


def test_a_writer_that_was_taken_for_dead_can_still_finish(store, path):
    row = store.create_session()
    begun = begin(store, row.id)
    for claim in (path.parent / "chat.db-writers").iterdir():
        claim.unlink()
    with ChatStore(path) as other:
        assert other.path(row.id)[-1].turn.state == "interrupted"
    store.save_partial(begun.turn_id, "still", FP, [1], ((0, 1),))
    assert store.path(row.id)[-1].turn.state == "open"
    store.finish_turn(begun.turn_id, "done", "still here", FP, [1, 2], ((0, 2),))
    assert store.path(row.id)[-1].turn.state == "done"


def test_one_store_serves_several_threads(store):
    from concurrent.futures import ThreadPoolExecutor

    def work(number: int) -> str:
        row = store.create_session(f"s{number}")
        for turn in range(5):
            begun = begin(store, row.id, f"turn {turn} of {number}")
            store.finish_turn(begun.turn_id, "done", f"reply {turn}", FP, [turn], ())
            store.sessions(limit=3)
        return row.id

    with ThreadPoolExecutor(4) as pool:
        sessions = list(pool.map(work, range(4)))
    assert [len(store.path(session)) for session in sessions] == [6, 6, 6, 6]
    assert store.check() == []


def test_path_of_a_damaged_tree_says_so(store, path: Path):
    import sqlite3

    row = store.create_session()
    begun = begin(store, row.id)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE turns SET depth = 7 WHERE id = ?", (begun.turn_id,))
        raw.execute("UPDATE messages SET meta = '{' WHERE turn_id = ?", (row.head_turn_id,))
    raw.close()
    with pytest.raises(StoreError, match="gap"):
        store.path(row.id)
    with pytest.raises(StoreError, match="unreadable in message 1"):
        store.path(row.id, row.head_turn_id)
