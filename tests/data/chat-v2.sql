CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
CREATE TABLE forgets(                                  -- append-only
  id INTEGER PRIMARY KEY, at_turn_id INTEGER NOT NULL REFERENCES turns(id) ON DELETE CASCADE,
  policy TEXT NOT NULL, reason TEXT NOT NULL, op TEXT NOT NULL, num_tokens INTEGER NOT NULL,
  cancels INTEGER REFERENCES forgets(id) ON DELETE CASCADE,
  receipt TEXT NOT NULL DEFAULT '{}', created_at INTEGER NOT NULL) STRICT;
CREATE INDEX forgets_turn ON forgets(at_turn_id);
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE TABLE messages(
  id INTEGER PRIMARY KEY, turn_id INTEGER NOT NULL REFERENCES turns(id) ON DELETE CASCADE,
  seq INTEGER NOT NULL,
  role TEXT NOT NULL CHECK(role IN ('system','user','assistant','tool','summary')),
  content TEXT NOT NULL,
  state TEXT NOT NULL DEFAULT 'done' CHECK(state IN ('partial','done','interrupted','error')),
  meta TEXT NOT NULL DEFAULT '{}', created_at INTEGER NOT NULL, UNIQUE(turn_id, seq)) STRICT;
CREATE VIRTUAL TABLE messages_fts USING fts5(content, content='messages', content_rowid='id', tokenize='trigram');
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE purges(id INTEGER PRIMARY KEY,            -- pages still to be removed from kv.db
  tok_fp BLOB NOT NULL, token_ids BLOB NOT NULL, keep_tokens INTEGER NOT NULL,
  ops TEXT NOT NULL DEFAULT '[]', created_at INTEGER NOT NULL) STRICT;
CREATE TABLE renders(                                  -- the exact ids the model is fed
  message_id INTEGER NOT NULL REFERENCES messages(id) ON DELETE CASCADE,
  tok_fp BLOB NOT NULL CHECK(length(tok_fp) = 32),
  token_ids BLOB NOT NULL CHECK(length(token_ids) % 4 = 0),              -- int32 little-endian
  sampled TEXT NOT NULL DEFAULT '[]',                  -- JSON: [start, end) of chosen ids
  PRIMARY KEY(message_id, tok_fp)) STRICT, WITHOUT ROWID;
CREATE TRIGGER renders_added AFTER INSERT ON renders BEGIN
  DELETE FROM turn_tokens WHERE turn_id = (
    SELECT turn_id FROM messages WHERE id = NEW.message_id);
  INSERT INTO turn_tokens SELECT m.turn_id, coalesce(sum((
      SELECT max(length(r.token_ids)) / 4 FROM renders r WHERE r.message_id = m.id)), 0)
    FROM messages m WHERE m.turn_id = (SELECT turn_id FROM messages WHERE id = NEW.message_id)
    GROUP BY m.turn_id;
END;
CREATE TRIGGER renders_changed AFTER UPDATE OF token_ids ON renders BEGIN
  DELETE FROM turn_tokens WHERE turn_id = (
    SELECT turn_id FROM messages WHERE id = NEW.message_id);
  INSERT INTO turn_tokens SELECT m.turn_id, coalesce(sum((
      SELECT max(length(r.token_ids)) / 4 FROM renders r WHERE r.message_id = m.id)), 0)
    FROM messages m WHERE m.turn_id = (SELECT turn_id FROM messages WHERE id = NEW.message_id)
    GROUP BY m.turn_id;
END;
CREATE TRIGGER renders_removed AFTER DELETE ON renders BEGIN
  DELETE FROM turn_tokens WHERE turn_id = (
    SELECT turn_id FROM messages WHERE id = OLD.message_id);
  INSERT INTO turn_tokens SELECT m.turn_id, coalesce(sum((
      SELECT max(length(r.token_ids)) / 4 FROM renders r WHERE r.message_id = m.id)), 0)
    FROM messages m WHERE m.turn_id = (SELECT turn_id FROM messages WHERE id = OLD.message_id)
    GROUP BY m.turn_id;
END;
CREATE TABLE sessions(
  id TEXT PRIMARY KEY,                                 -- random 128 bits, base32; never a path
  title TEXT NOT NULL DEFAULT '', created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
  trashed_at INTEGER,
  head_turn_id INTEGER REFERENCES turns(id),
  forked_from TEXT REFERENCES sessions(id) ON DELETE SET NULL,
  -- JSON: model, policy, sampling; and the ops typed since the last turn
  settings TEXT NOT NULL DEFAULT '{}', pending_ops TEXT NOT NULL DEFAULT '[]') STRICT;
CREATE TABLE turn_tokens(                              -- for lists of chats; kept by triggers
  turn_id INTEGER PRIMARY KEY REFERENCES turns(id) ON DELETE CASCADE,
  num_tokens INTEGER NOT NULL) STRICT;
CREATE TABLE turns(                                    -- one tree for all; a fork is a sibling
  id INTEGER PRIMARY KEY, parent_id INTEGER REFERENCES turns(id),
  depth INTEGER NOT NULL CHECK(depth >= 0),
  session_id TEXT NOT NULL REFERENCES sessions(id),    -- owner
  state TEXT NOT NULL DEFAULT 'open' CHECK(state IN ('open','done','interrupted','error')),
  pinned INTEGER NOT NULL DEFAULT 0, redacted_at INTEGER, created_at INTEGER NOT NULL,
  sampling TEXT NOT NULL DEFAULT '{}',                 -- JSON: settings and seed
  usage TEXT NOT NULL DEFAULT '{}',                    -- JSON: what the reply cost
  CHECK((parent_id IS NULL) = (depth = 0))) STRICT;
CREATE INDEX turns_parent ON turns(parent_id);
CREATE INDEX turns_session ON turns(session_id);
