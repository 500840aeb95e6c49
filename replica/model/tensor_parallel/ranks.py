"""The other ranks of a model, as the first one has them: processes, one channel each, and a watch over their lives.

A rank that is gone is noticed twice. Whoever reads or writes its channel gets `EngineDead`; and a thread that sleeps
until the process ends calls `on_loss` when the engine hasn't ended all ranks within a moment, because the engine may be
idle, or may wait on the device for a rank that is no more.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from replica.child_process import spawn
from replica.errors import BrimfulError, EngineDead, error_from_info
from replica.frames import Channel, PeerGone
from replica.model.tensor_parallel.messages import RankFailed, RankStart, Stop

_log = logging.getLogger(__name__)

MODULE = "replica.model.tensor_parallel.rank_process"
EXIT_GRACE_S = 5.0
# For the engine to notice a loss itself, end its streams and say why; while it loads it may be long about it.
NOTICE_S = 2.0
LOADING_NOTICE_S = 60.0
_SEND_S = 20.0
_TELL_S = 1.0

OnLoss = Callable[[str], None]


@dataclass(slots=True)
class _Rank:
    """`watch` sleeps until the process has ended; `end` says how it did."""

    number: int
    child: subprocess.Popen[bytes]
    channel: Channel
    arrived: list[object] = field(default_factory=list)
    watch: threading.Thread | None = None
    end: str | None = None

    def join(self, limit_s: float | None = None) -> None:
        if self.watch is not None:
            self.watch.join(limit_s)


class Ranks:
    """Ranks 1, 2, ... in order. Use it from one thread, which must live as long as they do: Linux ties them to it."""

    def __init__(self, size: int, on_loss: OnLoss) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="brimful-ranks-"))
        self._on_loss = on_loss
        self._notice_s = LOADING_NOTICE_S
        self._ending = threading.Event()
        self._ranks: list[_Rank] = []
        try:
            for number in range(1, size):
                self._spawn(number)
        except BaseException:
            self.kill()
            raise

    @property
    def rendezvous(self) -> str:
        """A file for the ranks to find each other through; only this user can reach it."""
        return str(self._folder / "rendezvous")

    @property
    def pids(self) -> list[int]:
        return [rank.child.pid for rank in self._ranks]

    def start(self, make: Callable[[int], RankStart]) -> None:
        for rank in self._ranks:
            self._post(rank, make(rank.number))

    def loaded(self) -> None:
        """From now on a loss is to be noticed at once."""
        self._notice_s = NOTICE_S

    def send(self, message: object) -> None:
        """To all. Raises `EngineDead` when one is gone or doesn't read."""
        for rank in self._ranks:
            self._post(rank, message)

    def collect(self, limit_s: float) -> list[object]:
        """The next message of each. Raises `EngineDead` when one is gone or says nothing for `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        return [self._next(rank, deadline_s) for rank in self._ranks]

    def failure(self) -> BrimfulError | None:
        """Why a rank couldn't load its shard, if one says so, or is gone, within a moment."""
        deadline_s = time.monotonic() + _TELL_S
        for rank in self._ranks:
            try:
                while True:
                    message = self._next(rank, deadline_s)
                    if isinstance(message, RankFailed):
                        return error_from_info(message.error)
            except EngineDead as error:
                if rank.end is not None:
                    return error
        return None

    def stop(self) -> None:
        """Tells them to end."""
        self._ending.set()
        for rank in self._ranks:
            try:
                rank.channel.post(Stop())
                rank.channel.flush(_TELL_S)
            except PeerGone:
                continue

    def close(self) -> None:
        """After `stop`: waits until they have ended. Who hasn't after a while is killed."""
        deadline_s = time.monotonic() + EXIT_GRACE_S
        for rank in self._ranks:
            rank.join(max(0.0, deadline_s - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        self._ending.set()
        for rank in self._ranks:
            rank.child.kill()
            rank.join()
            rank.channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # transformers places a process's shard by this variable.
            child = spawn(MODULE, theirs, f"rank {number} of engine {os.getpid()}", {"LOCAL_RANK": str(number)})
        rank = _Rank(number, child, Channel(ours))
        rank.watch = threading.Thread(target=self._watch, args=(rank,), daemon=True)
        self._ranks.append(rank)
        rank.watch.start()

    def _watch(self, rank: _Rank) -> None:
        code = rank.child.wait()
        rank.end = f"signal {-code}" if code < 0 else f"exit code {code}"
        if self._ending.is_set():
            return
        reason = f"rank {rank.number} of the model ended ({rank.end})"
        _log.error("%s", reason)
        if not self._ending.wait(self._notice_s):
            self._on_loss(reason)

    def _post(self, rank: _Rank, message: object) -> None:
        try:
            rank.channel.post(message)
            rank.channel.flush(_SEND_S)
        except PeerGone as error:
            raise self._death(rank) from error

    def _next(self, rank: _Rank, deadline_s: float) -> object:
        while not rank.arrived:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise EngineDead(f"rank {rank.number} of the model doesn't answer")
            try:
                rank.arrived += rank.channel.receive(left_s)
            except PeerGone as error:
                raise self._death(rank) from error
        return rank.arrived.pop(0)

    def _death(self, rank: _Rank) -> EngineDead:
        rank.join(_TELL_S)
        return EngineDead(f"rank {rank.number} of the model ended ({rank.end or 'it hung up'})")
