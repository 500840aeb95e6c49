"""What the ranks of a model share through torch.distributed: NCCL between GPUs, gloo between processes on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from replica.model.shard_group import TokenSampler
from replica.scheduler.plan import JoinedSequence, StepPlan

# Loading may differ by minutes between ranks. In a step a rank that hangs is the stall timeout's affair.
_TIMEOUT = timedelta(minutes=30)


class RankGroup:
    """A `ShardGroup` of several processes on one machine. Made once in a process at a time."""

    def __init__(self, rank: int, size: int, device: torch.device, rendezvous: str) -> None:
        """Waits for the other ranks."""
        self._rank = rank
        self._device = device
        self._size = size
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=distributed.FileStore(rendezvous, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=device if on_gpu else None,
        )

    @property
    def size(self) -> int:
        return self._size

    @property
    def is_first(self) -> bool:
        return self._rank == 0

    @property
    def device(self) -> torch.device:
        return self._device

    def least(self, number: int) -> int:
        numbers = torch.tensor(number, device=self._device)
        distributed.all_reduce(numbers, distributed.ReduceOp.MIN)
        return int(numbers)

    def shared(self, sampler: TokenSampler) -> TokenSampler:
        return _SharedTokens(sampler, self)

    def share(self, tokens: Tensor) -> None:
        """Make `tokens` what they are on the first rank, in place; on a GPU in the order of its work."""
        distributed.broadcast(tokens, src=0)

    def num_collectives(self) -> int:
        """How many collective operations this process has begun, in all its groups."""
        groups: Iterable[Any] = distributed.distributed_c10d._world.pg_map
        return sum(int(group._get_sequence_number_for_group()) for group in groups)

    def leave(self, *, orderly: bool) -> None:
        """With all others (`orderly`), or when they are gone: then NCCL could wait for ever, and the process's end must
        do."""
        if orderly or self._device.type == "cpu":
            distributed.destroy_process_group()


class _SharedTokens:
    """Sampling by the first rank only: even where all have the same logits, nothing promises the same last bits."""

    def __init__(self, sampler: TokenSampler, group: RankGroup) -> None:
        self._sampler = sampler
        self._group = group

    def join(self, joined: JoinedSequence) -> None:
        self._sampler.join(joined)

    def sample(self, logits: Tensor, plan: StepPlan, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        if not self._group.is_first:
            self._group.share(tokens)
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        try:
            drawn, sound = self._sampler.sample(logits, plan, rows)
            tokens.copy_(drawn)
        finally:
            self._group.share(tokens)  # the others wait for it, whatever happened here
        return tokens, sound
