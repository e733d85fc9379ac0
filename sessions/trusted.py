"""Pages from a file, for a user who trusts it: checked, one of them computed again, then stored
under a salt of their own.

A valid chain over the ids does not prove that the rows came from them: foreign K/V can say what the
transcript does not. So pages of a file are only ever found by the chats that came with them.

Runs where the engine runs. Knows the format of the file, the store and the model.
"""

from __future__ import annotations

import json
import secrets
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from chatkv.engine import Engine
from chatkv.errors import ChatKVError
from chatkv.kv.keys import canonical_json, page_key, root_key, unpack_bits
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.store import PageImage
from chatkv.prefill import PrefillReport, Prompts
from chatkv.sampling import SamplingParams
from sessions.exchange_kv import FORMAT, HEADER_BYTES, digest
from sessions.pages import COMMIT_PAGES, SqlitePageStore

LARGEST = 1e4
"""No key and no value of a real model is larger."""


class BadPages(ChatKVError):
    """A file of pages that is not used."""

    code = "bad_file"


@dataclass(frozen=True, slots=True)
class _Page:
    """What the header says of a page, checked."""

    parent: int
    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    first: int
    """Position of its first token."""
    index: int
    """Pages before it."""
    key: bytes
    digest: str
    offset: int
    """Of its rows, in the file."""


def take_pages(
    path: Path, jsonl: str, engine: Engine, pages: SqlitePageStore, *, max_bytes: int
) -> tuple[int, bytes]:
    """Check the pages of a file and store them. Returns how many, and their salt.

    Args:
        path: The file.
        jsonl: Digest of the JSON lines that it must belong to.
        engine: Computes one page again.
        pages: Where they go.
        max_bytes: The largest file that is read.

    Raises:
        BadPages: The file is not what it claims, or not of this model; nothing is stored.
        StoreError: They cannot be stored.
    """
    salt = secrets.token_bytes(32)
    root = root_key(pages.model.fp, salt)
    with _open(path, max_bytes) as file, closing(file):
        found = _header(file, path, jsonl, root, engine, pages)
        if sum(len(page.ids) for page in found) * pages.model.token_bytes > pages.limit_bytes:
            raise BadPages(
                f"{len(found)} pages do not fit the budget of {pages.limit_bytes:,} bytes.",
                hint="Raise kv.disk_max.",
            )
        for page in found:  # all are sound before one is stored
            _expect_numbers(_rows(file, page, pages), page, engine)
        _compute_one(file, found, engine, pages)
        pages.add_root(root, f"import {salt[:4].hex()}")
        images = (_image(file, page, found, root, pages) for page in found)
        while some := [image for _, image in zip(range(COMMIT_PAGES), images, strict=False)]:
            pages.write(some)
    return len(found), salt


def _open(path: Path, max_bytes: int) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadPages(f"{path} cannot be read: {error.strerror}.") from error
    size = path.stat().st_size
    if size > max_bytes:
        file.close()
        raise BadPages(
            f"{path} has {size:,} bytes; the most is {max_bytes:,}.", hint="Raise --max-bytes."
        )
    return file


def _header(
    file: BinaryIO,
    path: Path,
    jsonl: str,
    root: bytes,
    engine: Engine,
    pages: SqlitePageStore,
) -> list[_Page]:
    """Every page that the header names. Nothing is believed: sizes come from the local model."""
    size = path.stat().st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(HEADER_BYTES, size - 8):
        raise BadPages(f"{path} has a header of {length:,} bytes; the most is {HEADER_BYTES:,}.")
    try:
        header = json.loads(file.read(length))
        about: dict[str, Any] = header.pop("__metadata__")
        entries: Any = json.loads(about["pages"])
        tensors = cast("dict[str, Any]", header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadPages(f"{path} is no file of pages.", hint="Export the chat again.") from None
    wanted = {
        "format": (FORMAT, "was written in another format"),
        "jsonl": (jsonl, "belongs to other JSON lines"),
        "identity": (
            canonical_json(pages.model.identity).decode(),
            "is of another model, or of the same in other numbers",
        ),
        "codec": ("exact", "is coded in another way"),
        "page_tokens": (str(pages.model.page_tokens), "has pages of another size"),
    }
    for name, (mine, why) in wanted.items():
        if about.get(name) != mine:
            raise BadPages(f"{path} {why}.", hint="Import it without --trust-kv.")
    if not isinstance(entries, list) or not entries:
        raise BadPages(f"{path} has no pages.")
    rows = cast("list[Any]", entries)
    if len(rows) != len(tensors):
        raise BadPages(f"{path} tells of {len(rows)} pages and has {len(tensors)}.")
    found: list[_Page] = []
    end = 0
    for place, entry in enumerate(rows):
        try:
            page = _page(entry, found, root, engine, pages, 8 + length + end)
            num_bytes = len(page.ids) * pages.model.token_bytes
            mine = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [end, end + num_bytes]}
            if tensors.get(f"page.{place}") != mine:
                raise ValueError("another shape than its ids need")
        except (ValueError, TypeError) as error:
            raise BadPages(f"{path}: page {place}: {error}.") from error
        found.append(page)
        end += num_bytes
    if 8 + length + end != size:
        raise BadPages(f"{path} has {size:,} bytes, and its pages {8 + length + end:,}.")
    return found


def _page(
    entry: Any, found: list[_Page], root: bytes, engine: Engine, pages: SqlitePageStore, offset: int
) -> _Page:
    """One entry of the header. Raises ValueError or TypeError."""
    parent, ids, bits, told = entry
    vocab_size, page_tokens = engine.model.spec.vocab_size, pages.model.page_tokens
    if type(parent) is not int or not -1 <= parent < len(found):
        raise ValueError(f"behind page {str(parent)[:20]}, which is none before it")
    if not isinstance(ids, list) or not 1 <= len(cast("list[Any]", ids)) <= page_tokens:
        raise ValueError(f"no list of 1 to {page_tokens} ids")
    numbers = cast("list[Any]", ids)
    if any(type(token) is not int or not 0 <= token < vocab_size for token in numbers):
        raise ValueError(f"an id outside of 0 to {vocab_size - 1}")
    sampled = unpack_bits(bytes.fromhex(bits), len(numbers))
    before = found[parent] if parent >= 0 else None
    if before is not None and len(before.ids) != page_tokens:
        raise ValueError("behind a page that is not full")
    if not isinstance(told, str) or len(told) != 64:
        raise ValueError("no digest")
    return _Page(
        parent=parent,
        ids=tuple(numbers),
        sampled=sampled,
        first=0 if before is None else before.first + page_tokens,
        index=0 if before is None else before.index + 1,
        key=page_key(root if before is None else before.key, numbers, sampled),
        digest=told,
        offset=offset,
    )


def _rows(file: BinaryIO, page: _Page, pages: SqlitePageStore) -> bytes:
    """The rows of a page, whole and unchanged."""
    size = len(page.ids) * pages.model.token_bytes
    file.seek(page.offset)
    payload = file.read(size)
    if len(payload) != size or digest(payload) != page.digest:
        raise BadPages(f"Page {page.index} of the file is damaged.", hint="Get the file again.")
    return payload


def _expect_numbers(payload: bytes, page: _Page, engine: Engine) -> None:
    """Refuse values that no model computes: NaN, infinity, and what is far too large."""
    pool, rows = engine.pool, len(page.ids)
    (room,) = pool.take()
    try:
        pool.load(room, payload, rows)
        held = [t[:, room, :, :, :rows] for t in pool.tensors if t.dtype.itemsize > 1]
        sound = all(bool((values.float().abs() <= LARGEST).all()) for values in held)
    finally:
        pool.release(room)
    if not sound:  # NaN is not below anything either
        raise BadPages(f"Page {page.index} of the file holds values that no model computes.")


def _compute_one(
    file: BinaryIO, found: list[_Page], engine: Engine, pages: SqlitePageStore
) -> None:
    """Compute one random page again, from the first token on, and compare it bit for bit."""
    room = min(engine.context_limit - 1, engine.pool.num_pages * engine.pool.page_size)
    fits = [page for page in found if page.first + len(page.ids) < room]
    page = secrets.choice(fits or found)
    chain = [page]
    while chain[0].parent >= 0:
        chain.insert(0, found[chain[0].parent])
    tokens = [token for one in chain for token in one.ids]
    sampled = [flag for one in chain for flag in one.sampled]
    seq = engine.add(tokens, sampled, SamplingParams(max_tokens=1))
    # Neither found in the pool nor on disk, and seen by nobody else.
    scratch = PrefixCache(engine.pool)
    try:
        for _ in Prompts(engine.model, engine.pool, scratch, None).fill(seq, PrefillReport()):
            pass
        held = scratch.match([seq.chain.key(page.first, page.first + len(page.ids))])
        room = held[0] if held else seq.table.page(page.index)
        computed = engine.pool.image(room, len(page.ids))
        for room in held:
            engine.pool.release(room)
    finally:
        scratch.clear()
        seq.table.release()
    if computed != _rows(file, page, pages):
        raise BadPages(
            f"Page {page.index} was computed again and is another one: the file does not hold what "
            "its text says.",
            hint="The chats are imported without their pages.",
        )


def _image(
    file: BinaryIO, page: _Page, found: list[_Page], root: bytes, pages: SqlitePageStore
) -> PageImage:
    return PageImage(
        key=page.key,
        parent_key=root if page.parent < 0 else found[page.parent].key,
        chain_index=page.index,
        first_position=page.first,
        token_ids=page.ids,
        sampled=page.sampled,
        origin="step" if all(page.sampled) else "mixed" if any(page.sampled) else "chunk",
        payload=_rows(file, page, pages),
    )
