"""Every backend against attention written out over whole sequences, for mixed steps over shuffled blocks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replica.model.attention.backend import make_backend
from replica.model.attention.interface import AttentionCall, masked_softmax_attention
from replica.model.inputs import build_inputs
from replica.model.kv_cache import KVCache
from replica.model.support import LayerShape
from tests.model.plans import Row, make_plan

_CPU = torch.device("cpu")
_HEADS, _KV_HEADS, _SIZE, _VALUE_SIZE = 6, 2, 8, 4
_NUM_BLOCKS = 128
# start and number of tokens of each row: decodes, first chunks, later chunks, block borders, a chunk of one; chunks of
# more queries, over more keys, than compiled loops take at once.
_ROWS = (
    (0, 1),
    (7, 1),
    (8, 1),
    (33, 1),
    (63, 1),
    (0, 9),
    (0, 8),
    (5, 3),
    (16, 20),
    (31, 2),
    (0, 2),
    (0, 150),
    (100, 70),
)
_KINDS = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "wide window": {"window": 1000},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 2, _HEADS)},
    "all": {"window": 9, "softcap": 3.0, "sinks": torch.linspace(-1, 3, _HEADS)},
}


def _oracle(call: AttentionCall, key: Tensor, value: Tensor, start: int) -> Tensor:
    """`key`, `value` [KV, context, D]: the whole sequence; the call's queries are its last."""
    context = key.shape[1]
    distance = torch.arange(start, context)[:, None] - torch.arange(context)[None, :]
    mask = (distance >= 0) & (distance < (call.window or context + 1))
    query = call.query.reshape(_KV_HEADS, -1, *call.query.shape[1:])
    return masked_softmax_attention(call, query, key, value, mask).flatten(0, 1).transpose(0, 1)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("block_size", [1, 8, 128])
@pytest.mark.parametrize("name", ["reference", "gather", "pool"])
def test_a_mixed_step_equals_attention_written_out(name: str, block_size: int, kind: str) -> None:
    torch.manual_seed(2)
    contexts = [start + count for start, count in _ROWS]
    keys = [torch.randn(_KV_HEADS, context, _SIZE) for context in contexts]
    values = [torch.randn(_KV_HEADS, context, _VALUE_SIZE) for context in contexts]
    blocks = list(range(640 if block_size == 1 else _NUM_BLOCKS))
    random.Random(1).shuffle(blocks)
    cache = KVCache([LayerShape(_HEADS, _KV_HEADS, _SIZE, _VALUE_SIZE)], len(blocks), block_size, torch.float32, _CPU)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.fill_(float("nan"))
    tables = [[blocks.pop() for _ in range(-(-context // block_size))] for context in contexts]
    backend = make_backend(name)

    def step(rows: list[Row], queries: Tensor) -> Tensor:
        layout = build_inputs(make_plan(1, rows), block_size, _CPU).layout
        ends = [row.start + len(row.token_ids) for row in rows]
        key = torch.cat([keys[row.lane][:, row.start : end] for row, end in zip(rows, ends, strict=True)], dim=1)
        value = torch.cat([values[row.lane][:, row.start : end] for row, end in zip(rows, ends, strict=True)], dim=1)
        call = AttentionCall(0, queries, key, value, 0.3, **_KINDS[kind])  # type: ignore[arg-type]
        return backend.prepare(layout, cache).attend(call)

    before = [Row(lane, 0, [0] * start, tables[lane]) for lane, (start, _) in enumerate(_ROWS) if start]
    step(before, torch.randn(_HEADS, sum(len(row.token_ids) for row in before), _SIZE))
    rows = [Row(lane, start, [0] * count, tables[lane]) for lane, (start, count) in enumerate(_ROWS)]
    queries = torch.randn(_HEADS, sum(count for _, count in _ROWS), _SIZE)
    found = step(rows, queries)

    first = 0
    for lane, (start, count) in enumerate(_ROWS):
        call = AttentionCall(0, queries[:, first : first + count], keys[lane], values[lane], 0.3, **_KINDS[kind])  # type: ignore[arg-type]
        wanted = _oracle(call, keys[lane], values[lane], start)
        torch.testing.assert_close(found[first : first + count], wanted, atol=2e-6, rtol=1e-5)
        first += count


def test_a_window_changes_the_oracle() -> None:
    """The comparison above would see a backend that ignores windows, caps or sinks."""
    torch.manual_seed(2)
    key, value = torch.randn(_KV_HEADS, 20, _SIZE), torch.randn(_KV_HEADS, 20, _VALUE_SIZE)
    plain = AttentionCall(0, torch.randn(_HEADS, 1, _SIZE), key, value, 0.3)
    results = [_oracle(replace(plain, **kind), key, value, 19) for kind in _KINDS.values()]  # type: ignore[arg-type]
    distances = [float((result - results[0]).abs().max()) > 1e-3 for result in results]
    assert distances == [False, True, True, False, True, True, True]
