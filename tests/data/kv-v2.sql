CREATE TABLE chain_ops(                                -- links that hold no tokens (forgets)
  key BLOB PRIMARY KEY CHECK(length(key) = 32),
  parent_key BLOB NOT NULL CHECK(length(parent_key) = 32),
  model_fp BLOB NOT NULL REFERENCES models(fp) ON DELETE CASCADE, op TEXT NOT NULL)
  STRICT, WITHOUT ROWID;
CREATE INDEX chain_ops_parent ON chain_ops(parent_key);
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE models(
  fp BLOB PRIMARY KEY CHECK(length(fp) = 32), identity TEXT NOT NULL, codec TEXT NOT NULL,
  page_tokens INTEGER NOT NULL CHECK(page_tokens > 0), num_layers INTEGER NOT NULL,
  num_kv_heads INTEGER NOT NULL, head_dim INTEGER NOT NULL, created_at INTEGER NOT NULL)
  STRICT, WITHOUT ROWID;
CREATE TABLE page_data(
  page_id INTEGER PRIMARY KEY REFERENCES pages(id) ON DELETE CASCADE, data BLOB NOT NULL) STRICT;
CREATE TABLE pages(
  id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE CHECK(length(key) = 32),
  parent_key BLOB NOT NULL CHECK(length(parent_key) = 32),
  model_fp BLOB NOT NULL REFERENCES models(fp) ON DELETE CASCADE,
  chain_index INTEGER NOT NULL, first_position INTEGER NOT NULL,
  num_tokens INTEGER NOT NULL CHECK(num_tokens > 0),
  token_ids BLOB NOT NULL CHECK(length(token_ids) = 4 * num_tokens),
  sampled BLOB NOT NULL CHECK(length(sampled) = (num_tokens + 7) / 8),   -- one bit an id
  origin TEXT NOT NULL CHECK(origin IN ('step','chunk','mixed')),
  head_crc INTEGER NOT NULL,                           -- of key || index || position || origin
  crc INTEGER NOT NULL,                                -- of key || payload
  num_bytes INTEGER NOT NULL, last_used INTEGER NOT NULL,
  quarantined TEXT                                     -- the reason, or NULL
  ) STRICT;
CREATE INDEX pages_lru ON pages(last_used, chain_index);
CREATE INDEX pages_parent ON pages(parent_key);
CREATE TABLE roots(                                    -- first parent key of each (model, salt)
  key BLOB PRIMARY KEY CHECK(length(key) = 32),
  model_fp BLOB NOT NULL REFERENCES models(fp) ON DELETE CASCADE, salt_id TEXT NOT NULL)
  STRICT, WITHOUT ROWID;
CREATE TABLE snapshots(                                -- the end of a turn: a witness
  head_key BLOB PRIMARY KEY CHECK(length(head_key) = 32),
  model_fp BLOB NOT NULL REFERENCES models(fp) ON DELETE CASCADE,
  num_tokens INTEGER NOT NULL,
  logits_hash BLOB NOT NULL CHECK(length(logits_hash) = 16),
  top_ids BLOB NOT NULL CHECK(length(top_ids) = 32),
  top_values BLOB NOT NULL CHECK(length(top_values) = 32),
  backend TEXT NOT NULL, created_at INTEGER NOT NULL) STRICT, WITHOUT ROWID;
