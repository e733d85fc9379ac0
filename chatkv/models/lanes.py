"""Sixteen outputs at a time: the inner kernels of the linear layers, as LLVM vectors.

Knows the tile format of `packing.py` and how this processor multiplies 16-bit integers. Knows no
model and no threads.

A tile is 16 outputs of a weight matrix; its weights lie in groups of 32 inputs, each with its
scales behind it. A row (the activations of one token) comes as int16 codes with one float scale a
group. For each group the products of codes are added as integers, which is exact in any order; then
`scale * sum` is added in float32 with fused multiply-adds, groups in ascending order. So the bits
of an output depend on its own row and weights only: not on how many rows share a call, nor on the
processor's vector width.
"""

from __future__ import annotations

import itertools
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from chatkv.models.packing import Q4_GROUP_BYTES, Q8_GROUP_BYTES

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
INTS, _SHORTS = ir.VectorType(_I32, 16), ir.VectorType(_I16, 32)
FLOATS, _HALVES = ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.HalfType(), 16)
_BYTES = ir.VectorType(_I8, 32)


def _host_dot() -> str:
    """The best way this processor has to add products of int16 pairs to int32 lanes."""
    features = llvm.get_host_cpu_features()
    for name, needs in (("vnni", "avx512vnni"), ("avx512", "avx512bw"), ("avx2", "avx2")):
        if features.get(needs):
            return name
    return "plain"


HOST_DOT = _host_dot()
TILES = 2 if HOST_DOT in ("vnni", "avx512") else 1
"""Tiles that are multiplied side by side: each value of a row is loaded once for both, and a load
of a whole vector takes as long as two products. With 16 vectors only, their sums have no room."""
AHEAD = 12
"""Groups to prefetch: with several rows the processor does not look that far by itself."""


def ints(value: int) -> ir.Constant:
    return ir.Constant(INTS, [value] * 16)


def call_llvm(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call_llvm(builder, "llvm.fma.v16f32", FLOATS, a, b, c)


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ints(0))


def _dot(builder: Any, way: str, total: Any, w: Any, a: Any) -> Any:
    """total[i] + w[i].low * a[i].low + w[i].high * a[i].high, all int32, halves int16."""
    if way == "vnni":
        return call_llvm(builder, "llvm.x86.avx512.vpdpwssd.512", INTS, total, w, a)
    if way == "avx512":
        shorts = [builder.bitcast(x, _SHORTS) for x in (w, a)]
        pairs = call_llvm(builder, "llvm.x86.avx512.pmaddw.d.512", INTS, *shorts)
        return builder.add(total, pairs)
    if way == "avx2":
        half = ir.VectorType(_I32, 8)
        sums = []
        for start in (0, 8):
            pick = ir.Constant(half, list(range(start, start + 8)))
            parts = [builder.shuffle_vector(x, x, pick) for x in (w, a)]
            parts = [builder.bitcast(x, ir.VectorType(_I16, 16)) for x in parts]
            sums.append(call_llvm(builder, "llvm.x86.avx2.pmadd.wd", half, *parts))
        pairs = builder.shuffle_vector(*sums, ir.Constant(INTS, list(range(16))))
        return builder.add(total, pairs)
    by = ints(16)
    low = [builder.ashr(builder.shl(x, by), by) for x in (w, a)]
    high = [builder.ashr(x, by) for x in (w, a)]
    return builder.add(total, builder.add(builder.mul(*low), builder.mul(*high)))


class _Group:
    """Code for one group of a tile: weights as int16 pairs, four vectors at a time, and scales."""

    def __init__(self, builder: Any, base: Any) -> None:
        self.builder, self.base = builder, base

    def load(self, offset: int, kind: Any) -> Any:
        place = self.builder.gep(self.base, [_I64(offset)])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()), align=32)

    def prefetch(self, size: int, more: Any) -> None:
        """Ask for the bytes that will be needed in AHEAD groups, which lie `more` bytes further
        where they are of the next tiles; past the end it does nothing."""
        first = size * AHEAD // 64 * 64
        base = self.builder.gep(self.base, [more])
        for offset in range(first, first + size, 64):
            place = self.builder.gep(base, [_I64(offset)])
            options = [_I32(0), _I32(3), _I32(1)]  # to read, into every cache level, data
            call_llvm(self.builder, "llvm.prefetch.p0i8", ir.VoidType(), place, *options)

    def scale(self, offset: int) -> Any:
        return self.builder.fpext(self.load(offset, _HALVES), FLOATS)

    def q4(self, quarter: int) -> list[Any]:
        """Pairs 4 * quarter on, four of them: nibble i of a lane with its nibble i + 4."""
        packed = self.load(64 * quarter, INTS)
        moved = [self.builder.lshr(packed, ints(4 * i)) if i else packed for i in range(4)]
        return [self.builder.and_(x, ints(0x000F000F)) for x in moved]

    def q8(self, quarter: int) -> list[Any]:
        places = range(128 * quarter, 128 * quarter + 128, 32)
        wide = [self.builder.sext(self.load(p, _BYTES), _SHORTS) for p in places]
        return [self.builder.bitcast(x, INTS) for x in wide]


def tile_kernel(kind: str, rows: int, tiles: int = 1, way: str = HOST_DOT) -> Any:
    """An intrinsic: `tiles` tiles of outputs side by side, for `rows` rows; for numba code.

    Args:
        kind: `q4` (codes 0..15, scale and minimum) or `q8` (codes -128..127, scale).
        rows: How many rows the code is unrolled for.
        tiles: And for how many tiles.
        way: How products are added: `vnni`, `avx512`, `avx2`, `plain`. All give the same bits.

    The intrinsic's arguments, all int64; the first, third, fourth and fifth are addresses:
        weights: Of the first tile, 32-byte aligned.
        groups: G.
        codes: int16 [rows, 32 G].
        scales: float32 [rows, G, 2]: scale, and scale * sum of the group's codes.
        out: float32, of the first tile's first output in the first row.
        width: Floats between rows of out.
        add: 1 adds to what `out` holds, 0 replaces it.
    """
    size = Q4_GROUP_BYTES if kind == "q4" else Q8_GROUP_BYTES
    # Without other rows to fill the pipeline, integer sums are kept in several registers.
    partial = max(1, 4 // (rows * tiles))

    @intrinsic
    def tile(
        _typing: Any,
        weights: Any,
        groups: Any,
        codes: Any,
        scales: Any,
        out: Any,
        width: Any,
        add: Any,
    ) -> Any:
        def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            weights, groups, codes, scales, out, width, add = args
            bytes_, shorts, floats = (t.as_pointer() for t in (_I8, _I16, ir.FloatType()))
            zeros = ir.Constant(FLOATS, [0.0] * 16)
            sums = [[cgutils.alloca_once(b, FLOATS) for _ in range(tiles)] for _ in range(rows)]
            for place in itertools.chain(*sums):
                b.store(zeros, place)
            steps = [b.mul(groups, _I64(r)) for r in range(rows)]
            tile_bytes = b.mul(groups, _I64(size))
            starts = [
                b.gep(b.inttoptr(weights, bytes_), [b.mul(tile_bytes, _I64(t))])
                for t in range(tiles)
            ]
            others = b.mul(tile_bytes, _I64(tiles - 1))
            code_rows = [b.gep(b.inttoptr(codes, shorts), [b.mul(n, _I64(32))]) for n in steps]
            scale_rows = [b.gep(b.inttoptr(scales, floats), [b.mul(n, _I64(2))]) for n in steps]
            with cgutils.for_range(b, groups) as loop:
                offset = b.mul(loop.index, _I64(size))
                parts = [_Group(b, b.gep(start, [offset])) for start in starts]
                last = b.icmp_signed(">=", b.add(loop.index, _I64(AHEAD)), groups)
                for group in parts:
                    group.prefetch(size, b.select(last, others, _I64(0)))
                at = b.mul(loop.index, _I64(32))
                pairs = [b.bitcast(b.gep(x, [at]), _I32.as_pointer()) for x in code_rows]
                totals = [[[ints(0)] * partial for _ in range(tiles)] for _ in range(rows)]
                for quarter in range(4):
                    vectors = [g.q4(quarter) if kind == "q4" else g.q8(quarter) for g in parts]
                    for pair, total in zip(pairs, totals, strict=True):
                        for i in range(4):
                            value = b.load(b.gep(pair, [_I64(4 * quarter + i)]))
                            spread, to = splat(b, value, INTS), i % partial
                            for own, sides in zip(total, vectors, strict=True):
                                own[to] = _dot(b, way, own[to], sides[i], spread)
                scale = [group.scale(size - (64 if kind == "q4" else 32)) for group in parts]
                least = [group.scale(size - 32) for group in parts] if kind == "q4" else None
                for total, scale_row, places in zip(totals, scale_rows, sums, strict=True):
                    first = b.gep(scale_row, [b.mul(loop.index, _I64(2))])
                    row_scale = splat(b, b.load(first), FLOATS)
                    code_sum = splat(b, b.load(b.gep(first, [_I64(1)])), FLOATS)
                    for t, place in enumerate(places):
                        factor = b.fmul(scale[t], row_scale)
                        whole = total[t][0]
                        for more in total[t][1:]:
                            whole = b.add(whole, more)
                        value = _fma(b, b.sitofp(whole, FLOATS), factor, b.load(place))
                        if least is not None:
                            value = _fma(b, least[t], code_sum, value)
                        b.store(value, place)
            adds = b.icmp_signed("!=", add, _I64(0))
            for r, t in itertools.product(range(rows), range(tiles)):
                to = b.gep(b.inttoptr(out, floats), [b.add(b.mul(width, _I64(r)), _I64(16 * t))])
                to = b.bitcast(to, FLOATS.as_pointer())
                value = b.load(sums[r][t])
                with b.if_else(adds) as (then, otherwise):
                    with then:
                        b.store(b.fadd(b.load(to, align=4), value), to, align=4)
                    with otherwise:
                        b.store(value, to, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


@intrinsic
def call_address(
    _typing: Any,
    function: Any,
    weights: Any,
    tiles: Any,
    groups: Any,
    codes: Any,
    scales: Any,
    rows: Any,
    out: Any,
    width: Any,
    add: Any,
) -> Any:
    """Call a compiled function by its address (int64) with nine int64 arguments.

    Keeps the tiles' code in one place: numba would compile a copy into every caller.
    """

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 9)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen
