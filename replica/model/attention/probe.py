"""Does a backend compute what it should, on this device, for this model's layers? Asked at start, before it serves.

Whether a kernel of torch's reads pages, in which sizes, with a window or without, depends on versions and on the GPU;
whether ours compile, on the driver. So both run a small ragged step over a shuffled pool full of NaN, as every
layer of the model would call them, and must equal the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from replica.model.attention.backend import AttentionBackend
from replica.model.attention.interface import AttentionCall, AttentionStep
from replica.model.attention.paged import PagedBackend, decode_layout
from replica.model.attention.reference import ReferenceBackend
from replica.model.inputs import StepLayout, build_inputs
from replica.model.kv_cache import KVCache
from replica.model.support import LayerShape
from replica.scheduler.plan import StepPlan

# Largest difference of results that are means of values around 1. A wrong page is off by about 1.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
_LONG_CONTEXT = 1100
# Large enough, on a GPU, that a copy of the pool would show beside what a kernel takes for itself.
_CUDA_POOL_BYTES = 64 << 20


def probe(
    backend: AttentionBackend, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the backend can't serve these layers in blocks of this size; None when it can."""
    for layer in dict.fromkeys(layers):
        try:
            with torch.inference_mode():
                reason = _Trial(layer, block_size, dtype, device).judge(backend)
        except Exception as error:  # noqa: BLE001 - whatever a foreign kernel raises: it can't serve, and this is why
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error) else repr(error)
        if reason is not None:
            return reason
    return None


class _Trial:
    """One kind of layer. Rows are (start, tokens): decodes, then chunks, within blocks and across their borders."""

    def __init__(self, layer: LayerShape, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layer, self._block_size, self._dtype, self._device = layer, block_size, dtype, device
        self._generator = torch.Generator(device).manual_seed(5)
        self._decodes = [(0, 1), (block_size - 1, 1), (block_size, 1), (_LONG_CONTEXT, 1)]
        self._rows = [*self._decodes, (0, 9), (block_size - 1, 7), (5, block_size + 2)]
        counts = [-(-(start + count) // block_size) for start, count in self._rows]
        ends = list(accumulate(counts))
        self._spare_block = ends[-1]
        order = torch.randperm(self._spare_block, generator=torch.Generator().manual_seed(5)).tolist()
        self._tables = [order[end - count : end] for count, end in zip(counts, ends, strict=True)]
        self._sinks = self._randn(layer.num_heads) if layer.has_sinks else None

    def judge(self, backend: AttentionBackend) -> str | None:
        """The rows' history, then all rows in one step, then the decodes as a captured graph holds them."""
        cache, twin = self._pool(), self._pool()
        for rows in ([(0, start) for start, _ in self._rows], self._rows):
            layout = self._layout(rows)
            call = self._call(int(layout.num_tokens.sum()))
            expected = ReferenceBackend().prepare(layout, twin).attend(call)
            if reason := self._compare(backend.prepare(layout, cache), call, expected):
                return reason
        if not isinstance(backend, PagedBackend):
            return None
        call = self._call(len(self._decodes))
        expected = ReferenceBackend().prepare(self._layout(self._decodes), twin).attend(call)
        tables = torch.full((len(self._decodes), max(map(len, self._tables))), self._spare_block, dtype=torch.int32)
        for line, table in enumerate(self._tables[: len(self._decodes)]):
            tables[line, : len(table)] = torch.tensor(table)
        positions = torch.tensor([start for start, _ in self._decodes], device=self._device)
        paged = decode_layout(
            tables.to(self._device), positions, self._block_size, self._spare_block, max_context=2 * _LONG_CONTEXT
        )
        return self._compare(backend.prepare_paged(paged, cache), call, expected)

    def _pool(self) -> KVCache:
        """Full of NaN."""
        layer, num_blocks = self._layer, self._spare_block + 1
        if self._device.type == "cuda":
            block_bytes = layer.num_kv_heads * self._block_size * layer.head_size * self._dtype.itemsize
            num_blocks = max(num_blocks, _CUDA_POOL_BYTES // block_bytes)
        cache = KVCache([layer], num_blocks, self._block_size, self._dtype, self._device)
        for tensor in (cache.keys[0], cache.values[0]):
            tensor.fill_(float("nan"))
        return cache

    def _layout(self, rows: Sequence[tuple[int, int]]) -> StepLayout:
        tables = [table for table, (_, count) in zip(self._tables, rows, strict=False) if count]
        starts = [start for start, count in rows if count]
        num_tokens = [count for _, count in rows if count]
        lines, none = list(range(len(tables))), [0] * len(tables)
        plan = StepPlan(
            step=0,
            seq_ids=lines,
            lanes=lines,
            starts=starts,
            num_tokens=num_tokens,
            block_tables=tables,
            samples=[False] * len(tables),
            num_logits=none,
            output_index=none,
            token_ids=[0] * sum(num_tokens),
        )
        return build_inputs(plan, self._block_size, self._device).layout

    def _call(self, num_tokens: int) -> AttentionCall:
        layer = self._layer
        return AttentionCall(
            layer=0,
            query=self._randn(layer.num_heads, num_tokens, layer.head_size),
            key=self._randn(layer.num_kv_heads, num_tokens, layer.head_size),
            value=self._randn(layer.num_kv_heads, num_tokens, layer.value_size),
            scaling=layer.head_size**-0.5,
            window=layer.window,
            softcap=layer.softcap,
            sinks=self._sinks,
        )

    def _randn(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._generator, dtype=self._dtype, device=self._device)

    def _compare(self, step: AttentionStep, call: AttentionCall, expected: Tensor) -> str | None:
        taken = _CudaMemory(self._device)
        found = step.attend(call)
        if taken.peak() > _CUDA_POOL_BYTES // 2:
            return f"it copies the pool ({taken.peak() / 1e6:.0f} MB for a few tokens)"
        off = float((found.float() - expected.float()).abs().max())
        if not off <= _TOLERANCE[self._dtype]:
            return f"its result is off by {off:.2g}"
        return None


class _CudaMemory:
    """What has been allocated at most, at once, since this was made: bytes, 0 on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        self._device = device

    def peak(self) -> int:
        if not self._is_cuda:
            return 0
        return int(torch.cuda.max_memory_allocated(self._device)) - int(self._before)
