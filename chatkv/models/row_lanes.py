"""Turning a row into int16 codes, as LLVM vectors: numba leaves these short loops unvectorised.

Knows addresses and blocks of 32 floats. `layers.quantise_plain` is the plain form: same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from chatkv.attention.jit import intrinsic
from chatkv.models.lanes import FLOATS, INTS, call_llvm, ints, splat

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_SHORTS = ir.VectorType(_I16, 16)

MAX_CODE = 32767.0
SMALLEST = 1e-30
"""Blocks whose largest value is not above it become zeros: its inverse must not overflow."""


@intrinsic
def quantise_blocks(_typing: Any, values: Any, codes: Any, scales: Any, count: Any) -> Any:
    """Quantise `count` blocks of 32 float32 at the address `values`.

    Args:
        codes: Address of the int16 codes, rounded to nearest even.
        scales: Address of two float32 a block: largest magnitude / 32767, and that times the sum
            of the codes. Not a number, when a value of the block is not.
    """

    def codegen(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        values, codes, scales, count = args
        source = b.inttoptr(values, _F32.as_pointer())
        coded = b.inttoptr(codes, _I16.as_pointer())
        scaled = b.inttoptr(scales, _F32.as_pointer())
        with cgutils.for_range(b, count) as loop:
            at = [b.add(b.mul(loop.index, _I64(32)), _I64(half)) for half in (0, 16)]
            halves = [
                b.load(b.bitcast(b.gep(source, [i]), FLOATS.as_pointer()), align=4) for i in at
            ]
            # As integers, magnitudes sort like floats and NaN comes out on top: it is not hidden.
            sizes = [b.and_(b.bitcast(half, INTS), ints(0x7FFFFFFF)) for half in halves]
            larger = b.select(b.icmp_signed(">", *sizes), *sizes)
            top = call_llvm(b, "llvm.vector.reduce.smax.v16i32", _I32, larger)
            largest = b.bitcast(top, _F32)
            scale = b.fdiv(largest, _F32(MAX_CODE))
            inverse = b.select(
                b.fcmp_ordered(">", largest, _F32(SMALLEST)),
                b.fdiv(_F32(MAX_CODE), largest),
                _F32(0.0),
            )
            spread = splat(b, inverse, FLOATS)
            whole = []
            for i, half in zip(at, halves, strict=True):
                rounded = call_llvm(b, "llvm.rint.v16f32", FLOATS, b.fmul(half, spread))
                whole.append(b.fptosi(rounded, INTS))
                place = b.bitcast(b.gep(coded, [i]), _SHORTS.as_pointer())
                b.store(b.trunc(whole[-1], _SHORTS), place, align=2)
            total = call_llvm(b, "llvm.vector.reduce.add.v16i32", _I32, b.add(*whole))
            place = b.gep(scaled, [b.mul(loop.index, _I64(2))])
            b.store(scale, place)
            b.store(b.fmul(scale, b.sitofp(total, _F32)), b.gep(place, [_I64(1)]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
