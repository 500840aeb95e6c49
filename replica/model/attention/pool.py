"""Attention over the pool as it lies, for float32 on the CPU, by compiled loops that follow each row's block table:
decodes read the blocks in place (`replica/model/cpu_attention.py`), prefill chunks collect theirs once a layer
(`replica/model/cpu_prefill.py`). What the loops lack, soft caps, goes through `gather.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replica.model import cpu_attention, cpu_compiler, cpu_kernels, cpu_prefill
from replica.model.attention.gather import GatherStep
from replica.model.attention.interface import AttentionCall, AttentionStep
from replica.model.inputs import IntArray, StepLayout
from replica.model.kv_cache import KVCache

_ROWS_A_PART = 4
_NO_SINKS = np.empty(0, dtype=np.float32)
_NO_WINDOW = 1 << 40


class PoolBackend:
    """float32 on the CPU; head sizes, windows, sinks and soft caps as they come."""

    block_size = 32

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        cpu_compiler.use_threads(torch.get_num_threads())
        return _PoolStep(layout, cache)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Rows with one token as layers of one kind see them; see `cpu_attention.decode_attention`."""

    first: IntArray
    last: IntArray
    work: IntArray
    work_starts: IntArray
    heads: int


class _Rows:
    """Some of a step's rows as compiled loops take them: where their tokens are, and their block tables."""

    def __init__(self, layout: StepLayout, rows: IntArray, num_blocks: int) -> None:
        self.places, self.counts, self.starts = layout.offsets[rows], layout.num_tokens[rows], layout.starts[rows]
        self.context_lens = layout.context_lens[rows]
        tables = [layout.block_tables[row] for row in rows.tolist()]
        widths = np.array([len(table) for table in tables], dtype=np.int64)
        self.blocks = np.array([block for table in tables for block in table], dtype=np.int64)
        self.table_starts = np.cumsum(widths) - widths
        _require_blocks(self.blocks, num_blocks)


class _PoolStep:
    def __init__(self, layout: StepLayout, cache: KVCache) -> None:
        self._cache = cache
        self._gather = GatherStep(layout, cache)
        self._slots = layout.slot_blocks.numpy(), layout.slot_places.numpy()
        _require_blocks(self._slots[0], cache.num_blocks)
        self._ones = _Rows(layout, np.flatnonzero(layout.num_tokens == 1), cache.num_blocks)
        self._chunks = _Rows(layout, np.flatnonzero(layout.num_tokens > 1), cache.num_blocks)
        self._views: dict[tuple[int | None, int], _Decodes] = {}
        self._scratch: dict[tuple[int, int], NDArray[np.float32]] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        if call.softcap is not None:
            return self._gather.attend(call)
        query, key, value = (_by_token(heads) for heads in (call.query, call.key, call.value))
        keys, values = self._cache.keys[call.layer].numpy(), self._cache.values[call.layer].numpy()
        cpu_kernels.write_slots(keys, values, key, value, *self._slots)
        out = torch.empty(query.shape[0], query.shape[1], value.shape[2])
        rest = np.float32(call.scaling), _NO_SINKS if call.sinks is None else call.sinks.float().contiguous().numpy()
        if len(self._ones.places):
            ones, view = self._ones, self._decodes(call.window, key.shape[1])
            cpu_attention.decode_attention(
                query, keys, values, ones.places, ones.blocks, ones.table_starts,
                view.first, view.last, view.work, view.work_starts, view.heads, *rest, out.numpy(),
            )  # fmt: skip
        if len(self._chunks.places):
            chunks, window = self._chunks, _NO_WINDOW if call.window is None else call.window
            cpu_prefill.prefill_attention(
                query, keys, values, chunks.places, chunks.starts, chunks.counts, chunks.blocks, chunks.table_starts,
                window, *rest, self._room(0, keys), self._room(1, values), out.numpy(),
            )  # fmt: skip
        return out

    def _room(self, number: int, cache: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scratch for the longest context of a chunk, for the step."""
        kind = number, cache.shape[1] * cache.shape[3]
        if kind not in self._scratch:
            longest = -(-int(self._chunks.context_lens.max()) // cpu_prefill.KEYS) * cpu_prefill.KEYS
            self._scratch[kind] = np.empty(longest * kind[1], dtype=np.float32)
        return self._scratch[kind]

    def _decodes(self, window: int | None, num_kv_heads: int) -> _Decodes:
        kind = window, num_kv_heads
        if kind not in self._views:
            last = self._ones.context_lens
            first = np.zeros_like(last) if window is None else np.maximum(last - window, 0)
            self._views[kind] = _Decodes(first, last, *_shared_out(last - first, num_kv_heads, torch.get_num_threads()))
        return self._views[kind]


def _shared_out(lengths: IntArray, num_kv_heads: int, num_parts: int) -> tuple[IntArray, IntArray, int]:
    """Every row * num_kv_heads + kv_head, in parts of about equal length: dealt out from the longest, to and fro.

    With enough rows for all parts the heads of a row stay together, because they lie together in memory: the third
    number says how many.
    """
    rows = np.argsort(-lengths, kind="stable")
    heads = num_kv_heads if len(rows) >= _ROWS_A_PART * num_parts else 1
    work = (rows[:, None] * num_kv_heads + np.arange(0, num_kv_heads, heads)[None, :]).ravel()
    turn = np.arange(len(work)) % (2 * num_parts)
    part = np.minimum(turn, 2 * num_parts - 1 - turn)
    starts = np.concatenate(([0], np.cumsum(np.bincount(part, minlength=num_parts))))
    return work[np.argsort(part, kind="stable")], starts, heads


def _require_blocks(blocks: IntArray, num_blocks: int) -> None:
    """Compiled loops check no index: a block that isn't there would be somebody's memory."""
    if blocks.size and not 0 <= blocks.min() <= blocks.max() < num_blocks:
        raise IndexError(f"a block table names a block outside of the {num_blocks} that there are")


def _by_token(heads: Tensor) -> NDArray[np.float32]:
    """[heads, T, D] as contiguous [T, heads, D]: no copy where it comes from a projection."""
    by_token: NDArray[np.float32] = heads.transpose(0, 1).contiguous().numpy()
    return by_token
