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

from replica.model.cpu_compiler import compiled, one_team
from replica.model.cpu_tiles import ROWS, WIDTH, sum_tile

_PANELS_A_THREAD = 4
"""Fewer than so many, and rows are shared out too."""
_BLOCK = 1 << 16
"""Numbers in a block of rows; twice as many are still one block."""
NOTHING = np.empty((0, 0), dtype=np.float32)
_ZEROS = np.zeros(WIDTH, dtype=np.float32)


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
    num_rows, i = hidden.shape
    num_outputs = out.shape[1]
    rows, weights, target, others = hidden.ravel(), panels.ravel(), out.ravel(), other.ravel()
    column = panel * WIDTH
    p, pace = column * i, max(1, WIDTH // (end - first))
    plus, s = (bias, column) if len(bias) else (zeros, 0)
    width = min(WIDTH, num_outputs - column)
    for tile in range(first, end):
        row = num_rows * tile // num_tiles
        count = num_rows * (tile + 1) // num_tiles - row
        h, o = row * i, row * num_outputs + column
        a = p + i * min(WIDTH + (tile - first) * pace, 2 * WIDTH - pace)
        if width < WIDTH:
            sums = np.empty(ROWS * WIDTH, np.float32)
            sum_tile(count, rows, h, i, weights, p, WIDTH, i, plus, s, 0, sums, 0, WIDTH, weights, a, pace)
            for r in range(count):
                for w in range(width):
                    out[row + r, column + w] = sums[r * WIDTH + w] + (other[row + r, column + w] if len(other) else 0)
        elif len(other):
            sum_tile(
                count,
                rows,
                h,
                i,
                weights,
                p,
                WIDTH,
                i,
                others,
                o,
                num_outputs,
                target,
                o,
                num_outputs,
                weights,
                a,
                pace,
            )
            if len(bias):
                for r in range(row, row + count):
                    for w in range(WIDTH):
                        out[r, column + w] += bias[column + w]
        else:
            sum_tile(count, rows, h, i, weights, p, WIDTH, i, plus, s, 0, target, o, num_outputs, weights, a, pace)


@compiled(parallel=True, fastmath=False)
def _product(hidden: Any, panels: Any, bias: Any, other: Any, zeros: Any, parts: int, out: Any) -> None:
    num_tiles = (len(hidden) + ROWS - 1) // ROWS
    row_parts = max(1, min(num_tiles, parts, _PANELS_A_THREAD * parts // len(panels)))
    panel_parts = parts // row_parts
    for part in prange(row_parts * panel_parts):
        across, down = part % panel_parts, part // panel_parts
        first, end = len(panels) * across // panel_parts, len(panels) * (across + 1) // panel_parts
        tile, end_tile = num_tiles * down // row_parts, num_tiles * (down + 1) // row_parts
        tiles = end_tile - tile
        if tiles * ROWS * hidden.shape[1] > 2 * _BLOCK:
            tiles = max(1, _BLOCK // (ROWS * hidden.shape[1]))
        while tile < end_tile:
            next_tile = min(tile + tiles, end_tile)
            for panel in range(first, end):
                _panel_product(hidden, panels, panel, bias, other, tile, next_tile, num_tiles, zeros, out)
            tile = next_tile
