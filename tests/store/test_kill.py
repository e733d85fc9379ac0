"""kill -9 at random moments: what was acknowledged is there, and the store opens."""

from __future__ import annotations

import json
import random
import time

from sessions.store import ChatStore

CHILD = """
    import json, sys
    from sessions.store import ChatStore
    FP = b"f" * 32
    store = ChatStore(sys.argv[1])
    round = sys.argv[2]
    rows = store.sessions(limit=1)
    session = rows[0].id if rows else store.create_session("kill").id
    print(json.dumps(["start", session]), flush=True)
    for turn in range(10_000):
        head = store.session(session).head_turn_id
        prompt = f"prompt {turn} of round {round}"
        begun = store.begin_turn(session, head, head, prompt, {"seed": turn})
        print(json.dumps(["prompt", begun.turn_id, prompt]), flush=True)
        store.save_partial(begun.turn_id, "half", FP, [1, 2], ((0, 2),))
        print(json.dumps(["partial", begun.turn_id, "half"]), flush=True)
        store.finish_turn(begun.turn_id, "done", "whole " + prompt, FP, [1, 2, 3], ((0, 2),))
        print(json.dumps(["done", begun.turn_id, "whole " + prompt]), flush=True)
"""


def test_no_acknowledged_message_is_lost_by_kill_9(path, start_child):
    chance = random.Random(11)
    prompts: dict[int, str] = {}
    replies: dict[int, tuple[str, str]] = {}
    for number in range(12):
        child = start_child(CHILD, path, number)
        line = child.stdout.readline()
        assert json.loads(line)[0] == "start"
        time.sleep(chance.uniform(0.0, 0.25))
        child.kill()
        for line in child.communicate()[0].splitlines(keepends=True):
            if line.endswith("\n"):
                kind, turn, text = json.loads(line)
                if kind == "prompt":
                    prompts[turn] = text
                else:
                    replies[turn] = (kind, text)
        with ChatStore(path) as store:
            (row,) = store.sessions()
            turns = {turn.turn.id: turn for turn in store.path(row.id)}
            assert set(prompts) <= set(turns)
            assert all(turn.turn.state != "open" for turn in turns.values())
            for turn_id, text in prompts.items():
                assert turns[turn_id].messages[0].row.content == text
            for turn_id, (kind, text) in replies.items():
                reply = turns[turn_id].message("assistant")
                assert reply is not None
                if kind == "done":
                    assert (reply.row.content, reply.row.state) == (text, "done")
                    assert reply.renders[0].token_ids == (1, 2, 3)
                else:  # what followed may have been committed too
                    assert (reply.row.content, reply.row.state) in (
                        (text, "interrupted"),
                        (f"whole {prompts[turn_id]}", "done"),
                    )
            assert store.check() == []
    assert len(prompts) > 12
