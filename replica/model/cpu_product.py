"""Matrix products on the CPU against packed weights: as fast as memory gives the weights, or as the cores multiply.

Weights lie as panels, [panels, inputs, WIDTH]: all that a panel's outputs take from one input side by side. A tile of
up to `_ROWS` rows and one panel is summed in vector registers over all inputs, so that an input costs a load for each
row and two for the weights, and up to 12 multiply-adds. Threads share out the panels.

    for each block of rows that fits into the second-level cache:
        for each panel of the thread:
            for each tile of the block:
                for each input:  sums += row's input * panel's weights

With one tile memory sets the pace; with more, each fetches its share of the next panel while it computes. A row's sums
are made one input after the other, whatever rows are beside it: neighbours change no bit of a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import get_num_threads, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from replica.model.cpu_compiler import compiled, one_team

_LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
_VECTORS = 2
_ROWS = 6
_PANELS_A_THREAD = 4
"""Fewer than so many, and rows are shared out too."""
_BLOCK = 1 << 16
"""Numbers in a block of rows; twice as many are still one block."""
WIDTH = _LANES * _VECTORS
"""Outputs in a panel."""
NOTHING = np.empty((0, 0), dtype=np.float32)
_ZEROS = np.zeros(WIDTH, dtype=np.float32)

_VECTOR = ir.VectorType(ir.FloatType(), _LANES)
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_READ, _KEEP_NEAR, _DATA = (ir.Constant(_I32, number) for number in (0, 3, 1))


def pack(weights: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Weights [outputs, inputs] of one product, their outputs side by side, as panels; the last is filled with 0."""
    together = weights[0] if len(weights) == 1 else np.concatenate(weights)
    num_outputs, num_inputs = together.shape
    panels = np.zeros((-(-num_outputs // WIDTH), num_inputs, WIDTH), dtype=np.float32)
    whole = num_outputs // WIDTH
    panels[:whole] = together[: whole * WIDTH].reshape(whole, WIDTH, num_inputs).transpose(0, 2, 1)
    if whole < len(panels):
        panels[whole, :, : num_outputs - whole * WIDTH] = together[whole * WIDTH :].T
    return panels


def pack_bias(bias: NDArray[np.float32] | None, panels: NDArray[np.float32]) -> NDArray[np.float32]:
    """As long as the panels are wide together; [0] for none."""
    if bias is None:
        return NOTHING.ravel()
    return np.pad(bias, (0, len(panels) * WIDTH - len(bias)))


def product(hidden: Any, panels: Any, bias: Any, other: Any, out: Any) -> None:
    """out = hidden @ weights.T + bias + other; float32, C-contiguous.

    `hidden` [T, I], `panels` of `pack`, `bias` of `pack_bias`, `other` [T, O] or [0, 0], `out` [T, O].
    """
    with one_team:
        _product(hidden, panels, bias, other, _ZEROS, get_num_threads(), out)


def _typed_tile(
    _: Any, _n: Any, hidden: Any, _h: Any, panels: Any, _p: Any, _i: Any,
    plus: Any, _s: Any, _lds: Any, out: Any, _o: Any, _ldo: Any, _a: Any, _pace: Any,
) -> Any:  # fmt: skip
    """(num_rows, hidden, h, panels, p, num_inputs, plus, s, lds, out, o, ldo, a, pace), compiled:

        out[o + r * ldo + w] = plus[s + r * lds + w]
                               + sum over i < num_inputs of hidden[h + r * num_inputs + i] * panels[p + i * WIDTH + w]

    for r < num_rows, w < WIDTH. Meanwhile it fetches panels[a:] into the cache, `pace` numbers for every input. Arrays
    are flat; neither they nor the places are checked.
    """
    place = types.int64
    signature = types.void(
        place, hidden, place, panels, place, place, plus, place, place, out, place, place, place, place
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def start(array: int, first: int) -> Any:
            data = context.make_array(signature.args[array])(context, builder, args[array]).data
            return builder.gep(data, [args[first]])

        plus, out = (start(6, 7), args[8]), (start(9, 10), args[11])
        starts = start(1, 2), start(3, 4), args[5], plus, out, start(3, 12), args[13]
        done = builder.append_basic_block("tile.done")
        cases = builder.switch(args[0], done)
        for num_rows in range(1, _ROWS + 1):
            block = builder.append_basic_block(f"tile.{num_rows}")
            cases.add_case(_I64(num_rows), block)
            builder.position_at_end(block)
            _sum_tile(builder, num_rows, *starts)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, generate


_tile: Any = intrinsic(_typed_tile)


def _sum_tile(
    builder: Any, num_rows: int, hidden: Any, panel: Any, count: Any, plus: Any, out: Any, ahead: Any, pace: Any
) -> None:
    """`plus` and `out` are (start, numbers from row to row)."""
    find = cgutils.get_or_insert_function
    prefetch_type = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    prefetch = find(builder.module, prefetch_type, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
    multiply_add_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    multiply_add = find(builder.module, multiply_add_type, f"llvm.fmuladd.v{_LANES}f32")  # type: ignore[no-untyped-call]
    new = cgutils.alloca_once
    sums = [[new(builder, _VECTOR) for _ in range(_VECTORS)] for _ in range(num_rows)]  # type: ignore[no-untyped-call]
    rows = [builder.gep(hidden, [builder.mul(count, _I64(row))]) for row in range(num_rows)]
    for accumulator, place in zip(_flat(sums), _places(builder, num_rows, *plus), strict=True):
        builder.store(builder.load(place, align=4), accumulator)
    # Not unrolled: the compiler would load several inputs ahead and run out of registers.
    with cgutils.for_range_slice(builder, _I64(0), count, _I64(1), inc=True) as (at, _):
        line = builder.gep(ahead, [builder.mul(at, pace)])
        builder.call(prefetch, [builder.bitcast(line, _BYTES), _READ, _KEEP_NEAR, _DATA])
        first = builder.mul(at, _I64(WIDTH))
        weights = [_load(builder, panel, builder.add(first, _I64(v * _LANES))) for v in range(_VECTORS)]
        for row, accumulators in zip(rows, sums, strict=True):
            number = _everywhere(builder, builder.load(builder.gep(row, [at])))
            for weight, accumulator in zip(weights, accumulators, strict=True):
                builder.store(builder.call(multiply_add, [number, weight, builder.load(accumulator)]), accumulator)
    for accumulator, place in zip(_flat(sums), _places(builder, num_rows, *out), strict=True):
        builder.store(builder.load(accumulator), place, align=4)


def _flat(rows: list[list[Any]]) -> list[Any]:
    return [one for row in rows for one in row]


def _places(builder: Any, num_rows: int, start: Any, from_row_to_row: Any) -> list[Any]:
    """Of a tile's vectors, row by row."""
    rows = [builder.gep(start, [builder.mul(from_row_to_row, _I64(row))]) for row in range(num_rows)]
    places = [builder.gep(row, [_I64(v * _LANES)]) for row in rows for v in range(_VECTORS)]
    return [builder.bitcast(place, _VECTOR.as_pointer()) for place in places]


def _load(builder: Any, array: Any, at: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(array, [at]), _VECTOR.as_pointer()), align=4)


def _everywhere(builder: Any, number: Any) -> Any:
    """A vector of this number."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES))


@compiled(fastmath=False)
def _panel_product(
    hidden: Any,
    panels: Any,
    panel: int,
    bias: Any,
    other: Any,
    first: int,
    end: int,
    num_tiles: int,
    zeros: Any,
    out: Any,
) -> None:
    """One panel's outputs of the tiles first <= tile < end."""
    num_rows, num_inputs = hidden.shape
    num_outputs = out.shape[1]
    rows, weights, target, others = hidden.ravel(), panels.ravel(), out.ravel(), other.ravel()
    column = panel * WIDTH
    p, pace = column * num_inputs, max(1, WIDTH // (end - first))
    plus, s = (bias, column) if len(bias) else (zeros, 0)
    width = min(WIDTH, num_outputs - column)
    for tile in range(first, end):
        row = num_rows * tile // num_tiles
        count = num_rows * (tile + 1) // num_tiles - row
        h, o = row * num_inputs, row * num_outputs + column
        a = p + num_inputs * min(WIDTH + (tile - first) * pace, 2 * WIDTH - pace)
        if width < WIDTH:
            sums = np.empty(_ROWS * WIDTH, np.float32)
            _tile(count, rows, h, weights, p, num_inputs, plus, s, 0, sums, 0, WIDTH, a, pace)
            for r in range(count):
                for w in range(width):
                    out[row + r, column + w] = sums[r * WIDTH + w] + (other[row + r, column + w] if len(other) else 0)
        elif len(other):
            _tile(count, rows, h, weights, p, num_inputs, others, o, num_outputs, target, o, num_outputs, a, pace)
            if len(bias):
                for r in range(row, row + count):
                    for w in range(WIDTH):
                        out[r, column + w] += bias[column + w]
        else:
            _tile(count, rows, h, weights, p, num_inputs, plus, s, 0, target, o, num_outputs, a, pace)


@compiled(parallel=True, fastmath=False)
def _product(hidden: Any, panels: Any, bias: Any, other: Any, zeros: Any, parts: int, out: Any) -> None:
    num_tiles = (len(hidden) + _ROWS - 1) // _ROWS
    row_parts = max(1, min(num_tiles, parts, _PANELS_A_THREAD * parts // len(panels)))
    panel_parts = parts // row_parts
    for part in prange(row_parts * panel_parts):
        across, down = part % panel_parts, part // panel_parts
        first, end = len(panels) * across // panel_parts, len(panels) * (across + 1) // panel_parts
        tile, end_tile = num_tiles * down // row_parts, num_tiles * (down + 1) // row_parts
        tiles = end_tile - tile
        if tiles * _ROWS * hidden.shape[1] > 2 * _BLOCK:
            tiles = max(1, _BLOCK // (_ROWS * hidden.shape[1]))
        while tile < end_tile:
            next_tile = min(tile + tiles, end_tile)
            for panel in range(first, end):
                _panel_product(hidden, panels, panel, bias, other, tile, next_tile, num_tiles, zeros, out)
            tile = next_tile
