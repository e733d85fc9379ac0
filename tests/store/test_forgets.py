"""Forget records in the store: append-only, told apart by tokenizer, moved by a redaction."""

from __future__ import annotations

import pytest
from fakes import EOS, REPLY, USER, VOCAB, ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from chatkv.forget import TurnSpan
from chatkv.kv.ops import live_ranges
from sessions.context import moved, spans_of_path, standing, to_ops
from sessions.records import PurgeRow, Render
from sessions.rendering import render
from sessions.request import PathMessage


def path_of(talk, session):
    return talk.store.path(session)


def purged(rows: list[PurgeRow]) -> list[tuple[str, int]]:
    return [("".join(map(chr, row.token_ids)), row.keep_tokens) for row in rows]


@pytest.fixture
def told(talk):
    """`sys!`, then turns of five ids each: `a1...`, `b2...`, ..."""
    session = talk.start(system="sys!")
    for letter in "abcdef":
        talk.turn(session, letter * 3, letter * 2)
    return session


def test_pending_ops_are_committed_with_the_turn_and_not_before(talk, memory, told):
    op = {"policy": "user", "reason": "user", "op": {"turns": [1]}, "num_tokens": 5}
    memory.set_pending_ops(told, [op])
    assert standing(path_of(talk, told)) == []
    talk.turn(told, "ggg", "gg")
    (one,) = standing(path_of(talk, told))
    assert (one.turn, one.policy, one.turns) == (7, "user", [1])
    assert memory.session(told).pending_ops == []


def test_a_recall_stands_in_the_place_of_what_it_cancels(talk, memory, told):
    turn = path_of(talk, told)[5].turn.id
    memory.add_forget(turn, "turns", "limit", {"turns": [1, 2]}, 10)
    memory.add_forget(turn, "user", "user", {"turns": [3]}, 5)
    (first, second) = standing(path_of(talk, told))
    recall = {"policy": "user", "reason": "recall", "op": {"turns": [2]}, "num_tokens": 5}
    memory.set_pending_ops(told, [{**recall, "cancels": first.record}])
    talk.turn(told, "ggg", "gg")
    now = standing(path_of(talk, told))
    assert [(one.turn, one.policy, one.turns) for one in now] == [
        (5, "turns", [2]),
        (5, "user", [3]),
    ]
    assert len([row for turn in path_of(talk, told) for row in turn.forgets]) == 3
    # Cancelled wholly, by the newest record in its place.
    gone = {**recall, "op": {"turns": []}, "cancels": now[0].record}
    memory.set_pending_ops(told, [gone])
    talk.turn(told, "hhh", "hh")
    assert [one.turns for one in standing(path_of(talk, told))] == [[3]]
    assert second.turns == [3]


def test_records_by_turns_hold_under_every_tokenizer(talk, memory, told):
    turn = path_of(talk, told)[4].turn.id
    memory.add_forget(turn, "turns", "limit", {"turns": [1, 3]}, 10)
    places = {"turns": [2], "at": 19, "drop": [[9, 14]], "tok_fp": talk.FP.hex()}
    memory.add_forget(turn, "window", "limit", places, 5)
    path = path_of(talk, told)
    records = [one.to_json() for one in standing(path)]
    spans = spans_of_path(path, talk.FP)
    assert spans is not None
    ops = to_ops(records, spans, talk.FP.hex())
    assert [(op.at, op.drop) for op in ops] == [(19, ((4, 9), (14, 19))), (19, ((9, 14),))]
    doubled = [TurnSpan(s.number, 2 * s.start, 2 * s.stop) for s in spans]
    ops = to_ops(records, doubled, "another")
    assert [(op.at, op.drop) for op in ops] == [(38, ((8, 18), (28, 38))), (38, ((18, 28),))]


def test_an_op_stands_before_the_ids_that_close_a_reply_unless_it_drops_them():
    spans = [TurnSpan(0, 0, 4), *(TurnSpan(n, 9 * n - 5, 9 * n + 4, tail=2) for n in (1, 2))]
    spans.append(TurnSpan(3, 22, 25))
    assert [op.at for op in to_ops([{"turn": 3, "turns": [1]}], spans, "00")] == [20]
    assert [op.at for op in to_ops([{"turn": 3, "turns": [1, 2]}], spans, "00")] == [22]


def test_a_tail_is_what_the_engine_takes_it_for(talk, memory):
    chat = talk.start(system="sys")
    ids = {"prompt": [USER, 65, REPLY], "reply": [66, 67, EOS, 10]}
    head = memory.session(chat).head_turn_id
    begun = memory.begin_turn(chat, head, head, "A", {}, render=Render(talk.FP, ids["prompt"]))
    memory.finish_turn(begun.turn_id, "done", "BC", talk.FP, ids["reply"], ((0, 3),))
    path = memory.path(chat)
    stored = spans_of_path(path, talk.FP)
    messages = [
        PathMessage(m.row.role, m.row.content, r.token_ids, r.sampled, turn.turn.depth)
        for turn in path
        for m in turn.messages
        for r in m.renders
    ]
    assert stored == render(messages, ByteTokenizer(), VOCAB).spans
    assert [span.tail for span in stored] == [0, 1]


def test_a_record_whose_reply_was_lost_is_void(talk, memory, told):
    turn = path_of(talk, told)[6].turn.id
    places = {"turns": [1], "at": 40, "drop": [[4, 9]], "tok_fp": talk.FP.hex()}
    memory.add_forget(turn, "window", "limit", places, 5)
    path = path_of(talk, told)
    spans = spans_of_path(path, talk.FP)
    assert spans is not None
    assert spans[-1].stop == 34
    assert to_ops([one.to_json() for one in standing(path)], spans, talk.FP.hex()) == []


@given(
    redacted=st.integers(1, 6),
    at=st.integers(0, 33),
    edges=st.lists(st.integers(0, 33), min_size=2, max_size=6, unique=True),
)
def test_ops_count_on_without_what_a_redaction_took(redacted, at, edges):
    """What was in sight of the ids that stay is in sight after it, and nothing else."""
    edges = sorted(edge for edge in edges if edge <= at)
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    start, stop = 3 + 5 * (redacted - 1), 3 + 5 * redacted
    op = {"at": at, "drop": [list(pair) for pair in pairs], "tok_fp": "00", "turns": []}
    spans = [TurnSpan(0, 0, 3), *(TurnSpan(n, 5 * n - 2, 5 * n + 3) for n in range(1, 7))]
    (before,) = to_ops([{"turn": 6, **op}], spans, "00") or [None]
    after = to_ops([{"turn": 6, **moved(op, start, stop)}], spans, "00")
    ids = list(range(33))
    seen = ids if before is None else [i for a, b in live_ranges([before], 33) for i in ids[a:b]]
    left = [i for i in ids if not start <= i < stop]
    found = [i for a, b in live_ranges(after, len(left)) for i in left[a:b]]
    assert found == [i for i in seen if not start <= i < stop]


def test_a_redaction_moves_ops_by_places_and_leaves_those_by_turns(talk, memory, told):
    path = path_of(talk, told)
    memory.add_forget(path[5].turn.id, "turns", "limit", {"turns": [1]}, 5)
    places = {"turns": [4], "at": 29, "drop": [[19, 24]], "tok_fp": talk.FP.hex()}
    memory.add_forget(path[6].turn.id, "window", "limit", places, 5)
    memory.redact([path[2].turn.id, path[3].turn.id])
    ops = [one.op for one in standing(path_of(talk, told))]
    assert ops[0] == {"turns": [1]}
    assert (ops[1]["at"], ops[1]["drop"]) == (19, [[9, 14]])


def test_the_chains_of_restarts_are_purged_as_well(talk, memory, told):
    path = path_of(talk, told)
    memory.add_forget(path[4].turn.id, "turns", "limit", {"turns": [1], "restart": True}, 5)
    memory.add_forget(path[6].turn.id, "turns", "limit", {"turns": [2, 3], "restart": True}, 5)
    memory.redact([path[3].turn.id])
    assert sorted(purged(memory.purges())) == [
        ("sys!aaaaabbbbbccccc", 14),
        ("sys!bbbbbccccc", 9),  # the second restart had put the turn out of sight
    ]
    for row in memory.purges():
        memory.purge_done(row.id)
    memory.delete(told)
    texts = [text for text, _ in purged(memory.purges())]
    assert "sys!aaaaabbbbbdddddeeeeefffff" in texts
    assert "sys!bbbbbdddddeeeeefffff" in texts
    assert "sys!dddddeeeeefffff" in texts
