"""`explain`: the reason of each turn, and where a prompt left what was stored before it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from fakes import ByteTokenizer, TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import EngineLost, ModelError
from chatkv.events import Done
from sessions.build import template_notice
from sessions.chat import Chats
from sessions.explain import explain
from sessions.local import LocalEngine
from sessions.pages import SqlitePageStore
from sessions.records import Render
from sessions.service import EngineService
from sessions.store import ChatStore

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
SAMPLING = {"temperature": 1.0, "max_tokens": 12, "seed": 11}
TOK = ByteTokenizer()


class Program:
    """A store and the tiny model in one process; `kv` keeps pages on disk."""

    def __init__(self, folder: Path, *, kv: bool = True, seed: int = 0) -> None:
        model = TinyModel(seed, context_limit=1024)
        identity = model.identity(model.page_size)
        path = folder / "kv.db"
        self.pages = SqlitePageStore(path, identity, limit_bytes=1 << 30) if kv else None
        salt = self.pages.salt if self.pages else b""
        engine = Engine(
            model, EngineConfig(spec="none"), store=self.pages, salt=salt, costs=COSTS, guard=False
        )
        self.engine = LocalEngine(EngineService(engine, self.pages))
        self.engine.start()
        self.store = ChatStore(folder / "chat.db")
        settings = {"model": "tiny", "sampling": SAMPLING}
        self.chats = Chats(self.store, self.engine, settings=settings)

    def close(self) -> None:
        self.engine.close()
        if self.pages is not None:
            self.pages.close()
        self.store.close()


@pytest.fixture
def start(tmp_path):
    running = []

    def begin(**options) -> Program:
        while running:
            running.pop().close()
        tmp_path.chmod(0o700)
        running.append(Program(tmp_path, **options))
        return running[-1]

    yield begin
    while running:
        running.pop().close()


def say(events) -> Done:
    (*_, done) = events
    assert isinstance(done, Done), done
    return done


def reasons(program: Program, chat) -> list[str | None]:
    return [report.reason for report in explain(program.store, chat.id, TOK)]


def test_a_chat_that_only_grew_is_new_all_along(start):
    program = start()
    chat = program.chats.new()
    for number in range(8):
        say(chat.send(f"prompt {number}"))
    reports = explain(program.store, chat.id, TOK)
    assert [report.reason for report in reports] == ["new"] * 8
    for before, report in pairwise(reports):
        assert report.reused + report.computed == report.prompt_tokens
        assert report.reused > before.prompt_tokens
        assert [span.reason for span in report.spans] == ["reused", "new"]
        assert (report.divergence, report.note) == (None, "")


def test_positions_behind_a_forgotten_turn_are_those_of_what_the_model_sees(start):
    program = start()
    chat = program.chats.new()
    for number in range(4):
        say(chat.send(f"prompt {number}"))
    chat.forget([1, 2])
    say(chat.send("prompt four"))
    done = say(chat.edit(chat.turns()[-1].id, "prompt five"))
    found = explain(program.store, chat.id, TOK)[-1].divergence
    assert found.position == done.usage.prompt_tokens - len(TOK.user_ids("ive", False)) + 1
    assert found.now.before == "prompt f"
    for file in program.store.file.parent.glob("kv.db*"):
        file.unlink()  # so that all ids are computed, the forgotten ones too
    again = start().chats.open(chat.id)
    assert say(again.edit(again.turns()[-1].id, "prompt fix")).usage.prompt_n > found.position + 9
    last = explain(start().store, chat.id, TOK)[-1].divergence
    assert (last.position, last.now.text) == (found.position + 1, "x<reply>")


def test_an_edit_of_turn_3_of_8_names_the_position_and_both_texts(start):
    program = start()
    chat = program.chats.new()
    for number in range(8):
        say(chat.send(f"prompt {number}"))
    done = say(chat.edit(chat.turns()[2].id, "prompt two, please"))
    reports = explain(program.store, chat.id, TOK)
    assert [report.reason for report in reports] == ["new", "new", "diverged"]
    found = reports[2].divergence
    assert found.cause == "edit"
    assert found.position == done.usage.cached_tokens  # rows inside a page are reused too
    assert found.stored.before == found.now.before == "<user>prompt "
    assert found.stored.text.startswith("2<reply>")
    assert found.now.text == "two, plea"
    assert [span.reason for span in reports[2].spans] == ["reused", "diverged"]
    # What grows on the edited turn is new, and so is the other branch, as it was.
    say(chat.send("on"))
    assert reasons(program, chat) == ["new", "new", "diverged", "new"]


def test_the_same_prompt_again_costs_one_token(start):
    program = start()
    chat = program.chats.new()
    say(chat.send("one"))
    chat.set("seed", 5)
    say(chat.again())
    (report,) = explain(program.store, chat.id)
    assert (report.reason, report.computed) == ("new", 1)
    assert report.note.startswith("again")


def test_a_fork_leaves_the_other_at_its_prompt(start):
    program = start()
    chat = program.chats.new("fox")
    say(chat.send("one"))
    say(chat.send("two"))
    fork = chat.fork(chat.turns()[0].id, "side")
    say(fork.send("tea"))
    found = explain(program.store, fork.id, TOK)[1].divergence
    assert (found.cause, found.stored.text[:2], found.now.text[:2]) == ("fork", "wo", "ea")
    assert found.position == explain(program.store, fork.id)[1].reused


def test_without_its_pages_a_resumed_chat_is_not_stored(start, tmp_path):
    chat = start().chats.new("a")
    say(chat.send("one"))
    start()
    for file in tmp_path.glob("kv.db*"):
        file.unlink()
    program = start()
    chat = program.chats.open("a")
    done = say(chat.send("two"))
    assert done.usage.cached_tokens == 0
    report = explain(program.store, chat.id)[1]
    assert report.reason == "not_stored"
    assert [span.reason for span in report.spans] == ["not_stored", "new"]
    assert report.spans[-1].stop == report.prompt_tokens


def test_a_reply_that_was_cut_is_closed_and_nothing_else(start):
    program = start()
    chat = program.chats.new()
    for event in chat.send("one"):
        if event.type == "delta":
            chat.cancel()
    say(chat.send("two"))
    report = explain(program.store, chat.id)[1]
    assert (report.reason, report.divergence) == ("new", None)
    assert "was cut" in report.note


def test_a_reply_that_never_began_shifts_nothing(start, monkeypatch):
    program = start()
    chat = program.chats.new()
    say(chat.send("one"))
    with monkeypatch.context() as patch:
        patch.setattr(program.engine, "wait_ready", _lost)
        with pytest.raises(EngineLost):
            say(chat.send("lost"))
    say(chat.send("two"))
    assert "left out" in explain(program.store, chat.id, TOK)[-1].note
    done = say(chat.edit(chat.turns()[2].id, "tea"))
    lost, last = explain(program.store, chat.id, TOK)[1:]
    assert (lost.reason, lost.prompt_tokens, lost.state) == (None, None, "interrupted")
    assert last.divergence.position == done.usage.cached_tokens


def _lost(timeout_s=None):
    raise EngineLost("gone")


def counted(talk, store, session, prompt, reply, *, tok_fp=None, cached=0, **usage):
    """A turn with the counts its reply would have been stored with."""
    head = store.session(session).head_turn_id
    fp = tok_fp or talk.FP
    begun = store.begin_turn(session, head, head, prompt, {}, render=Render(fp, talk.ids(prompt)))
    before = sum(
        len(found.token_ids)
        for turn in store.path(session)
        for message in turn.messages
        if (found := message.render(fp))
    )
    usage = {"prompt_tokens": before, "cached_tokens": cached, "prompt_n": before - cached, **usage}
    ids = talk.ids(reply)
    store.finish_turn(begun.turn_id, "done", reply, fp, ids, ((0, len(ids)),), usage)
    return begun.turn_id


class Letters:
    """Shows the ids of `Talk`."""

    def __init__(self, fp: bytes) -> None:
        self.fp = fp

    def tok_fp(self) -> bytes:
        return self.fp

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def token_text(self, token: int) -> str | None:
        return chr(token)


def test_the_reason_that_was_stored_wins(talk, memory):
    session = talk.start(system="sys")
    counted(talk, memory, session, "one", "1111")
    counted(talk, memory, session, "two", "2222", cached=4, reuse_reason="damaged")
    report = explain(memory, session)[1]
    assert report.reason == "damaged"
    known = len("sysone1111") - 1
    assert [(s.start, s.stop, s.reason) for s in report.spans] == [
        (0, 4, "reused"),
        (4, known, "damaged"),
        (known, report.prompt_tokens, "new"),
    ]


def test_another_model_is_named(talk, memory):
    session = talk.start(system="sys")
    counted(talk, memory, session, "one", "1111", model="small")
    counted(talk, memory, session, "two", "2222", model="large")
    report = explain(memory, session)[1]
    assert (report.reason, report.note) == ("fingerprint", "the model was small and is large")


def test_another_template_is_found_and_shown(talk, memory):
    session = talk.start(system="sys")
    turn = counted(talk, memory, session, "one", "1111")
    other = b"u" * 32
    (system, *_), (prompt, reply) = (part.messages for part in memory.path(session))
    memory.set_render(system.row.id, other, talk.ids("[sys]"))
    memory.set_render(prompt.row.id, other, talk.ids("[one]"))
    memory.set_render(reply.row.id, other, talk.ids("1111"))
    counted(talk, memory, session, "two", "2222", tok_fp=other)
    first, second = explain(memory, session, Letters(other))
    assert first.divergence is None
    found = second.divergence
    assert (second.reason, found.cause, found.position) == ("diverged", "template", 0)
    # The tokenizer that wrote the other side is not here, but it spells these ids the same way.
    assert (found.stored.turn_id, found.stored.text, found.now.text) == (
        turn,
        "sysone111",
        "[sys][one",
    )


def test_ids_that_nobody_here_can_spell_are_shown_as_ids(talk, memory):
    session = talk.start(system="sys")
    counted(talk, memory, session, "one", "1")
    root = memory.path(session)[0].turn.id
    begun = memory.begin_turn(
        session,
        memory.session(session).head_turn_id,
        root,
        "owe",
        {},
        render=Render(talk.FP, talk.ids("owe")),
    )
    memory.finish_turn(begun.turn_id, "interrupted")
    (report,) = explain(memory, session)
    assert report.reason is None
    found = report.divergence
    assert (found.position, found.cause, found.now.text) == (4, "edit", None)
    assert found.now.ids[-2:] == (ord("w"), ord("e"))


def test_a_first_prompt_is_compared_with_other_chats_up_to_its_system_prompt(talk, memory):
    monday = talk.start(system="Today is Monday.")
    counted(talk, memory, monday, "hi", "1")
    tuesday = talk.start(system="Today is Tuesday.")
    counted(talk, memory, tuesday, "hi", "1", cached=9)
    (report,) = explain(memory, tuesday, Letters(talk.FP))
    found = report.divergence
    assert (report.reason, found.cause, found.position) == ("diverged", "system prompt", 9)
    assert (found.stored.text, found.now.text) == ("Monday.", "Tuesday.")
    (first,) = explain(memory, monday)
    assert first.divergence is None  # it was there before the other
    twin = talk.start(system="Today is Tuesday.")
    counted(talk, memory, twin, "ho", "1", cached=17)
    (report,) = explain(memory, twin)
    assert (report.reason, report.divergence) == ("new", None)


def test_a_forgotten_turn_is_said(talk, memory):
    session = talk.start(system="sys")
    counted(talk, memory, session, "one", "1111")
    op = {"policy": "turns", "reason": "asked", "op": {"drop": [1]}, "num_tokens": 7}
    memory.set_pending_ops(session, [op])
    counted(talk, memory, session, "two", "2222", cached=3)
    report = explain(memory, session)[1]
    assert (report.reason, report.note) == ("forgot", "turns: 7 tokens (asked)")


def test_an_empty_chat_has_nothing_to_explain(talk, memory):
    assert explain(memory, talk.start()) == []


class Template:
    """A tokenizer whose template is what the test says."""

    def __init__(self, stable: bool | Exception) -> None:
        self.stable = stable

    def prefix_stable(self) -> bool:
        if isinstance(self.stable, Exception):
            raise self.stable
        return self.stable


def test_a_template_that_rewrites_old_turns_is_said_in_one_sentence():
    notice = template_notice(Template(False))
    assert "chat template writes old turns in another way" in notice
    assert notice.count(".") == 1
    assert template_notice(Template(True)) == ""
    # One that refuses some histories is not known to rewrite any.
    assert template_notice(Template(ModelError("it wants a user first"))) == ""
