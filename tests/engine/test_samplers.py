"""Penalties, bias, grammar and log probabilities on an engine: drafted = plain, alone = in company,
and what was asked for is stored with the turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import EOS, VOCAB, TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ConfigError
from chatkv.events import Delta, Done, Event, Failed, Rendered, from_json, to_json
from chatkv.models.logits import HostLogits
from chatkv.sampling import Grammar, SamplingParams
from chatkv.sequence import Sequence
from sessions.chat import Chats
from sessions.local import LocalEngine
from sessions.port import ChatPort
from sessions.service import EngineService
from sessions.store import ChatStore

PROMPT = [259, *b"the cat sat on the mat, the cat sat on the mat, the ", 258]
COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
WORDS = Grammar("regex", "((the|cat|sat|on|mat) ){3,12}end")
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}},
            "required": ["a", "b"],
        }
    ),
)
DEAD_END = Grammar("lark", 'start: "abc" X\nX: /a/ & /b/')
MIXED = [
    {},
    {"repetition_penalty": 1.3},
    {"grammar": WORDS},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 3},
    {"grammar": SCHEMA, "logit_bias": {ord("{"): 5}, "repetition_penalty": 1.1},
    {"logprobs": 0, "temperature": 0.0},
    {"grammar": WORDS, "logprobs": 2, "temperature": 0.0},
]


def engine(model: TinyModel, spec: str = "none", *drafters: str) -> Engine:
    config = EngineConfig(spec=spec, drafters=drafters or ("ngram",))
    return Engine(model, config, costs=COSTS, guard=False)


def begin(on: Engine, tokens: list[int], params: SamplingParams) -> Sequence:
    seq = on.add(tokens, [False] * len(tokens), params)
    for _ in on.prefill(seq):
        pass
    return seq


def run(on: Engine, params: SamplingParams, tokens: list[int] = PROMPT) -> Sequence:
    seq = begin(on, tokens, params)
    while not seq.finished:
        on.step([seq])
    on.finish(seq)
    return seq


def reply(seq: Sequence) -> list[int]:
    return seq.tokens[seq.prompt_tokens :]


@pytest.mark.parametrize(
    ("spec", "drafters"),
    [
        ("tree:9", ("random", "ngram")),
        ("chain:4", ("ngram",)),
        ("tree:12", ("lookahead", "ngram")),
    ],
    ids=str,
)
@pytest.mark.parametrize("settings", MIXED[1:], ids=lambda found: "+".join(found))
def test_drafted_is_plain(settings: dict, spec: str, drafters: tuple[str, ...]) -> None:
    model = TinyModel()
    for seed in range(3):
        given = {"temperature": 1.0, **settings}
        params = SamplingParams(seed=seed, max_tokens=50, **given)
        plain, drafted = run(engine(model), params), run(engine(model, spec, *drafters), params)
        assert reply(drafted) == reply(plain)
        assert drafted.finish_reason == plain.finish_reason
        assert drafted.logprobs == plain.logprobs
        if params.logprobs is not None:
            assert [found.token for found in plain.logprobs] == reply(plain)
            assert all(len(found.top) == params.logprobs for found in plain.logprobs)
            assert all(found.logprob < 0 for found in plain.logprobs)


@settings(max_examples=10)
@given(
    st.integers(0, 2**63 - 1),
    st.sampled_from([0.0, 0.7, 2.0]),
    st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.floats(0.5, 2),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)),
            "grammar": st.sampled_from([WORDS, SCHEMA]),
            "top_k": st.sampled_from([1, 5]),
            "logprobs": st.integers(0, 20),
        },
    ),
)
def test_drafted_is_plain_with_any_settings(seed: int, temperature: float, given: dict) -> None:
    model = TinyModel()
    params = SamplingParams(seed=seed, temperature=temperature, max_tokens=40, **given)
    plain, drafted = run(engine(model), params), run(engine(model, "tree:9", "random"), params)
    assert reply(drafted) == reply(plain)
    assert drafted.logprobs == plain.logprobs


@pytest.mark.parametrize("spec", ["none", "tree:5"])
def test_a_batch_of_mixed_settings_is_each_alone(spec: str) -> None:
    model = TinyModel()
    params = [
        SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 40, **settings})
        for seed, settings in enumerate(MIXED)
    ]
    prompts = [[*PROMPT[: 10 + 5 * i], 258] for i in range(len(MIXED))]
    alone = [run(engine(model), p, ids) for p, ids in zip(params, prompts, strict=True)]
    on = engine(model, spec, "ngram", "random")
    together = [begin(on, ids, p) for p, ids in zip(params, prompts, strict=True)]
    while going := [seq for seq in together if not seq.finished]:
        on.step(going)
    assert [reply(seq) for seq in together] == [reply(seq) for seq in alone]
    assert [seq.logprobs for seq in together] == [seq.logprobs for seq in alone]


def test_a_grammar_forms_the_reply() -> None:
    model, finished = TinyModel(), 0
    for seed in range(4):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=120, grammar=SCHEMA)
        seq = run(engine(model, "tree:9", "random"), params)
        text = bytes(token for token in reply(seq) if token < 256).decode("utf-8", "replace")
        assert seq.finish_reason in ("stop", "length")
        if seq.finish_reason == "stop":
            finished += 1
            found = json.loads(text)
            assert isinstance(found["a"], int)
            assert len(found["b"]) <= 5
            assert reply(seq)[-1] == EOS
    assert finished


@pytest.mark.parametrize("spec", ["none", "tree:9"])
def test_a_dead_end_ends_the_reply_and_says_so(spec: str) -> None:
    params = SamplingParams(seed=1, grammar=DEAD_END)
    seq = run(engine(TinyModel(), spec, "random"), params)
    assert (reply(seq), seq.finish_reason) == ([*b"abc", EOS], "dead_end")


def test_the_end_comes_when_the_grammar_is_whole_and_not_before() -> None:
    params = SamplingParams(
        temperature=0, grammar=Grammar("regex", "[a-z]{7}"), logit_bias={EOS: 100}
    )
    seq = run(engine(TinyModel(), "tree:9", "random"), params)
    assert (len(reply(seq)), reply(seq)[-1], seq.finish_reason) == (8, EOS, "stop")


@pytest.mark.parametrize("given", [{}, {"repetition_penalty": 1.1}], ids=["plain", "edited"])
@pytest.mark.parametrize("drafters", [("random", "ngram"), ("lookahead", "ngram")], ids=str)
def test_an_edited_row_gets_its_history_and_a_plain_one_none(
    given: dict, drafters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, real = set(), HostLogits.pick

    def listen(self: HostLogits, row: int, history=()) -> int:
        deep.add(self._places[row] - self._places[0])
        if given:
            assert len(history) == self._places[row]
            assert history[-1] == self._batch.tokens[row]
        else:
            assert history == ()
        return real(self, row, history)

    monkeypatch.setattr(HostLogits, "pick", listen)
    run(engine(TinyModel(), "tree:9", *drafters), SamplingParams(max_tokens=60, **given))
    assert deep > {0, 1}


def test_what_the_model_lacks_is_refused() -> None:
    on = engine(TinyModel())
    with pytest.raises(ConfigError, match="token 260"):
        on.add([1], [False], SamplingParams(logit_bias={3: 1, VOCAB: 1}))
    with pytest.raises(ConfigError, match="does not compile"):
        on.add([1], [False], SamplingParams(grammar=Grammar("regex", "(")))


@pytest.fixture
def chats(tmp_path: Path) -> Iterator[Callable[..., Chats]]:
    """Programs one after the other on the same store."""
    opened: list[tuple[LocalEngine, ChatStore]] = []

    def start(spec: str = "none", **sampling: object) -> Chats:
        local = LocalEngine(EngineService(engine(TinyModel(), spec, "ngram", "random")))
        local.start()
        store = ChatStore(tmp_path / "chat.db")
        opened.append((local, store))
        sampling = {"temperature": 1.0, "max_tokens": 40, "seed": 5, **sampling}
        return Chats(store, local, settings={"model": "tiny", "sampling": sampling})

    yield start
    for local, store in opened:
        local.close()
        store.close()


def said(events: Iterator[Event]) -> Done:
    (*_, done) = events
    assert isinstance(done, Done), done
    return done


STORED = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "logit_bias": {"101": 2.0, "32": -1.5},
    "grammar": str(WORDS),
}


def test_settings_are_stored_and_the_text_is_the_same_after_reopening(chats) -> None:
    chat: ChatPort = chats().new()
    for key, value in STORED.items():
        chat.set(key, value)
    first, second = said(chat.send("hello")), said(chat.send("and then?"))
    reopened = chats("tree:6").open("@last")
    assert {key: reopened.sampling[key] for key in STORED} == STORED
    again = said(reopened.again())
    assert (again.text, again.ids) == (second.text, second.ids)
    fork = reopened.fork(reopened.turns()[0].id)
    assert said(fork.send("and then?")).ids == second.ids
    turn = reopened._path[-1].turn  # type: ignore[attr-defined]
    assert {key: turn.sampling[key] for key in STORED} == STORED
    assert first.text.endswith("end") or first.finish_reason == "length"


def test_a_chat_of_an_older_version_opens_with_the_new_settings_off(chats) -> None:
    old = chats().new()
    expected = said(old.send("hello"))
    sampling = old._row.settings["sampling"]  # type: ignore[attr-defined]
    assert not sampling.keys() & {"repetition_penalty", "grammar", "logit_bias", "logprobs"}
    opened = chats(repetition_penalty=1.5, grammar=None).open("@last")
    assert said(opened.again()).ids == expected.ids


def test_a_grammar_can_be_lifted(chats) -> None:
    chat = chats().new()
    free = said(chat.send("hello"))
    chat.set("grammar", STORED["grammar"])
    assert said(chat.again()).ids != free.ids
    chat.set("grammar", None)
    assert said(chat.again()).ids == free.ids


def test_a_grammar_that_does_not_compile_leaves_the_chat_as_it_was(chats) -> None:
    chat = chats().new()
    said(chat.send("hello"))
    chat.set("grammar", "regex:(a")
    events = list(chat.send("more"))
    assert not any(isinstance(event, Rendered) for event in events)
    assert isinstance(events[-1], Failed)
    assert (events[-1].code, events[-1].exit) == ("config", 2)
    assert [turn.prompt for turn in chat.turns()] == ["hello"]
    with pytest.raises(ConfigError, match="no grammar of kind"):
        chat.set("grammar", "yaml:a")


def test_a_dead_end_is_told(chats) -> None:
    chat = chats().new()
    chat.set("grammar", str(DEAD_END))
    done = said(chat.send("hello"))
    assert (done.text, done.finish_reason) == ("abc", "dead_end")
    assert "nothing follow" in done.notice
    assert chat.turns()[-1].state == "done"


def test_log_probabilities_come_with_the_tokens(chats) -> None:
    chat = chats("tree:6").new()
    chat.set("logprobs", 2)
    events = [event for event in chat.send("hello") if isinstance(event, Delta)]
    assert events
    for event in events:
        assert [found.id for found in event.logprobs] == list(event.ids)
        assert all(len(found.top) == 2 for found in event.logprobs)
        assert from_json(json.loads(json.dumps(to_json(event)))) == event
    marks = {EOS: "<eos>", 258: "<reply>"}
    for found in (one for event in events for one in (*event.logprobs, *event.logprobs[0].top)):
        assert found.token == marks.get(found.id, found.token)
        if found.id < 128:
            assert found.token == chr(found.id)
