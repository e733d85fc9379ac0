"""The tree of turns against a plain model: whatever is done in whatever order, paths stay."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sessions.store import MEMORY, ChatStore

FP = b"f" * 32


@dataclass
class Node:
    parent: int | None
    owner: str
    text: str
    state: str = "open"


class TurnTree(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = ChatStore(MEMORY)
        self.heads: dict[str, int] = {}
        self.nodes: dict[int, Node] = {}
        self.count = 0

    def teardown(self) -> None:
        self.store.close()

    def session(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.heads)))

    def ancestors(self, turn: int | None) -> list[int]:
        path: list[int] = []
        while turn is not None:
            path.append(turn)
            turn = self.nodes[turn].parent
        return path[::-1]

    @rule()
    def create(self) -> None:
        row = self.store.create_session()
        assert row.head_turn_id is not None
        self.heads[row.id] = row.head_turn_id
        self.nodes[row.head_turn_id] = Node(None, row.id, "", "done")

    @precondition(lambda self: self.heads)
    @rule(data=st.data(), stale=st.booleans(), elsewhere=st.booleans())
    def begin(self, data: st.DataObject, stale: bool, elsewhere: bool) -> None:
        session = self.session(data)
        path = self.ancestors(self.heads[session])
        parent = data.draw(st.sampled_from(path)) if elsewhere else path[-1]
        self.count += 1
        text = f"word{self.count:05d}x"
        expected = -1 if stale else self.heads[session]
        begun = self.store.begin_turn(session, expected, parent, text, {"seed": self.count})
        assert begun.forked == stale
        assert (begun.session_id == session) == (not stale)
        assert begun.number == len(self.ancestors(parent))
        self.heads[begun.session_id] = begun.turn_id
        self.nodes[begun.turn_id] = Node(parent, begun.session_id, text)

    @precondition(lambda self: any(node.state == "open" for node in self.nodes.values()))
    @rule(data=st.data(), state=st.sampled_from(["partial", "done", "interrupted", "error"]))
    def reply(self, data: st.DataObject, state: str) -> None:
        open_turns = sorted(t for t, node in self.nodes.items() if node.state == "open")
        turn = data.draw(st.sampled_from(open_turns))
        if state == "partial":
            self.store.save_partial(turn, "a", FP, [1], ((0, 1),))
        else:
            self.store.finish_turn(turn, state, "ab", FP, [1, 2], ((0, 2),))
            self.nodes[turn].state = state

    @precondition(lambda self: self.heads)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        session = self.session(data)
        turn = data.draw(st.sampled_from(self.ancestors(self.heads[session])))
        self.heads[self.store.fork(session, turn).id] = turn

    @precondition(lambda self: self.heads)
    @rule(data=st.data())
    def move_head(self, data: st.DataObject) -> None:
        session = self.session(data)
        turn = data.draw(st.sampled_from(self.ancestors(self.heads[session])))
        assert self.store.set_head(session, turn, self.heads[session])
        self.heads[session] = turn

    @precondition(lambda self: self.heads)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        session = self.session(data)
        self.store.delete(session)
        del self.heads[session]
        needed: dict[int, set[str]] = {}
        for owner, turn in [
            *self.heads.items(),
            *((n.owner, t) for t, n in self.nodes.items() if n.owner != session),
        ]:
            for above in self.ancestors(turn):
                needed.setdefault(above, set()).add(owner)
        for turn in [t for t, node in self.nodes.items() if node.owner == session]:
            if turn in needed:
                self.nodes[turn].owner = min(needed[turn])
            else:
                text = self.nodes.pop(turn).text
                assert not text or self.store.search(text) == []

    @invariant()
    def paths_are_the_models(self) -> None:
        for session, head in self.heads.items():
            path = self.store.path(session)
            assert [turn.turn.id for turn in path] == self.ancestors(head)
            for turn in path:
                node = self.nodes[turn.turn.id]
                assert turn.turn.session_id == node.owner
                assert turn.turn.state == node.state
                assert turn.messages[0].row.content == node.text

    @invariant()
    def nothing_is_left_over(self) -> None:
        turns = {row[0] for row in self.store._db.execute("SELECT id FROM turns")}
        assert turns == set(self.nodes)
        assert {row.id for row in self.store.sessions()} == set(self.heads)
        for turn in list(self.nodes)[-3:]:
            text = self.nodes[turn].text
            assert not text or [match.turn_id for match in self.store.search(text)] == [turn]
        assert self.store.check() == []
        self.store._db.execute(
            "INSERT INTO messages_fts(messages_fts, rank) VALUES('integrity-check', 1)"
        )


TurnTree.TestCase.settings = settings(max_examples=20, stateful_step_count=20)
test_turn_tree = TurnTree.TestCase
