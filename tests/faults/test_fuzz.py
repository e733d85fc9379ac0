"""Files that nobody should import and page files that nobody should open: no crash, no hang,
nothing written outside the store, and nothing wrong ever served.

`CHATKV_FUZZ` sets how many imports the slow test tries, and a tenth of it how many page files
(`make fuzz`). Each file follows from its number alone, so one that fails can be made again.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
from mutate import mutated, of_pages
from shares import in_shares

from chatkv.errors import ChatKVError, StoreError
from chatkv.kv.keys import page_key
from chatkv.kv.store import PageImage, Snapshot
from sessions.cachefile import CacheFile
from sessions.exchange import export_jsonl
from sessions.exchange_files import BadFile
from sessions.exchange_import import Imported, ImportStore
from sessions.pages import SqlitePageStore
from sessions.store import MEMORY
from sessions.upkeep import collect, verify

MANY = int(os.environ.get("CHATKV_FUZZ", "5000"))
PATIENCE_S = 20
OLD = (Path(__file__).parents[1] / "data" / "export-v1.jsonl").read_bytes()
OPENAI, SHAREGPT, PLAIN = (
    json.dumps(value).encode()
    for value in (
        {"title": "t", "messages": [{"role": r, "content": r} for r in ("user", "assistant")]},
        {"system": "s", "conversations": [{"from": r, "value": r} for r in ("human", "gpt")]},
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    )
)
MARKDOWN = b"".join(
    b"\n<!-- chatkv turn %d %s -->\n\nsaid\n" % (turn, role)
    for turn, role in ((0, b"system"), (1, b"user"), (1, b"assistant"), (2, b"user"))
)
SEEDS = (
    *(OLD, OLD, PLAIN, OPENAI + b"\n" + OPENAI, SHAREGPT + b"\n" + SHAREGPT),
    b'---\ntitle: "t"\n---\n' + MARKDOWN,
)

_allowed: str | None = None
_outside: list[str] = []


def _audit(event: str, args: tuple[object, ...]) -> None:
    """What Python is about to do to a file; SQLite's own files are named by `sqlite3.connect`."""
    if _allowed is None:
        return
    if event == "open":
        path, _, flags = args
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not writes or not isinstance(path, str):
            return
    elif event not in ("os.remove", "os.rename", "os.mkdir", "os.system", "subprocess.Popen"):
        return
    else:
        path = args[0]
    if not str(path).startswith(_allowed):
        _outside.append(f"{event} {path}")


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """No file outside `folder` is written while the body runs."""
    global _allowed
    if _audit not in _HOOKS:
        sys.addaudithook(_audit)
        _HOOKS.append(_audit)
    _allowed = str(folder)
    _outside.clear()
    try:
        yield
    finally:
        _allowed = None
    assert _outside == []


_HOOKS: list[object] = []


@contextmanager
def in_time() -> Iterator[None]:
    """The body ends, or is a hang."""

    def hang(*_: object) -> None:
        raise TimeoutError(f"still running after {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def told(what: str, seen: Counter[str]) -> None:
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(seen.items()))
    sys.stderr.write(f"\n{what}: {counts}\n")


# Imports.


def take(store: ImportStore, raw: bytes, seen: Counter[str]) -> list[Imported]:
    """Import a file; only BadFile may come of it."""
    made: list[Imported] = []
    with suppress(BadFile):
        for item in store.read(io.BytesIO(raw)):
            seen["conversations refused" if isinstance(item, BadFile) else "imported"] += 1
            if isinstance(item, Imported):
                made.append(item)
    return made


def use(store: ImportStore, made: Imported) -> None:
    """What came in is a chat like any other: it can be read, and exported to what comes in again
    as the same."""
    text = "".join(f"{line}\n" for line in export_jsonl(store, made.session)).encode()
    store.path(made.session)
    assert store.find(made.session).id == made.session
    with ImportStore(MEMORY) as elsewhere:
        (again,) = elsewhere.read(io.BytesIO(text))
        assert isinstance(again, Imported), again
        assert "".join(f"{x}\n" for x in export_jsonl(elsewhere, again.session)).encode() == text


def fuzz_imports(count: int, seed: int, folder: Path) -> Counter[str]:
    seen: Counter[str] = Counter()
    with ImportStore(MEMORY) as store, watched(folder):
        for number in range(count):
            dice = random.Random(f"{seed} {number}")
            raw = mutated(SEEDS[number % len(SEEDS)], dice)
            seen["files"] += 1
            try:
                with in_time():
                    made = [item for item in take(store, raw, seen) if not item.skipped]
                    for item in made:
                        if dice.random() < 0.3:
                            use(store, item)
                    store.sessions(query="a b")
                    rows = store.sessions()
                    assert bool(rows) == bool(made)  # whole, or not there at all
                    for row in rows:
                        store.delete(row.id)
            except BaseException as error:
                error.add_note(f"number {number} of seed {seed}")
                raise
            if number % 2000 == 0:
                assert store.check() == []
        assert store.check() == []
    return seen


def test_changed_imports(tmp_path):
    seen = fuzz_imports(400, 3, tmp_path)
    assert min(seen["imported"], seen["conversations refused"]) > 50


@pytest.mark.slow
def test_many_changed_imports(tmp_path):
    told("imports", sum(in_shares(_imports, MANY, tmp_path), Counter()))


def _imports(count: int, share: int, folder: Path) -> Counter[str]:
    return fuzz_imports(count, 100 + share, folder)


# Page files.

IDENTITY = {
    "layers": 1,
    "kv_heads": 1,
    "head_dim": 64,
    "page_tokens": 4,
    "pool_dtype": "bfloat16",
    "weights": "one",
}


def chain(root: bytes, count: int, first: int = 0) -> list[PageImage]:
    images: list[PageImage] = []
    parent = root
    for index in range(count):
        ids = (first + index, 1, 2, 3)
        key = page_key(parent, ids, (False,) * 4)
        payload = bytes([index % 256]) * 1024
        images.append(PageImage(key, parent, index, 4 * index, ids, (False,) * 4, "chunk", payload))
        parent = key
    return images


def page_store(path: Path) -> SqlitePageStore:
    return SqlitePageStore(path, IDENTITY, limit_bytes=1 << 30)


def good_files(folder: Path) -> tuple[dict[str, bytes], list[PageImage]]:
    """kv.db with its journal, as a crash leaves them, and the pages in it."""
    # Where bytes lie follows from the keys, and these from the salt.
    with mock.patch("sessions.pagefile.secrets.token_bytes", return_value=b"salt" * 8):
        pages = page_store(folder / "kv.db")
    images = chain(pages.root, 24)
    pages.write(images)
    for image in images[::6]:
        values = tuple(float(v) for v in range(8))
        pages.save_snapshot(Snapshot(image.key, 4, b"h" * 16, tuple(range(8)), values, "cpu"))
    pages.end_turn()
    pages.write(chain(pages.root, 4, first=100))
    files = {name: (folder / name).read_bytes() for name in ("kv.db", "kv.db-wal")}
    pages.close()
    for file in folder.glob("kv.db*"):
        file.unlink()
    return files, images


def try_everything(path: Path, images: list[PageImage], seen: Counter[str]) -> None:
    """All that is ever done to a page file; it never serves what was not stored."""
    by_key = {image.key: image for image in images}
    keys = list(by_key)
    pages = page_store(path)
    pages.find(keys)
    found = list(pages.read(keys))
    for image in images[::6]:
        pages.children(image.key)
        pages.snapshot(image.key)
    found += pages.read(keys[12:])
    assert all(by_key[image.key] == image for image in found)
    with suppress(StoreError):
        pages.write(images)
        found = list(pages.read(keys))
        assert all(by_key[image.key] == image for image in found)
        seen["whole again"] += len(found) == len(keys)
    pages.stats()
    for work in (
        lambda: pages.quarantine(keys[3], "test", descendants=True),
        lambda: pages.shrink(20 * 65536),
        lambda: pages.purge([5, 1, 2, 3], 1),
        pages.end_turn,
    ):
        with suppress(StoreError):
            work()
    notices = pages.take_notices()
    pages.close()
    disk = CacheFile(path, limit_bytes=1 << 30)
    for look in (verify, collect):
        with suppress(ChatKVError):
            look(disk)
    disk.close()
    seen["set aside"] += any("set aside" in notice for notice in notices)
    seen["a page failed"] += any("failed a check" in notice for notice in notices)
    seen["nothing noticed"] += not notices


def fuzz_pages(count: int, seed: int, folder: Path) -> Counter[str]:
    seen: Counter[str] = Counter()
    folder.chmod(0o700)
    files, images = good_files(folder)
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        work = folder / str(number)
        work.mkdir(mode=0o700)
        for name, raw in files.items():
            hit = dice.random() < (0.8 if name == "kv.db" else 0.3)
            if name == "kv.db" or dice.random() < 0.5:
                (work / name).write_bytes(of_pages(raw, dice) if hit else raw)
                (work / name).chmod(0o600)
        seen["files"] += 1
        try:
            with in_time(), watched(work):
                try_everything(work / "kv.db", images, seen)
        except BaseException as error:
            error.add_note(f"number {number} of seed {seed}")
            raise
        for file in work.iterdir():
            file.unlink()
        work.rmdir()
    return seen


def test_damaged_page_files(tmp_path):
    seen = fuzz_pages(30, 3, tmp_path)
    assert min(seen["set aside"], seen["nothing noticed"]) > 0


@pytest.mark.slow
def test_many_damaged_page_files(tmp_path):
    told("page files", sum(in_shares(_pages, MANY // 10, tmp_path), Counter()))


def _pages(count: int, share: int, folder: Path) -> Counter[str]:
    return fuzz_pages(count, 100 + share, folder)


def test_mutations_are_json_often_enough():
    """Or only the parser is tested."""
    dice, good = random.Random(2), 0
    for number in range(300):
        with suppress(ValueError):
            for line in mutated(SEEDS[number % len(SEEDS)], dice).splitlines():
                json.loads(line)
            good += 1
    assert good > 100
