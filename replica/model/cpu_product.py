"""Matrix products on the CPU against packed weights: as fast as memory gives the weights, or as the cores multiply.

Weights lie as panels, [panels, inputs, WIDTH]: all that a panel's outputs take from one input side by side. A tile of
up to `ROWS` rows and one panel is summed in vector registers over all inputs, so that an input costs a load for each
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
from numba import get_num_threads, prange
from numpy.typing import NDArray

from replica.model import huge_pages
from replica.model.cpu_compiler import compiled, one_team
from replica.model.cpu_kernels import silu_times
from replica.model.cpu_tiles import ROWS, WIDTH, sum_tile

_PANELS_A_THREAD = 4
"""Fewer than so many, and rows are shared out too."""
_BLOCK = 1 << 16
"""Numbers in a block of rows; twice as many are still one block."""
NOTHING = np.empty((0, 0), dtype=np.float32)
ZEROS = np.zeros(WIDTH, dtype=np.float32)


def pack(weights: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Weights [outputs, inputs] of one product, their outputs side by side, as panels; the last is filled with 0."""
    num_outputs, num_inputs = sum(len(some) for some in weights), weights[0].shape[1]
    panels = huge_pages.empty(-(-num_outputs // WIDTH), num_inputs, WIDTH)
    output = 0
    for some in weights:
        for number in range(0, len(some), WIDTH):
            _put(panels, output + number, some[number : number + WIDTH])
        output += len(some)
    return panels


def _put(panels: NDArray[np.float32], output: int, weights: NDArray[np.float32]) -> None:
    """At most WIDTH outputs from `output` on."""
    panel, column = divmod(output, WIDTH)
    fits = min(WIDTH - column, len(weights))
    panels[panel, :, column : column + fits] = weights[:fits].T
    if fits < len(weights):
        panels[panel + 1, :, : len(weights) - fits] = weights[fits:].T


def pack_pairs(gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights [outputs, inputs] of a gate and of what it lets through, as panels of one and the other by turns."""
    both = pack([gate]), pack([up])
    panels = huge_pages.empty(2 * len(both[0]), *both[0].shape[1:])
    panels[::2], panels[1::2] = both
    return panels


def pack_bias(bias: NDArray[np.float32] | None, num_panels: int) -> NDArray[np.float32]:
    """As long as the panels are wide together; [0] for none."""
    if bias is None:
        return NOTHING.ravel()
    return np.pad(bias, (0, num_panels * WIDTH - len(bias)))


def pack_pair_biases(
    num_panels: int, gate: NDArray[np.float32] | None = None, up: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Of panels by turns; [0] for none."""
    if gate is None or up is None:
        return NOTHING.ravel()
    return np.stack([pack_bias(one, num_panels // 2).reshape(-1, WIDTH) for one in (gate, up)], axis=1).ravel()


def run_product(hidden: Any, panels: Any, bias: Any, out: Any) -> None:
    """`product` by all threads, from Python."""
    with one_team:
        product(hidden, panels, bias, NOTHING, ZEROS, get_num_threads(), out)


@compiled(fastmath=False)
def _ahead(size: int, tile: int, num_tiles: int) -> tuple[int, int]:
    """Of a panel of `size` numbers, which a series of tiles brings into the cache: where this tile's share begins, and
    the pace for each input."""
    pace = max(1, WIDTH // num_tiles)
    return size // WIDTH * min(tile * pace, WIDTH - pace), pace


@compiled(fastmath=False)
def _panel_product(
    hidden: Any, panels: Any, panel: int, bias: Any, other: Any, first: int, end: int, num_tiles: int, zeros: Any,
    out: Any,
) -> None:  # fmt: skip
    """One panel's outputs of the tiles first <= tile < end."""
    num_rows, i = hidden.shape
    num_outputs = out.shape[1]
    rows, weights, target = hidden.ravel(), panels.ravel(), out.ravel()
    column = panel * WIDTH
    p, width = column * i, min(WIDTH, num_outputs - column)
    plus, s, lds = zeros, 0, 0
    if width == WIDTH and len(other):
        plus, s, lds = other.ravel(), column, num_outputs
    elif len(bias):
        plus, s = bias, column
    for tile in range(first, end):
        row = num_rows * tile // num_tiles
        count = num_rows * (tile + 1) // num_tiles - row
        h, o = row * i, row * num_outputs + column
        share, pace = _ahead(i * WIDTH, tile - first, end - first)
        a = p + i * WIDTH + share
        if width == WIDTH:
            sum_tile(
                count, rows, h, i, weights, p, WIDTH, i, plus, s + row * lds, lds, target, o, num_outputs,
                weights, a, pace,
            )  # fmt: skip
            if len(other) and len(bias):
                for r in range(row, row + count):
                    for w in range(WIDTH):
                        out[r, column + w] += bias[column + w]
        else:
            sums = np.empty(ROWS * WIDTH, np.float32)
            sum_tile(count, rows, h, i, weights, p, WIDTH, i, plus, s, 0, sums, 0, WIDTH, weights, a, pace)
            for r in range(count):
                for w in range(width):
                    out[row + r, column + w] = sums[r * WIDTH + w] + (other[row + r, column + w] if len(other) else 0)


@compiled(fastmath=False)
def _pair_product(
    hidden: Any, panels: Any, pair: int, bias: Any, first: int, end: int, num_tiles: int, zeros: Any, sums: Any,
    line: Any, out: Any,
) -> None:  # fmt: skip
    """silu(gate) * up of one pair of panels, for the tiles first <= tile < end."""
    num_rows, i = hidden.shape
    rows, weights = hidden.ravel(), panels.ravel()
    column, size = pair * WIDTH, i * WIDTH
    width = min(WIDTH, out.shape[1] - column)
    plus, s = (bias, 2 * column) if len(bias) else (zeros, 0)
    next_panel = WIDTH if len(bias) else 0
    for tile in range(first, end):
        row = num_rows * tile // num_tiles
        count = num_rows * (tile + 1) // num_tiles - row
        share, pace = _ahead(size, tile - first, end - first)
        for half in range(2):
            p = (2 * pair + half) * size
            sum_tile(
                count, rows, row * i, i, weights, p, WIDTH, i, plus, s + half * next_panel, 0,
                sums, half * ROWS * WIDTH, WIDTH, weights, p + 2 * size + share, pace,
            )  # fmt: skip
        silu_times(count * WIDTH, sums, sums[ROWS * WIDTH :], line)
        for r in range(count):
            for w in range(width):
                out[row + r, column + w] = sums[r * WIDTH + w]


@compiled(fastmath=False)
def _share(part: int, parts: int, num_rows: int, num_inputs: int, num_panels: int) -> tuple[int, int, int, int, int]:
    """What a part computes: first and end panel, first and end tile, and how many tiles a block of rows has."""
    num_tiles = (num_rows + ROWS - 1) // ROWS
    row_parts = _row_parts(parts, num_rows, num_panels)
    panel_parts = parts // row_parts
    across, down = part % panel_parts, part // panel_parts
    first_tile, end_tile = num_tiles * down // row_parts, num_tiles * (down + 1) // row_parts
    block = max(1, end_tile - first_tile)
    if block * ROWS * num_inputs > 2 * _BLOCK:
        block = max(1, _BLOCK // (ROWS * num_inputs))
    return num_panels * across // panel_parts, num_panels * (across + 1) // panel_parts, first_tile, end_tile, block


@compiled(fastmath=False)
def _row_parts(parts: int, num_rows: int, num_panels: int) -> int:
    return max(1, min((num_rows + ROWS - 1) // ROWS, parts, _PANELS_A_THREAD * parts // num_panels))


@compiled(parallel=True, fastmath=False)
def product(hidden: Any, panels: Any, bias: Any, other: Any, zeros: Any, parts: int, out: Any) -> None:
    """out = hidden @ weights.T + bias + other; float32, C-contiguous.

    `hidden` [T, I], `panels` of `pack`, `bias` of `pack_bias`, `other` [T, O] or [0, 0], `out` [T, O], which may be
    `other`. For `parts` threads.
    """
    num_rows, num_inputs = hidden.shape
    num_tiles, row_parts = (num_rows + ROWS - 1) // ROWS, _row_parts(parts, num_rows, len(panels))
    for part in prange(row_parts * (parts // row_parts)):
        first, end, tile, end_tile, block = _share(part, parts, num_rows, num_inputs, len(panels))
        while tile < end_tile:
            next_tile = min(tile + block, end_tile)
            for panel in range(first, end):
                _panel_product(hidden, panels, panel, bias, other, tile, next_tile, num_tiles, zeros, out)
            tile = next_tile


@compiled(parallel=True, fastmath=False)
def gated_product(hidden: Any, panels: Any, bias: Any, zeros: Any, parts: int, out: Any) -> None:
    """out = silu(hidden @ gate.T + its bias) * (hidden @ up.T + its bias); as above, of `pack_pairs`."""
    num_rows, num_inputs = hidden.shape
    num_tiles, row_parts = (num_rows + ROWS - 1) // ROWS, _row_parts(parts, num_rows, len(panels) // 2)
    for part in prange(row_parts * (parts // row_parts)):
        sums, line = np.empty(2 * ROWS * WIDTH, np.float32), np.empty(ROWS * WIDTH, np.float32)
        first, end, tile, end_tile, block = _share(part, parts, num_rows, num_inputs, len(panels) // 2)
        while tile < end_tile:
            next_tile = min(tile + block, end_tile)
            for pair in range(first, end):
                _pair_product(hidden, panels, pair, bias, tile, next_tile, num_tiles, zeros, sums, line, out)
            tile = next_tile
