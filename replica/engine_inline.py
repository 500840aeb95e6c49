"""The engine on the event loop's own thread: the same `EngineClient`, one step a loop turn, deterministic.

For tests and simulations with a fake model. A real model would block the loop for the length of each step.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from replica.engine import Engine
from replica.engine_api import EngineCommands, EngineUpdate
from replica.errors import EngineDead

_log = logging.getLogger(__name__)


class InlineClient:
    """An `EngineClient` whose engine steps whenever the loop has nothing else ready to run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: list[EngineCommands] = []
        self._turn_planned = False
        self._ended = False
        self._on_update: Callable[[EngineUpdate], None] = lambda _: None
        self._on_death: Callable[[str], None] = lambda _: None

    @property
    def pid(self) -> int:
        return os.getpid()

    def listen(self, on_update: Callable[[EngineUpdate], None], on_death: Callable[[str], None]) -> None:
        self._on_update, self._on_death = on_update, on_death
        on_update(self._engine.idle_update())

    def send(self, commands: EngineCommands) -> None:
        if not self._ended:
            self._commands.append(commands)
            self._plan_turn()

    def kill(self, cause: str) -> None:
        if not self._ended:
            self._ended = True
            self._on_death(cause)

    async def close(self) -> None:
        self._ended = True

    def _plan_turn(self) -> None:
        if not self._turn_planned:
            self._turn_planned = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_planned = False
        if self._ended:
            return
        commands, self._commands = self._commands, []
        try:
            for batch in commands:
                self._engine.apply(batch)
            update = self._engine.step() if self._engine.has_work else self._engine.idle_update()
        except Exception as error:  # noqa: BLE001 - as in the worker: the engine says that it is dead
            _log.exception("the engine is dead: %s", error)
            self._on_update(self._engine.fail_all(EngineDead("the engine of this replica failed")))
            self.kill("the engine of this replica failed")
            return
        self._on_update(update)
        if self._engine.has_work:
            self._plan_turn()
