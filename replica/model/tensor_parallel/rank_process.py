"""The process of rank 1, 2, ... of a model: loads its shard, then runs the steps that the first rank gives out.

Nothing else runs here. It never outlives the engine's process, and ends when that says so or hangs up. A step that
raises is told; then this rank waits for the first one's word that all may go on, because it can't know whether the
others still wait for it in a collective. If no word comes it ends, which frees whoever waits.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from replica.child_process import leave_signals_to_parent, live_and_die_with_parent
from replica.errors import BrimfulError, ErrorInfo, StartupError
from replica.frames import Channel, PeerGone
from replica.model.api import ModelRunner, OutOfDeviceMemory
from replica.model.tensor_parallel.messages import (
    Proceed,
    RankAwake,
    RankFailed,
    RankReady,
    RankStart,
    RunStep,
    StepDone,
    Stop,
)

if TYPE_CHECKING:
    from replica.model.tensor_parallel.group import RankGroup

_log = logging.getLogger(__name__)

PROCEED_S = 15.0
"""How long a rank whose step failed waits for the first one, which may take that long to come out of its own."""
_IDLE_S = 3600.0
_FLUSH_S = 5.0


class _Inbox:
    """Messages of the first rank, oldest first. Raises `PeerGone` when that is no more."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._arrived: deque[object] = deque()

    def next(self) -> object:
        while not self._arrived:
            self._arrived += self._channel.receive(_IDLE_S)
        return self._arrived.popleft()

    def wait_for(self, message: object, limit_s: float) -> bool:
        """Whether `message` comes within `limit_s`; what came before it waits."""
        deadline_s = time.monotonic() + limit_s
        while message not in self._arrived:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._arrived += self._channel.receive(left_s)
        self._arrived.remove(message)
        return True


def main(socket_fd: int) -> None:
    leave_signals_to_parent()
    channel = Channel(socket.socket(fileno=socket_fd))
    inbox = _Inbox(channel)
    try:
        start = inbox.next()
        if not isinstance(start, RankStart):
            raise TypeError(f"expected RankStart, got {type(start).__name__}")
        live_and_die_with_parent(start.parent_pid)
        runner, group = _load(start, channel)
        channel.post(RankReady(runner.shape))
        try:
            _run_steps(runner, group, inbox, channel)
        finally:
            runner.close()
        group.leave(orderly=True)
    except PeerGone:
        _log.info("the engine is gone; rank ends")
        os._exit(0)  # nobody is left to take leave of in torch.distributed


def _load(start: RankStart, channel: Channel) -> tuple[ModelRunner, RankGroup]:
    """A failure is told in one message, then this process ends."""
    from replica.model.runner import load_runner
    from replica.model.tensor_parallel.group import RankGroup
    from replica.model.tensor_parallel.sharding import shard_device

    channel.post(RankAwake())
    size = start.config.tensor_parallel_size
    try:
        device = shard_device(start.config.device, size, start.rank)
        group = RankGroup(start.rank, size, device, start.rendezvous)
        runner = load_runner(start.card, start.config, start.scheduler, progress=lambda _line: None, group=group)
    except BrimfulError as error:
        _fail(channel, error.info())
    except Exception as error:  # noqa: BLE001 - a library's error becomes one clear line
        _log.exception("rank %d can't load its shard", start.rank)
        _fail(channel, StartupError(f"loading rank {start.rank} failed: {type(error).__name__}: {error}").info())
    gc.collect()
    gc.freeze()
    return runner, group


def _run_steps(runner: ModelRunner, group: RankGroup, inbox: _Inbox, channel: Channel) -> None:
    """Until told to stop."""
    while True:
        match inbox.next():
            case RunStep() as step:
                done = _run(runner, group, step)
                channel.post(done)
                channel.flush(_FLUSH_S)
                if done.failure is not None and not inbox.wait_for(Proceed(step.ticket), PROCEED_S):
                    _log.error("step failed here, and the first rank doesn't say that all may go on; rank ends")
                    os._exit(1)
            case Proceed():
                continue  # it failed elsewhere
            case Stop():
                return
            case message:
                raise TypeError(f"unexpected message of the first rank: {type(message).__name__}")


def _run(runner: ModelRunner, group: RankGroup, step: RunStep) -> StepDone:
    try:
        runner.submit(step.unpacked())
    except Exception as error:  # noqa: BLE001 - the first rank decides what it means
        _log.warning("a step failed on this rank: %s: %s", type(error).__name__, error)
        failure = f"{type(error).__name__}: {error}"
        return StepDone(step.ticket, group.num_collectives(), failure, isinstance(error, OutOfDeviceMemory))
    return StepDone(step.ticket, group.num_collectives())


def _fail(channel: Channel, error: ErrorInfo) -> NoReturn:
    _log.error("this rank can't load its shard: %s", error.message)  # the first rank may not be able to say so
    channel.post(RankFailed(error))
    channel.flush(_FLUSH_S)
    sys.exit(1)
