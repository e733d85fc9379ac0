"""How penalties, grammars and log probabilities are asked for on the command line, and told."""

from __future__ import annotations

import json

import pytest

from chatkv.errors import ConfigError
from chatkv.events import Delta, TokenLogprob
from chatkv.sampling import SamplingParams
from tui import schema

SCHEMA = '{"type": "object"}'


def test_flags_become_settings_of_the_chat(chatkv, chats):
    options = {
        "repetition_penalty": "1.1",
        "presence_penalty": "-0.5",
        "frequency_penalty": "2",
        "logit_bias": '{"7": -100, "3": 1.5}',
    }
    args = [word for name, value in options.items() for word in ("-o", name, value)]
    assert chatkv("ask", "hi", *args, "--regex", "a+:b", "--json", "--logprobs", "2").code == 0
    sampling = chats.rows[0].sampling
    assert {name: sampling[name] for name in options} == {
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 2.0,
        "logit_bias": {"7": -100.0, "3": 1.5},
    }
    assert sampling["grammar"] == "regex:a+:b"
    assert sampling["logprobs"] == 2


def test_a_schema_is_json_or_a_file(chatkv, chats, tmp_path):
    path = tmp_path / "form.json"
    path.write_text(SCHEMA)
    for given in (SCHEMA, f"\n {SCHEMA}", str(path)):
        assert chatkv("ask", "hi", "--json-schema", given).code == 0
        kind, _, text = chats.rows[-1].sampling["grammar"].partition(":")
        assert (kind, json.loads(text)) == ("json_schema", {"type": "object"})


def test_a_grammar_can_be_lifted(chatkv, chats):
    chatkv("ask", "hi", "-o", "grammar", 'lark:start: "a"')
    assert chats.rows[0].sampling["grammar"] == 'lark:start: "a"'
    chatkv("ask", "hi", "-c", "-o", "grammar", "none")
    assert chats.rows[0].sampling["grammar"] is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--json-schema", '{"type":'), "line 1 column 9"),
        (("--json-schema", "no-such-file.json"), "cannot be read"),
        (("--json-schema", SCHEMA, "--regex", "a"), "Only one"),
        (("--regex", ""), "empty"),
        (("--logprobs", "3"), "--json or --jsonl"),
        (("--json", "--logprobs", "21"), "whole number"),
        (("-o", "repetition_penalty", "0"), "from 0.01 to 100"),
        (("-o", "frequency_penalty", "3"), "from -2 to 2"),
        (("-o", "logit_bias", "7"), "token id"),
        (("-o", "logit_bias", '{"a": 1}'), "token id"),
        (("-o", "grammar", "yaml:a"), "no grammar of kind"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(chatkv, chats, args, words):
    ran = chatkv("ask", "hi", *args)
    assert ran.code == 2
    assert words in ran.out + ran.err
    assert not chats.rows


def test_log_probabilities_are_in_the_json(chatkv, chats):
    first = TokenLogprob(5, "Hi", -0.25, (TokenLogprob(5, "Hi", -0.25), TokenLogprob(6, "Yo", -2)))
    second = TokenLogprob(9, "!", -0.5)
    chats.script = lambda chat, text: iter(
        [Delta("Hi", (5,), (first,)), Delta("!", (9,), (second,))]
    )
    content = [
        {
            "token": "Hi",
            "id": 5,
            "logprob": -0.25,
            "top_logprobs": [
                {"token": "Hi", "id": 5, "logprob": -0.25},
                {"token": "Yo", "id": 6, "logprob": -2},
            ],
        },
        {"token": "!", "id": 9, "logprob": -0.5, "top_logprobs": []},
    ]
    data = chatkv("ask", "hi", "--json", "--logprobs", "2").json
    assert data["logprobs"] == {"content": content}
    lines = chatkv("ask", "hi", "--jsonl", "--logprobs", "2").lines
    deltas = [line for line in lines if line["type"] == "delta"]
    assert [line["logprobs"]["content"] for line in deltas] == [content[:1], content[1:]]
    chats.script = lambda chat, text: iter([Delta("Hi", (5,))])
    assert "logprobs" not in chatkv("ask", "hi", "--json").json


def test_a_setting_reads_what_a_file_holds():
    assert schema.read("sampling.logit_bias", {"5": 1}) == {"5": 1.0}
    assert schema.read("sampling.grammar", "regex:a") == "regex:a"
    assert schema.read("sampling.grammar", "none") is None
    for raw in ({"regex": "a"}, 5, "regex", ""):
        with pytest.raises(ConfigError, match="grammar is"):
            schema.read("sampling.grammar", raw)


def test_defaults_edit_nothing():
    off = {
        key.removeprefix("sampling."): setting.default
        for key, setting in schema.SETTINGS.items()
        if key.startswith("sampling.") and setting.default is not None
    }
    assert not SamplingParams(**off).edits_rows
