"""Changes valid files: bits and bytes of any, values and lines of JSON."""

from __future__ import annotations

import json
import random
from typing import Any

from data.escape_corpus import CORPUS

PIECES = [b"[", b"{", b"}", b'"', b"\\", b"\\ud800", b"1e999", b"NaN", b"null", b"-1", b"9" * 30]
VALUES: list[Any] = [
    *(None, True, -1, 0, 1.5, 1e308, 2**31, 2**53, 2**63, 10**40),
    *("", " ", "\0", "../../x", "/tmp/x.gguf", "NaN", "x" * 70_000, "\ud83d", "1", "@last"),
    *([], [[]], {}, {"a": {}}, [None], [2**40], [[0, 1]], [[1, 0]], [[0, 2**40]]),
    *(text for text in CORPUS.values() if len(text) < 300),
]


def mutated(raw: bytes, dice: random.Random) -> bytes:
    """`raw` with one to four changes, as bytes or, if it is JSON, as values."""
    for _ in range(dice.randint(1, 4)):
        raw = (_of_lines if dice.random() < 0.6 else of_bytes)(raw, dice)
    return raw


def of_bytes(data: bytes, dice: random.Random) -> bytes:
    """One change that knows no format."""
    raw = bytearray(data or b" ")
    place = dice.randrange(len(raw))
    match dice.randrange(6):
        case 0:
            raw[place] ^= 1 << dice.randrange(8)
        case 1:
            del raw[place : place + dice.randint(1, 40)]
        case 2:
            raw[place:place] = raw[: dice.randrange(60)]
        case 3:
            raw[place:place] = dice.choice(PIECES)
        case 4:
            del raw[place:]
        case _:
            raw[place] = dice.randrange(256)
    return bytes(raw)


def _of_lines(data: bytes, dice: random.Random) -> bytes:
    lines = data.split(b"\n")
    place = dice.randrange(len(lines))
    match dice.randrange(8):
        case 0:
            del lines[place]
        case 1:
            lines.insert(dice.randrange(len(lines) + 1), lines[place])
        case 2:
            other = dice.randrange(len(lines))
            lines[place], lines[other] = lines[other], lines[place]
        case _:
            lines[place] = _of_values(lines[place], dice)
    return b"\n".join(lines)


def _of_values(line: bytes, dice: random.Random) -> bytes:
    """One value of a line is another one, is gone, or is there twice."""
    try:
        value = json.loads(line)
    except ValueError:
        return line
    parents = [node for node in _nodes(value) if node]
    if not parents:
        return line
    parent = dice.choice(parents)
    key = dice.choice(list(parent)) if isinstance(parent, dict) else dice.randrange(len(parent))
    match dice.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, list):
            parent.append(parent[key])
        case 2 if isinstance(parent, dict):
            parent[f"{key}x"] = parent.pop(key)
        case 3:
            other = dice.choice(parents)  # never a part of itself: that would not be JSON
            parent[key] = json.loads(json.dumps(dice.choice(list(_values(other)))))
        case _:
            parent[key] = dice.choice(VALUES)
    return json.dumps(value, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")


def _values(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


def _nodes(value: Any) -> list[Any]:
    """All lists and objects in it."""
    found, left = [], [value]
    while left:
        node = left.pop()
        if isinstance(node, dict | list):
            found.append(node)
            left += _values(node)
    return found


def of_pages(data: bytes, dice: random.Random, page: int = 65536) -> bytes:
    """A database file with bits flipped, pages swapped, or parts gone."""
    raw = bytearray(data)
    pages = max(1, len(raw) // page)
    for _ in range(dice.choice([1, 1, 2, 20])):
        start = dice.randrange(pages) * page
        # Where SQLite looks first: the head of a page, its cells, the end of its last cell.
        near = [dice.randrange(120), dice.randrange(page), page - 1 - dice.randrange(200)]
        place = min(len(raw) - 1, start + dice.choice(near))
        match dice.randrange(8):
            case 0 | 1 | 2:
                raw[place] ^= 1 << dice.randrange(8)
            case 3:
                raw[place : place + 4] = dice.randbytes(4)
            case 4:
                end = min(len(raw), place + dice.randrange(1, 300))
                raw[place:end] = bytes(end - place)
            case 5:
                other = dice.randrange(pages) * page
                raw[start : start + page], raw[other : other + page] = (
                    raw[other : other + page],
                    raw[start : start + page],
                )
            case 6:
                raw[place] = dice.choice([0, 1, 2, 5, 10, 13, 255])
            case _ if dice.random() < 0.1:
                del raw[place:]
                raw = raw or bytearray(b"x")
                pages = max(1, len(raw) // page)
            case _:
                raw[place] = dice.randrange(256)
    return bytes(raw)
