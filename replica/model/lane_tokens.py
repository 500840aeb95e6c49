"""The last sampled token of every lane, on the device: what a plan made before its predecessor's commit refers to.

Two tokens a lane, each with its step: a step that runs again (whole, or without some rows) must still find what was
sampled before it, although it may already have sampled once itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class LaneTokens:
    def __init__(self, num_lanes: int, device: torch.device) -> None:
        self._tokens = torch.zeros(2, num_lanes, dtype=torch.int64, device=device)
        self._newest = np.zeros(num_lanes, dtype=np.int64)
        self._steps = np.full(num_lanes, -1, dtype=np.int64)

    def keep(self, step: int, lanes: Sequence[int], tokens: Tensor) -> None:
        """`tokens` [R] are what `step` sampled for `lanes`."""
        which = np.array(lanes, dtype=np.int64)
        again = self._steps[which] == step
        self._newest[which] ^= (~again).astype(np.int64)
        self._steps[which] = step
        place = torch.from_numpy(self._newest[which]).to(self._tokens.device)
        self._tokens[place, torch.from_numpy(which).to(self._tokens.device)] = tokens

    def before(self, step: int, lanes: Sequence[int]) -> Tensor:
        """The newest token of each lane that an earlier step than `step` sampled."""
        which = np.array(lanes, dtype=np.int64)
        place = self._newest[which] ^ (self._steps[which] == step).astype(np.int64)
        device = self._tokens.device
        return self._tokens[torch.from_numpy(place).to(device), torch.from_numpy(which).to(device)]
