"""Import: what was exported comes back the same, and no file does harm."""

from __future__ import annotations

import io
import json
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatkv.errors import StoreError
from sessions.exchange import export_jsonl
from sessions.exchange_files import BadFile, Limits
from sessions.exchange_formats import WRITERS
from sessions.exchange_import import ImportStore
from sessions.records import Render
from sessions.store import MEMORY, ChatStore

DATA = Path(__file__).parents[1] / "data"
OLD = (DATA / "export-v1.jsonl").read_bytes().replace(b',"records":19}', b"}", 1)
"""Also without the number of records, which the first ones lacked."""


@pytest.fixture
def elsewhere():
    with ImportStore(MEMORY) as opened:
        yield opened


def read(store, data, **more):
    data = data.encode() if isinstance(data, str) else data
    return list(store.read(io.BytesIO(data), **more))


def exported(store, session) -> bytes:
    return "".join(f"{line}\n" for line in export_jsonl(store, session)).encode()


def counts(store) -> list[int]:
    tables = ("sessions", "turns", "messages", "renders", "forgets", "messages_fts")
    return [store._db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]


def grow(store: ChatStore, rng: random.Random, texts: list[str]) -> str:
    """A chat of random turns, forks, edits, forget records and states."""
    fp, other = b"t" * 32, b"u" * 32
    main = store.create_session(rng.choice(["", "ada", "x  y\u2028"]), rng.choice(["", "be"]), {})
    store.set_settings(main.id, {"model": "Toy", "sampling": {"top_p": 0.5, "stop": ["x"]}})
    forks, turns, forgets = [main.id], [main.head_turn_id], 0
    for number in range(rng.randrange(7)):
        where = rng.choice(forks)
        if rng.random() < 0.3:
            where = store.fork(where, rng.choice(turns), f"f{number}").id
            forks.append(where)
        head = store.session(where).head_turn_id
        if rng.random() < 0.3:
            op = {"policy": "user", "reason": "r", "op": {"at": 1, "x": [1.5]}, "num_tokens": 2}
            if forgets and rng.random() < 0.5:
                op["cancels"] = rng.randint(1, forgets)
            store.set_pending_ops(where, [op])
            if rng.random() < 0.3:
                continue
            forgets += 1
        parent = head if rng.random() < 0.7 else rng.choice(turns)
        prompt, reply = rng.choice(texts), rng.choice(texts)
        begun = store.begin_turn(
            where, head, parent, prompt, {"seed": number}, render=Render(fp, range(number))
        )
        turns.append(begun.turn_id)
        if rng.random() < 0.2:
            store.save_partial(begun.turn_id, reply, fp, [1, 2], ((0, 2),))
        state = rng.choice(["done", "interrupted", "error", None])
        if state is not None:
            ids = list(range(5))
            store.finish_turn(begun.turn_id, state, reply, other, ids, ((0, 2), (3, 4)), {"n": 1})
    return main.id


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.lists(st.text(), min_size=1, max_size=5))
def test_any_tree_comes_back_byte_for_byte(seed, texts):
    with ChatStore(MEMORY) as store, ImportStore(MEMORY) as elsewhere:
        data = exported(store, grow(store, random.Random(seed), texts))
        (made,) = read(elsewhere, data)
        assert exported(elsewhere, made.session) == data
        assert (made.skipped, made.notes) == (False, ())
        assert elsewhere.check() == []
        for row in elsewhere.sessions():
            messages = [message for turn in elsewhere.path(row.id) for message in turn.messages]
            counts = [[len(r.token_ids) for r in message.renders] for message in messages]
            assert row.tokens == sum(max(count, default=0) for count in counts)
        (again,) = read(elsewhere, data)
        assert (again.session, again.skipped) == (made.session, True)


def test_an_export_of_the_first_release_comes_in(elsewhere):
    (made,) = read(elsewhere, OLD)
    assert (made.name, made.turns, made.forks) == ("ada-notes", 5, 2)
    again = exported(elsewhere, made.session)
    assert again.replace(b',"records":19}', b"}", 1) == OLD
    assert [match.excerpt for match in elsewhere.search("नमस्ते")] == ["नमस्ते"]
    assert made.unknown_ids == 11
    (skipped,) = read(elsewhere, OLD, name="other")
    assert (skipped.skipped, skipped.session) == (True, made.session)
    elsewhere.rename(made.session, "mine")
    assert read(elsewhere, OLD)[0].skipped
    elsewhere.set_settings(made.session, {})
    (fresh,) = read(elsewhere, OLD, name="other")
    assert (fresh.skipped, fresh.name, fresh.unknown_ids) == (False, "other", 0)
    assert fresh.session != made.session


def test_a_recall_that_waits_names_its_record_not_a_row(talk, memory, elsewhere):
    talk.turn(talk.start("other"), "x", "y")
    session = talk.start("ada")
    op = {"policy": "p", "reason": "r", "op": {}, "num_tokens": 1}
    for name in ("first", "second"):
        row = memory.create_session(name)
        memory.set_pending_ops(row.id, [op])
        talk.turn(row.id, "q", "a")
    memory.set_pending_ops(session, [op])
    talk.turn(session, "q", "a")
    (forget,) = memory.path(session)[-1].forgets
    memory.set_pending_ops(session, [{**op, "cancels": forget.id}])
    data = exported(memory, session)
    assert b'"cancels":1,"num_tokens"' in data
    (made,) = read(elsewhere, data)
    (waiting,) = elsewhere.session(made.session).pending_ops
    assert waiting["cancels"] == elsewhere.path(made.session)[-1].forgets[0].id


def small_export() -> bytes:
    with ImportStore(MEMORY) as store:
        (made,) = read(store, OLD)
        return exported(store, made.session)


def test_no_truncation_leaves_half_a_chat(talk, memory, elsewhere):
    op = {"policy": "p", "reason": "r", "op": {}, "num_tokens": 1}
    session = talk.start("ada")
    fork = memory.fork(session, None, "f").id
    memory.set_pending_ops(fork, [op])
    talk.turn(fork, "q", "a")
    data = exported(memory, session)
    for cut in range(len(data) - 1):
        with suppress(BadFile):
            assert all(isinstance(item, BadFile) for item in read(elsewhere, data[:cut])), cut
    assert counts(elsewhere) == [0] * 6


def test_damaged_files_neither_crash_nor_hang_nor_leave_halves(elsewhere):
    rng, started, data = random.Random(3), time.monotonic(), small_export()
    sharegpt = b'{"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b"}]}\n'
    openai = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n'
    whole = 0
    for number in range(2000):
        raw = bytearray((data, sharegpt * 2, openai * 2)[number % 3])
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(raw))
            match rng.randrange(5):
                case 0:
                    raw[place] ^= 1 << rng.randrange(8)
                case 1:
                    del raw[place : place + rng.randint(1, 40)]
                case 2:
                    raw[place:place] = raw[: rng.randrange(60)]
                case 3:
                    raw[place:place] = rng.choice(
                        [b"[", b"{", b'"', b"\\", b"1e999", b"NaN", b"null", b"-1", b"9" * 30]
                    )
                case _:
                    raw[place : place + 1] = bytes([rng.randrange(256)])
        before = counts(elsewhere)
        try:
            made = [c for c in read(elsewhere, bytes(raw)) if not isinstance(c, BadFile)]
        except BadFile:
            made = []
        fresh = [item for item in made if not item.skipped]
        if not fresh:
            assert counts(elsewhere) == before
        for item in fresh:
            whole += 1
            # What it gave is a chat like any other: it can be written, and read again as the same.
            with ImportStore(MEMORY) as third:
                text = exported(elsewhere, item.session)
                (again,) = read(third, text)
                assert exported(third, again.session) == text
        for row in elsewhere.sessions():
            elsewhere.delete(row.id)
    assert whole > 20
    assert elsewhere.check() == []
    assert time.monotonic() - started < 120


TALK = [("user", "a"), ("assistant", "b"), ("user", "c\u2028\x85\x1b[2J")]


@pytest.mark.parametrize("kind", ["openai", "sharegpt"])
def test_plain_formats_come_back(memory, elsewhere, kind):
    for system in ("", "Be brief."):
        row = memory.create_session("ada", system)
        for prompt, reply in (("a", "b"), ("c\u2028\x85\x1b[2J", "")):
            head = memory.session(row.id).head_turn_id
            begun = memory.begin_turn(row.id, head, head, prompt, {})
            memory.finish_turn(begun.turn_id, "done" if reply else "interrupted", reply)
        (line,) = WRITERS[kind]("ada", memory.path(row.id))
        assert len(line.splitlines()) == 1
        (made,) = read(elsewhere, line)
        assert (made.turns, made.skipped) == (2, False)
        path = elsewhere.path(made.session)
        said = [(m.row.role, m.row.content) for turn in path for m in turn.messages]
        assert said == [("system", system), *TALK]
        assert list(WRITERS[kind]("ada", path)) == [line]
        assert read(elsewhere, line)[0].skipped
        assert elsewhere.check() == []


def test_prompts_in_a_row_are_one_turn(elsewhere):
    """A turn without a reply would not be shown to the model."""
    said = [("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"), ("user", "e")]
    line = json.dumps({"messages": [{"role": role, "content": text} for role, text in said]})
    (made,) = read(elsewhere, line)
    path = elsewhere.path(made.session)[1:]
    assert [[m.row.content for m in turn.messages] for turn in path] == [
        ["a\n\nb", "c"],
        ["d\n\ne"],
    ]
    assert [turn.answered for turn in path] == [True, False]
    assert read(elsewhere, line)[0].skipped
    many = json.dumps([{"from": "human", "value": "x"}] * 200_000)
    assert read(elsewhere, many)[0].turns == 1
    (error,) = read(elsewhere, line, limits=Limits(text_chars=3))
    assert "4 characters; the most is 3" in error.message


TWO = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("value", "num"),
    [
        (TWO, 1),
        ({"messages": TWO, "model": "gpt"}, 1),
        ([{"messages": TWO}, {"messages": TWO[:1]}], 2),
        ([TWO, TWO[:1]], 2),
        ([{"from": "human", "value": "x"}], 1),
        ([{"id": "1", "conversations": [{"from": "human", "value": "x"}], "system": "s"}], 1),
        ([{"role": "developer", "content": "s"}, *TWO], 1),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], 1),
        ([TWO[0], {**TWO[1], "refusal": None, "annotations": []}], 1),
    ],
)
def test_one_value_over_several_lines_or_one_a_line(elsewhere, value, num):
    made = read(elsewhere, "\ufeff" + json.dumps(value, indent=1))
    assert [type(item).__name__ for item in made] == ["Imported"] * num
    again = read(elsewhere, json.dumps(value) + "\n\n")
    assert [item.skipped for item in again] == [True] * num


@pytest.mark.parametrize(
    ("text", "line", "says", "hint"),
    [
        ("", 1, "empty", "Nothing"),
        ("hello", 1, "no JSON", ""),
        ("3", 1, "no conversation", "chatkv"),
        ('{"mesages":[]}', 1, "'mesages'", "'messages'"),
        ('{"messages":[{"role":"usr","content":"x"}]}', 1, "message 1 has the role 'usr'", "user"),
        ('{"messages":[{"role":"user","contnet":"x"}]}', 1, "no field 'content'", "contnet"),
        ('{"messages":[{"role":"user","content":"x","mood":1}]}', 1, "'mood'", "Known"),
        ('{"messages":[{"role":"tool","content":"x"}]}', 1, "'tool'", "tools"),
        ('{"messages":[{"role":"assistant","content":"x"}]}', 1, "answers nothing", "leave out"),
        ('{"messages":[]}', 1, "no message of a user", ""),
        ('{"messages":[\n{"role":"user",\n"content":x}]}', 3, "no JSON", ""),
        ('[\n\n\n{"role":"user",\n\n"content":\nx}]', 7, "no JSON", ""),
        ('{"conversations":[{"from":"humam","value":"x"}]}', 1, "'humam'", "'human'"),
        ('{"messages":[{"role":"user","content":NaN}]}', 1, "NaN", ""),
        ('{"messages":[{"role":"user","content":1e999}]}', 1, "too large", ""),
        ('{"messages":[' + "[" * 70 + "]" * 70 + "]}", 1, "deeper than 64", ""),
        ('{"format":"chatkv/9","turns":0,"sessions":[]}', 1, "'chatkv/9'", "chatkv/1"),
    ],
)
def test_what_is_refused_is_named(elsewhere, text, line, says, hint):
    try:
        (error,) = read(elsewhere, text)
    except BadFile as raised:
        error = raised
    assert (error.line, error.exit_code) == (line, 1)
    assert says in error.message
    assert hint in error.hint
    assert counts(elsewhere) == [0] * 6


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"parent":2,"session":1', b'"parent":3,"session":1', "parent of turn 3"),
        (b'"parent":null', b'"parent":1', "parent of turn 1"),
        (b'"head":6', b'"head":7', "head of session 1"),
        (b'"forked_from":1', b'"forked_from":3', "forked from 3"),
        (b'"cancels":1', b'"cancels":2', "cancels 2"),
        (b'"role":"user"', b'"role":"usr"', "'usr'"),
        (b'"sampled":[[0,2]]', b'"sampled":[[0,9]]', "do not fit"),
        (b'"token_ids":[5,6,7]', b'"token_ids":[5,-6,7]', "-6"),
        (b'"token_ids":[5,6,7]', b'"token_ids":[5,true,7]', "whole numbers"),
        (b'"token_ids":[5,6,7]', b'"token_ids":[5,4294967296]', "ids make no sense"),
        (b'"seed":7', b'"seed":"7"', "'sampling'"),
        (b'"model":"SmolLM2","top_p":0.95', b'"sampling":{"top_p":9}', "'sampling' cannot be used"),
        (b'"prompt_tokens":3', b'"prompt_tokens":"3"', "'prompt_tokens'"),
        (b'"seq":1', b'"seq":0', "stands behind"),
        (b'"pinned":false', b'"pinned":0', "true or false"),
        (b'"created_at":1760000000000', b'"created_at":-1', "'created_at'"),
        (b'"settings":{"model":"SmolLM2","top_p":0.95}', b'"settings":{"model":3}', "'model'"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(elsewhere, old, new, says):
    assert OLD.count(old)
    errors = read(elsewhere, OLD.replace(old, new, 1))
    assert all(isinstance(item, BadFile) for item in errors)
    assert says in errors[0].message
    assert counts(elsewhere) == [0] * 6


def test_a_bad_chat_costs_itself_alone(elsewhere):
    good = small_export()
    bad = good.replace(b'"seq":1', b'"seq":"1"', 1)
    found = read(elsewhere, bad + good)
    assert [type(item).__name__ for item in found] == ["BadFile", "Imported"]
    assert found[0].line == 6
    lines = b'{"messages":[{"role":"user","content":"%d"}]}\n'
    found = read(elsewhere, lines % 1 + b"{]\n" + lines % 2, name="n")
    assert [getattr(item, "name", item) for item in found[::2]] == ["n", "n 2"]
    assert (found[1].line, type(found[1])) == (2, BadFile)


def test_limits_are_told_with_the_way_out(elsewhere):
    small = Limits(200, 100, 20, 4, 10, 3)
    line = '{"messages":[{"role":"user","content":"%s"}]}\n'
    for text, says in (
        (line % ("x" * 100), "100 bytes"),
        (line % "ab" * 9, "200 bytes"),
        (line % ("x" * 11), "'content' has 11 characters; the most is 10"),
        ('{"messages":[' + "1," * 30 + "1]}", "20"),
        ('{"messages":[{"a":[[[]]]}]}', "deeper than 4"),
        (json.dumps([{"from": "x"}] * 4), "4 messages; the most is 3"),
    ):
        errors = []
        try:
            errors = [c for c in read(elsewhere, text, limits=small) if isinstance(c, BadFile)]
        except BadFile as error:
            errors = [error]
        assert says in errors[-1].message
        assert errors[-1].hint
    header = OLD.replace(b'"turns":6', b'"turns":2000000', 1)
    (error, *_) = read(elsewhere, header)
    assert "2,000,000 turns; the most is 1,000,000" in error.message


def test_what_a_foreign_file_may_not_decide(elsewhere):
    far = OLD.replace(b'"model":"SmolLM2"', b'"model":"/tmp/evil.gguf"').replace(
        b'"updated_at":1760000032000', b'"updated_at":9007199254740991'
    )
    (made,) = read(elsewhere, far)
    row = elsewhere.session(made.session)
    assert "model" not in row.settings
    assert "path" in made.notes[0]
    assert row.updated_at < 2 * time.time() * 1000
    newer = elsewhere.create_session("newer")
    assert elsewhere.find("@last").id == newer.id
    text = '{"messages":[{"role":"user","content":"\\ud83d x"}]}'
    (made,) = read(elsewhere, text)
    assert elsewhere.path(made.session)[1].messages[0].row.content == "\ufffd x"


def test_a_commit_that_fails_leaves_nothing(elsewhere, failing):
    real, made = elsewhere._db, []
    for left in range(200):
        elsewhere._db = failing(real, left)
        with suppress(StoreError):
            made = read(elsewhere, OLD)
        elsewhere._db = real
        if made:
            break
        assert counts(elsewhere) == [0] * 6, left
    assert left > 40
    assert counts(elsewhere) == [3, 6, 11, 12, 2, 11]
