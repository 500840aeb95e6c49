"""The real engine's double: time goes on, or it says that it can't."""

from __future__ import annotations

import pytest

from bench.fit.engine import Order, fixed_request
from replica.engine import Engine
from replica.engine_api import EngineUpdate
from tests.unit.bench.fit.engines import LINEAR, engine


class PlansNothing:
    """Takes requests and never plans a step until `num_requests` are there."""

    def __init__(self, engine: Engine, num_requests: int) -> None:
        self._engine, self._num_missing = engine, num_requests
        self.has_work = True
        self.idle_update = engine.idle_update

    def apply(self, commands: list[object]) -> None:
        self._engine.apply(commands)  # type: ignore[arg-type]
        self._num_missing -= 1

    def step(self) -> EngineUpdate:
        if self._num_missing > 0:
            return self._engine.idle_update()
        update = self._engine.step()
        self.has_work = self._engine.has_work
        return update


ORDERS = [Order(at_s, (fixed_request(f"r{at_s}", (1, 2, 3), 2),)) for at_s in (0.0, 7.0)]


def test_an_engine_that_has_work_and_plans_nothing_ends_with_an_error() -> None:
    virtual = engine(LINEAR.of_plan)
    virtual._engine = PlansNothing(virtual._engine, 3)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="the engine plans nothing, although it has work"):
        virtual.play(ORDERS, lambda _: None)


def test_an_engine_that_plans_nothing_waits_for_who_comes_next() -> None:
    virtual = engine(LINEAR.of_plan)
    virtual._engine = PlansNothing(virtual._engine, 2)  # type: ignore[assignment]
    played = virtual.play(ORDERS, lambda _: None)
    names = {name for update in played.updates for name in update.request_ids}
    assert names == {"r0.0", "r7.0"}
    assert played.updates[-1].made_at_s > 7.0
