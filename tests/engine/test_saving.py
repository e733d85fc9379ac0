"""Pages go to disk between replies, and nobody who has them in the pool waits for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from program import PROMPTS, Program, say

from chatkv.events import Delta


class Gate:
    """A page store whose writes wait until it is open."""

    def __init__(self, pages) -> None:
        self.real, self.open = pages, threading.Event()
        self.open.set()
        self.commits = 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def write(self, images):
        assert self.open.wait(10)
        self.commits += 1
        return self.real.write(images)


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """The replies of a chat without a disk."""
    (tmp_path / "plain").mkdir(mode=0o700)
    with closing(Program(tmp_path / "plain", kv=False)) as program:
        chat = program.chats.new()
        return [say(chat, prompt).text for prompt in PROMPTS[:3]]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    tmp_path.chmod(0o700)
    with closing(Program(tmp_path, wrap=Gate, pool_tokens=16 * 14)) as made:
        yield made
        gate_of(made).open.set()


def gate_of(program: Program) -> Gate:
    assert program.core.saver is not None
    gate = program.core.saver.store
    assert isinstance(gate, Gate)
    return gate


def test_no_page_is_written_while_a_reply_runs(program):
    seen = 0
    for event in program.chats.new().send(PROMPTS[0]):
        if isinstance(event, Delta):
            seen += 1
            assert gate_of(program).commits == 0
    assert seen > 16  # a page of the reply is whole by now
    program.flush()
    assert gate_of(program).commits == 1


def test_the_next_prompt_waits_for_no_page_that_the_pool_has(program, texts):
    chat = program.chats.new()
    gate_of(program).open.clear()
    ends = [say(chat, prompt) for prompt in PROMPTS[:3]]
    assert gate_of(program).commits == 0
    assert [done.text for done in ends] == texts
    assert {done.usage.reuse_reason for done in ends} == {"new"}
    assert all(done.usage.cached_tokens for done in ends[1:])


def test_a_page_that_left_the_pool_is_waited_for(program, texts):
    first, other = program.chats.new("a"), program.chats.new("b")
    gate_of(program).open.clear()
    said = [say(first, prompt).text for prompt in PROMPTS[:2]]
    say(other, "something else altogether, so long that what was said in the other chat goes" * 2)
    threading.Timer(0.2, gate_of(program).open.set).start()
    done = say(first, PROMPTS[2])
    assert [*said, done.text] == texts
    assert done.usage.restored_pages > 0
    assert (done.usage.reuse_reason, done.usage.verified) == ("new", True)
