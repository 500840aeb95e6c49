"""Our side on an engine in virtual time; outputs of a wrong length are refused."""

from __future__ import annotations

import pytest

from bench.engine_speed.limits import ModelLoad
from bench.engine_speed.rows import Row, prompts
from bench.engine_speed.sides import OwnSide, Run, checked
from bench.peers.driver import DriverFailed
from tests.unit.bench.fit.engines import engine

MODEL = ModelLoad(body_weights=1000, head_weights=0, weight_bytes=1, kv_bytes_per_token=0, ops_per_pair=0)


def test_our_side_counts_tokens_steps_and_the_first_tokens() -> None:
    side = OwnSide(engine(lambda plan: 0.5), 0, MODEL)
    row = Row(3, 30, 4)
    for number in range(2):
        run = side.run(row, prompts(row, 1000, number))
        assert [len(output) for output in run.outputs] == [4, 4, 4]
        # 90 prompt tokens under a budget of 64: two steps; the third sequence is a step behind the others
        assert len(run.steps) == 5
        assert run.first_tokens_s == 1.0
        assert run.steps[0].num_ops == 2.0 * 1000 * 64


def test_steps_are_not_followed_without_a_model() -> None:
    side = OwnSide(engine(lambda plan: 0.5), 0, None)
    row = Row(2, 8, 3)
    assert side.run(row, prompts(row, 1000, 0)).steps == []


@pytest.mark.parametrize("outputs", [[], [[1, 2]], [[1, 2], [1]]])
def test_outputs_of_another_length_are_refused(outputs: list[list[int]]) -> None:
    with pytest.raises(DriverFailed, match="2 x 8/2: "):
        checked(Row(2, 8, 2), Run(1.0, outputs))
