"""Export: everything, in an order and spelling of its own, the same bytes every time."""

from __future__ import annotations

import json

import pytest

from chatkv.errors import UnknownSession
from sessions.exchange import export_jsonl


def lines(store, session, **more):
    return [json.loads(line) for line in export_jsonl(store, session, **more)]


def test_the_whole_tree_is_written_parents_first(talk, memory):
    session = talk.start("ada", system="s", model="m")
    root = memory.session(session).head_turn_id
    one = talk.turn(session, "one\u2028\x85", "1")
    talk.turn(session, "two", "2", parent=root)
    fork = memory.fork(session, one, "f").id
    memory.set_pending_ops(fork, [{"policy": "p", "reason": "r", "op": {"at": 1}, "num_tokens": 2}])
    talk.turn(fork, "drei 3", "III")
    other = talk.start("other")
    talk.turn(other, "not in it", "no")

    header, *rest = lines(memory, fork)
    assert header["format"] == "chatkv/1"
    assert [
        (s["session"], s["title"], s["forked_from"], s["head"]) for s in header["sessions"]
    ] == [
        (1, "ada", None, 3),
        (2, "f", 1, 4),
    ]
    assert header["sessions"][0]["settings"] == {"model": "m"}
    turns = [line for line in rest if line["type"] == "turn"]
    assert [(t["turn"], t["parent"], t["session"]) for t in turns] == [
        (1, None, 1),
        (2, 1, 1),
        (3, 1, 1),
        (4, 2, 2),
    ]
    assert turns[1]["sampling"] == {"seed": 7}
    messages = [line for line in rest if line["type"] == "message"]
    assert [(m["turn"], m["content"]) for m in messages] == [
        (1, "s"),
        (2, "one\u2028\x85"),
        (2, "1"),
        (3, "two"),
        (3, "2"),
        (4, "drei 3"),
        (4, "III"),
    ]
    assert messages[2]["renders"] == [
        {"tok_fp": talk.FP.hex(), "token_ids": [49], "sampled": [[0, 1]]}
    ]
    (forget,) = [line for line in rest if line["type"] == "forget"]
    assert (forget["forget"], forget["turn"], forget["op"]) == (1, 4, {"at": 1})
    assert list(export_jsonl(memory, fork)) == list(export_jsonl(memory, session))
    assert all(len(line.splitlines()) == 1 for line in export_jsonl(memory, session))


def test_a_path_alone(talk, memory):
    session = talk.start("ada")
    one = talk.turn(session, "one", "1")
    talk.turn(session, "two", "2")
    fork = memory.fork(session, one, "f").id
    header, *rest = lines(memory, fork, path_only=True)
    (row,) = header["sessions"]
    assert (row["session"], row["title"], row["forked_from"], row["head"]) == (1, "f", None, 2)
    assert [(t["turn"], t["session"]) for t in rest if t["type"] == "turn"] == [(1, 1), (2, 1)]


def test_no_random_id_and_no_process_gets_into_the_file(talk, memory):
    session = talk.start()
    head = memory.session(session).head_turn_id
    memory.begin_turn(session, head, head, "still open", {})
    memory._db.execute("UPDATE turns SET usage = '{\"writer\":\"abc123\"}' WHERE state = 'open'")
    text = "\n".join(export_jsonl(memory, session))
    assert session not in text
    assert "abc123" not in text


def test_only_what_is_there_can_be_exported(memory):
    with pytest.raises(UnknownSession):
        export_jsonl(memory, "nobody")
