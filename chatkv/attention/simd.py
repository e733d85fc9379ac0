"""Vector routines that numba cannot be trusted to vectorise, written as LLVM vectors of 16 floats.

Knows arrays and offsets. A sum is added in a fixed order; LLVM fits the 16 lanes to the machine.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from chatkv.attention.jit import intrinsic

LANES = 16
LOWEST = -1e30
INDEX = ir.IntType(64)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)
WORDS = ir.VectorType(ir.IntType(32), LANES)


@intrinsic(prefer_literal=True)
def add_weighted_rows(
    _context: Any,
    num_outs: Any,
    num_vectors: Any,
    weights: Any,
    weight_at: Any,
    weight_step: Any,
    rows: Any,
    shift: Any,
    offsets: Any,
    offset_at: Any,
    count: Any,
    outs: Any,
    out_at: Any,
    out_step: Any,
) -> Any:
    """outs[o, :] += sum over i < count of weights[o, i] * rows[i, :], one term after another.

    For o < num_outs and num_vectors vectors of 16 floats; both are literals, so that all sums stay
    in registers. A term has one rounding. Arrays have one dimension:

        weights[o, i] is weights[weight_at + o * weight_step + i]   float32
        rows[i, :]    is rows[offsets[offset_at + i] + shift:]      float32, or uint16 for bfloat16
        outs[o, :]    is outs[out_at + o * out_step:]               float32
    """
    n = types.int64
    signature = types.void(num_outs, num_vectors, weights, n, n, rows, n, offsets, n, n, outs, n, n)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight, row, offset, out = (
            data_of(context, builder, signature, args, i) for i in (2, 5, 7, 10)
        )
        weight_at, weight_step, shift, offset_at = (args[i] for i in (3, 4, 6, 8))
        count, out_at, out_step = (args[i] for i in (9, 11, 12))
        tall, wide = num_outs.literal_value, num_vectors.literal_value
        cells = [(o, j) for o in range(tall) for j in range(wide)]
        sums = {cell: cgutils.alloca_once(builder, FLOATS) for cell in cells}
        places = {}
        for o, j in cells:
            at = sum_terms(builder, out_at, times(builder, out_step, o), INDEX(j * LANES))
            places[o, j] = place_of(builder, out, at, FLOATS)
            builder.store(builder.load(places[o, j], align=4), sums[o, j])
        with cgutils.for_range(builder, count) as loop:
            first = builder.load(builder.gep(offset, [builder.add(offset_at, loop.index)]))
            terms = [
                _load_row(builder, row, sum_terms(builder, first, shift, INDEX(j * LANES)))
                for j in range(wide)
            ]
            for o in range(tall):
                at = sum_terms(builder, weight_at, times(builder, weight_step, o), loop.index)
                factor = splat(builder, builder.load(builder.gep(weight, [at])))
                for j, term in enumerate(terms):
                    total = _fma(builder, factor, term, builder.load(sums[o, j]))
                    builder.store(total, sums[o, j])
        for cell in cells:
            builder.store(builder.load(sums[cell]), places[cell], align=4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def transpose_bf16(
    _context: Any, rows: Any, row_at: Any, row_step: Any, columns: Any, column_at: Any, step: Any
) -> Any:
    """columns[c, r] = rows[r, c] for 16 rows of 32 bfloat16, widened to float32.

    rows[r, c]    is rows[row_at + r * row_step + c]          uint16
    columns[c, r] is columns[column_at + c * step + r]        float32
    """
    n = types.int64
    signature = types.void(rows, n, n, columns, n, n)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, column = (data_of(context, builder, signature, args, i) for i in (0, 3))
        _, row_at, row_step, _, column_at, step = args
        words = []
        for r in range(LANES):
            at = builder.add(row_at, times(builder, row_step, r))
            words.append(builder.load(place_of(builder, row, at, WORDS), align=2))
        # A word holds two channels: the words are transposed first and taken apart after.
        transpose(builder, words, (8, 4, 2, 1))
        for r, word in enumerate(words):
            pair = (
                builder.shl(word, WORDS([16] * LANES)),
                builder.and_(word, WORDS([0xFFFF0000] * LANES)),
            )
            for i, bits in enumerate(pair):
                at = builder.add(column_at, times(builder, step, 2 * r + i))
                place = place_of(builder, column, at, FLOATS)
                builder.store(builder.bitcast(bits, FLOATS), place, align=4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def largest_of(_context: Any, values: Any, count: Any) -> Any:
    """The largest of `count` float32, a multiple of 64; -1e30 if all are below."""

    def larger(builder: Any, a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return _fold(values, larger, LOWEST)


@intrinsic
def sum_of(_context: Any, values: Any, count: Any) -> Any:
    """The sum of `count` float32, a multiple of 64: 64 sums side by side, then half onto half."""
    return _fold(values, lambda builder, a, b: builder.fadd(a, b), 0.0)


def _fold(values: Any, combine: Any, neutral: float) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = data_of(context, builder, signature, args, 0)
        totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(4)]
        for total in totals:
            builder.store(FLOATS([neutral] * LANES), total)
        with cgutils.for_range(builder, builder.udiv(args[1], INDEX(4 * LANES))) as loop:
            for i, total in enumerate(totals):
                at = builder.add(times(builder, loop.index, 4 * LANES), INDEX(i * LANES))
                term = builder.load(place_of(builder, value, at, FLOATS), align=4)
                builder.store(combine(builder, builder.load(total), term), total)
        a, b, c, d = (builder.load(total) for total in totals)
        total = combine(builder, combine(builder, a, c), combine(builder, b, d))
        for distance in (8, 4, 2, 1):
            turned = WORDS([lane ^ distance for lane in range(LANES)])
            total = combine(builder, total, builder.shuffle_vector(total, total, turned))
        return builder.extract_element(total, ir.IntType(32)(0))

    return types.float32(values, types.int64), codegen


@intrinsic
def prefetch(_context: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of array[at]; changes nothing but time."""
    signature = types.void(array, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        base = data_of(context, builder, signature, args, 0)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read, into the second-level cache, as data.
        place = builder.bitcast(builder.gep(base, [args[1]]), byte)
        builder.call(function, [place, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return signature, codegen


def transpose(builder: Any, words: list[Any], distances: tuple[int, ...]) -> None:
    """Exchange row and lane where they differ in these bits: all four transpose 16 rows of 16."""
    for distance in distances:
        stays = [lane & distance == 0 for lane in range(LANES)]
        low = [i if stays[i] else i - distance + LANES for i in range(LANES)]
        high = [i + distance if stays[i] else i + LANES for i in range(LANES)]
        for r in range(len(words)):
            if stays[r]:
                a, b = words[r], words[r + distance]
                words[r] = builder.shuffle_vector(a, b, WORDS(low))
                words[r + distance] = builder.shuffle_vector(a, b, WORDS(high))


def data_of(context: Any, builder: Any, signature: Any, args: Any, i: int) -> Any:
    return context.make_array(signature.args[i])(context, builder, args[i]).data


def place_of(builder: Any, base: Any, at: Any, vector: Any) -> Any:
    return builder.bitcast(builder.gep(base, [at]), vector.as_pointer())


def times(builder: Any, step: Any, i: int) -> Any:
    return builder.mul(step, INDEX(i))


def sum_terms(builder: Any, *terms: Any) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = builder.add(total, term)
    return total


def _load_row(builder: Any, base: Any, at: Any) -> Any:
    if base.type.pointee == ir.FloatType():
        return builder.load(place_of(builder, base, at, FLOATS), align=4)
    halves = builder.load(place_of(builder, base, at, HALVES), align=2)
    words = builder.shl(builder.zext(halves, WORDS), WORDS([16] * LANES))
    return builder.bitcast(words, FLOATS)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def splat(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(FLOATS, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, nothing, WORDS([0] * LANES))
