"""Names of pages: a hash chain over model, salt, token ids and who chose them.

Knows no tensor and no store. All hashes are BLAKE2b-256 with a `person` tag for each kind, so that
one kind can never pass for another. Integers are little-endian. The formats are final: a change
here is a change of every key on every disk.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import cast

KEY_BYTES = 32


def fingerprint(identity: Mapping[str, object]) -> bytes:
    """The 32 bytes that name a model's numerics: whatever changes the bits of a page.

    Args:
        identity: Strings, numbers, booleans, None, lists and mappings of them, to any depth.

    Raises:
        TypeError: A value or key of another type.
        ValueError: A float that is not finite.
    """
    return _hash(b"chatkv.fp", canonical_json(identity))


def root_key(fp: bytes, salt: bytes) -> bytes:
    """The parent of every first page of one model under one salt."""
    return _hash(b"chatkv.root", _checked(fp), salt)


def page_key(parent: bytes, ids: Sequence[int], sampled: Sequence[bool]) -> bytes:
    """The key of the page that holds `ids` behind `parent`. It covers all ids before it.

    Args:
        parent: Key of the page (or op, or root) before.
        ids: At least one token id, int32.
        sampled: One for each id: true where the model chose it.
    """
    if len(ids) == 0:
        raise ValueError("A page holds at least one token.")
    packed = struct.pack(f"<I{len(ids)}i", len(ids), *ids)
    return _hash(b"chatkv.page", _checked(parent), packed, pack_bits(sampled, len(ids)))


def op_key(parent: bytes, op: Mapping[str, object]) -> bytes:
    """The key of a link that holds no tokens but changes all pages behind it (a forget)."""
    return _hash(b"chatkv.op", _checked(parent), canonical_json(op))


def page_keys(
    root: bytes, ids: Sequence[int], sampled: Sequence[bool], page_tokens: int
) -> list[bytes]:
    """Keys of all pages of `ids`: the full ones in order, then the tail's if ids are left over.

    Args:
        root: Parent of the first page; the key of a page to go on from there.
        ids: Token ids; `keys[i]` names `ids[i * page_tokens : (i + 1) * page_tokens]`.
        sampled: One for each id.
        page_tokens: Slots of a full page.
    """
    if len(sampled) != len(ids):
        raise ValueError(f"{len(sampled)} sampled bits for {len(ids)} ids.")
    keys: list[bytes] = []
    for start in range(0, len(ids), page_tokens):
        stop = start + page_tokens
        root = page_key(root, ids[start:stop], sampled[start:stop])
        keys.append(root)
    return keys


def pack_bits(sampled: Sequence[bool], count: int | None = None) -> bytes:
    """One bit an id, lowest first: bit `i % 8` of byte `i // 8`. Spare bits are clear.

    Args:
        sampled: The bits.
        count: How many there have to be, or None for any number.
    """
    if count is not None and len(sampled) != count:
        raise ValueError(f"{len(sampled)} sampled bits for {count} ids.")
    word = 0
    for index, bit in enumerate(sampled):
        if bit:
            word |= 1 << index
    return word.to_bytes((len(sampled) + 7) // 8, "little")


def unpack_bits(packed: bytes, count: int) -> tuple[bool, ...]:
    """The first `count` bits of what `pack_bits` made.

    Raises:
        ValueError: The length is not that of `count` bits, or a spare bit is set.
    """
    word = int.from_bytes(packed, "little")
    if len(packed) != (count + 7) // 8 or word >> count:
        raise ValueError(f"{len(packed)} bytes are not {count} bits.")
    return tuple(bool(word >> index & 1) for index in range(count))


def common_tokens(
    ids: Sequence[int],
    sampled: Sequence[bool],
    other_ids: Sequence[int],
    other_sampled: Sequence[bool],
) -> int:
    """How many tokens two runs share from their start: same id, chosen by the same side."""
    count = 0
    for mine, other in zip(
        zip(ids, sampled, strict=True), zip(other_ids, other_sampled, strict=True), strict=False
    ):
        if mine != other:
            break
        count += 1
    return count


def canonical_json(value: Mapping[str, object]) -> bytes:
    """The one ASCII spelling of `value`: sorted keys, no spaces, floats as hex strings."""
    return json.dumps(
        _canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True
    ).encode("ascii")


def _canonical(value: object) -> object:
    """`value` with floats as hex strings; raises for what has no one spelling."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if value - value != 0:
                raise ValueError(f"{value} has no place in an identity.")
            return value.hex()
        case list() | tuple():
            return [_canonical(item) for item in cast("Sequence[object]", value)]
        case Mapping():
            items = cast("Mapping[object, object]", value).items()
            for key, _ in items:
                if not isinstance(key, str):
                    raise TypeError(f"Key {key!r} of an identity is not a string.")
            return {key: _canonical(item) for key, item in items}
        case _:
            raise TypeError(f"{type(value).__name__} has no place in an identity.")


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"A key is {KEY_BYTES} bytes, not {len(key)}.")
    return key


def _hash(person: bytes, *parts: bytes) -> bytes:
    digest = blake2b(digest_size=KEY_BYTES, person=person)
    for part in parts:
        digest.update(part)
    return digest.digest()
