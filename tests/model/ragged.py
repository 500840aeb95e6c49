"""Random ragged steps for attention backends, beside the reference: sequences that grow over a pool full of NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replica.model.attention.backend import AttentionBackend
from replica.model.attention.interface import AttentionCall
from replica.model.attention.reference import ReferenceBackend
from replica.model.inputs import build_inputs
from replica.model.kv_cache import KVCache
from replica.model.support import LayerShape
from tests.model.plans import Row, make_plan

NUM_BLOCKS = 96
_CPU = torch.device("cpu")


@dataclass
class World:
    """Sequences that grow by random steps; `cache` is the backend's, `twin` the reference's. Unused blocks are NaN."""

    layer: LayerShape
    block_size: int
    seed: int
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    lengths: list[int] = field(default_factory=lambda: [0] * 5)
    tables: list[list[int]] = field(default_factory=lambda: [[] for _ in range(5)])

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.random = random.Random(self.seed)
        self.free = list(range(NUM_BLOCKS))
        self.random.shuffle(self.free)
        self.sinks = torch.randn(self.layer.num_heads).to(self.device) if self.layer.has_sinks else None
        self.cache, self.twin = self._pool(), self._pool()

    def _pool(self) -> KVCache:
        cache = KVCache([self.layer], NUM_BLOCKS + 1, self.block_size, self.dtype, self.device)
        for tensor in (cache.keys[0], cache.values[0]):
            tensor.fill_(float("nan"))
        return cache

    def rows(self, counts: dict[int, int]) -> list[Row]:
        """The sequences grow by so many tokens; their tables with them, and further ahead now and then."""
        rows = []
        for lane, count in counts.items():
            start = self.lengths[lane]
            self.lengths[lane] += count
            while len(self.tables[lane]) * self.block_size < self.lengths[lane] + self.random.choice((0, 5)):
                self.tables[lane].append(self.free.pop())
            rows.append(Row(lane, start, [0] * count, self.tables[lane]))
        return rows

    def call(self, num_tokens: int) -> AttentionCall:
        layer = self.layer
        # Strides as transformers gives them: [T, heads, D] seen as [heads, T, D].
        query, key, value = (
            torch.randn(num_tokens, heads, size).to(self.device, self.dtype).transpose(0, 1)
            for heads, size in (
                (layer.num_heads, layer.head_size),
                (layer.num_kv_heads, layer.head_size),
                (layer.num_kv_heads, layer.value_size),
            )
        )
        return AttentionCall(0, query, key, value, 0.4, layer.window, layer.softcap, self.sinks)

    def step(self, backend: AttentionBackend, counts: dict[int, int]) -> tuple[Tensor, Tensor]:
        """What the backend and the reference make of one step."""
        layout = build_inputs(make_plan(1, self.rows(counts)), self.block_size, self.device).layout
        call = self.call(sum(counts.values()))
        found = backend.prepare(layout, self.cache).attend(call)
        return found, ReferenceBackend().prepare(layout, self.twin).attend(call)

    def random_counts(self) -> dict[int, int]:
        lanes = self.random.sample(range(5), self.random.randint(1, 5))
        return {lane: self.random.choice((1, 1, 1, 2, 7, 30)) for lane in lanes if self.lengths[lane] < 90}


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 5e-6) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
