"""The newest samples of every lane, on the device: what a plan made before its predecessor's commit refers to.

Kept by the number of the draw (`StepPlan.output_index`), not by step: draw i of a sequence is the same token whenever
and however often its step runs. With two plans in flight, n and n + 1, either may run again, whole or in part; n then
needs draw i - 1 although draw i + 1 may have been made. Hence three tokens a lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_DEPTH = 3
"""Plans in flight and one before."""


class LaneTokens:
    def __init__(self, num_lanes: int, device: torch.device) -> None:
        self._tokens = torch.zeros(_DEPTH, num_lanes, dtype=torch.int64, device=device)

    def keep(self, lanes: Sequence[int], numbers: Sequence[int], tokens: Tensor) -> None:
        """`tokens` [R] are the draws with these numbers in these lanes."""
        self._tokens[self._places(lanes, numbers)] = tokens

    def find(self, lanes: Sequence[int], numbers: Sequence[int]) -> Tensor:
        """The draws [R] with these numbers, which are among the last three of their lanes."""
        return self._tokens[self._places(lanes, numbers)]

    def _places(self, lanes: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        depths, places = torch.tensor([[number % _DEPTH for number in numbers], lanes]).to(self._tokens.device)
        return depths, places
