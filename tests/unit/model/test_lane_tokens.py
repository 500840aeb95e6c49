"""What a pending token refers to, also when steps run again."""

from __future__ import annotations

import torch

from replica.model.lane_tokens import LaneTokens


def test_draws_are_found_by_lane_and_number() -> None:
    lanes = LaneTokens(3, torch.device("cpu"))
    lanes.keep([0, 2], [5, 0], torch.tensor([15, 20]))
    lanes.keep([0], [6], torch.tensor([16]))
    assert lanes.find([2, 0], [0, 6]).tolist() == [20, 16]


def test_a_draw_outlives_the_two_after_it_and_may_be_made_again() -> None:
    lanes = LaneTokens(1, torch.device("cpu"))
    for number in range(3):
        lanes.keep([0], [number], torch.tensor([10 + number]))
    assert lanes.find([0], [0]).tolist() == [10]
    lanes.keep([0], [1], torch.tensor([11]))
    assert [lanes.find([0], [number]).tolist() for number in range(3)] == [[10], [11], [12]]
