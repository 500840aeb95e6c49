"""Captured decode steps: a step of one token a row is recorded once and then done again by one call.

Launching a decode step kernel by kernel takes the host longer than the device needs to compute it. So for a ladder of
sizes the whole forward is recorded over tensors that stay where they are; a step takes the next larger size, copies
its columns into those tensors and replays:

    columns   [3, top]        token ids (-1: pending), positions, where a pending token lies among the lanes' tokens
    tables    [top, width]    block tables; `width` serves the longest context
    logits    [top, V]        float32, the last replay's

Rows beyond the step's are padding: they write to a spare block that no table holds, and nobody samples from them.
What a table holds beyond its row's context is an older step's and is never read.

A recording must not depend on values: the backend prepares from tensors (`PagedBackend`). `EagerCapture` runs the same
code without a GPU, so that ladder, padding and copies are proved on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from replica.model.api import ModelShape, Progress
from replica.model.attention.interface import AttentionStep
from replica.model.attention.paged import PagedBackend, decode_layout
from replica.model.kv_cache import KVCache
from replica.model.lane_tokens import LaneTokens
from replica.model.transfers import to_device
from replica.model.warmup import decode_check_plan
from replica.scheduler.plan import PENDING_TOKEN, StepPlan

# Relative distance (2-norm) by which rounding alone may part a replayed step from an eager one.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}

Work = Callable[[], None]

Forward = Callable[[Tensor, Tensor, AttentionStep], Tensor]
"""Token ids [T], positions [T] and attention to float32 logits [T, V] of all of them."""


class GraphCapture(Protocol):
    """Records what `work` does with tensors that stay where they are."""

    def capture(self, work: Work) -> Work:
        """What does it again. Raises what `work` or the recording raises."""
        ...


class EagerCapture:
    """No recording: the work is done anew."""

    def capture(self, work: Work) -> Work:
        work()
        return work


class CudaCapture:
    """CUDA graphs, whose temporary memory is shared: only one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, work: Work) -> Work:
        # Twice beside the recording: libraries get ready in their first call, by means that can't be recorded.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._pool = graph.pool()
        return graph.replay


def ladder(top: int) -> tuple[int, ...]:
    """Sizes up to `top`: 1, 2, 4, 8, 16, 24, ... 64, then four steps a doubling; padding is cheap, a recording not."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < top:
        sizes.append(sizes[-1] + max(8, 1 << sizes[-1].bit_length() - 1 >> 2))
    return (*(size for size in sizes if size < top), top)


def captured(
    graphs: DecodeGraphs, capture: GraphCapture, eager: Callable[[StepPlan], Tensor] | None, progress: Progress
) -> DecodeGraphs | None:
    """Record all sizes and hold each against the same step run by `eager`, if given. None when that fails, after a
    line that says why: then all steps run eagerly, more slowly."""
    try:
        graphs.capture(capture, progress)
        reason = graphs.differs(eager) if eager is not None else None
    except Exception as error:  # noqa: BLE001 - models and kernels that can't be recorded fail in ways of their own
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    if reason is not None:
        progress(f"decode steps are not captured: {reason}")
        return None
    return graphs


class DecodeGraphs:
    """Steps of up to `max_rows` rows. The block of `cache` behind those of `shape` is the spare one. Call within
    `torch.inference_mode`."""

    def __init__(
        self,
        forward: Forward,
        backend: PagedBackend,
        cache: KVCache,
        lane_tokens: LaneTokens,
        shape: ModelShape,
        max_rows: int,
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._cache = cache
        self._lane_tokens = lane_tokens
        self._shape = shape
        self._spare_block = spare_block = shape.num_blocks
        self._sizes = ladder(max_rows)
        device = lane_tokens.tokens.device
        width = -(-shape.max_model_len // shape.block_size)
        # Until a step comes, all rows are padding.
        self._pad_position = min(1, shape.block_size - 1)
        self._columns = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self._columns[1] = self._pad_position
        self._tables = torch.full((max_rows, width), spare_block, dtype=torch.int32, device=device)
        self._logits = torch.empty(0, device=device)
        self._replays: dict[int, Work] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._sizes

    def capture(self, capture: GraphCapture, progress: Progress, sizes: Sequence[int] | None = None) -> None:
        """Record all sizes, or some. Raises what the recording raises; then no step is served from here."""
        chosen = sorted(sizes or self._sizes, reverse=True)
        progress(f"capturing decode steps of {len(chosen)} sizes up to {chosen[0]}")
        self._cache.clear(self._spare_block)
        self._logits = torch.zeros_like(self._compute(self._sizes[-1]))
        # The largest first: the others use its memory again.
        self._replays = {size: capture.capture(lambda size=size: self._step(size)) for size in chosen}  # type: ignore[misc]

    def logits(self, plan: StepPlan) -> Tensor | None:
        """Float32 logits [rows, V] of a plan of single tokens that all want them, valid until the next call; None for
        another plan. Raises IndexError for a block that isn't there (an error of the plan)."""
        num_rows = len(plan)
        size = next((size for size in self._sizes if size >= num_rows), None)
        replay = self._replays.get(size) if size is not None else None
        if size is None or replay is None or len(plan.token_ids) != num_rows or any(c != 1 for c in plan.num_logits):
            return None
        self._load(plan, size)
        replay()
        return self._logits[:num_rows]

    def differs(self, eager: Callable[[StepPlan], Tensor]) -> str | None:
        """How a replayed step differs from the same step run anew; None: by rounding only. Writes into blocks 0 up."""
        for size in self._sizes:
            plan = decode_check_plan(self._shape, size)
            found = self.logits(plan)
            if found is None:
                return f"size {size} was not recorded"
            expected = eager(plan)
            off = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
            if not off <= _TOLERANCE[self._cache.keys[0].dtype]:
                return f"the logits of {size} rows are off by {off:.1e}"
        return None

    def _load(self, plan: StepPlan, size: int) -> None:
        """The plan's columns to where the recording reads them, by one copy from the host."""
        num_rows, block_size = len(plan), self._cache.block_size
        width = max(plan.starts) // block_size + 1
        packed = np.zeros((3 + width) * size, dtype=np.int32)
        columns, tables = packed[: 3 * size].reshape(3, size), packed[3 * size :].reshape(size, width)
        columns[0, :num_rows] = plan.token_ids
        columns[1, :num_rows] = plan.starts
        columns[1, num_rows:] = self._pad_position
        tables[num_rows:] = self._spare_block
        places = self._lane_tokens.places(plan.lanes, [number - 1 for number in plan.output_index])
        columns[2, :num_rows] = np.where(columns[0, :num_rows] == PENDING_TOKEN, places, 0)
        for row, (table, start) in enumerate(zip(plan.block_tables, plan.starts, strict=True)):
            used = table[: start // block_size + 1]
            if len(used) <= start // block_size or max(used) >= self._spare_block:
                raise IndexError(f"row {row} has no block for position {start}")
            tables[row, : len(used)] = used
        moved = to_device(packed, self._columns.device)
        self._columns[:, :size] = moved[: 3 * size].view(3, size)
        self._tables[:size, :width] = moved[3 * size :].view(size, width)

    def _step(self, size: int) -> None:
        self._logits[:size] = self._compute(size)

    def _compute(self, size: int) -> Tensor:
        token_ids, positions, places = self._columns[:, :size].unbind()
        token_ids = torch.where(token_ids == PENDING_TOKEN, self._lane_tokens.tokens[places], token_ids)
        layout = decode_layout(
            self._tables[:size], positions, self._cache.block_size, self._spare_block, self._shape.max_model_len
        )
        return self._forward(token_ids, positions, self._backend.prepare_paged(layout, self._cache))
