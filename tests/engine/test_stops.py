"""Replies that end in the middle of an accepted path: the same text, ids and log probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from fakes import EOS, TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.sampling import SamplingParams
from chatkv.sequence import ReplyText, Sequence
from chatkv.spec import drafters
from chatkv.spec.drafters.random import RandomDrafter
from chatkv.spec.tree import DraftTree

PROMPT = [259, *b"the cat sat on the mat, the cat sat on the mat, the ", 258]
COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
DEPTH = 7


class Oracle(RandomDrafter):
    """Guesses the very text that comes, and would go on behind its end."""

    name = "oracle"
    text: tuple[int, ...] = ()

    def _tree(self, context, max_rows):
        done = len(context.tokens)
        path = [int(context.tokens[-1]), *self.text[done : done + DEPTH]]
        return DraftTree.of(path, [0, *range(len(path) - 1)], source=self.name).best(max_rows)


@dataclass
class Run:
    seq: Sequence
    pieces: list[str] = field(default_factory=list)
    gained: list[int] = field(default_factory=list)

    def told(self) -> tuple[object, ...]:
        """All that may not depend on drafting."""
        assert self.seq.reply is not None
        text = self.seq.reply.text
        assert "".join(self.pieces) == text
        return (
            self.seq.tokens,
            self.seq.sampled,
            text,
            self.seq.finish_reason,
            self.seq.logprobs,
            self.seq.table.num_tokens,
        )


def run(model: TinyModel, spec: str, params: SamplingParams) -> Run:
    config = EngineConfig(spec=spec, drafters=("oracle",))
    on = Engine(model, config, costs=COSTS, guard=False)
    reply = ReplyText(model.tokenizer.stream(), params.stop)
    found = Run(on.add(PROMPT, [False] * len(PROMPT), params, reply=reply))
    for _ in on.prefill(found.seq):
        pass
    found.pieces.append(reply.take())
    while not found.seq.finished:
        (tokens,) = on.step([found.seq])
        found.gained.append(len(tokens))
        found.pieces.append(reply.take())
    found.pieces.append(reply.finish())
    told = found.told()
    on.finish(found.seq)
    found.told = lambda: told  # the table is empty from here on
    return found


@settings(max_examples=15, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    place=st.integers(1, 39),
    length=st.integers(1, 4),
    others=st.lists(st.text("abc \U0001f600", min_size=1, max_size=3), max_size=2),
    most=st.integers(1, 45),
    ends=st.booleans(),
    logprobs=st.sampled_from([None, 2]),
)
def test_a_stop_inside_an_accepted_path_ends_there(
    seed, place, length, others, most, ends, logprobs
):
    """Stop strings that span tokens, the end token and the limit: whichever is first."""
    model = TinyModel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(drafters.DRAFTERS, "oracle", lambda means: Oracle(means.vocab_size))
        given = {"seed": seed, "temperature": 1.0, "max_tokens": 48}
        free = run(model, "none", SamplingParams(**given, logit_bias={EOS: -100}))
        patch.setattr(Oracle, "text", tuple(free.seq.tokens))
        text = free.told()[2]
        stop = (text[place : place + length] or "z", *others)
        bias = {} if ends else {EOS: -100}
        params = SamplingParams(
            **{**given, "max_tokens": most}, stop=stop, logprobs=logprobs, logit_bias=bias
        )
        plain, drafted = run(model, "none", params), run(model, "chain:7", params)
        assert drafted.told() == plain.told()
        # U+FFFD stands for a code point that the end cut: nobody can stop at it any more.
        assert not any(one in plain.told()[2] for one in stop if "\ufffd" not in one)
        if len(drafted.gained) > 1 and not ends:
            assert drafted.gained[0] == DEPTH + 1  # a path of several tokens was accepted
