"""Keys are a format: the literals here were made by hashlib alone and never change."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.kv.keys import (
    canonical_json,
    common_tokens,
    fingerprint,
    op_key,
    pack_bits,
    page_key,
    page_keys,
    root_key,
    unpack_bits,
)

IDENTITY = {"theta": 100000.0, "name": "café", "heads": (3, None, True)}
FP = "7cd7a069ec68f9071da4fecde4b26cff22da5f0e6d209d5d95b18a35209bff59"
ROOT = "c186a3fb501255afb6526f0391c5cc76871616083c3cb8e5ac5b6d1ba604b362"
PAGE = "161c447e7fac24725dc18d1cd2d5cf1b679a77688d820508f7e89d50c1a4f50d"
NEXT = "b5695126f75869de9296946bf6cc1b02d3635d8d9a864f170067cd61adc42558"
OP = "4999557432be9ce9d6c9c23876e27504f18e31aafce1c8e4e3459f64ce59d908"
NINE = (True, *[False] * 7, True)

tokens = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=40)


def test_golden_fingerprint_and_root():
    assert canonical_json(IDENTITY) == (
        b'{"heads":[3,null,true],"name":"caf\\u00e9","theta":"0x1.86a0000000000p+16"}'
    )
    assert fingerprint(IDENTITY).hex() == FP
    assert root_key(bytes.fromhex(FP), b"salt").hex() == ROOT


def test_golden_pages_and_op():
    assert page_key(bytes.fromhex(ROOT), [1, 2, 49151], [False, True, True]).hex() == PAGE
    assert page_key(bytes.fromhex(PAGE), range(9), NINE).hex() == NEXT
    assert op_key(bytes.fromhex(NEXT), {"kind": "window", "drop": [2, 5]}).hex() == OP


def test_golden_bits():
    assert pack_bits([]) == b""
    assert pack_bits([True, False, False, True]) == b"\x09"
    assert pack_bits(NINE) == b"\x01\x01"


def test_order_of_fields_does_not_matter_and_content_does():
    assert fingerprint(dict(reversed(IDENTITY.items()))) == fingerprint(IDENTITY)
    assert fingerprint({**IDENTITY, "theta": 100000.00000000001}) != fingerprint(IDENTITY)
    assert fingerprint({**IDENTITY, "theta": 100000}) != fingerprint(IDENTITY)


@pytest.mark.parametrize("value", [b"raw", {1, 2}, object()], ids=["bytes", "set", "object"])
def test_identity_refuses_what_has_no_one_spelling(value: object):
    with pytest.raises(TypeError, match="identity"):
        fingerprint({"deep": [{"value": value}]})


def test_identity_refuses_nan_and_other_keys():
    with pytest.raises(ValueError, match="nan"):
        fingerprint({"value": float("nan")})
    with pytest.raises(ValueError, match="inf"):
        fingerprint({"value": float("-inf")})
    with pytest.raises(TypeError, match="Key 3"):
        fingerprint({"value": {3: "three"}})


def test_wrong_sizes_are_refused():
    parent = bytes(32)
    with pytest.raises(ValueError, match="at least one"):
        page_key(parent, [], [])
    with pytest.raises(ValueError, match="31"):
        page_key(parent[1:], [1], [True])
    with pytest.raises(ValueError, match="1 sampled bits for 2 ids"):
        page_key(parent, [1, 2], [True])
    with pytest.raises(ValueError, match="3 sampled bits for 2 ids"):
        page_keys(parent, [1, 2], [True] * 3, 1)
    with pytest.raises(ValueError, match="33"):
        root_key(bytes(33), b"")


def test_same_salt_hits_and_other_salt_misses():
    fp, ids, sampled = fingerprint(IDENTITY), list(range(20)), [False] * 20
    keys = page_keys(root_key(fp, b"one"), ids, sampled, 8)
    assert page_keys(root_key(fp, b"one"), ids, sampled, 8) == keys
    assert not set(keys) & set(page_keys(root_key(fp, b"two"), ids, sampled, 8))
    other = fingerprint({**IDENTITY, "name": "cafe"})
    assert not set(keys) & set(page_keys(root_key(other, b"one"), ids, sampled, 8))


@given(tokens, st.integers(1, 9))
def test_keys_are_a_chain(run: list[tuple[int, bool]], size: int):
    ids, sampled = [token for token, _ in run], [bit for _, bit in run]
    keys = page_keys(bytes(32), ids, sampled, size)
    assert len(keys) == -(-len(ids) // size)
    assert len(set(keys)) == len(keys)
    half = len(keys) // 2 * size
    front = page_keys(bytes(32), ids[:half], sampled[:half], size)
    back = page_keys((bytes(32), *front)[-1], ids[half:], sampled[half:], size)
    assert front + back == keys


@given(tokens.filter(bool), st.data())
def test_one_change_changes_its_page_and_all_behind(
    run: list[tuple[int, bool]], data: st.DataObject
):
    size, where = 4, data.draw(st.integers(0, len(run) - 1))
    ids, sampled = [token for token, _ in run], [bit for _, bit in run]
    keys = page_keys(bytes(32), ids, sampled, size)
    if data.draw(st.booleans()):
        ids[where] ^= 1
    else:
        sampled[where] = not sampled[where]
    changed = page_keys(bytes(32), ids, sampled, size)
    same = [a == b for a, b in zip(keys, changed, strict=True)]
    assert same == [index < where // size for index in range(len(keys))]


def test_a_tail_is_not_its_full_page_nor_padded_with_zero():
    parent = bytes(32)
    keys = {page_key(parent, [0] * n, [False] * n) for n in range(1, 18)}
    assert len(keys) == 17


@given(st.lists(st.booleans(), max_size=40))
def test_bits_round_trip(bits: list[bool]):
    assert unpack_bits(pack_bits(bits), len(bits)) == tuple(bits)


def test_bits_that_cannot_be_right():
    for packed, count in [(b"\x01", 0), (b"\x02", 1), (b"\x01\x00", 8), (b"", 1)]:
        with pytest.raises(ValueError, match="are not"):
            unpack_bits(packed, count)


def test_common_tokens_compares_ids_and_bits():
    ids, sampled = (1, 2, 3), (False, True, True)
    assert common_tokens(ids, sampled, ids, sampled) == 3
    assert common_tokens(ids, sampled, (1, 2), (False, True)) == 2
    assert common_tokens(ids, sampled, (1, 2, 4), sampled) == 2
    assert common_tokens(ids, sampled, ids, (False, False, True)) == 1
    assert common_tokens(ids, sampled, (), ()) == 0


def test_keys_and_records_load_no_tensors():
    code = (
        "import sys, chatkv.kv.keys, chatkv.kv.store; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()", done.stderr
