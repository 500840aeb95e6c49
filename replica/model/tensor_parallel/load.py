"""Starts the ranks of a model and loads it in all of them. This module imports torch only after the other ranks have
been started, which import it meanwhile."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from replica.config import ModelConfig, SchedulerConfig
from replica.errors import EngineDead, ResourceError
from replica.model.api import Progress
from replica.model.tensor_parallel.messages import RankReady, RankStart
from replica.model.tensor_parallel.ranks import OnLoss, Ranks
from replica.model.tensor_parallel.runner import TensorParallelRunner
from replica.model_card import ModelCard

if TYPE_CHECKING:
    from replica.model.tensor_parallel.group import RankGroup

_AWAKE_S = 300.0
# After the first rank is ready: the others have done the same work.
_READY_S = 120.0


def load_sharded(
    card: ModelCard, config: ModelConfig, scheduler: SchedulerConfig, *, progress: Progress, on_loss: OnLoss
) -> TensorParallelRunner:
    """As `load_runner`, over `config.tensor_parallel_size` devices of this machine. `on_loss` is called on another
    thread when a rank has died and the runner wasn't closed within a moment: the process should end then.

    Raises a `StartupError` that says what to change, and leaves no process behind.
    """
    size = config.tensor_parallel_size
    shares = replace(config, num_threads=max(1, (config.num_threads or os.cpu_count() or 1) // size))
    progress(f"starting {size} ranks")
    ranks = Ranks(size, on_loss)
    try:
        ranks.start(lambda rank: RankStart(card, shares, scheduler, rank, ranks.rendezvous, os.getpid()))
        group = _gather(ranks, shares, progress)
        try:
            return _load(ranks, group, card, shares, scheduler, progress)
        except BaseException:
            ranks.kill()
            group.leave(orderly=False)
            raise
    except EngineDead as error:
        ranks.kill()
        raise ResourceError(f"{error.message}, while it was loading; free memory, or choose a smaller model") from error
    except BaseException:
        ranks.kill()
        raise


def _gather(ranks: Ranks, config: ModelConfig, progress: Progress) -> RankGroup:
    from replica.model.tensor_parallel.group import RankGroup
    from replica.model.tensor_parallel.sharding import shard_device

    device = shard_device(config.device, config.tensor_parallel_size, 0)
    if device.type == "cpu":
        progress("tensor parallel on the CPU is for tests only: one process is faster")
    ranks.collect(_AWAKE_S)
    return RankGroup(0, config.tensor_parallel_size, device, ranks.rendezvous)


def _load(
    ranks: Ranks,
    group: RankGroup,
    card: ModelCard,
    config: ModelConfig,
    scheduler: SchedulerConfig,
    progress: Progress,
) -> TensorParallelRunner:
    from replica.model.runner import load_runner

    try:
        runner = load_runner(card, config, scheduler, progress=progress, group=group)
    except Exception as error:
        # A rank that failed alone hung up, which here looks like a fault of the connection.
        raise (ranks.failure() or error) from error
    for message in ranks.collect(_READY_S):
        if not isinstance(message, RankReady) or message.shape != runner.shape:
            raise ranks.failure() or ResourceError(f"the ranks of {card.name} loaded different models: {message}")
    ranks.loaded()
    return TensorParallelRunner(runner, ranks, group)
