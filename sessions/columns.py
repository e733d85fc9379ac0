"""What single columns hold, and the checks that SQLite cannot do: JSON, token ids, spans, names.

Knows no table. What a caller passes wrong is a ValueError; what a file holds wrong is a StoreError,
since it is damage.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, cast

from chatkv.errors import StoreError

Spans = tuple[tuple[int, int], ...]
"""Half-open ranges `[start, stop)` of one message's ids: those the model chose."""


def new_id() -> str:
    """128 random bits in base32: 26 characters of a-z and 2-7."""
    return base64.b32encode(secrets.token_bytes(16)).decode("ascii").rstrip("=").lower()


def storable(text: str) -> str:
    """`text` as SQLite can hold it: lone surrogates become U+FFFD, all else stays."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def dump_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """One spelling: sorted keys, no spaces, ASCII.

    Raises:
        ValueError: A number that JSON cannot hold.
        TypeError: A value that is no JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def load_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in a column. Raises StoreError if it is none."""
    value = _load(text, where)
    if not isinstance(value, dict):
        raise damaged(where, "not a JSON object")
    return cast("dict[str, Any]", value)


def load_list(text: str, where: str) -> list[Any]:
    """The JSON list in a column. Raises StoreError if it is none."""
    value = _load(text, where)
    if not isinstance(value, list):
        raise damaged(where, "not a JSON list")
    return cast("list[Any]", value)


def _load(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise damaged(where, str(error)) from error


def damaged(where: str, why: str) -> StoreError:
    """The error of a row that SQLite reads and that makes no sense."""
    return StoreError(
        f"The session store holds something unreadable in {where}: {why}.",
        hint="Nothing was changed. Keep the file, and put a backup in its place if there is one.",
    )


def checked_spans(spans: Sequence[Sequence[int]], count: int) -> Spans:
    """`spans` as tuples. Raises ValueError unless they ascend, part, and lie in `[0, count)`."""
    checked = tuple((start, stop) for start, stop in spans)
    edge = 0
    for start, stop in checked:
        if not edge <= start < stop <= count:
            raise ValueError(f"spans {checked} do not fit {count} ids")
        edge = stop
    return checked


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32, little-endian. Raises ValueError for what is no token id."""
    try:
        packed = array("i", ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"Not a list of token ids: {error}.") from error
    if packed and min(packed) < 0:
        raise ValueError(f"Token id {min(packed)}.")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    """What `pack_ids` packed."""
    packed = array("i")
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)
