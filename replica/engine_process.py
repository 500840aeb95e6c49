"""The asyncio side of an engine that runs in a process of its own: start, talk, notice its death, end it.

    asyncio process                                  engine process (engine_worker.py)
    ProcessClient.send ---- list[EngineCommands] ---> taken at the next step boundary
    on_update <------------ list[EngineUpdate] ------ posted after each step

Neither side waits for the other: commands sent while the engine is in a step, and updates posted while this loop is
busy, pile up at the sender and travel as one frame. Death shows at once, as the end of the socket's stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Callable
from typing import cast

from replica.child_process import spawn
from replica.engine_api import EngineCommands, EngineUpdate
from replica.engine_worker import EngineFailed, EngineProgress, EngineReady, EngineStart
from replica.errors import ResourceError, error_from_info
from replica.frames import FrameReader, pack

_CHILD = "replica.engine_worker"
_EXIT_GRACE_S = 5.0
_DIED_LOADING = (
    "the engine process ended while it was loading the model (killed, or out of memory?): "
    "free memory, or choose a smaller model or KV cache"
)


class ProcessClient(asyncio.Protocol):
    """An `EngineClient`. `ready` holds what the engine said when its model was loaded."""

    def __init__(self, child: subprocess.Popen[bytes], progress: Callable[[str], None]) -> None:
        self._child = child
        self._progress = progress
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._outgoing: list[EngineCommands] = []
        self._may_write = True
        self._flush_planned = False
        self._closing = False
        self._cause = "the engine process ended"
        self._on_update: Callable[[EngineUpdate], None] | None = None
        self._on_death: Callable[[str], None] | None = None
        self._early: list[EngineUpdate] = []

    @classmethod
    async def start(cls, start: EngineStart, progress: Callable[[str], None]) -> ProcessClient:
        """Starts the process and waits until its model is loaded; lines for a waiting person go to `progress`.

        Raises the `StartupError` that the process reports. Cancelled or failed, it leaves no process behind. Linux ties
        the child to the thread that runs this loop: let that thread live as long as the engine.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = spawn(_CHILD, theirs, f"engine of {start.replica_id}")
            client = cls(child, progress)
            try:
                transport, _ = await asyncio.get_running_loop().create_connection(lambda: client, sock=ours)
                transport.set_write_buffer_limits(high=0)
                transport.write(pack(start))
                await asyncio.shield(client._ready)
            except BaseException:
                await client.close()
                raise
        except BaseException:
            ours.close()
            raise
        return client

    @property
    def ready(self) -> EngineReady:
        return self._ready.result()

    @property
    def pid(self) -> int:
        return self._child.pid

    def listen(self, on_update: Callable[[EngineUpdate], None], on_death: Callable[[str], None]) -> None:
        self._on_update, self._on_death = on_update, on_death
        for update in self._early:
            on_update(update)
        self._early.clear()
        if self._gone.is_set():
            on_death(self._cause)

    def send(self, commands: EngineCommands) -> None:
        self._outgoing.append(commands)
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def kill(self, cause: str) -> None:
        self._cause = cause
        self._child.kill()

    async def close(self) -> None:
        self._closing = True
        if self._transport is not None and not self._gone.is_set():
            self._transport.write(pack([*self._outgoing, EngineCommands(shutdown=True)]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), _EXIT_GRACE_S if self._ready.done() else 0)
        await self._reap()
        if self._transport is not None:
            self._transport.abort()
            await self._gone.wait()

    async def _reap(self) -> None:
        """The end of the stream comes a moment before the end of the process; a stuck one is killed."""
        try:
            await asyncio.to_thread(self._child.wait, _EXIT_GRACE_S if self._gone.is_set() else 0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            await asyncio.to_thread(self._child.wait)

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            for message in frame if isinstance(frame, list) else [frame]:
                self._take(message)

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._gone.set()
        if not self._ready.done():
            self._ready.set_exception(ResourceError(_DIED_LOADING))
            self._ready.exception()
        if not self._closing and self._on_death is not None:
            self._on_death(self._cause)

    def _take(self, message: object) -> None:
        match message:
            case EngineUpdate():
                if self._on_update is None:
                    self._early.append(message)
                elif not self._closing:
                    self._on_update(message)
            case EngineProgress(line):
                self._progress(line)
            case EngineReady():
                self._ready.set_result(message)
            case EngineFailed(error):
                if self._ready.done():
                    self._cause = error.message
                else:
                    self._ready.set_exception(error_from_info(error))
            case _:
                raise TypeError(f"unexpected message of the engine: {type(message).__name__}")

    def _flush(self) -> None:
        """Everything sent since the last frame leaves as one, unless the engine hasn't read that yet."""
        self._flush_planned = False
        if self._outgoing and self._may_write and self._transport is not None and not self._gone.is_set():
            frame, self._outgoing = self._outgoing, []
            self._transport.write(pack(frame))
