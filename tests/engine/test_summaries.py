"""Turns that are summed up, on a tiny model whose replies end soon."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import EOS, ByteTokenizer, TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import StoreError
from chatkv.events import Done, Failed, ForgetEvent, Summarizing
from sessions import branches
from sessions import summary as summaries
from sessions.chat import Chats
from sessions.exchange import export_jsonl
from sessions.exchange_files import LIMITS
from sessions.exchange_formats import WRITERS, read_chats
from sessions.exchange_import import ImportStore
from sessions.local import LocalEngine
from sessions.pages import SqlitePageStore
from sessions.service import EngineService
from sessions.store import MEMORY, ChatStore

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
LIMIT = 200
POLICY = "summarize:ask=no,shrink=1.5"
ENDS = (EOS, *range(48))


class ShortReplies(ByteTokenizer):
    """A fifth of all bytes ends a reply."""

    eos_ids = ENDS


class Program:
    """chatkv without its processes; closing it and making another is a restart."""

    def __init__(
        self,
        folder: Path,
        *,
        spec: str = "none",
        policy: str = POLICY,
        limit: int = LIMIT,
        **shape: Any,
    ) -> None:
        model: Any = TinyModel(repeat=0.5, eos_ids=ENDS, **shape)
        model.tokenizer = ShortReplies()
        self.pages = SqlitePageStore(
            folder / "kv.db", model.identity(model.page_size), limit_bytes=1 << 30
        )
        config = EngineConfig(spec=spec, drafters=("ngram", "random"), context_limit=limit)
        engine = Engine(
            model, config, store=self.pages, salt=self.pages.salt, costs=COSTS, guard=False
        )
        self.engine = LocalEngine(EngineService(engine, self.pages))
        self.engine.start()
        self.store = ChatStore(folder / "chat.db")
        settings = {"model": "tiny", "sampling": {"temperature": 1.0, "seed": 5, "max_tokens": 16}}
        self.chats = Chats(self.store, self.engine, settings=settings, policy=policy)

    def close(self) -> None:
        self.engine.close()
        self.pages.close()
        self.store.close()


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setattr(summaries, "PROMPT", "Sum up in {words}.")
    made: list[Program] = []

    def start(name: str = "one", **options: Any) -> Program:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(Program(tmp_path / name, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def prompt(number: int) -> str:
    return f"{number}: what do you think?"


def until_summed_up(chat: Any, most: int = 12) -> tuple[int, list[Any]]:
    """Prompts until a summary stands for turns: how many, and the events of the last."""
    for number in range(1, most):
        events = list(chat.send(prompt(number)))
        assert isinstance(events[-1], Done), events[-1]
        if any(isinstance(event, ForgetEvent) for event in events):
            return number, events
    raise AssertionError("nothing was forgotten")


def forget_of(events: list[Any]) -> ForgetEvent:
    (found,) = [event for event in events if isinstance(event, ForgetEvent)]
    return found


def test_a_summary_stands_for_turns_on_a_branch_of_its_own(program):
    here = program()
    chat = here.chats.new("ada")
    number, events = until_summed_up(chat)
    event = forget_of(events)
    assert event.policy == "summarize"
    turns = chat.turns()
    (place,) = [index for index, turn in enumerate(turns) if turn.summary]
    assert event.turns == tuple(range(1, place + 1))
    assert [turn.seen for turn in turns[:place]] == ["summarised"] * place
    assert {turn.seen for turn in turns[place:]} == {"live"}
    kept = [prompt(n) for n in range(1, number + 1)]
    assert [turn.prompt for turn in turns if not turn.summary] == kept
    assert event.live_after < event.live_before
    assert chat.context().used <= LIMIT
    counted = [usage for _, usage in here.store.turn_usage()]
    assert len(counted) == number + 1  # copies are none
    assert here.store.forget_counts() == {"summarize": {"times": 1, "tokens": event.num_tokens}}
    done = events[-1]
    assert done.usage.forgotten_tokens == event.num_tokens
    assert done.usage.summary_n > 0
    assert done.usage.summary_ms > 0
    assert any(isinstance(one, Summarizing) and one.done for one in events)
    (moment,) = turns[place].moments
    assert (moment.policy, moment.turns) == ("summarize", event.turns)


def test_the_turns_it_stands_for_are_out_of_sight_and_the_rest_is_as_it_was(program):
    here = program()
    chat = here.chats.new("ada")
    until_summed_up(chat)
    turns = chat.turns()
    (place,) = [index for index, turn in enumerate(turns) if turn.summary]
    other = [leaf for leaf in chat.tree() if leaf.number == place + 1 and not leaf.on_path]
    chat.select(other[0].id)  # the branch without it, as it was
    old = chat.turns()
    assert not any(turn.summary for turn in old)
    assert {turn.seen for turn in old} == {"live"}
    assert [(t.prompt, t.reply) for t in old] == [
        (t.prompt, t.reply) for t in turns[:-1] if not t.summary
    ]
    chat.select(turns[-1].id)
    assert [turn.id for turn in chat.turns()] == [turn.id for turn in turns]


def test_resumed_is_never_quit_and_drafted_is_plain_behind_a_summary(program, tmp_path):
    def told(chat: Any) -> list[Any]:
        return [(turn.prompt, turn.reply, turn.seen) for turn in chat.turns()]

    wanted = None
    for name, spec, lost in (("plain", "none", False), ("drafted", "tree:3", True)):
        here = program(name, spec=spec)
        chat = here.chats.new("ada")
        until_summed_up(chat)
        fork = chat.fork()
        list(chat.send("and now?"))
        wanted = wanted or told(chat)
        assert told(chat) == wanted
        here.close()
        for file in tmp_path.glob(f"{name}/kv.db*") if lost else ():
            file.unlink()
        resumed = program(name).chats.open(fork.id)
        list(resumed.send("and now?"))
        assert told(resumed) == wanted


def test_a_summary_that_is_not_shorter_is_not_used(program, monkeypatch):
    here = program(policy="summarize:ask=no,shrink=8")
    chat = here.chats.new("ada")
    _, events = until_summed_up(chat)
    assert forget_of(events).policy == "turns"
    assert "without a summary" in events[-1].notice
    assert not any(turn.summary for turn in chat.turns())


def test_small_models_are_refused_unless_forced(program):
    here = program(parameters=135_000_000)
    chat = here.chats.new("ada")
    (failed,) = chat.send("hello")
    assert isinstance(failed, Failed)
    assert "0.14" in failed.message
    assert "force=yes" in failed.hint
    assert here.store.sessions() == [] or chat.turns() == []
    chat.set_policy(f"{POLICY},force=yes")
    assert isinstance(list(chat.send("hello"))[-1], Done)


def until_it_is_begun(chat: Any) -> tuple[int, list[Any], list[Any]]:
    """Prompts until a summary is begun; stops that one. Which, the turns before, its events."""
    for number in range(1, 12):
        before, events = chat.turns(), []
        for event in chat.send(prompt(number)):
            events.append(event)
            if isinstance(event, Summarizing):
                chat.cancel()
        if any(isinstance(event, Summarizing) for event in events):
            return number, before, events
    raise AssertionError("no summary was begun")


def test_a_summary_can_be_stopped_and_loses_nothing(program):
    chat = program().chats.new("ada")
    number, before, events = until_it_is_begun(chat)
    assert events[-1].finish_reason == "cancelled"
    assert not any(isinstance(event, ForgetEvent) for event in events)
    (*same, last) = chat.turns()
    assert same == before
    assert (last.prompt, last.reply, last.state) == (prompt(number), "", "interrupted")
    assert forget_of(list(chat.send(prompt(number)))).policy == "summarize"


def test_a_summary_that_fails_gives_the_prompt_back(program, monkeypatch):
    here = program()
    chat = here.chats.new("ada")
    answer = here.engine.generate

    def refuse(request: Any) -> Any:
        if request.messages[-1].content.startswith("Sum up"):
            yield Failed("out_of_memory", 4, "The memory is full.", "Close what else uses it.")
        else:
            yield from answer(request)

    monkeypatch.setattr(here.engine, "generate", refuse)
    number, before, events = until_it_is_begun(chat)
    assert "No summary could be written: The memory is full." in events[-1].message
    assert "--on-overflow turns" in events[-1].hint
    assert chat.turns() == before
    assert here.store.search(f"{number}: what", limit=5)  # what was typed is stored
    monkeypatch.undo()
    monkeypatch.setattr(summaries, "PROMPT", "Sum up in {words}.")
    assert forget_of(list(chat.send(prompt(number)))).policy == "summarize"


def test_a_branch_that_cannot_be_stored_leaves_the_old_one_whole(program, monkeypatch):
    here = program()
    chat = here.chats.new("ada")

    def full(db: Any, turn: int) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(branches, "_remove", full)  # the last of its statements
    with pytest.raises(StoreError, match="disk is full"):
        until_summed_up(chat)
    (*same, last) = chat.turns()
    assert {turn.state for turn in same} == {"done"}
    assert (last.reply, last.state) == ("", "interrupted")
    assert [turn.prompt for turn in chat.tree()] == [prompt(n + 1) for n in range(len(same) + 1)]
    monkeypatch.undo()
    monkeypatch.setattr(summaries, "PROMPT", "Sum up in {words}.")
    assert forget_of(list(chat.send("again"))).policy == "summarize"


def test_what_the_user_had_forgotten_stays_so_behind_a_summary(program):
    chat = program(limit=400).chats.new("ada")
    for text in ("one", "two: " + 12 * "what do you think? ", "three", "four"):
        list(chat.send(text))
    chat.forget([1, 4])  # one before the turn that goes, one behind it
    chat.set("max_tokens", 200)  # so that room has to be made
    events = list(chat.send("five"))
    (made,) = [event for event in events if getattr(event, "policy", "") == "summarize"]
    (said,) = [event for event in events if getattr(event, "policy", "") == "user"]
    assert (made.turns, said.turns) == ((2,), (1, 5))  # the fourth is the fifth by then
    shown = [(turn.prompt[:4], turn.seen) for turn in chat.turns()]
    assert shown == [
        ("one", "forgotten"),
        ("two:", "summarised"),
        ("Sum ", "live"),
        ("thre", "live"),
        ("four", "forgotten"),
        ("five", "live"),
    ]
    assert dict(chat.context().why) == {1: "user", 2: "summarize", 5: "user"}
    assert chat.context().used == events[-1].usage.context_used
    chat.set("max_tokens", 16)
    chat.recall([2, 5])  # the turn itself comes back, beside what stands for it
    list(chat.send("six"))
    assert [turn.seen for turn in chat.turns()] == ["forgotten", *["live"] * 6]


def test_redacting_reaches_summaries_and_copies(program, tmp_path):
    chat = program().chats.new("ada")
    until_summed_up(chat)
    turns = chat.turns()
    (place,) = [index for index, turn in enumerate(turns) if turn.summary]
    copy = turns[place + 1]
    chat.redact([copy.id], purge=True)
    gone = chat.redact([turns[0].id], purge=True)
    assert gone.turns == (1, place + 1)
    assert gone.num_tokens > 0
    shown = chat.turns()
    assert shown[place].redacted  # it had seen the first turn
    chat.select(next(t.id for t in chat.tree() if t.number == place + 1 and not t.on_path))
    assert chat.turns()[place].redacted  # the one that was copied
    assert isinstance(list(chat.send("still there?"))[-1], Done)


def test_exports_mark_a_summary_or_leave_it_out(program):
    here = program()
    chat = here.chats.new("ada")
    number, _ = until_summed_up(chat)
    path = here.store.path(chat.id)
    (line,) = WRITERS["openai"]("ada", path)
    said = json.loads(line)["messages"]
    assert [m["content"] for m in said if m["role"] == "user"] == [
        prompt(n) for n in range(1, number + 1)
    ]
    text = "".join(f"{each}\n" for each in WRITERS["markdown"]("ada", path))
    assert " summary -->" in text
    (back,) = read_chats(io.BytesIO(text.encode()), "auto", LIMITS)
    assert back.talk == [(m["role"], m["content"]) for m in said]
    whole = "".join(f"{each}\n" for each in export_jsonl(here.store, chat.id))
    with ImportStore(MEMORY) as elsewhere:
        (found,) = elsewhere.read(io.BytesIO(whole.encode()))
        (row,) = elsewhere.sessions()
        assert "".join(f"{each}\n" for each in export_jsonl(elsewhere, row.id)) == whole, found
        turns = elsewhere.path(row.id)
        (place,) = [index for index, turn in enumerate(turns) if turn.is_summary]
        copy, summed = turns[place + 1].turn.id, turns[1].turn.id
        assert len(elsewhere.versions([copy])) == 2  # it is known for a copy there, too
        assert turns[place].turn.id in elsewhere.versions([summed])


def test_a_stopped_prompt_goes_along_and_a_policy_that_is_none_is_refused(program):
    chat = program().chats.new("ada")
    events = chat.send("never mind")
    next(events)
    chat.cancel()
    list(events)
    until_summed_up(chat)
    shown = chat.turns()
    kept = [turn for turn in shown if turn.prompt == "never mind"]
    assert [(turn.reply, turn.state) for turn in kept] == [("", "interrupted")]
    chat._policy = "summarize:nonsense"
    (failed,) = chat.send("hi")
    assert "no parameter 'nonsense'" in failed.message
    assert [turn.id for turn in chat.turns()] == [turn.id for turn in shown]
