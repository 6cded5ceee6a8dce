"""Vectors of float32 and bare memory for functions that numba compiles.

numba vectorises loops where it can prove that arrays do not overlap, which in a product of matrices it cannot. Here a
kernel says itself what stays in registers: a `vector` is `LANES` floats, and LLVM makes of it what the processor has
(one AVX register, two of NEON). Addresses are plain integers in bytes.

The functions below have no bodies in Python: they are operations that numba's `@njit` functions call.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from pallas_kernels.cpu.units import FLOAT, LANES

#: `njit` without Python's checks for division by zero, which can raise nothing here.
compiled = njit(error_model="numpy")
#: The same, for large functions that are called at one place: numba would optimise them once more for their caller.
inlined = njit(error_model="numpy", inline="always")


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = _VectorType()

_F32, _I32, _WORD = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any):
        super().__init__(manager, numba_type, _FLOATS)


def operation(result: Any, *arguments: Any) -> Callable[[Callable], Callable]:
    """Makes an operation of a function that emits its LLVM instructions: (builder, *values) -> value or None."""

    def decorate(emit: Callable) -> Callable:
        def generate(context, builder, signature, values):
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        def typed(typing, *given):
            return result(*arguments), generate

        typed.__name__ = emit.__name__
        typed.__doc__ = emit.__doc__
        # numba looks at the signature, and would take `*given` for one tuple.
        names = ["typing", *(f"a{i}" for i in range(len(arguments)))]
        vars(typed)["__signature__"] = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names])
        return intrinsic(typed)

    return decorate


def _at(builder, address, llvm_type):
    return builder.inttoptr(address, llvm_type.as_pointer())


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * LANES)


def _shuffle(builder, a, b, lanes):
    """Lanes of `a`, and from `LANES` on of `b`."""
    return builder.shuffle_vector(a, b, ir.Constant(_INTS, lanes))


def _call(builder, name: str, *values):
    """One of LLVM's own functions on vectors."""
    of_type = ir.FunctionType(_FLOATS, [_FLOATS] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, of_type, f"llvm.{name}.v{LANES}f32"), values)


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _across(builder, combine: Callable, value):
    """One float from all lanes: halves are combined until one is left."""
    width = LANES // 2
    while width:
        turned = _shuffle(builder, value, value, [(lane + width) % LANES for lane in range(LANES)])
        value = combine(value, turned)
        width //= 2
    return builder.extract_element(value, _I32(0))


# -- memory


@operation(vector, types.intp)
def load(builder, address):
    """The vector at `address`."""
    return builder.load(_at(builder, address, _FLOATS), align=FLOAT)


@operation(types.void, types.intp, vector)
def store(builder, address, value):
    """Puts a vector at `address`."""
    builder.store(value, _at(builder, address, _FLOATS), align=FLOAT)


@operation(types.float32, types.intp)
def load_float(builder, address):
    """The float32 at `address`."""
    return builder.load(_at(builder, address, _F32))


@operation(types.void, types.intp, types.float32)
def store_float(builder, address, value):
    """Puts a float32 at `address`."""
    builder.store(value, _at(builder, address, _F32))


@operation(types.intp, types.intp)
def load_int32(builder, address):
    """The int32 at `address`."""
    return builder.sext(builder.load(_at(builder, address, _I32)), _WORD)


@operation(types.intp, types.intp)
def load_word(builder, address):
    """The pointer or int64 at `address`."""
    return builder.load(_at(builder, address, _WORD))


@operation(types.void, types.intp, types.intp)
def store_word(builder, address, value):
    """Puts a pointer or an int64 at `address`."""
    builder.store(value, _at(builder, address, _WORD))


@operation(types.intp, types.intp, types.intp)
def fetch_add(builder, address, value):
    """Adds to the int64 at `address`, atomically, and returns what it was."""
    return builder.atomic_rmw("add", _at(builder, address, _WORD), value, "seq_cst")


# -- arithmetic


@operation(vector, types.float32)
def splat(builder, value):
    """`value` in every lane."""
    empty = ir.Constant(_FLOATS, ir.Undefined)
    return _shuffle(builder, builder.insert_element(empty, value, _I32(0)), empty, [0] * LANES)


@operation(vector, vector, vector)
def add(builder, a, b):
    """`a + b`."""
    return builder.fadd(a, b)


@operation(vector, vector, vector)
def sub(builder, a, b):
    """`a - b`."""
    return builder.fsub(a, b)


@operation(vector, vector, vector)
def mul(builder, a, b):
    """`a * b`."""
    return builder.fmul(a, b)


@operation(vector, vector, vector, vector)
def fma(builder, a, b, c):
    """`a * b + c`, in one rounding where the processor can."""
    return _call(builder, "fmuladd", a, b, c)


@operation(vector, vector, vector)
def larger(builder, a, b):
    """The larger of each lane; `b` where either is NaN."""
    return _larger(builder, a, b)


@operation(types.float32, vector)
def largest(builder, value):
    """The largest of all lanes."""
    return _across(builder, lambda a, b: _larger(builder, a, b), value)


@operation(types.float32, vector)
def total(builder, value):
    """The sum of all lanes."""
    return _across(builder, builder.fadd, value)


@operation(vector, vector)
def exp(builder, x):
    """`e ** x` for `x <= 0`, within 2 units in the last place; 0 below -87, NaN for NaN.

    Cephes' `expf`: x = n ln 2 + r in two steps (Cody and Waite), a polynomial for e^r, and n into the exponent.
    """
    low = _constant(-87.0)
    inside = _larger(builder, x, low)  # NaN becomes -87 here: n is a number, and r is NaN
    n = _call(builder, "floor", _call(builder, "fmuladd", inside, _constant(1.44269504088896341), _constant(0.5)))
    r = _call(builder, "fmuladd", n, _constant(-0.693359375), x)
    r = _call(builder, "fmuladd", n, _constant(2.12194440e-4), r)
    power = _constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        power = _call(builder, "fmuladd", power, r, _constant(factor))
    power = _call(builder, "fmuladd", power, builder.fmul(r, r), builder.fadd(r, _constant(1.0)))
    exponent = builder.add(builder.fptosi(n, _INTS), ir.Constant(_INTS, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(_INTS, [23] * LANES)), _FLOATS)
    return builder.select(builder.fcmp_ordered("<", x, low), _constant(0.0), builder.fmul(power, scale))


@operation(types.void, types.intp, types.intp, types.intp, types.intp)
def transpose(builder, source, source_stride, target, target_stride):
    """Turns a block of `LANES x LANES` floats; strides between rows are in bytes."""

    def row(start, stride, index):
        return _at(builder, builder.add(start, builder.mul(stride, _WORD(index))), _FLOATS)

    rows = [builder.load(row(source, source_stride, i), align=FLOAT) for i in range(LANES)]
    bit = 1
    while bit < LANES:  # swap this bit of the row's number with that of the lane's
        low = [lane if not lane & bit else (lane ^ bit) + LANES for lane in range(LANES)]
        high = [lane | bit if not lane & bit else lane + LANES for lane in range(LANES)]
        for i in range(LANES):
            if not i & bit:
                a, b = rows[i], rows[i | bit]
                rows[i], rows[i | bit] = _shuffle(builder, a, b, low), _shuffle(builder, a, b, high)
        bit *= 2
    for i in range(LANES):
        builder.store(rows[i], row(target, target_stride, i), align=FLOAT)
