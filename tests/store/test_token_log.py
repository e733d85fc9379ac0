"""The token log: what chat.db has and nothing else, whoever writes to it."""

from __future__ import annotations

import sqlite3
import threading
from array import array
from pathlib import Path

import pytest
from copied import FP, OTHER, guesses, packed, turns_of

from chatkv.errors import StoreError
from chatkv.spec.token_log import BARRIER, GIVEN
from sessions import logfile
from sessions import token_log as stored
from sessions.logfile import HEADER, LogFile, log_path
from sessions.store import ChatStore
from sessions.token_log import StoredLog


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
    LogFile(other, OTHER).append(logfile.turn_key(*turns_of(store)[-1]), talk.ids("secret too"))
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


def test_the_barrier_is_the_same_for_both_sides():
    assert logfile.BARRIER == BARRIER
