"""`ask`: what is asked, what is printed, and how it ends."""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest

from chatkv.errors import EngineLost
from chatkv.events import Delta, Failed
from tui import answer, interrupts, output, prompt_text

TEXT = "Paris is the capital."


def test_the_reply_goes_to_a_pipe_exactly(chatkv, chats):
    ran = chatkv("ask", "What is the capital of France?")
    assert (ran.code, ran.out, ran.err) == (0, TEXT, "")
    assert chats.rows[0].told[0].prompt == "What is the capital of France?"
    assert chats.engines[0].closed


def test_escape_sequences_reach_a_pipe_and_no_terminal(chatkv, chats, monkeypatch):
    chats.script = lambda chat, text: iter([Delta("a\x1b", (1,)), Delta("[2Jb\x9b", (2,))])
    assert chatkv("ask", "hi").out == "a\x1b[2Jb\x9b"
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    cleaned = chatkv("ask", "hi").out
    assert "\x1b" not in cleaned
    assert "\x9b" not in cleaned
    assert cleaned.endswith("\n")
    assert chatkv("ask", "hi", "--raw").out.startswith("a\x1b[2Jb\x9b")


def test_a_notice_stands_on_a_line_of_its_own(chatkv, chats, monkeypatch):
    """Also where stdout is no terminal and both streams end in one place."""
    chats.notice = "Pages are not saved any more."
    assert chatkv("ask", "hi").err == f"\n{chats.notice}\n"
    assert chatkv("ask", "--json", "hi").err == f"{chats.notice}\n"
    monkeypatch.setattr(output, "is_terminal", lambda stream: stream is sys.stdout)
    assert chatkv("ask", "hi").err == f"{chats.notice}\n"
    order = []
    monkeypatch.setattr(output, "write", lambda text, **_: order.append(text))
    monkeypatch.setattr(output, "note", order.append)
    chatkv("chat", "--plain", stdin=b"hi\n")
    assert order[-2:] == ["\n", chats.notice]


def test_json_has_the_names_of_the_server(chatkv, chats):
    data = chatkv("ask", "hi", "--json", "-s", "Be brief.").json
    assert data["text"] == TEXT
    assert data["session"] == chats.rows[0].id
    assert (data["fork"], data["turn"], data["seed"], data["model"]) == ("main", 1, 7, "Toy")
    assert data["finish_reason"] == "stop"
    assert data["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 5,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 30},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 3,
        },
    }
    timings = data["timings"]
    assert (timings["prompt_n"], timings["predicted_n"], timings["draft_n"]) == (10, 5, 6)
    assert timings["predicted_per_second"] == 100.0
    assert (data["reuse"]["tokens"], data["reuse"]["reason"]) == (30, "new")
    context = {"limit": 4096, "used": 46, "reserved": 1024, "missing": [], "why": {}}
    assert data["context"] == context
    assert chats.rows[0].system == "Be brief."


def test_jsonl_has_one_event_a_line(chatkv, chats):
    lines = chatkv("ask", "hi", "--jsonl").lines
    assert [line["type"] for line in lines] == ["start", "prefill", *["delta"] * 5, "done"]
    assert all(line["v"] == 1 for line in lines)
    assert lines[1] == {"v": 1, "type": "prefill", "reused": 30, "done": 40, "total": 40}
    assert "".join(line["text"] for line in lines if line["type"] == "delta") == TEXT
    assert lines[-1]["text"] == TEXT


def test_a_reply_that_fails_ends_with_its_own_status(chatkv, chats):
    def script(chat, text):
        yield Failed("context_full", 5, "It does not fit.", "Shorten it.")

    chats.script = script
    ran = chatkv("ask", "hi")
    assert (ran.code, ran.out) == (5, "")
    assert ran.err == "chatkv: It does not fit.\n  Shorten it.\n"
    assert chatkv("ask", "hi", "--json").json["error"]["code"] == "context_full"
    last = chatkv("ask", "hi", "--jsonl").lines[-1]
    assert (last["type"], last["error"]["exit"]) == ("error", 5)


def test_a_lost_engine_ends_with_8(chatkv, chats):
    def script(chat, text):
        yield Delta("Par", (1,))
        raise EngineLost("The engine process ended (signal 9).")

    chats.script = script
    ran = chatkv("ask", "hi")
    assert (ran.code, ran.out) == (8, "Par")


def test_options_win_over_what_the_chat_remembers(chatkv, chats, monkeypatch):
    chats.add("old").sampling["top_k"] = 3
    monkeypatch.setenv("CHATKV_SAMPLING_MIN_P", "0.25")
    args = ("-o", "temperature", "0", "--seed", "5", "--max-tokens", "7", "--stop", "END")
    assert chatkv("ask", "hi", "-c", *args).code == 0
    sampling = chats.rows[0].sampling
    assert sampling["temperature"] == 0
    assert (sampling["seed"], sampling["max_tokens"], sampling["stop"]) == (5, 7, ("END",))
    assert sampling["min_p"] == 0.25
    assert (sampling["top_k"], "top_p" in sampling) == (3, False)
    assert chatkv("ask", "hi", "-o", "top_p", "0.123").code == 2


def test_which_chat_goes_on(chatkv, chats):
    first, second = chats.add("first"), chats.add("second")
    chatkv("ask", "to the newest", "-c")
    chatkv("ask", "to the first", "-r", "first")
    chatkv("ask", "to a new one")
    prompts = [[turn.prompt for turn in chat.told] for chat in (first, second, chats.rows[2])]
    assert prompts == [["to the first"], ["to the newest"], ["to a new one"]]


@pytest.mark.parametrize(
    ("args", "shared"),
    [
        (("--fork", "now what?"), 2),
        (("--fork", "1", "now what?"), 1),
        (("now what?", "--fork"), 2),
        (("now what?", "--fork", "-2"), 1),
        (("--fork=1", "now what?"), 1),
    ],
    ids=str,
)
def test_a_fork_shares_turns_and_leaves_the_original(chatkv, chats, args, shared):
    old = chats.add("old")
    chatkv("ask", "one", "-c")
    chatkv("ask", "two", "-c")
    assert chatkv("ask", "-r", "old", *args).code == 0
    assert [turn.prompt for turn in old.told] == ["one", "two"]
    assert [turn.prompt for turn in chats.rows[1].told] == [*["one", "two"][:shared], "now what?"]


def test_an_ephemeral_chat_has_no_id(chatkv, chats):
    assert chatkv("ask", "hi", "--json", "--ephemeral").json["session"] is None
    assert chats.ephemeral


def test_prompt_stdin_and_files_in_this_order(chatkv, chats, tmp_path):
    (tmp_path / "notes.md").write_text("see ```x```\n")
    ran = chatkv("ask", "Sum up:", "-f", str(tmp_path / "notes.md"), stdin=b"piped\n")
    assert ran.code == 0
    asked = chats.rows[0].told[0].prompt
    assert asked == "Sum up:\n\npiped\n\n````notes.md\nsee ```x```\n````"


@pytest.mark.parametrize("args", [("-",), ()])
def test_stdin_alone_is_a_prompt(chatkv, chats, args):
    chatkv("ask", *args, stdin="Grüße\n".encode())
    assert chats.rows[0].told[0].prompt == "Grüße"


def test_invalid_utf8_is_replaced_with_a_warning(chatkv, chats):
    ran = chatkv("ask", "Sum up:", stdin=b"caf\xe9")
    assert ran.code == 0
    assert "not valid UTF-8" in ran.err
    assert chats.rows[0].told[0].prompt == "Sum up:\n\ncaf\ufffd"
    ran = chatkv("ask", b"caf\xe9".decode("utf-8", "surrogateescape"))
    assert "not valid UTF-8" in ran.err
    assert chats.rows[1].told[0].prompt == "caf\ufffd"
    assert "UTF-8" not in chatkv("ask", "-", stdin="caf\ufffd".encode()).err


def test_a_file_that_is_not_there(chatkv, chats):
    ran = chatkv("ask", "hi", "-f", "/nowhere/x.txt")
    assert (ran.code, chats.rows) == (2, [])


def test_only_the_last_code_block(chatkv, chats):
    text = "Do\n```python\nx = 1\n```\nor\n~~~\ny = 2\n```\n~~~\nthere."
    chats.script = lambda chat, _: iter([Delta(text, (1,))])
    assert chatkv("ask", "hi", "-x").out == "y = 2\n```\n"
    chats.script = lambda chat, _: iter([Delta("no code", (1,))])
    assert chatkv("ask", "hi", "-x").code == 1


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```\na\n```", "a\n"),
        ("```\na", "a"),
        ("````\n```\na\n```\n````\n", "```\na\n```\n"),
        ("    ```\na", None),
        ("", None),
    ],
)
def test_code_blocks(text, block):
    assert prompt_text.last_code_block(text) == block


def signalled(number, *, then="silence"):
    """A script in which a signal comes after the first word."""

    def script(chat, text):
        yield Delta("Paris", (1,))
        os.kill(os.getpid(), number)
        for _ in range(200):
            time.sleep(0.01)
            if chat.cancelled:
                return
        yield Delta(f" and then {then}", (2,))

    return script


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_stops_the_reply_and_keeps_the_partial(chatkv, chats, number, code):
    chats.script = signalled(number)
    before = signal.getsignal(number)
    ran = chatkv("ask", "hi")
    assert (ran.code, ran.out) == (code, "Paris")
    turn = chats.rows[0].told[0]
    assert (turn.reply, turn.state) == ("Paris", "interrupted")
    assert chats.engines[0].closed
    assert signal.getsignal(number) is before


def test_a_stopped_reply_is_still_one_object(chatkv, chats):
    chats.script = signalled(signal.SIGINT)
    ran = chatkv("ask", "hi", "--json")
    assert ran.code == 130
    assert (ran.json["text"], ran.json["finish_reason"]) == ("Paris", "cancelled")


def test_a_time_limit(chatkv, chats):
    chats.script = signalled(signal.SIGCONT)  # no signal of ours: it waits for the limit
    ran = chatkv("ask", "hi", "--timeout", "0.1", "--json")
    assert ran.code == 124
    assert ran.json["error"]["code"] == "timeout"
    assert chats.rows[0].told[0].reply == "Paris"


def test_a_signal_before_there_is_a_reply_ends_the_wait(chatkv, chats, monkeypatch):
    def loads_for_long(engine):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr(chats.Engine, "start", loads_for_long)
    begun = time.monotonic()
    ran = chatkv("ask", "hi")
    assert (ran.code, ran.out, ran.err) == (130, "", "")
    error = chatkv("ask", "hi", "--json").json["error"]
    assert (error["code"], error["exit"]) == ("interrupted", 130)
    assert time.monotonic() - begun < 3


def test_an_unknown_model_is_told_before_anything_is_stored(chatkv, chats):
    ran = chatkv("ask", "hi", "-m", "nothing-like-it")
    assert (ran.code, chats.rows, chats.engines[0].started) == (4, [], False)
    assert chatkv("chat", "-m", "nothing-like-it", stdin=b"hi").code == 4


def test_a_reader_that_leaves_ends_the_reply(chatkv, chats, monkeypatch):
    def closed(text, *, exact=False):
        raise BrokenPipeError

    monkeypatch.setattr(output, "write", closed)
    with pytest.raises(BrokenPipeError):
        chatkv("ask", "hi")
    turn = chats.rows[0].told[0]
    assert turn.state != "open"
    assert chats.engines[0].closed


def test_the_second_signal_leaves_at_once(monkeypatch):
    left = []
    monkeypatch.setattr(interrupts.os, "_exit", left.append)
    with interrupts.Interrupts() as found:
        found.guard(lambda: None, lambda: True)
        os.kill(os.getpid(), signal.SIGINT)
        assert found.exit_code == 130
        os.kill(os.getpid(), signal.SIGTERM)
    assert left == [143]


def test_ignored_signals_stay_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.Interrupts() as found:
            os.kill(os.getpid(), signal.SIGHUP)
            assert found.exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_hostile_reaches_a_terminal(chatkv, chats, monkeypatch):
    corpus = runpy.run_path(str(Path(__file__).parents[1] / "data" / "escape_corpus.py"))["CORPUS"]
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    for name, text in corpus.items():
        half = len(text) // 2
        pieces = [Delta(text[:half], (1,)), Delta(text[half:], (2,))]
        chats.script = lambda chat, _, pieces=pieces: iter(pieces)
        shown = chatkv("ask", "hi").out
        hostile = re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069]", shown)
        assert hostile is None, name


def test_a_stream_that_is_left_is_closed_at_once():
    ended = []

    def stream():
        try:
            yield Delta("Par", (1,))
        finally:
            ended.append(True)

    def refuse(event):
        raise BrokenPipeError

    held = stream()
    with pytest.raises(BrokenPipeError):
        answer.play(held, refuse)
    assert ended == [True]
    with pytest.raises(EngineLost):
        answer.play(iter([Delta("Par", (1,))]), lambda event: None)


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300", "0"])
def test_a_timeout_that_is_no_time(chatkv, seconds):
    ran = chatkv("ask", "hi", "--timeout", seconds)
    assert ran.code == 2
    assert "--timeout" in ran.err
