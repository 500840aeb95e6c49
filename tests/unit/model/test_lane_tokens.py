"""What a pending token refers to, also when a step runs again."""

from __future__ import annotations

import torch

from replica.model.lane_tokens import LaneTokens


def test_the_next_step_finds_the_last_sample_of_each_lane() -> None:
    lanes = LaneTokens(3, torch.device("cpu"))
    lanes.keep(1, [0, 2], torch.tensor([10, 12]))
    lanes.keep(2, [0], torch.tensor([20]))
    assert lanes.before(3, [2, 0]).tolist() == [12, 20]


def test_a_step_that_runs_again_finds_what_was_sampled_before_it() -> None:
    lanes = LaneTokens(2, torch.device("cpu"))
    lanes.keep(1, [0, 1], torch.tensor([10, 11]))
    lanes.keep(2, [0, 1], torch.tensor([20, 21]))
    assert lanes.before(2, [0, 1]).tolist() == [10, 11]
    lanes.keep(2, [1], torch.tensor([22]))
    assert lanes.before(2, [0, 1]).tolist() == [10, 11]
    assert lanes.before(3, [0, 1]).tolist() == [20, 22]
