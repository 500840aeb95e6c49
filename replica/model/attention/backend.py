"""The contract of attention backends, and those that run anywhere by name. Which one serves is said in `choice.py`.

A backend turns a step's layout into what its kernels need once (`prepare`), then computes every layer (`attend`): write
the new K and V into the pool, attend to it. To add one: implement `AttentionBackend`, add it to the candidates in
`choice.py`, and run tests/model/test_attention.py, which holds all backends against the same oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from replica.model.attention.interface import AttentionStep
from replica.model.inputs import StepLayout
from replica.model.kv_cache import KVCache


class AttentionBackend(Protocol):
    """`block_size` is what its kernels like best; it must work with any."""

    @property
    def block_size(self) -> int: ...

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        """What computes this step's layers. Holds views of `cache`, valid for this step only."""
        ...


def _reference() -> AttentionBackend:
    from replica.model.attention.reference import ReferenceBackend

    return ReferenceBackend()


def _gather() -> AttentionBackend:
    from replica.model.attention.gather import GatherBackend

    return GatherBackend()


def _pool() -> AttentionBackend:
    from replica.model.attention.pool import PoolBackend

    return PoolBackend()


def _tiles() -> AttentionBackend:
    from replica.model.attention.tiles import TileBackend

    return TileBackend()


_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "reference": _reference,
    "gather": _gather,
    "pool": _pool,
    "tiles": _tiles,
}


def make_backend(name: str) -> AttentionBackend:
    return _BACKENDS[name]()
