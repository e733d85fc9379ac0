"""A token log that is cut short, damaged, replaced or not ours: made anew, or told."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest
from copied import FP, OTHER, guesses, keys_of, packed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessions.logfile import HEADER, BadLog, LogFile, erase_turns, log_path
from sessions.token_log import StoredLog


@pytest.mark.parametrize(
    ("damage", "notice"),
    [
        (lambda raw: b"", ""),
        (lambda raw: raw[:3], "cut short"),
        (lambda raw: b"not a log" + raw[9:], "no token log"),
        (lambda raw: raw[:8] + OTHER + raw[40:], "another tokenizer"),
        (lambda raw: raw[: HEADER.size] + b"\0\0\0\0" + raw[HEADER.size + 4 :], "damaged"),
        (lambda raw: raw[: HEADER.size - 4] + b"\1" + raw[HEADER.size - 3 :], "never finished"),
        (lambda raw: raw[: HEADER.size - 8] + b"\xff" * 4 + raw[HEADER.size - 4 :], "cut short"),
    ],
)
def test_a_bad_log_is_made_anew(talk_on, store, open_log, damage, notice):
    talk = talk_on(store)
    talk.turn(talk.start(), "hello there", "general reply")
    log = open_log()
    log.path.write_bytes(damage(log.path.read_bytes()))
    again = open_log()
    assert guesses(again, "hello") == {" theregeneral reply"}
    notices = again.take_notices()
    assert len(notices) == bool(notice)
    assert not notice or notice in notices[0]
    log.look()  # the one that had it open
    assert guesses(log, "hello") == {" theregeneral reply"}


def test_truncated_at_any_byte(talk_on, store, open_log):
    talk = talk_on(store)
    session = talk.start()
    for word in ("one", "two"):
        talk.turn(session, word, f"reply {word}")
    log = open_log()
    whole = log.path.read_bytes()
    expected = guesses(log, "reply ")
    for size in range(len(whole)):
        os.truncate(log.path, size)
        index = log.now()
        assert index is None or guesses(log, "reply ") == expected
        log.look()
        assert log.path.read_bytes()[HEADER.size :] == whole[HEADER.size :]
        assert guesses(log, "reply ") == expected
        assert len(log.take_notices()) <= 1


@settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=4))
def test_any_damage_is_harmless(talk_on, store, open_log, flips):
    if not store.sessions():
        talk = talk_on(store)
        talk.turn(talk.start(), "one", "reply one")
    log = open_log()
    raw = bytearray(log.path.read_bytes())
    for place, bits in flips:
        raw[place % len(raw)] ^= bits
    log.path.write_bytes(raw)
    log.look()
    open_log().look()
    for path in log.path.parent.glob("history-*"):
        erase_turns(path.parent, keys_of(store))
        assert not path.exists() or packed("reply") not in path.read_bytes()


def test_deleted_or_replaced_while_open(talk_on, store, open_log):
    talk = talk_on(store)
    session = talk.start()
    talk.turn(session, "hello there", "general reply")
    log = open_log()
    log.path.unlink()
    talk.turn(session, "second prompt", "second reply")
    log.look()
    assert guesses(log, "hello") == {" theregeneral reply"}
    assert guesses(log, "second p") == {"romptsecond reply"}
    assert log.path.exists()


def test_a_crash_while_appending_leaves_nothing_behind(talk_on, store, open_log, monkeypatch):
    talk = talk_on(store)
    session = talk.start()
    talk.turn(session, "hello there", "general reply")
    log = open_log()
    talk.turn(session, "second prompt", "second reply")

    def crash(self, words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LogFile, "_set_words", crash)
    log.look()
    assert log.now() is None
    assert "No space left" in log.take_notices()[0]
    log.look()
    assert log.take_notices() == []
    monkeypatch.undo()
    assert packed("second reply") in log.path.read_bytes()
    erase_turns(log.path.parent, [])
    assert packed("second reply") not in log.path.read_bytes()
    again = open_log()
    assert guesses(again, "second p") == {"romptsecond reply"}


def test_a_log_of_others_is_refused(talk_on, store, open_log, chat_path):
    talk = talk_on(store)
    talk.turn(talk.start(), "hello", "reply")
    path = log_path(chat_path.parent, FP)
    path.write_bytes(b"")
    path.chmod(0o666)
    log = open_log()
    assert log.now() is None
    assert "can be written by other users" in log.take_notices()[0]
    assert path.read_bytes() == b""


def test_a_link_is_not_followed(talk_on, store, open_log, chat_path, tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    target.chmod(0o600)
    log_path(chat_path.parent, FP).symlink_to(target)
    log = open_log()
    assert log.now() is None
    assert len(log.take_notices()) == 1
    talk = talk_on(store)
    session = talk.start()
    talk.turn(session, "hello", "reply")
    store.delete(session)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: os.mkfifo(path, 0o600)], ids=["folder", "pipe"]
)
def test_what_is_no_file_is_told_and_keeps_no_chat_from_being_deleted(
    talk_on, store, open_log, chat_path, make
):
    make(log_path(chat_path.parent, FP))
    log = open_log()
    assert log.now() is None
    assert "is no file" in log.take_notices()[0]
    talk = talk_on(store)
    session = talk.start()
    talk.turn(session, "hello", "reply")
    store.delete(session)
    assert [found.id for found in store.sessions()] == []


def test_without_chat_db_there_is_no_log(tmp_path):
    log = StoredLog(tmp_path / "chat.db", FP)
    log.look()
    assert log.now() is None
    assert list(tmp_path.iterdir()) == []
    log.close()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    turns=st.lists(st.lists(st.integers(0, 2**30 - 2), max_size=20), max_size=12),
    erased=st.sets(st.integers(0, 11)),
)
def test_any_ids_come_back_and_erased_ones_do_not(tmp_path_factory, turns, erased):
    path = log_path(tmp_path_factory.mktemp("log"), FP)
    file = LogFile(path, FP)
    for number, ids in enumerate(turns):
        file.append((number + 1, 5), ids)
    doomed = [(number + 1, 5) for number in erased]
    assert file.erase(doomed) == any(number < len(turns) for number in erased)
    left = {(n + 1, 5): ids for n, ids in enumerate(turns) if n not in erased}
    found = file.turns()
    assert found.keys() == left.keys()
    for turn, (start, stop) in found.items():
        assert array("I", file.read(start, stop)).tolist()[4:] == left[turn]
    file.shrink()
    assert file.turns().keys() == left.keys()
    words, _ = file.head()
    assert words == sum(4 + len(ids) for ids in left.values())
    assert path.stat().st_size == HEADER.size + 4 * words
    file.close()


def test_an_unfinished_change_is_seen(tmp_path, monkeypatch):
    path = log_path(tmp_path, FP)
    file = LogFile(path, FP)
    file.append((1, 1), [1, 2, 3, 4, 5])
    before = file.changes()

    def crash(self, start, stop):
        raise KeyboardInterrupt

    monkeypatch.setattr(LogFile, "_blank", crash)
    with pytest.raises(KeyboardInterrupt):
        file.erase([(1, 1)])
    monkeypatch.undo()
    assert file.changes() != before
    with pytest.raises(BadLog, match="never finished"):
        file.head()
    erase_turns(tmp_path, [(1, 1)])
    assert not path.exists()
    assert file.changes() is None
    file.close()


def test_what_is_erased_is_on_the_disk_before_a_reader_may_use_the_rest(tmp_path, monkeypatch):
    path = log_path(tmp_path, FP)
    file = LogFile(path, FP)
    file.append((1, 1), [1, 2, 3, 4, 5])
    synced = []

    def sync(fd):
        raw = os.pread(fd, 1000, HEADER.size)
        changes = file.changes()
        assert changes is not None
        synced.append((changes % 2, set(raw)))

    monkeypatch.setattr(os, "fsync", sync)
    file.erase([(1, 1)])
    assert synced == [(1, {0xFF})]
    file.close()
