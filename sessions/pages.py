"""`kv.db`: pages of the KV cache on disk, found by their content. Implements `chatkv.kv.store`.

Knows the model they belong to and which pages are bad. Knows no session and no tensor. Two threads
may use it at once: one that writes, one that reads.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from chatkv.errors import ConfigError, StoreError
from chatkv.kv.chain import Link
from chatkv.kv.store import PageHead, PageImage, Snapshot, StoreStats
from sessions import eviction, pagerows
from sessions.cachefile import CacheFile
from sessions.pagemodel import Identity, PageModel, differing, get_rates, put_rates
from sessions.retention import default_limit_bytes, limit_warning

COMMIT_PAGES = 8
"""Pages in one commit."""
FIND_KEYS = 256
"""Keys in one question."""


class SqlitePageStore:
    """Pages of one model in `kv.db`. Made without an error, whatever is wrong with the file.

    Without a usable file everything is a miss and nothing is kept; `take_notices` says why.

    Args:
        path: The file; made (0600, its folder 0700) if missing.
        identity: What `ModelSpec.identity` returns; None for upkeep without a model: `stats`,
            `delete`, `shrink` and `purge`.
        limit_bytes: The budget of the file. Pages are evicted before it is passed.
        codec: How rows are stored; `exact` keeps the pool's own bytes.
    """

    def __init__(
        self,
        path: Path,
        identity: Identity | None = None,
        *,
        limit_bytes: int,
        codec: Literal["exact"] = "exact",
    ) -> None:
        if codec != "exact":
            raise ConfigError(f"Unknown page codec {codec!r}.", hint="Use exact.")
        self.path = path
        self.limit_bytes = limit_bytes
        self._disk = CacheFile(path, limit_bytes=limit_bytes)
        self._bad: set[bytes] = set()
        self._written_pages = self._written_bytes = self._read_pages = 0
        self._model = None if identity is None else PageModel(identity, codec, self.salt)
        if self._model is not None:
            self._disk.on_fresh(self._model.register)

    @property
    def saving(self) -> bool:
        """Whether pages are still written in this run."""
        return self._disk.saving

    @property
    def usable(self) -> bool:
        """Whether there is a file to read from or write to."""
        return self._disk.is_open

    @property
    def salt(self) -> bytes:
        """Part of every key of this store, 32 bytes."""
        return self._disk.salt

    @property
    def root(self) -> bytes:
        """Parent key of the first page of every chain: `root_key(fingerprint(identity), salt)`."""
        return self.model.root

    def recognise(self, name: str) -> str:
        """One sentence if other weights were used under the name of this model before, else
        nothing. Their pages stay, and are found only by them."""
        model, since = self.model, None
        with suppress(StoreError):  # it is in the notices
            since = self._disk.save(lambda db: model.recognise(db, name), None)
        if since is None:
            return ""
        date = time.strftime("%-d %B %Y", time.localtime(since / 1000))
        return f"{name} changed since {date}: what it computed until then is computed anew."

    def take_notices(self) -> list[str]:
        """What the user has to be told once, and is now told. From any thread."""
        notices: list[str] = []
        with suppress(IndexError):
            while True:
                notices.append(self._disk.notices.popleft())
        return notices

    def find(self, keys: Sequence[bytes]) -> dict[bytes, PageHead]:
        """Those of `keys` that are held and not quarantined, in that order. They are used now."""
        found: dict[bytes, PageHead] = {}
        for start in range(0, len(keys), FIND_KEYS):
            some = keys[start : start + FIND_KEYS]
            for head in self._heads(f"p.key IN ({', '.join('?' * len(some))})", some):
                found[head.key] = head
        self._disk.touch(found)
        return {key: found[key] for key in keys if key in found}

    def children(self, parent: bytes) -> list[PageHead]:
        """Pages whose parent key is `parent`, quarantined ones left out."""
        return self._heads("p.parent_key = ?", [parent])

    def read(self, keys: Sequence[bytes]) -> Iterator[PageImage]:
        """Pages in the order of `keys`; stops before the first that is missing or fails a check.

        A page that fails is quarantined. Values are not looked at.
        """
        for key in keys:
            image = self._image(key)
            if image is None:
                return
            self._read_pages += 1
            yield image

    def write(self, images: Iterable[PageImage]) -> int:
        """Store pages, 8 a commit, and return how many were new; 0 when saving is off.

        Raises:
            ValueError: A page of another size, or whose key is not that of its ids.
            StoreBusy: Another process is writing. The next call may succeed.
            StoreError: Full even after evicting, or not writable: saving is off from now on. The
                pages of the commit that failed are not stored.
        """
        pages = list(images)
        for image in pages:
            self.model.check(image)
        return sum(
            self._write(pages[start : start + COMMIT_PAGES])
            for start in range(0, len(pages), COMMIT_PAGES)
        )

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages. Returns how many were held. Raises StoreError."""
        rows = [(key,) for key in keys]
        return self._disk.save(
            lambda db: db.executemany("DELETE FROM pages WHERE key = ?", rows).rowcount, 0
        )

    def shrink(self, limit_bytes: int) -> int:
        """Evict, leaf first, until the file uses at most `limit_bytes`. Returns the pages evicted.

        What a file without pages takes (about a MiB) stays. Raises StoreError.
        """
        return self._disk.shrink(limit_bytes)

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Store or replace the witness of `snapshot.head_key`. Raises StoreError."""
        fp = self.model.fp
        self._disk.save(lambda db: pagerows.put_snapshot(db, snapshot, model_fp=fp), None)

    def save_link(self, link: Link) -> None:
        """Store an op that pages stand behind. Raises StoreError."""
        fp = self.model.fp
        self._disk.save(lambda db: pagerows.put_link(db, link, model_fp=fp), None)

    def snapshot(self, head_key: bytes) -> Snapshot | None:
        """The witness at that page, or None."""
        fp = self.model.fp
        with suppress(ValueError):  # a row that makes no snapshot is none
            return self._disk.ask(lambda db: pagerows.get_snapshot(db, head_key, model_fp=fp), None)
        return None

    def quarantine(self, key: bytes, reason: str, *, descendants: bool = False) -> int:
        """Never return that page again, nor any behind it if `descendants`. Returns how many."""
        keys = [key]
        if descendants:
            keys += self._disk.ask(lambda db: eviction.descendants(db, key), [])
        # For this run at once, and also where it cannot be written.
        fresh = [bad for bad in keys if bad not in self._bad]
        self._bad.update(keys)
        with suppress(StoreError):
            return self._disk.save(
                lambda db: sum(pagerows.quarantine(db, bad, reason) for bad in keys), len(fresh)
            )
        return len(fresh)

    def quarantined(self, parent: bytes) -> str:
        """Which check a page behind `parent` failed, or nothing."""
        row = self._disk.ask(
            lambda db: db.execute(
                "SELECT quarantined FROM pages WHERE parent_key = ? AND quarantined IS NOT NULL",
                (parent,),
            ).fetchone(),
            None,
        )
        return "" if row is None else str(row[0])

    def other_models(self, ids: Sequence[int], sampled: Sequence[bool]) -> list[str]:
        """Fields of the identity in which a model differs that has a page of these ids."""
        model, salt = self.model, self._disk.salt
        return self._disk.ask(lambda db: differing(db, model, salt, ids, sampled), [])

    def kept_rates(self) -> dict[str, object]:
        """What was measured with this model, also by another process."""
        return self._disk.ask(lambda db: get_rates(db, self.model.fp), {})

    def keep_rates(self, rates: Mapping[str, float | None]) -> None:
        """Remember what was measured with this model. Raises StoreError."""
        self._disk.save(lambda db: put_rates(db, self.model.fp, rates), None)

    def stats(self) -> StoreStats:
        """What the file holds, of all models, and what this run did to it."""
        pages, tokens, payload, quarantined, snapshots = self._disk.ask(
            lambda db: db.execute(
                "SELECT count(*), total(num_tokens), total(num_bytes), count(quarantined),"
                " (SELECT count(*) FROM snapshots) FROM pages"
            ).fetchone(),
            (0, 0, 0, 0, 0),
        )
        return StoreStats(
            pages=pages,
            tokens=int(tokens),
            payload_bytes=int(payload),
            file_bytes=file_bytes(self.path),
            limit_bytes=self.limit_bytes,
            snapshots=snapshots,
            quarantined=quarantined,
            written_pages=self._written_pages,
            written_bytes=self._written_bytes,
            read_pages=self._read_pages,
            evicted_pages=self._disk.evicted,
        )

    def end_turn(self) -> None:
        """After the pages of a turn: checkpoint, and see that the file is still there.

        One that was deleted or replaced while open is made, or opened, anew; keys stay good. Never
        raises. For the thread that writes.
        """
        self._disk.end_turn()

    def purge(self, token_ids: Sequence[int], keep_tokens: int) -> int:
        """Remove all that is stored of a path past `keep_tokens`, of every model, and overwrite it.

        Returns the number of pages. Raises StoreError: then it has to be done again later.
        """
        gone = self._disk.purge(lambda db: eviction.purge_path(db, token_ids, keep_tokens))
        self._bad.clear()
        return gone

    def close(self) -> None:
        """Close the file. Whatever is asked later is a miss."""
        self._disk.close()

    def _heads(self, where: str, values: Sequence[bytes]) -> list[PageHead]:
        fp = self.model.fp
        rows = self._disk.ask(
            lambda db: db.execute(
                f"SELECT {pagerows.HEAD} FROM pages p"
                f" WHERE {where} AND p.model_fp = ? AND p.quarantined IS NULL",
                (*values, fp),
            ).fetchall(),
            [],
        )
        heads: list[PageHead] = []
        for row in rows:
            if row[0] in self._bad:
                continue
            try:
                heads.append(pagerows.head_of(row))
            except pagerows.BadPage as bad:
                self._condemn(row[0], bad)
        return heads

    def _image(self, key: bytes) -> PageImage | None:
        fp = self.model.fp
        row = self._disk.ask(
            lambda db: db.execute(
                f"SELECT {pagerows.HEAD}, p.crc, p.num_bytes, d.data FROM pages p"
                " LEFT JOIN page_data d ON d.page_id = p.id"
                " WHERE p.key = ? AND p.model_fp = ? AND p.quarantined IS NULL",
                (key, fp),
            ).fetchone(),
            None,
        )
        if row is None or key in self._bad:
            return None
        try:
            return pagerows.image_of(row, token_bytes=self.model.token_bytes)
        except pagerows.BadPage as bad:
            self._condemn(key, bad)
            return None

    def _condemn(self, key: bytes, bad: pagerows.BadPage) -> None:
        if self.quarantine(key, str(bad)):
            self._disk.notices.append(f"A stored page failed a check ({bad}); it is made anew.")

    def _write(self, pages: Sequence[PageImage]) -> int:
        fp = self.model.fp

        def work(db: sqlite3.Connection) -> list[PageImage]:
            clock = self._disk.touch(())  # in here it is past that of every other process
            return [
                image
                for image in pages
                if pagerows.put_page(
                    db, image, model_fp=fp, clock=clock, page_tokens=self.model.page_tokens
                )
            ]

        need = sum(len(image.payload) for image in pages)
        new = self._disk.save(work, [], need_bytes=need)
        self._bad.difference_update(image.key for image in new)
        self._written_pages += len(new)
        self._written_bytes += sum(len(image.payload) for image in new)
        return len(new)

    def add_root(self, root: bytes, salt_id: str) -> None:
        """Make `root` another beginning of chains of this model. Raises StoreError."""
        row = (root, self.model.fp, salt_id)
        self._disk.save(
            lambda db: db.execute("INSERT OR IGNORE INTO roots VALUES(?, ?, ?)", row), None
        )

    @property
    def model(self) -> PageModel:
        """Whose pages these are. Raises ValueError without one: a bug of the caller."""
        if self._model is None:
            raise ValueError("This page store was opened without a model.")
        return self._model


class OpenedPages(NamedTuple):
    """What `open_page_store` found."""

    store: SqlitePageStore | None
    """None when there is no file that this run may use."""
    notice: str
    """What the user should see once, or nothing."""


def open_page_store(
    path: Path,
    identity: Identity | None = None,
    *,
    context_bytes: int = 0,
    limit_bytes: int | None = None,
) -> OpenedPages:
    """The store, with the default budget if none is given. Raises nothing.

    Args:
        path: `kv.db`.
        identity: Of the model, or None for upkeep.
        context_bytes: K/V of one full context of the model.
        limit_bytes: The budget.
    """
    if limit_bytes is None:
        limit_bytes = default_budget(path, context_bytes)
    store = SqlitePageStore(path, identity, limit_bytes=limit_bytes)
    warning = limit_warning(limit_bytes, context_bytes)
    notice = " ".join([*store.take_notices(), *([warning] if warning else [])])
    if store.usable:
        return OpenedPages(store, notice)
    store.close()
    return OpenedPages(None, notice)


def default_budget(path: Path, context_bytes: int = 0) -> int:
    """The budget of that file when nobody sets one; what it holds counts as free disk."""
    folder = next(place for place in path.absolute().parents if place.exists())
    free = shutil.disk_usage(folder).free + file_bytes(path)
    return default_limit_bytes(free, context_bytes)


def file_bytes(path: Path) -> int:
    """Bytes of the file and its journal; 0 if there is none."""
    total = 0
    for name in (path.name, f"{path.name}-wal"):
        with suppress(OSError):
            total += path.with_name(name).stat().st_size
    return total
