"""The processes that hold one model together (tensor parallelism), as loading and running a model see them.

All of them run the same code on the same inputs in the same order, because the model's forwards contain collective
operations that wait for everybody. What may differ between them goes through this group: the device, what memory is
left, and the sampled tokens, which are the first rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from replica.scheduler.plan import JoinedSequence, StepPlan


class TokenSampler(Protocol):
    """What of `sampler.py` a step needs."""

    def join(self, joined: JoinedSequence) -> None: ...

    def sample(self, logits: Tensor, plan: StepPlan, rows: Sequence[int]) -> tuple[Tensor, Tensor]: ...


class ShardGroup(Protocol):
    """`size` processes on one machine, each with its own device."""

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device | None:
        """This process's device; None: the setting says which."""
        ...

    def least(self, number: int) -> int:
        """The smallest of the numbers that the processes bring."""
        ...

    def shared(self, sampler: TokenSampler) -> TokenSampler:
        """A sampler whose tokens are the same in all processes."""
        ...


class _Alone:
    """The model is in this process, whole."""

    size = 1
    device = None

    def least(self, number: int) -> int:
        return number

    def shared(self, sampler: TokenSampler) -> TokenSampler:
        return sampler


ALONE: ShardGroup = _Alone()
