"""Whatever is forgotten, recalled, pinned, redacted and asked anew: nothing happens in silence."""

from __future__ import annotations

import re

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from seeing import SeeingEngine

from chatkv.errors import ChatKVError
from chatkv.events import Failed, ForgetEvent, RecallEvent
from sessions import summary
from sessions.chat import Chats
from sessions.store import ChatStore

LIMIT = 260
POLICIES = (
    "turns",
    "error",
    "oldest:limit_tokens=200,drop_tokens=60",
    "turns:keep_last=0",
)


class ContextMachine(RuleBasedStateMachine):
    """One chat, its forks, and an engine that says what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = SeeingEngine(LIMIT)
        self.chats = Chats(
            ChatStore(":memory:"),
            self.engine,
            settings={"model": "seeing", "sampling": {"max_tokens": 20}},
            policy="turns",
        )
        self.chat = self.chats.new("ada")
        self.said = 0
        self.prompt, summary.PROMPT = summary.PROMPT, "Sum {words}"

    @initialize(sizes=st.lists(st.integers(20, 60), max_size=4))
    def talk(self, sizes: list[int]) -> None:
        for size in sizes:
            self.send(size, "turns")

    def teardown(self) -> None:
        summary.PROMPT = self.prompt
        self.chats.store.close()

    @rule(size=st.integers(1, 70), policy=st.sampled_from(POLICIES))
    def send(self, size: int, policy: str) -> None:
        self.chat.set_policy(policy)
        before = self.visible()
        self.said += 1
        self.check(list(self.chat.send(f"<{self.said}>" + "x" * size)), before)

    @rule(size=st.integers(40, 70), keep_last=st.integers(0, 3))
    def sum_up(self, size: int, keep_last: int) -> None:
        self.send(size, f"summarize:ask=no,shrink=1.5,keep_last={keep_last}")

    @precondition(lambda self: self.chat.turns() and not self.chat.turns()[-1].redacted)
    @rule()
    def again(self) -> None:
        before = self.visible(upto=self.chat.turns()[-1].number - 1)
        self.check(list(self.chat.again()), before)

    @precondition(lambda self: self.chat.turns())
    @rule(data=st.data())
    def edit(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.chat.turns()))
        before = self.visible(upto=turn.number - 1)
        self.said += 1
        self.check(list(self.chat.edit(turn.id, f"<{self.said}>")), before)

    @precondition(lambda self: self.chat.turns())
    @rule(data=st.data(), wish=st.sampled_from(["forget", "recall"]))
    def wish(self, data: st.DataObject, wish: str) -> None:
        numbers = data.draw(
            st.lists(st.integers(1, len(self.chat.turns())), min_size=1, max_size=3, unique=True)
        )
        before = self.chat.context()
        try:
            getattr(self.chat, wish)(numbers)
        except ChatKVError as error:
            assert self.chat.context() == before
            said = error.message
            if not re.search(r"\d", said):
                raise AssertionError(said) from error
        assert self.visible() == self.live(before)  # nothing happens before the next turn

    @precondition(lambda self: self.chat.turns())
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        number = data.draw(st.integers(1, len(self.chat.turns())))
        self.chat.pin([number], pinned=pinned)
        assert self.chat.turns()[number - 1].pinned is pinned

    @precondition(lambda self: len(self.chat.turns()) > 2)
    @rule(data=st.data(), purge=st.booleans())
    def redact(self, data: st.DataObject, purge: bool) -> None:
        turn = data.draw(st.sampled_from(self.chat.turns()))
        before = self.visible()
        gone = self.chat.redact([turn.id], purge=purge)
        assert turn.number in gone.turns
        assert self.visible() == before - set(gone.turns)

    @precondition(lambda self: self.chat.turns())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.chat.turns()))
        self.chat = self.chat.fork(turn.id)

    @precondition(lambda self: self.chat.id)
    @rule()
    def reopen(self) -> None:
        fresh = self.chats.open(self.chat.id)
        assert (fresh.turns(), fresh.context()) == (self.chat.turns(), self.chat.context())
        self.chat = fresh

    @staticmethod
    def live(view) -> set[int]:
        return {turn.number for turn in view.turns if turn.state == "live"}

    def visible(self, *, upto: int = 10**9) -> set[int]:
        """Numbers of the turns in sight."""
        return {number for number in self.live(self.chat.context()) if number <= upto}

    def check(self, events: list, before: set[int]) -> None:
        """The ids that were shown are those of the path less what the events name."""
        if isinstance(events[-1], Failed):
            assert events[-1].code == "context_full"
            assert "260 tokens" in events[-1].message or "200 tokens" in events[-1].message
            return
        turns = self.chat.turns()
        current = turns[-1]
        forgotten = {n for e in events if isinstance(e, ForgetEvent) for n in e.turns}
        back = {n for e in events if isinstance(e, RecallEvent) for n in e.turns}
        after = self.visible()
        if summed := [e.turns[-1] for e in events if getattr(e, "policy", "") == "summarize"]:
            place = summed[0] + 1  # of the summary: what was behind it has gone one further
            assert turns[place - 1].summary
            before = {n + (n >= place) for n in before} | {place}
            back = {n + (n >= place) for n in back}
        if events[0].type != "rendered" or current.siblings == 1:
            assert after - {current.number} == (before | back) - forgotten
        path = self.engine.path(self.engine.requests[-1])
        shown = [
            token
            for span in path.spans
            if span.number in {0, *after}
            for token in path.tokens[span.start : span.stop]
        ]
        assert shown == self.engine.seen[-1]
        assert len(shown) < LIMIT
        view = self.chat.context()
        assert set(view.why) == set(view.missing) >= forgotten
        assert all(turn.why for turn in view.turns if turn.state == "forgotten")


ContextMachine.TestCase.settings = settings(max_examples=6, stateful_step_count=25)


TestContext = ContextMachine.TestCase
