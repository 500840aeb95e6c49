"""The innermost loops of products and attention on the CPU, written for vector registers.

Compilers don't find these by themselves: a tile of sums stays in registers while its inputs stream by. Both are for use
inside compiled loops; arrays are flat, and neither they nor the places in them are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, codegen
from numba.extending import intrinsic

_LANES = 16 if "+avx512f" in codegen.get_host_cpu_features() else 8  # type: ignore[no-untyped-call]
_VECTORS = 2
ROWS = 6
"""Rows of a tile, at most: with more, its sums don't fit into registers."""
WIDTH = _LANES * _VECTORS
"""Columns of a tile."""
KEYS = 8
"""Keys that are scored together, and numbers of theirs that are multiplied together."""
LINE = 16
"""Numbers in a line of the cache."""

_LOG2E = math.log2(math.e)
_EXP2 = [math.log(2) ** k / math.factorial(k) for k in range(8)]
"""Of the polynomial for 2^f, |f| <= 1/2: exact to a unit in the last place."""
_MOST_POWER = 126.0
_LAST_BITS = 1.5 * 2**23
"""Added to a whole number, it leaves that in the last bits."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_READ, _KEEP_NEAR, _DATA = (ir.Constant(_I32, number) for number in (0, 3, 1))


def _vector(lanes: int) -> Any:
    return ir.VectorType(ir.FloatType(), lanes)


def _typed_sum_tile(
    _: Any, _n: Any, hidden: Any, _h: Any, _ldh: Any, panel: Any, _p: Any, _ldp: Any, _i: Any,
    plus: Any, _s: Any, _lds: Any, out: Any, _o: Any, _ldo: Any, other: Any, _a: Any, _pace: Any,
) -> Any:  # fmt: skip
    at = types.int64
    signature = types.void(at, hidden, at, at, panel, at, at, at, plus, at, at, out, at, at, other, at, at)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def start(array: int, first: int) -> Any:
            return _start(context, builder, signature, args, array, first)

        hidden, panel = (start(1, 2), args[3]), (start(4, 5), args[6])
        plus, out, ahead = (start(8, 9), args[10]), (start(11, 12), args[13]), (start(14, 15), args[16])
        given = [args[7], *hidden, *panel, *plus, *out, *ahead]
        done = builder.append_basic_block("tile.done")
        cases = builder.switch(args[0], done)
        for num_rows in range(1, ROWS + 1):
            block = builder.append_basic_block(f"tile.{num_rows}")
            cases.add_case(_I64(num_rows), block)
            builder.position_at_end(block)
            builder.call(_own_function(builder, f"sum_tile_{num_rows}", given, partial(_sum_tile, num_rows)), given)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, generate


sum_tile: Callable[..., None] = intrinsic(_typed_sum_tile)
"""(num_rows, hidden, h, ldh, panel, p, ldp, num_inputs, plus, s, lds, out, o, ldo, other, a, pace):

    out[o + r * ldo + w] = plus[s + r * lds + w]
                           + sum over i < num_inputs of hidden[h + r * ldh + i] * panel[p + i * ldp + w]

for r < num_rows <= ROWS, w < WIDTH. For every input it fetches a line of the cache at other[a:], `pace` numbers further
each time; any place is allowed.
"""


def _typed_score_keys(
    _: Any, query: Any, _q: Any, keys: Any, _k: Any, _ldk: Any, _d: Any, out: Any, _o: Any,
    other: Any, _a: Any, _pace: Any, _n: Any,
) -> Any:  # fmt: skip
    at = types.int64
    signature = types.void(query, at, keys, at, at, at, out, at, other, at, at, at)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def start(array: int, first: int) -> Any:
            return _start(context, builder, signature, args, array, first)

        given = [args[11], start(0, 1), start(2, 3), args[4], args[5], start(6, 7), start(8, 9), args[10]]
        builder.call(_own_function(builder, "score_keys", given, _score_keys), given)
        return context.get_dummy_value()

    return signature, generate


score_keys: Callable[..., None] = intrinsic(_typed_score_keys)
"""(query, q, keys, k, ldk, size, out, o, other, a, pace, count):

    out[o + j] = sum over d < size of query[q + d] * keys[k + j * ldk + d]

for j < count; `size` and `count` are multiples of KEYS. For every KEYS numbers of KEYS keys it fetches two lines of the
cache at other[a:], `pace` numbers further each time.
"""


def _typed_largest(_: Any, numbers: Any, _n: Any, _count: Any) -> Any:
    signature = types.float32(numbers, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _largest(builder, _start(context, builder, signature, args, 0, 1), args[2])

    return signature, generate


largest: Callable[..., Any] = intrinsic(_typed_largest)
"""(numbers, n, count): the largest of numbers[n : n + count], -inf at least; `count` is a multiple of KEYS. What is no
number is passed over."""


def _typed_exp_all(_: Any, numbers: Any, _n: Any, _count: Any, _scale: Any, _base: Any) -> Any:
    signature = types.float32(numbers, types.int64, types.int64, types.float32, types.float32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _exp_all(builder, _start(context, builder, signature, args, 0, 1), *args[2:])

    return signature, generate


exp_all: Callable[..., Any] = intrinsic(_typed_exp_all)
"""(numbers, n, count, scale, base): numbers[n : n + count] become exp(scale * number - base); returns their sum.

`count` is a multiple of KEYS. Differences are held between -87 and 87; exact to some units in the last place; what
is no number stays none.
"""


def _start(context: Any, builder: Any, signature: Any, args: Any, array: int, first: int) -> Any:
    data = context.make_array(signature.args[array])(context, builder, args[array]).data
    return builder.gep(data, [args[first]])


def _own_function(builder: Any, name: str, arguments: list[Any], fill: Callable[..., None]) -> Any:
    """Of its own, never inlined: the caller's variables would take registers that the loops need."""
    function = _function(builder, f"brimful_{name}", ir.VoidType(), [argument.type for argument in arguments])
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        fill(inner, *function.args)
        inner.ret_void()
    return function


def _sum_tile(
    num_rows: int, builder: Any, count: Any, hidden: Any, ldh: Any, panel: Any, ldp: Any, plus: Any, lds: Any,
    out: Any, ldo: Any, ahead: Any, pace: Any,
) -> None:  # fmt: skip
    vector = _vector(_LANES)
    sums = _registers(builder, num_rows * _VECTORS, vector)
    for accumulator, place in zip(sums, _places(builder, num_rows, plus, lds), strict=True):
        builder.store(builder.load(place, align=4), accumulator)
    rows = [builder.gep(hidden, [builder.mul(ldh, _I64(row))]) for row in range(num_rows)]
    # Not unrolled: the compiler would load several inputs ahead and run out of registers.
    with cgutils.for_range_slice(builder, _I64(0), count, _I64(1), inc=True) as (at, _):
        _prefetch(builder, builder.gep(ahead, [builder.mul(at, pace)]))
        first = builder.gep(panel, [builder.mul(at, ldp)])
        weights = [_load(builder, builder.gep(first, [_I64(v * _LANES)]), vector) for v in range(_VECTORS)]
        for number, row in enumerate(rows):
            one = _everywhere(builder, builder.load(builder.gep(row, [at])), _LANES)
            for v, weight in enumerate(weights):
                _add_product(builder, one, weight, sums[number * _VECTORS + v], _LANES)
    for accumulator, place in zip(sums, _places(builder, num_rows, out, ldo), strict=True):
        builder.store(builder.load(accumulator), place, align=4)


def _score_keys(
    builder: Any, count: Any, query: Any, keys: Any, ldk: Any, size: Any, out: Any, ahead: Any, pace: Any
) -> None:
    """The sums of each key's lanes are added up in three rounds of pairs, those of KEYS keys together."""
    vector = _vector(KEYS)
    sums = _registers(builder, KEYS, vector)
    lines = builder.alloca(_I64)
    builder.store(_I64(0), lines)
    with cgutils.for_range_slice(builder, _I64(0), count, _I64(KEYS), inc=True) as (first, _):
        for accumulator in sums:
            builder.store(ir.Constant(vector, [0.0] * KEYS), accumulator)
        rows = [builder.gep(keys, [builder.mul(ldk, builder.add(first, _I64(key)))]) for key in range(KEYS)]
        with cgutils.for_range_slice(builder, _I64(0), size, _I64(KEYS), inc=True) as (at, _):
            part = _load(builder, builder.gep(query, [at]), vector)
            for row, accumulator in zip(rows, sums, strict=True):
                _add_product(builder, part, _load(builder, builder.gep(row, [at]), vector), accumulator, KEYS)
            line = builder.load(lines)
            next_line = builder.add(line, pace)
            _prefetch(builder, builder.gep(ahead, [line]))
            _prefetch(builder, builder.gep(ahead, [next_line]))
            builder.store(builder.add(next_line, pace), lines)
        found = [builder.load(accumulator) for accumulator in sums]
        for _ in range(2):  # within halves of a vector, where that is cheap
            found = [
                _sum_of_shuffles(builder, a, b, (0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15))
                for a, b in zip(found[::2], found[1::2], strict=True)
            ]
        scores = _sum_of_shuffles(builder, found[0], found[1], (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
        builder.store(scores, builder.bitcast(builder.gep(out, [first]), vector.as_pointer()), align=4)


def _largest(builder: Any, numbers: Any, count: Any) -> Any:
    vector = _vector(KEYS)
    (most,) = _registers(builder, 1, vector)
    builder.store(ir.Constant(vector, [float("-inf")] * KEYS), most)
    with cgutils.for_range_slice(builder, _I64(0), count, _I64(KEYS), inc=True) as (at, _):
        found = _load(builder, builder.gep(numbers, [at]), vector)
        builder.store(_select(builder, ">", found, builder.load(most)), most)
    lanes, half = builder.load(most), KEYS
    while half > 1:
        half //= 2
        other = builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(_I32, KEYS), _folded(half)))
        lanes = _select(builder, ">", lanes, other)
    return builder.extract_element(lanes, _I32(0))


def _exp_all(builder: Any, numbers: Any, count: Any, scale: Any, base: Any) -> Any:
    """2^x = 2^n 2^f with n the nearest whole number: the first factor is an exponent field, the second a polynomial."""
    vector, ints = _vector(KEYS), ir.VectorType(_I32, KEYS)

    def same(number: float) -> Any:
        return ir.Constant(vector, [number] * KEYS)

    (total,) = _registers(builder, 1, vector)
    builder.store(same(0.0), total)
    scales, bases = _everywhere(builder, scale, KEYS), _everywhere(builder, builder.fneg(base), KEYS)
    fma = _function(builder, f"llvm.fmuladd.v{KEYS}f32", vector, [vector] * 3)
    with cgutils.for_range_slice(builder, _I64(0), count, _I64(KEYS), inc=True) as (at, _):
        place = builder.gep(numbers, [at])
        power = builder.call(fma, [_load(builder, place, vector), scales, bases])
        power = builder.fmul(power, same(_LOG2E))
        power = _select(builder, "<", same(_MOST_POWER), _select(builder, ">", same(-_MOST_POWER), power))
        whole = builder.call(_function(builder, f"llvm.nearbyint.v{KEYS}f32", vector, [vector]), [power])
        rest = builder.fsub(power, whole)
        value = same(_EXP2[-1])
        for factor in reversed(_EXP2[:-1]):
            value = builder.call(fma, [value, rest, same(factor)])
        bits = builder.bitcast(builder.fadd(whole, same(_LAST_BITS)), ints)
        exponent = builder.shl(bits, ir.Constant(ints, [23] * KEYS))
        two_to_n = builder.add(exponent, ir.Constant(ints, [127 << 23] * KEYS))
        value = builder.fmul(value, builder.bitcast(two_to_n, vector))
        builder.store(value, builder.bitcast(place, vector.as_pointer()), align=4)
        builder.store(builder.fadd(builder.load(total), value), total)
    lanes, half = builder.load(total), KEYS
    while half > 1:
        half //= 2
        other = builder.shuffle_vector(lanes, lanes, ir.Constant(ints, _folded(half)))
        lanes = builder.fadd(lanes, other)
    return builder.extract_element(lanes, _I32(0))


def _folded(half: int) -> list[int]:
    """Lanes after which each of the first `half` lies beside the one that is `half` further."""
    return [(lane + half) % KEYS for lane in range(KEYS)]


def _select(builder: Any, order: str, one: Any, other: Any) -> Any:
    """`one` where it is more (or less), else `other`: also where one of them is no number."""
    return builder.select(builder.fcmp_ordered(order, one, other), one, other)


def _registers(builder: Any, count: int, vector: Any) -> list[Any]:
    new: Any = cgutils.alloca_once
    return [new(builder, vector) for _ in range(count)]


def _places(builder: Any, num_rows: int, start: Any, from_row_to_row: Any) -> list[Any]:
    """Of a tile's vectors, row by row."""
    rows = [builder.gep(start, [builder.mul(from_row_to_row, _I64(row))]) for row in range(num_rows)]
    places = [builder.gep(row, [_I64(v * _LANES)]) for row in rows for v in range(_VECTORS)]
    return [builder.bitcast(place, _vector(_LANES).as_pointer()) for place in places]


def _load(builder: Any, place: Any, vector: Any) -> Any:
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=4)


def _everywhere(builder: Any, number: Any, lanes: int) -> Any:
    """A vector of this number."""
    undefined = ir.Constant(_vector(lanes), ir.Undefined)
    first = builder.insert_element(undefined, number, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _sum_of_shuffles(builder: Any, a: Any, b: Any, one: tuple[int, ...], other: tuple[int, ...]) -> Any:
    masks = (ir.Constant(ir.VectorType(_I32, KEYS), list(mask)) for mask in (one, other))
    return builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks))


def _add_product(builder: Any, a: Any, b: Any, accumulator: Any, lanes: int) -> None:
    multiply_add = _function(builder, f"llvm.fmuladd.v{lanes}f32", _vector(lanes), [_vector(lanes)] * 3)
    builder.store(builder.call(multiply_add, [a, b, builder.load(accumulator)]), accumulator)


def _prefetch(builder: Any, place: Any) -> None:
    prefetch = _function(builder, "llvm.prefetch.p0", ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    builder.call(prefetch, [builder.bitcast(place, _BYTES), _READ, _KEEP_NEAR, _DATA])


def _function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    find: Any = cgutils.get_or_insert_function
    return find(builder.module, ir.FunctionType(result, arguments), name)
