"""Import: conversations of a file into `chat.db`, each whole in one transaction or not at all.

Knows which format a file has, which chats are here already, and the rows that make one. A bad
conversation costs itself alone; those around it are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, BinaryIO

from sessions.columns import dump_json, new_id, pack_ids, storable
from sessions.exchange import export_jsonl, lines_of
from sessions.exchange_files import LIMITS, BadFile, Limits
from sessions.exchange_formats import ReadChat, read_chats
from sessions.exchange_plain import Talk
from sessions.records import SessionRow, TurnPath
from sessions.store import ChatStore


@dataclass(frozen=True, slots=True)
class Imported:
    """One conversation that is here now."""

    line: int
    session: str
    """Id of its first session."""
    name: str
    turns: int
    forks: int
    skipped: bool
    """It was here before, with the same content."""
    unknown_ids: int = 0
    """Messages whose ids come only from tokenizers that no chat here has seen."""
    notes: tuple[str, ...] = ()


class ImportStore(ChatStore):
    """`chat.db` that takes conversations from files."""

    _plain: dict[bytes, str] | None = None

    def read(
        self,
        stream: BinaryIO,
        *,
        kind: str = "auto",
        name: str = "",
        limits: Limits = LIMITS,
    ) -> Iterator[Imported | BadFile]:
        """Store each conversation of a file as it is read; one that cannot be is yielded as the
        error that tells why.

        Args:
            stream: The file.
            kind: Its format: chatkv, openai, sharegpt, markdown, or auto: by how it begins.
            name: What the chat is called instead; the second of a file gets a 2 behind it.
            limits: The most that is taken.

        Raises:
            BadFile: Nothing more can be read.
            StoreError: Nothing more can be stored.
        """
        self._plain = None
        count = 0
        for chat in read_chats(stream, kind, limits):
            if isinstance(chat, BadFile):
                yield chat
                continue
            count += 1
            title = f"{name} {count}" if count > 1 and name else name
            yield self._take(chat, title)

    def _take(self, chat: ReadChat, name: str) -> Imported:
        sessions, turns = chat.sessions, chat.turns
        if name:
            sessions = [replace(sessions[0], title=name), *sessions[1:]]
        held = self._held_tree(sessions, turns) if chat.talk is None else self._held(chat.talk)
        unknown = 0 if held else self._unknown_ids(turns)
        session = held or self.add(sessions, turns)
        if self._plain is not None and chat.talk is not None:
            self._plain[_digest(chat.talk)] = session
        return Imported(
            chat.line,
            session,
            (self.session(held).title if held else sessions[0].title) or _first_line(turns),
            sum(turn.turn.depth > 0 for turn in turns),
            len(sessions) - 1,
            held is not None,
            unknown,
            tuple(chat.notes),
        )

    def add(self, sessions: Sequence[SessionRow], turns: Sequence[TurnPath]) -> str:
        """Store a chat under new ids, in one transaction. Returns the id of its first session."""
        with self._writing():
            ids = {row.id: new_id() for row in sessions}
            turn_ids: dict[int, int] = {}
            forget_ids: dict[int, int] = {}
            for row in sessions:
                self._db.execute(
                    "INSERT INTO sessions(id, title, created_at, updated_at, forked_from, settings)"
                    " VALUES(?, ?, ?, ?, ?, ?)",
                    (
                        ids[row.id],
                        storable(row.title),
                        row.created_at,
                        row.updated_at,
                        ids[row.forked_from] if row.forked_from else None,
                        dump_json(row.settings),
                    ),
                )
            for turn in turns:
                owner, parent = ids[turn.turn.session_id], turn_ids.get(turn.turn.parent_id or 0)
                turn_ids[turn.turn.id] = self._add_turn(turn, owner, parent)
                self._add_forgets(turn, turn_ids[turn.turn.id], forget_ids)
            for row in sessions:
                ops = [
                    {**op, "cancels": forget_ids.get(op["cancels"] or 0)} if "cancels" in op else op
                    for op in row.pending_ops
                ]
                self._db.execute(
                    "UPDATE sessions SET head_turn_id = ?, pending_ops = ? WHERE id = ?",
                    (turn_ids.get(row.head_turn_id or 0), dump_json(ops), ids[row.id]),
                )
            return ids[sessions[0].id]

    def _add_turn(self, turn: TurnPath, owner: str, parent: int | None) -> int:
        row = turn.turn
        turn_id = self._insert(
            "INSERT INTO turns(parent_id, depth, session_id, state, pinned, redacted_at,"
            " created_at, sampling, usage) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                parent,
                row.depth,
                owner,
                row.state,
                row.pinned,
                row.redacted_at,
                row.created_at,
                dump_json(row.sampling),
                dump_json(row.usage),
            ),
        )
        for message in turn.messages:
            text = message.row
            content = storable(text.content)
            message_id = self._insert(
                "INSERT INTO messages(turn_id, seq, role, content, state, meta, created_at)"
                " VALUES(?, ?, ?, ?, ?, ?, ?)",
                (
                    turn_id,
                    text.seq,
                    text.role,
                    content,
                    text.state,
                    dump_json(text.meta),
                    text.created_at,
                ),
            )
            self._insert(
                "INSERT INTO messages_fts(rowid, content) VALUES(?, ?)", (message_id, content)
            )
            for render in message.renders:
                spans = dump_json(list(render.sampled))
                self._db.execute(
                    "INSERT INTO renders(message_id, tok_fp, token_ids, sampled)"
                    " VALUES(?, ?, ?, ?)",
                    (message_id, render.tok_fp, pack_ids(render.token_ids), spans),
                )
        return turn_id

    def _add_forgets(self, turn: TurnPath, turn_id: int, forget_ids: dict[int, int]) -> None:
        for row in turn.forgets:
            forget_ids[row.id] = self._insert(
                "INSERT INTO forgets(at_turn_id, policy, reason, op, num_tokens, cancels, receipt,"
                " created_at) VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    turn_id,
                    row.policy,
                    row.reason,
                    dump_json(row.op),
                    row.num_tokens,
                    forget_ids.get(row.cancels or 0),
                    dump_json(row.receipt),
                    row.created_at,
                ),
            )

    def _insert(self, statement: str, row: Sequence[Any]) -> int:
        made = self._db.execute(statement, row).lastrowid
        assert made is not None
        return made

    def _held_tree(self, sessions: Sequence[SessionRow], turns: Sequence[TurnPath]) -> str | None:
        """The chat that would be exported to the same bytes, whatever its name."""
        with self._reading():
            rows = self._db.execute(
                "SELECT id, title FROM sessions"
                " WHERE created_at = ? AND forked_from IS NULL AND trashed_at IS NULL",
                (sessions[0].created_at,),
            ).fetchall()
        for session_id, title in rows:
            ours = lines_of([replace(sessions[0], title=title), *sessions[1:]], turns)
            theirs = export_jsonl(self, session_id)
            if all(mine == other for mine, other in zip(ours, theirs, strict=False)):
                return session_id
        return None

    def _held(self, talk: Talk) -> str | None:
        """The chat, not in the trash, whose open path says the same."""
        if self._plain is None:
            self._plain = self._digests()
        session = self._plain.get(_digest(talk))
        with self._reading():
            here = "SELECT 1 FROM sessions WHERE id = ? AND trashed_at IS NULL"
            # Another process may have deleted it since.
            return session if self._db.execute(here, (session,)).fetchone() else None

    def _digests(self) -> dict[bytes, str]:
        """What every chat says, read once."""
        with self._reading():
            heads = self._db.execute(
                "SELECT head_turn_id, id FROM sessions WHERE forked_from IS NULL"
                " AND trashed_at IS NULL AND head_turn_id IS NOT NULL"
            ).fetchall()
            digests: dict[int, bytes] = {}
            for turn_id, parent, role, content in self._db.execute(
                "SELECT t.id, t.parent_id, m.role, m.content FROM turns t LEFT JOIN messages m"
                " ON m.turn_id = t.id ORDER BY t.id, m.seq"
            ):
                before = digests.get(turn_id) or digests.get(parent or 0, b"")
                digests[turn_id] = before if role is None else _extend(before, role, content)
        return {digests[head]: session for head, session in reversed(heads) if head in digests}

    def _unknown_ids(self, turns: Sequence[TurnPath]) -> int:
        """Messages that have ids, but none of a tokenizer that was used here."""
        named = [
            {render.tok_fp for render in message.renders}
            for turn in turns
            for message in turn.messages
            if message.renders
        ]
        known: set[bytes] = set()
        with self._reading():
            for tok_fp in set[bytes]().union(*named):
                here = self._db.execute("SELECT 1 FROM renders WHERE tok_fp = ? LIMIT 1", (tok_fp,))
                if here.fetchone() is not None:
                    known.add(tok_fp)
        return sum(not fps & known for fps in named)


def _digest(talk: Talk) -> bytes:
    digest = b""
    for role, text in talk:
        digest = _extend(digest, role, text)
    return digest


def _extend(before: bytes, role: str, text: str) -> bytes:
    """The digest of one more message; an empty system prompt is none."""
    if role == "system" and not text:
        return before
    return blake2b(before + f"{role}\n{text}".encode(), digest_size=16).digest()


def _first_line(turns: Sequence[TurnPath]) -> str:
    """What an untitled chat is called."""
    first = next((t.message("user") for t in turns if t.turn.depth == 1), None)
    return "" if first is None else first.row.content.strip().partition("\n")[0][:60]
