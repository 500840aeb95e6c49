"""The newest samples of every lane, on the device: what a plan made before its predecessor's commit refers to.

Kept by the number of the draw (`StepPlan.output_index`), not by step: draw i of a sequence is the same token whenever
and however often its step runs. With two plans in flight, n and n + 1, either may run again, whole or in part; n then
needs draw i - 1 although draw i + 1 may have been made. Hence three tokens a lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from replica.model.inputs import IntArray
from replica.model.transfers import to_device

_DEPTH = 3
"""Plans in flight and one before."""


class LaneTokens:
    """`tokens` [lanes * 3] stays where it is."""

    def __init__(self, num_lanes: int, device: torch.device) -> None:
        self.tokens = torch.zeros(_DEPTH * num_lanes, dtype=torch.int64, device=device)

    def keep(self, lanes: Sequence[int], numbers: Sequence[int], tokens: Tensor) -> None:
        """`tokens` [R] are the draws with these numbers in these lanes."""
        self.tokens[to_device(self.places(lanes, numbers), self.tokens.device)] = tokens

    def find(self, lanes: Sequence[int], numbers: Sequence[int]) -> Tensor:
        """The draws [R] with these numbers, which are among the last three of their lanes."""
        return self.tokens[to_device(self.places(lanes, numbers), self.tokens.device)]

    def places(self, lanes: Sequence[int], numbers: Sequence[int]) -> IntArray:
        """Where these draws are in `tokens`."""
        places: IntArray = np.array(lanes, dtype=np.int64) * _DEPTH + np.array(numbers, dtype=np.int64) % _DEPTH
        return places
