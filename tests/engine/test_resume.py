"""Resumed = never quit: after a restart, a fork, an edit, a lost, damaged or wrong cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from program import PROMPTS, Program, say

from chatkv.errors import EngineLost, ModelError, UsageError
from chatkv.events import Delta, Done, Failed, Prefill, Rendered
from sessions.rendering import render
from sessions.request import PathMessage


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    running: list[Program] = []

    def begin(name: str = "a", **options: object) -> Program:
        while running:
            running.pop().close()
        folder = tmp_path / name
        folder.mkdir(exist_ok=True, mode=0o700)
        running.append(Program(folder, **options))  # type: ignore[arg-type]
        return running[-1]

    yield begin
    for program in running:
        program.close()


@pytest.fixture
def never_quit(start: Callable[..., Program]) -> list[str]:
    chat = start("reference", kv=False).chats.new()
    return [say(chat, prompt).text for prompt in PROMPTS]


def test_restart_between_all_turns(start: Callable[..., Program], never_quit: list[str]) -> None:
    texts = []
    for turn, prompt in enumerate(PROMPTS):
        program = start(spec="tree:5" if turn % 2 else "none")
        chat = program.chats.open("@last") if turn else program.chats.new()
        done = say(chat, prompt)
        texts.append(done.text)
        if turn:
            assert done.usage.restored_pages > 0
            assert done.usage.disk_tokens == done.usage.cached_tokens
            assert done.usage.verified is True
            assert done.usage.cached_tokens + done.usage.prompt_n == done.usage.prompt_tokens
            assert done.usage.prompt_n < 45
    assert texts == never_quit


def test_kv_deleted_in_mid_conversation(
    start: Callable[..., Program], never_quit: list[str], tmp_path: Path
) -> None:
    texts = []
    for turn, prompt in enumerate(PROMPTS):
        if turn == 2:
            start("other")
            for file in (tmp_path / "a").glob("kv.db*"):
                file.unlink()
        program = start()
        chat = program.chats.open("@last") if turn else program.chats.new()
        texts.append(say(chat, prompt).text)
    assert texts == never_quit


def test_fork_edit_again(start: Callable[..., Program]) -> None:
    program = start()
    chat = program.chats.new("fox")
    first = say(chat, PROMPTS[0])
    second = say(chat, PROMPTS[1])
    fork = chat.fork(chat.turns()[0].id, "side")
    assert [turn.reply for turn in fork.turns()] == [first.text]
    assert say(fork, PROMPTS[1]).text == second.text
    assert len(chat.turns()) == 2
    (*_, edited) = chat.edit(chat.turns()[1].id, "something else")
    assert isinstance(edited, Done)
    assert edited.usage.cached_tokens > first.usage.prompt_tokens
    turn = chat.turns()[1]
    assert (turn.prompt, turn.sibling, turn.siblings) == ("something else", 3, 3)
    chat.set("seed", 99)
    (*_, again) = chat.again()
    assert isinstance(again, Done)
    assert again.text != edited.text
    assert chat.turns()[1].siblings == 4
    tree = [(turn.number, turn.prompt, turn.on_path, turn.forks) for turn in chat.tree()]
    assert tree == [
        (1, PROMPTS[0], True, ()),
        (2, PROMPTS[1], False, ()),
        (2, PROMPTS[1], False, ("side",)),
        (2, "something else", False, ()),
        (2, "something else", True, ("main",)),
    ]
    assert {turn.chat_id for turn in chat.tree()} == {chat.id, fork.id}
    assert program.chats.new().tree() == []
    names = {(row.name, row.fork) for row in program.chats.chats()}
    assert names == {("fox", "main"), ("fox", "side")}


def test_cancel_keeps_what_there_is_and_the_chat_goes_on(start: Callable[..., Program]) -> None:
    chat = start().chats.new()
    seen = ""
    for event in chat.send(PROMPTS[0]):
        if isinstance(event, Delta):
            seen += event.text
            chat.cancel()
        last = event
    assert isinstance(last, Done)  # pyright: ignore
    assert last.finish_reason == "cancelled"
    (turn,) = chat.turns()
    assert turn.state == "interrupted"
    assert turn.reply == last.text
    assert say(chat, "go on").text == say(start().chats.open("@last").fork(turn.id), "go on").text


def test_abandoned_stream_is_closed(start: Callable[..., Program]) -> None:
    chat = start().chats.new()
    stream = chat.send(PROMPTS[0])
    for event in stream:
        if isinstance(event, Delta):
            break
    stream.close()  # pyright: ignore
    (turn,) = chat.turns()
    assert turn.state == "interrupted"
    say(chat, PROMPTS[1])


def test_events_come_in_order(start: Callable[..., Program]) -> None:
    chat = start().chats.new()
    kinds = [event.type for event in chat.send("hello")]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    assert order == ["rendered", "prefill", "delta", "done"]
    assert not any(
        isinstance(event, Rendered) and len(event.messages) > 1 for event in chat.send("x")
    )
    assert any(isinstance(event, Prefill) for event in chat.send("y"))


def test_too_long_says_so_and_loses_nothing(start: Callable[..., Program]) -> None:
    program = start()
    chat = program.chats.new()
    say(chat, PROMPTS[0])
    (*_, failed) = chat.send("x" * 600)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.exit) == ("context_full", 5)
    assert "512" in failed.message
    assert len(chat.turns()) == 1
    assert say(chat, PROMPTS[1]).text
    found = program.store.search("x" * 100)
    assert len(found) == 1


def test_a_chat_that_began_with_what_does_not_fit_is_not_listed(
    start: Callable[..., Program],
) -> None:
    program = start()
    chat = program.chats.new()
    (*_, failed) = chat.send("x" * 600)
    assert isinstance(failed, Failed)
    assert program.chats.chats() == []
    assert len(program.chats.chats(trash=True)) == 1
    assert say(chat, PROMPTS[0]).text
    assert [row.turns for row in program.chats.chats()] == [1]


def test_empty_prompts_are_refused_before_anything_is_stored(start: Callable[..., Program]) -> None:
    program = start()
    chat = program.chats.new()
    with pytest.raises(UsageError):
        list(chat.send("  \n"))
    assert program.chats.chats() == []


def test_stop_strings_end_the_text(start: Callable[..., Program]) -> None:
    chat = start().chats.new()
    whole = say(chat, PROMPTS[0]).text
    stop = whole[4:6]
    chat.set("stop", [stop])
    (*_, done) = chat.again()
    assert isinstance(done, Done)
    assert done.finish_reason == "stop"
    assert done.text == whole[: whole.index(stop)]


def test_a_prompt_that_was_committed_stays_when_the_engine_never_comes(
    start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start()
    chat = program.chats.new()
    with monkeypatch.context() as patch:
        patch.setattr(program.engine, "wait_ready", _lost)
        with pytest.raises(EngineLost):
            list(chat.send(PROMPTS[0]))
    (turn,) = chat.turns()
    assert (turn.prompt, turn.state) == (PROMPTS[0], "interrupted")
    (*_, done) = chat.again()
    assert isinstance(done, Done)
    assert say(chat, PROMPTS[1]).text


def _lost(timeout_s: float | None = None) -> None:
    raise EngineLost("killed")


@pytest.mark.parametrize("lost", [False, True])
def test_a_turn_without_a_reply_is_not_shown_to_the_model(
    start: Callable[..., Program],
    monkeypatch: pytest.MonkeyPatch,
    never_quit: list[str],
    lost: bool,
) -> None:
    """Stopped before its first token, or its engine gone: as if it had never been said."""
    program = start()
    chat = program.chats.new()
    texts = [say(chat, PROMPTS[0]).text]
    if lost:
        with monkeypatch.context() as patch:
            patch.setattr(program.engine, "wait_ready", _lost)
            with pytest.raises(EngineLost):
                list(chat.send("never mind"))
    else:
        for event in chat.send("never mind"):
            if isinstance(event, Prefill):
                chat.cancel()
        assert isinstance(event, Done)  # pyright: ignore
        assert (event.text, event.ids) == ("", ())
    (_, turn) = chat.turns()
    assert (turn.state, turn.reply) == ("interrupted", "")
    texts += [say(chat, prompt).text for prompt in PROMPTS[1:3]]
    chat = start().chats.open("@last")
    texts.append(say(chat, PROMPTS[3]).text)
    assert texts == never_quit
    assert [turn.prompt for turn in chat.turns()] == [PROMPTS[0], "never mind", *PROMPTS[1:]]


def test_a_model_that_cannot_be_loaded_refuses_the_prompt(
    start: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing untitled stays in the list; the prompt can still be found."""
    program = start()
    with monkeypatch.context() as patch:
        patch.setattr(program.engine, "wait_ready", _not_here)
        chat = program.chats.new()
        with pytest.raises(ModelError):
            list(chat.send("the first words"))
    assert program.chats.chats() == []
    assert len(program.chats.chats(trash=True)) == 1
    assert say(chat, PROMPTS[0]).text
    with monkeypatch.context() as patch:
        patch.setattr(program.engine, "wait_ready", _not_here)
        with pytest.raises(ModelError):
            list(chat.send("more words"))
    assert [turn.prompt for turn in chat.turns()] == [PROMPTS[0]]
    assert program.store.search("more words")


def _not_here(timeout_s: float | None = None) -> None:
    raise ModelError("There is no such device.")


def test_a_device_that_runs_full_is_said_and_survived(start, never_quit, monkeypatch):
    program = start()
    chat = program.chats.new()
    model = program.engine.service.engine.model
    real = model.step

    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    monkeypatch.setattr(model, "step", full)
    (*_, failed) = chat.send(PROMPTS[0])
    assert isinstance(failed, Failed)
    assert failed.code == "out_of_memory"
    assert "1.0 GiB are free" in failed.message
    monkeypatch.setattr(model, "step", real)
    (*_, done) = chat.again()
    assert done.text == never_quit[0]


def test_ids_of_no_token_are_made_anew(start):
    """An import may bring any numbers."""
    service = start().engine.service
    message = PathMessage("user", "hello", ids=(10**6, 5), sampled=())
    path = render([message], service.tokenizer, service.engine.model.spec.vocab_size)
    assert [one.index for one in path.made] == [0]
    assert max(path.tokens) < service.engine.model.spec.vocab_size
