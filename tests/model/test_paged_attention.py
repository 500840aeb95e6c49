"""Backends for a GPU against the reference on random ragged steps: ours in Triton's interpreter, torch's by its double,
and decode steps made from tensors only, as a captured graph holds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replica.model.attention.backend import AttentionBackend
from replica.model.attention.paged import PagedBackend, decode_layout
from replica.model.attention.reference import ReferenceBackend
from replica.model.attention.varlen import VarlenBackend
from replica.model.inputs import build_inputs
from replica.model.support import LayerShape
from tests.model.plans import make_plan
from tests.model.ragged import NUM_BLOCKS, World, assert_close
from tests.model.varlen_double import VarlenDouble

_CPU = torch.device("cpu")


def _triton(num_processors: int = 64, min_share: int = 256) -> AttentionBackend:
    pytest.importorskip("triton", reason="Triton isn't installed: its kernels are not interpreted here")
    from replica.model.attention.triton_paged import TritonBackend

    return TritonBackend(num_processors, min_share)


def _varlen() -> AttentionBackend:
    return VarlenBackend(16, with_key_starts=True, attention=VarlenDouble(needs_key_starts=True))


_BACKENDS = {"triton": _triton, "varlen": _varlen, "reference": ReferenceBackend}
_LAYER = LayerShape(num_heads=6, num_kv_heads=2, head_size=8, value_size=8)
_LAYERS = {
    "plain": _LAYER,
    "window": replace(_LAYER, window=5),
    "sinks": replace(_LAYER, has_sinks=True),
    "window and sinks": replace(_LAYER, window=9, has_sinks=True),
    "soft cap": replace(_LAYER, softcap=1.5),
    "odd sizes, one KV head": LayerShape(5, 1, 24, 12, window=40, softcap=3.0, has_sinks=True),
    "no groups": LayerShape(3, 3, 16, 16),
}
_VARLEN_LACKS = ("soft cap", "odd sizes, one KV head")


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("kind", _LAYERS)
@pytest.mark.parametrize("name", ["triton", "varlen"])
def test_random_ragged_steps_equal_the_reference(name: str, kind: str, block_size: int) -> None:
    if name == "varlen" and kind in _VARLEN_LACKS:
        pytest.skip("flash attention has neither soft caps nor values of another size")
    backend = _BACKENDS[name]()
    world = World(_LAYERS[kind], block_size, seed=block_size)
    for _ in range(4):
        counts = world.random_counts()
        if block_size == 1:  # a block a token
            counts = {lane: min(count, 2) for lane, count in counts.items()}
        if counts:
            assert_close(*world.step(backend, counts))


@pytest.mark.parametrize("name", _BACKENDS)
def test_decodes_from_tensors_equal_the_reference_and_padding_reaches_nobody(name: str) -> None:
    backend = _BACKENDS[name]()
    assert isinstance(backend, PagedBackend)
    world = World(_LAYERS["window and sinks"], 16, seed=3)
    world.step(backend, {0: 33, 1: 15, 2: 16, 3: 1, 4: 60})
    for _ in range(3):
        rows = world.rows({4: 1, 1: 1, 2: 1, 0: 1})
        layout = build_inputs(make_plan(1, rows), 16, _CPU).layout
        call = world.call(6)
        # Two rows of padding; behind each row's own blocks stand foreign ones, full of NaN.
        foreign = world.free[0]
        tables = torch.full((6, 7), foreign, dtype=torch.int32)
        tables[4:] = NUM_BLOCKS
        for line, row in enumerate(rows):
            used = row.table[: row.start // 16 + 1]
            tables[line, : len(used)] = torch.tensor(used)
        positions = torch.tensor([*(row.start for row in rows), 1, 1])
        paged = decode_layout(tables, positions, 16, spare_block=NUM_BLOCKS, max_context=112)
        found = backend.prepare_paged(paged, world.cache).attend(call)
        short = replace(call, query=call.query[:, :4], key=call.key[:, :4], value=call.value[:, :4])
        expected = ReferenceBackend().prepare(layout, world.twin).attend(short)
        assert_close(found[:4], expected)
        assert world.cache.keys[0][foreign].isnan().all()


def test_a_blocks_rest_is_cleared_when_a_sequence_enters_it() -> None:
    world = World(_LAYER, 16, seed=0)
    world.step(_triton(), {0: 19})
    first, second = world.tables[0][:2]
    assert not world.cache.keys[0][first].isnan().any()
    assert world.cache.values[0][second, :, 3:].count_nonzero() == 0
    assert not world.cache.values[0][second].isnan().any()
    world.step(_triton(), {0: 1})
    assert world.cache.values[0][second, :, 3].count_nonzero() > 0
    assert_close(world.cache.keys[0][second], world.twin.keys[0][second], 0.0)


@pytest.mark.parametrize("window", [None, 100])
def test_long_contexts_are_split_and_merged_to_the_same(window: int | None) -> None:
    backend = _triton(num_processors=64, min_share=32)
    world = World(LayerShape(2, 1, 16, 16, window=window, has_sinks=True), 16, seed=1)
    assert_close(*world.step(backend, {0: 250}))
    assert_close(*world.step(backend, {1: 70, 2: 3}))
    for _ in range(2):
        assert_close(*world.step(backend, {0: 1, 1: 1, 2: 1}))


def test_half_precision_is_as_close_as_it_can_be() -> None:
    world = World(LayerShape(4, 2, 16, 16), 16, seed=2, dtype=torch.float16)
    assert_close(*world.step(_triton(), {0: 20, 1: 40}), 2e-3)
    assert_close(*world.step(_triton(), {0: 1, 1: 3}), 2e-3)


@pytest.mark.parametrize("name", ["triton", "varlen"])
def test_queries_in_another_precision_than_the_pool_are_answered_in_theirs(name: str) -> None:
    world = World(LayerShape(4, 2, 16, 16), 16, seed=2, dtype=torch.float16)
    layout = build_inputs(make_plan(1, world.rows({0: 20, 1: 1})), 16, _CPU).layout
    call = world.call(21)
    exact = replace(call, query=call.query.float())
    found = _BACKENDS[name]().prepare(layout, world.cache).attend(exact)
    expected = ReferenceBackend().prepare(layout, world.twin).attend(call)
    assert found.dtype == torch.float32
    assert_close(found.half(), expected, 2e-3)


def test_a_row_with_nan_in_its_own_context_fails_alone() -> None:
    backend = _triton()
    world = World(_LAYER, 16, seed=5)
    world.step(backend, {0: 20, 1: 20})
    world.cache.keys[0][world.tables[0][0], 0, 3] = float("nan")
    found, expected = world.step(backend, {0: 1, 1: 3})
    assert found[0].isnan().any()
    assert_close(found[1:], expected[1:])
