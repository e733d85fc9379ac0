"""A grammar as a pure function of ids: masks, ends, guesses, errors."""

from __future__ import annotations

import builtins
import json
import re
from functools import partial

import numpy as np
import pytest
from fakes import EOS, VOCAB, ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from chatkv.errors import ConfigError
from chatkv.grammar import Grammars, Matcher
from chatkv.sampling import Grammar, Sampler, SamplingParams
from chatkv.spec.drafter import DraftContext
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.tree import DraftTree

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ByteTokenizer(), VOCAB + 4, [EOS])


def following(matcher: Matcher, text: bytes) -> bytes:
    """What may follow, the end written as a full stop."""
    mask = matcher.mask(list(text))
    assert mask is not None
    return bytes(ord(".") if token == EOS else int(token) for token in np.flatnonzero(mask))


def test_what_may_follow(grammars):
    matcher = grammars.matcher(Grammar("regex", "ab*c?"))
    assert following(matcher, b"") == b"a"
    assert following(matcher, b"a") == b"bc."
    assert following(matcher, b"abbc") == b"."
    assert following(matcher, b"ab") == b"bc."
    assert following(matcher, b"") == b"a"
    assert [matcher.accepts(list(text)) for text in (b"", b"a", b"abc", b"b")] == [0, 1, 1, 0]


def test_behind_the_end_everything_may_follow(grammars):
    matcher = grammars.matcher(Grammar("regex", "ab?"))
    assert matcher.mask([97, EOS]) is None
    assert matcher.mask([97, EOS, 5]) is None
    assert following(matcher, b"a") == b"b."


@pytest.mark.parametrize(
    ("grammar", "whole"),
    [
        (Grammar("json_schema", json.dumps(SCHEMA)), b'{"a": -12,\n  "b": "yz"}'),
        (Grammar("lark", 'start: "(" start ")" | /[0-9]{1,3}/'), b"((42))"),
        (Grammar("regex", "[a-zé]+"), "été".encode()),
    ],
    ids=["json_schema", "lark", "regex"],
)
def test_each_kind(grammars, grammar, whole):
    matcher = grammars.matcher(grammar)
    ids = list(whole)
    assert matcher.fitting([], [*ids, EOS]) == len(ids) + 1
    assert matcher.fitting([], [ids[0], EOS]) == 1
    assert matcher.fitting([], [*ids[:-1], 0]) == len(ids) - 1
    assert matcher.accepts(ids)
    assert not matcher.accepts(ids[:-1])


def test_white_space_of_json_ends(grammars):
    matcher = grammars.matcher(Grammar("json_schema", '{"type": "array"}'))
    assert matcher.fitting([], list(b"[ 1]")) == 4
    assert matcher.fitting([], list(b"[\n    1]")) == 8
    assert matcher.fitting([], list(b"[  1]")) == 2
    assert matcher.fitting([], list(b"[\n\n")) == 2


@given(st.lists(st.lists(st.sampled_from([*b"abcx", EOS, 258]), max_size=6), max_size=12))
def test_it_depends_on_the_ids_alone(grammars, questions):
    """In any order of questions, valid or not, the answers are those of a fresh matcher."""
    grammar = Grammar("regex", "(ab|ac*|b(c|a){2}){1,4}")
    asked = grammars.matcher(grammar)
    for number, ids in enumerate(questions):
        fresh = grammars.matcher(grammar)
        path = questions[number - 1]
        assert asked.fitting(ids, path) == fresh.fitting(ids, path)
        np.testing.assert_array_equal(asked.mask(ids), fresh.mask(ids))
        assert asked.accepts(ids) == fresh.accepts(ids)


def test_a_dead_end_lets_the_reply_end(grammars):
    matcher = grammars.matcher(Grammar("lark", 'start: "a" X\nX: /a/ & /b/'))
    assert following(matcher, b"") == b"a"
    assert following(matcher, b"a") == b"."
    assert not matcher.accepts([97])
    sampler = Sampler(SamplingParams(grammar=Grammar("regex", "a")), [1], matcher)
    assert sampler.pick(np.zeros(VOCAB + 4, np.float32), [1, 97], 2).token == EOS


def test_a_matcher_that_met_a_limit_begins_again(grammars):
    from llguidance import LLMatcher, LLParserLimits

    hard = LLMatcher.grammar_from_regex("x|(a|b)*a(a|b){12}")
    limits = LLParserLimits(step_lexer_fuel=200)
    tokens = grammars._made or grammars._make()
    begin = partial(LLMatcher, tokens, hard, log_level=0, limits=limits)
    matcher = Matcher(begin, VOCAB + 4, [EOS])
    for _ in range(2):  # that it was asked for too much leaves no trace
        assert following(matcher, b"") == b"abx"
        assert following(matcher, b"aaaaaa") == b"."  # too complex: the reply must end
        assert not matcher.accepts(list(b"aaaaaa"))
        assert matcher.accepts([ord("x")])


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("regex", "a(b"), "regular expression does not compile.*unclosed group"),
        (Grammar("regex", "(" * 5000), r"regular expression does not compile: .* \.\.\. "),
        (Grammar("regex", "((((a{100}){100})?{100}){3,100})"), "repeats a part 100,000,000 times"),
        (Grammar("json_schema", '{"type": "foo"}'), "JSON schema does not compile.*foo"),
        (
            Grammar("json_schema", '{"enum":["\\ud800"]}'),
            "JSON schema does not compile.*hex escape",
        ),
        (
            Grammar("json_schema", '{"type":"number","minimum":1e400}'),
            "JSON schema does not compile",
        ),
        (Grammar("json_schema", '{"not": {}}'), "Unimplemented keys.*not"),
        (Grammar("json_schema", '{"allOf": [false]}'), "Unsatisfiable"),
        (Grammar("lark", 'start: "a" b\nb: foo'), r"grammar does not compile: .*2\(4\).*foo"),
    ],
    ids=lambda x: x.kind if isinstance(x, Grammar) else "",
)
def test_what_does_not_compile_is_told_with_its_place(grammars, grammar, words):
    with pytest.raises(ConfigError, match=words) as caught:
        grammars.matcher(grammar)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    "text", [r"[{9999999}]\{9999999x", "(a{100}b{100}|c{100}){100}", "(a{1000})+x{1000}"]
)
def test_counts_that_do_not_multiply_are_no_matter(grammars, text):
    assert not grammars.matcher(Grammar("regex", text)).error


def test_a_missing_package_is_told_with_its_command(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match="llguidance") as caught:
        Grammars(ByteTokenizer(), VOCAB, [EOS]).matcher(Grammar("regex", "a"))
    assert re.search(r"pip install 'chatkv\[grammar\]'", caught.value.hint)


def test_a_model_that_cannot_end_a_reply_takes_no_grammar():
    with pytest.raises(ConfigError, match="no token that ends"):
        Grammars(ByteTokenizer(), VOCAB, []).matcher(Grammar("regex", "a"))


class Fixed:
    """Guesses one tree."""

    name = "fixed"

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def follow(self, seq_id, tokens) -> None: ...
    def observe(self, seq_id, accepted) -> None: ...
    def drop(self, seq_id) -> None: ...

    def propose(self, contexts, max_rows):
        return [self.tree for _ in contexts]


def test_forbidden_guesses_never_reach_the_model(grammars):
    tree = DraftTree.of([97, 98, 120, 99, 98, EOS, 97], [0, 0, 0, 1, 2, 1, 3])
    guard = GuardedDrafters([Fixed(tree)], vocab_size=VOCAB)
    params = SamplingParams(grammar=Grammar("regex", "a(b|bc)"))
    for grammar, kept in (
        (None, [97, 98, 120, 99, 98, EOS, 97]),
        (params.grammar, [97, 98, 99, EOS]),
    ):
        own = params if grammar else SamplingParams()
        sampler = Sampler(own, [1], grammars.matcher(grammar) if grammar else None)
        found = guard.propose([DraftContext(0, [1, 97], sampler)], [16])[0]
        assert found.tokens.tolist() == kept
    sampler = Sampler(params, [1], grammars.matcher(params.grammar))
    ended = guard.propose([DraftContext(0, [1, 97, 98, EOS], sampler)], [16])
    assert len(ended[0]) == 1 or ended[0].tokens.tolist() == [EOS]
