"""The engine's own process: loads the model, then steps until told to stop. Started by `engine_process.py` only.

The loop: take what commands have arrived (waiting only when there is nothing to compute), step, post the update.
Nothing else runs here: no HTTP, no text, no second thread, because a busy Python thread beside the forward costs it up
to four fifths of its speed.

It never outlives its parent (`child_process.py`).
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from replica.child_process import leave_signals_to_parent, live_and_die_with_parent
from replica.config import EngineConfig
from replica.engine import Engine
from replica.engine_api import EngineCommands, EngineUpdate
from replica.errors import BrimfulError, EngineDead, ErrorInfo, SettingError, StartupError
from replica.frames import Channel, PeerGone
from replica.model.api import ModelRunner, ModelShape, Progress
from replica.model_card import ModelCard

_log = logging.getLogger(__name__)

RunnerFactory = Callable[[EngineConfig, Progress], tuple[ModelRunner, ModelCard]]
"""Makes a model ready in the process that calls it. Crosses the process border by its import path."""

KEEP_ALIVE_S = 1.0
_FLUSH_S = 5.0
_BREATHER_S = 0.01


@dataclass(frozen=True, slots=True)
class EngineStart:
    """The first message to the process: what to load and who it is."""

    config: EngineConfig
    runner_factory: RunnerFactory
    replica_id: str
    epoch: str
    parent_pid: int


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """A line about loading, for a person who waits."""

    line: str


@dataclass(frozen=True, slots=True)
class EngineReady:
    """Loaded: from now on commands are taken and updates come. `is_async` as the runner says."""

    card: ModelCard
    shape: ModelShape
    is_async: bool


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The process can't go on and ends: at the start (`error` says what to do) or later (`error` is `EngineDead`)."""

    error: ErrorInfo


def load_model(config: EngineConfig, progress: Progress) -> tuple[ModelRunner, ModelCard]:
    """Prepares and loads the configured model. The only way from a replica to torch; raises `StartupError`."""
    from replica.model.prepare import prepare

    card = prepare(config.model, progress=progress)
    if config.model.tensor_parallel_size > 1:
        from replica.model.tensor_parallel.load import load_sharded

        return load_sharded(card, config.model, config.scheduler, progress=progress, on_loss=_end_at_once), card
    from replica.model.runner import load_runner

    return load_runner(card, config.model, config.scheduler, progress=progress), card


def _end_at_once(reason: str) -> None:
    """For an engine that may wait on a device for ever. The replica sees its process end and fails the streams."""
    _log.error("%s: the engine ends", reason)
    os._exit(1)


def main(socket_fd: int) -> None:
    """Runs until told to stop or until the parent is gone."""
    leave_signals_to_parent()
    channel = Channel(socket.socket(fileno=socket_fd))
    try:
        start = _first_message(channel)
        live_and_die_with_parent(start.parent_pid)
        engine, runner = _start_engine(start, channel)
        try:
            run_loop(engine, channel)
        finally:
            runner.close()
    except PeerGone:
        _log.info("the replica is gone; the engine ends")


def _first_message(channel: Channel) -> EngineStart:
    while True:
        for message in channel.receive(KEEP_ALIVE_S):
            if isinstance(message, EngineStart):
                return message
            raise TypeError(f"expected EngineStart, got {type(message).__name__}")


def _start_engine(start: EngineStart, channel: Channel) -> tuple[Engine, ModelRunner]:
    """Loads the model. A failure is told in one message, then this process exits."""
    try:
        runner, card = start.runner_factory(start.config, lambda line: channel.post(EngineProgress(line)))
        engine = Engine(
            start.config,
            runner,
            clock=time.monotonic,
            random_seed=lambda: secrets.randbits(63),
            replica_id=start.replica_id,
            epoch=start.epoch,
        )
    except BrimfulError as error:
        _fail(channel, error.info())
    except PeerGone:
        raise
    except Exception as error:  # noqa: BLE001 - a library's error becomes one clear line
        _log.exception("loading the model failed")
        _fail(channel, StartupError(f"loading the model failed: {type(error).__name__}: {error}").info())
    # What loading made lives as long as the process: the collector needn't walk over it between steps.
    gc.collect()
    gc.freeze()
    channel.post(EngineReady(card, runner.shape, runner.is_async))
    return engine, runner


def run_loop(engine: Engine, channel: Channel) -> None:
    """See the module's first lines. Returns on shutdown; exits the process when the engine is dead."""
    update = engine.idle_update()
    while True:
        channel.post(update)
        batches = channel.receive(_pause_s(engine, update))
        try:
            for commands in batches:
                if not _apply(engine, commands):
                    return
            update = engine.step() if engine.has_work else engine.idle_update()
        except Exception as error:  # noqa: BLE001 - the engine says that it is dead, then dies
            _log.exception("the engine is dead: %s", error)
            dead = EngineDead("the engine of this replica failed")
            channel.post(engine.fail_all(dead))
            _fail(channel, dead.info())


def _apply(engine: Engine, commands: object) -> bool:
    """Whether to go on after one batch of orders."""
    if not isinstance(commands, EngineCommands):
        raise TypeError(f"expected EngineCommands, got {type(commands).__name__}")
    try:
        engine.apply(commands)
    except SettingError as error:
        _log.warning("budgets not changed: %s", error.message)
    return not commands.shutdown


def _pause_s(engine: Engine, update: EngineUpdate) -> float:
    """How long to wait for commands: not at all while steps run, a moment after a turn that computed nothing (memory
    was short), else until it is time for a sign of life."""
    if not engine.has_work:
        return KEEP_ALIVE_S
    return 0.0 if update.stats.num_tokens else _BREATHER_S


def _fail(channel: Channel, error: ErrorInfo) -> None:
    channel.post(EngineFailed(error))
    channel.flush(_FLUSH_S)
    sys.exit(1)
