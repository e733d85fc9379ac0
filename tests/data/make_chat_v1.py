"""Make `chat-v1.db`, `export-v1.jsonl`, `chat-v1.sql`: the fixtures of schema 1; and `kv-v2.sql`.

Run it once for a schema, from the root of the repository, and never again after its release:
later versions are tested against these files.

    python tests/data/make_chat_v1.py
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from itertools import count
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from sessions.exchange import export_jsonl
from sessions.records import Render
from sessions.store import ChatStore

HERE = Path(__file__).parent
FP, OTHER_FP = b"t" * 32, b"u" * 32


def fill(store: ChatStore) -> str:
    """A chat with forks, forget records, a partial turn, a redacted one and non-ASCII text."""
    row = store.create_session(
        "ada-notes", "Be terse. 簡潔に。", {"model": "SmolLM2", "top_p": 0.95}
    )
    main, root = row.id, row.head_turn_id
    assert root is not None
    system = store.path(main)[0].messages[0].row.id
    store.set_render(system, FP, [1, 9690, 198, 2683], ())
    store.set_render(system, OTHER_FP, [7, 7, 7], ())

    def turn(session: str, prompt: str, ids: list[int], reply: str, out: list[int]) -> int:
        head = store.session(session).head_turn_id
        assert head is not None
        begun = store.begin_turn(
            session,
            head,
            head,
            prompt,
            {"seed": 7, "temperature": 0.7},
            render=Render(FP, ids),
        )
        store.save_partial(begun.turn_id, reply[:3], FP, out[:1], ((0, 1),))
        usage = {"prompt_tokens": len(ids), "finish_reason": "stop"}
        store.finish_turn(begun.turn_id, "done", reply, FP, out, ((0, len(out) - 1),), usage)
        return begun.turn_id

    first = turn(main, "Grüße, what is a page?", [5, 6, 7], "16 Tokens. 🇰🇷", [30, 31, 2])
    second = turn(main, "And a \u202e fork?\nPlease.", [8, 9], "Nothing is copied.", [32, 2])
    fork = store.fork(main, first, "16-vs-32").id
    op = {
        "policy": "user",
        "reason": "/forget 1",
        "op": {"at": 10, "drop": [[4, 10]], "rebase": 0},
        "num_tokens": 6,
    }
    store.set_pending_ops(fork, [op])
    turn(fork, "नमस्ते", [10, 11], "مرحبا", [33, 34, 2])
    nested = store.fork(fork, None, "tail").id
    forget = store.path(nested)[-1].forgets[0]
    store.set_pending_ops(nested, [{**op, "reason": "/recall 1", "cancels": forget.id}])
    turn(nested, "recalled", [12], "ok", [35, 2])
    store.set_pending_ops(nested, [op])
    head = store.session(main).head_turn_id
    begun = store.begin_turn(main, head, second, "cut off", {"seed": 8}, render=Render(FP, [13]))
    store.save_partial(begun.turn_id, "It was", FP, [36, 37], ((0, 2),))
    return main


def schema(connection: sqlite3.Connection) -> str:
    """The text of every table and index that is ours."""
    rows = connection.execute(
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
        " AND name NOT LIKE 'messages\\_fts\\_%' ESCAPE '\\' ORDER BY name"
    )
    return "".join(f"{row[0]};\n" for row in rows)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("sessions.tree.new_id", side_effect=map("session{:019d}".format, count(1))),
        mock.patch("sessions.tree.now_ms", side_effect=count(1_760_000_000_000, 1000)),
        mock.patch(
            "sessions.locks.secrets.token_hex", side_effect=map("writer{}".format, count(1))
        ),
    ):
        path = Path(folder) / "data" / "chat.db"
        with ChatStore(path) as store:
            main_id = fill(store)
            store._db.execute(
                "UPDATE turns SET redacted_at = 1760000099000 WHERE depth = 2 AND session_id = ?",
                (main_id,),
            )
        with ChatStore(path) as store:  # closes the turn whose writer is gone
            (HERE / "chat-v1.sql").write_text(schema(store._db))
            text = "".join(f"{line}\n" for line in export_jsonl(store, main_id))
            (HERE / "export-v1.jsonl").write_text(text, encoding="utf-8")
        (HERE / "chat-v1.db").write_bytes(path.read_bytes())
        from sessions.pagefile import open_page_file

        pages = open_page_file(Path(folder) / "cache" / "kv.db", limit_bytes=1 << 30)
        (HERE / "kv-v2.sql").write_text(schema(pages.reader))
        pages.close()


if __name__ == "__main__":
    main()
