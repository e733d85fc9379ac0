"""The token log: what chat.db has and nothing else, whatever becomes of the file."""

from __future__ import annotations

import os
import sqlite3
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatkv.errors import StoreError
from chatkv.spec.token_log import BARRIER, GIVEN
from sessions import logfile
from sessions import token_log as stored
from sessions.logfile import HEADER, BadLog, LogFile, erase_turns, log_path
from sessions.store import ChatStore
from sessions.token_log import StoredLog

FP, OTHER = b"t" * 32, b"u" * 32  # FP is that of the `talk` fixture


@pytest.fixture
def open_log(chat_path: Path) -> Iterator[Callable[..., StoredLog]]:
    opened: list[StoredLog] = []

    def begin(tok_fp: bytes = FP) -> StoredLog:
        opened.append(StoredLog(chat_path, tok_fp))
        opened[-1].look()
        return opened[-1]

    yield begin
    for log in opened:
        log.close()


@pytest.fixture
def chat_path(store: ChatStore) -> Path:
    assert store.file is not None
    return store.file


def packed(text: str, *, given: bool = False) -> bytes:
    """Ids of a text as they lie in the file."""
    return array("I", [ord(letter) | GIVEN * given for letter in text]).tobytes()


def guesses(log: StoredLog, text: str) -> set[str]:
    """What the log knows behind a text."""
    index = log.now()
    if index is None:
        return set()
    return {
        "".join(chr(word & ~GIVEN) for word in index.following(place, 1000))
        for _, place in index.matches([ord(letter) for letter in text])
    }


def test_finished_turns_are_logged_once_and_forks_repeat_nothing(talk_on, store, open_log):
    talk = talk_on(store)
    session = talk.start("ada")
    one = talk.turn(session, "hello there", "general reply")
    log = open_log()
    assert guesses(log, "hello") == {" theregeneral reply"}
    assert log.path.stat().st_mode & 0o777 == 0o600
    raw = log.path.read_bytes()
    assert packed("hello there", given=True) + packed("general reply") in raw
    fork = store.fork(session, one).id
    talk.turn(fork, "and in the fork", "another one")
    log.look()
    log.look()
    raw = log.path.read_bytes()
    assert raw.count(packed("hello there", given=True)) == 1
    assert raw.count(packed("another one")) == 1
    assert log.take_notices() == []


def test_an_open_turn_waits_until_it_is_finished(talk_on, store, open_log):
    talk = talk_on(store)
    session = talk.start()
    begun = store.begin_turn(session, store.session(session).head_turn_id, 1, "a prompt", {})
    store.set_render(begun.message_id, FP, talk.ids("a prompt"), ())
    talk.turn(talk.start(), "the other chat", "goes on")
    log = open_log()
    assert guesses(log, "a pr") == set()
    assert guesses(log, "the other") == {" chatgoes on"}
    store.finish_turn(begun.turn_id, "done", "its reply", FP, talk.ids("its reply"), ((0, 9),))
    log.look()
    assert guesses(log, "a pr") == {"omptits reply"}


def test_rebuilt_equals_appended(talk_on, store, open_log):
    talk = talk_on(store)
    session = talk.start()
    log = open_log()
    for number in range(5):
        talk.turn(session, f"prompt {number}", f"reply {number} and more")
        log.look()
    appended = log.path.read_bytes()
    log.path.unlink()
    assert open_log().path.read_bytes()[: HEADER.size - 4] == appended[: HEADER.size - 4]
    assert log.path.read_bytes()[HEADER.size :] == appended[HEADER.size :]
    assert log.take_notices() == []


def test_deletion_leaves_no_trace_in_the_bytes(talk_on, store, open_log):
    talk = talk_on(store)
    kept, gone = talk.start("kept"), talk.start("gone")
    talk.turn(kept, "a harmless question", "a harmless answer")
    talk.turn(gone, "hidden question", "the secret answer")
    other = store.file.with_name(log_path(store.file.parent, OTHER).name)
    LogFile(other, OTHER).append(logfile.turn_key(*_turns(store)[-1]), talk.ids("secret too"))
    log = open_log()
    assert guesses(log, "the sec") == {"ret answer"}
    size = log.path.stat().st_size
    store.delete(gone)
    raw = log.path.read_bytes()
    for text in ("question", "answer"):
        assert raw.count(packed(text)) + raw.count(packed(text, given=True)) == 1
    assert packed("secr") not in raw
    assert packed("hidden", given=True) not in raw
    assert packed("secr") not in other.read_bytes()
    assert len(raw) == size  # a hole, taken out when the log is shortened
    assert log.now() is None  # at once, without having been told
    log.look()
    assert guesses(log, "the sec") == set()
    assert guesses(log, "a harm") == {"less questiona harmless answer", "less answer"}
    talk.turn(kept, "once more", "with feeling")
    log.look()
    assert guesses(log, "once") == {" morewith feeling"}


def test_a_linked_chat_db_has_its_log_beside_the_file(talk_on, store, chat_path, tmp_path):
    talk = talk_on(store)
    talk.turn(talk.start("gone"), "prompt", "secret reply")
    store.close()
    link = tmp_path / "elsewhere" / "chat.db"
    link.parent.mkdir(mode=0o700)
    link.symlink_to(chat_path)
    log = StoredLog(link, FP)
    log.look()
    assert packed("secret reply") in log.path.read_bytes()
    with ChatStore(link) as linked:
        linked.delete(linked.find("gone").id)
    assert packed("secret reply") not in log.path.read_bytes()
    log.close()


def test_a_failed_deletion_says_so_and_deletes_nothing(talk_on, store, open_log, monkeypatch):
    talk = talk_on(store)
    session = talk.start("ada")
    talk.turn(session, "prompt", "reply")
    log = open_log()
    monkeypatch.setattr(LogFile, "erase", lambda self, turns: (_ for _ in ()).throw(OSError("io")))
    monkeypatch.setattr(
        Path, "unlink", lambda self, missing_ok=False: (_ for _ in ()).throw(OSError("read-only"))
    )
    with pytest.raises(StoreError, match="holds ids of what is deleted"):
        store.delete(session)
    monkeypatch.undo()
    assert store.find("ada").id == session
    assert log.now() is None


def test_what_chat_db_has_not_is_dropped(talk_on, store, open_log, chat_path):
    talk = talk_on(store)
    session = talk.start("ada")
    talk.turn(session, "old secret", "told to nobody")
    open_log().close()
    db = sqlite3.connect(chat_path)  # a restored backup, an older program: ids are used again
    (last,) = db.execute("SELECT max(id) FROM turns").fetchone()
    db.execute("UPDATE turns SET created_at = created_at + 1 WHERE id = ?", (last,))
    db.execute("UPDATE renders SET token_ids = CAST(x'0700000008000000' AS BLOB), sampled = '[]'")
    db.commit()
    db.close()
    log = open_log()
    raw = log.path.read_bytes()
    assert packed("secret") not in raw
    assert packed("nobody") not in raw
    assert array("I", [7 | GIVEN, 8 | GIVEN]).tobytes() in raw


def test_redacted_turns_are_not_logged(talk_on, store, open_log, chat_path):
    talk = talk_on(store)
    turn = talk.turn(talk.start(), "prompt", "redacted reply")
    log = open_log()
    db = sqlite3.connect(chat_path)
    db.execute("UPDATE turns SET redacted_at = 1 WHERE id = ?", (turn,))
    db.commit()
    db.close()
    assert packed("redacted") in log.path.read_bytes()
    assert packed("redacted") not in open_log().path.read_bytes()


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
        erase_turns(path.parent, _keys(store))
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


def test_two_processes_at_once(talk_on, store, open_log, chat_path, start_child):
    """Another engine looks all the time while turns are added and deleted."""
    child = start_child(
        """
        import sys, threading
        from pathlib import Path
        from sessions.token_log import StoredLog

        log, done = StoredLog(Path(sys.argv[1]), b"t" * 32), threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
        looks = 0
        while not done.is_set():
            log.look()
            looks += 1
            if looks == 1:
                print("ready", flush=True)
        log.look()
        print(len(log.now()), *log.take_notices(), flush=True)
        """,
        chat_path,
    )
    assert child.stdout.readline() == "ready\n"
    talk = talk_on(store)
    log = open_log()
    for number in range(15):
        session = talk.start()
        talk.turn(session, f"prompt {number:02}", f"reply {number:02} ends")
        if number % 3 == 0:
            log.look()
        if number % 2:
            store.delete(session)
            assert packed(f"reply {number:02}") not in log.path.read_bytes()
    out, _ = child.communicate("")
    log.look()
    raw = log.path.read_bytes()
    for number in range(15):
        assert raw.count(packed(f"reply {number:02} ends")) == 1 - number % 2
    assert out == f"{len(log.now())}\n"
    assert log.take_notices() == []


def test_two_logs_in_turn(talk_on, store, open_log):
    talk = talk_on(store)
    session = talk.start()
    one, two = open_log(), open_log()
    for number in range(6):
        talk.turn(session, f"prompt {number}", f"reply {number} ends")
        (one, two)[number % 2].look()
    one.look()
    two.look()
    raw = one.path.read_bytes()
    for number in range(6):
        assert raw.count(packed(f"reply {number} ends")) == 1
        assert guesses(one, f"reply {number}") == guesses(two, f"reply {number}") == {" ends"}


def test_many_threads_at_once(talk_on, store, open_log):
    talk = talk_on(store)
    session = talk.start()
    logs = [open_log() for _ in range(3)]
    for number in range(12):
        talk.turn(session, f"prompt {number}", f"reply {number} ends")
        threads = [threading.Thread(target=log.look) for log in logs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    raw = logs[0].path.read_bytes()
    assert [raw.count(packed(f"reply {number} ends")) for number in range(12)] == [1] * 12
    assert [log.take_notices() for log in logs] == [[], [], []]


def test_the_oldest_turns_go_first(talk_on, store, open_log, monkeypatch):
    monkeypatch.setattr(logfile, "LIMIT_WORDS", 400)
    monkeypatch.setattr(logfile, "KEPT_WORDS", 300)
    monkeypatch.setattr(stored, "KEPT_WORDS", 300)
    talk = talk_on(store)
    session = talk.start()
    log = open_log()
    for number in range(20):
        talk.turn(session, f"prompt {number:02}", f"reply {number:02} " + "x" * 30)
        log.look()
        assert log.path.stat().st_size <= HEADER.size + 4 * 400
        assert guesses(log, f"reply {number:02}") == {" " + "x" * 30}
    raw = log.path.read_bytes()
    known = [number for number in range(20) if packed(f"reply {number:02}") in raw]
    assert known == list(range(known[0], 20))
    assert 3 <= len(known) <= 7
    log.path.unlink()
    rebuilt = open_log().path.read_bytes()
    assert packed("reply 19") in rebuilt
    assert packed("reply 10") not in rebuilt
    size = len(rebuilt)
    assert open_log().path.stat().st_size == size  # what had no room is not tried again


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


def test_a_busy_chat_db_is_tried_again(talk_on, store, open_log, chat_path, monkeypatch):
    monkeypatch.setattr("sessions.database.BUSY_TIMEOUT_MS", 10)
    talk = talk_on(store)
    talk.turn(talk.start(), "hello there", "general reply")
    db = sqlite3.connect(chat_path, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    log = open_log()
    assert log.now() is None
    db.execute("COMMIT")
    db.close()
    log.look()
    assert guesses(log, "hello") == {" theregeneral reply"}


def test_the_thread_follows_and_ends(talk_on, store, chat_path):
    talk = talk_on(store)
    talk.turn(talk.start(), "hello there", "general reply")
    log = StoredLog(chat_path, FP)
    log.start()
    for _ in range(500):
        if guesses(log, "hello"):
            break
        threading.Event().wait(0.01)
    assert guesses(log, "hello") == {" theregeneral reply"}
    log.close()
    assert log.now() is None


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


def _turns(store: ChatStore) -> list[tuple[int, int]]:
    return store._db.execute("SELECT id, created_at FROM turns ORDER BY id").fetchall()


def _keys(store: ChatStore) -> list[logfile.Turn]:
    return [logfile.turn_key(*row) for row in _turns(store)]


def test_the_barrier_is_the_same_for_both_sides():
    assert logfile.BARRIER == BARRIER
