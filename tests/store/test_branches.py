"""What summaries stand for, in a file that is damaged."""

from __future__ import annotations

import sqlite3

from sessions.branches import copies, summaries_of


def test_a_damaged_path_that_goes_round_ends():
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE turns(id INTEGER PRIMARY KEY, parent_id, depth, created_at)")
    db.execute("CREATE TABLE messages(turn_id, role, content)")
    db.execute("CREATE TABLE forgets(at_turn_id INTEGER, policy TEXT, op TEXT)")
    db.execute("INSERT INTO turns VALUES(1, 2, 0, 0), (2, 1, 1, 0)")
    db.set_progress_handler(lambda: 1, 100_000)  # instead of a hang
    assert summaries_of(db, 1) == []
    assert copies(db, 2) == []
