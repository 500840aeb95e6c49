"""A shard in a process of its own: windows go in and news comes out over a pipe."""

from __future__ import annotations

import gc
import resource
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from typing import Any

from bench.simulate.settings import ClusterSettings
from bench.simulate.shard import LocalShard, News, Sent
from bench.simulate.step_totals import StepTotals
from bench.traces.trace import Trace
from replica.errors import ResourceError

_JOIN_S = 10.0


class RemoteShard:
    """`LocalShard` by another process, which ends with this one."""

    def __init__(self, settings: ClusterSettings, trace: Trace, first: int, last: int) -> None:
        self.peak_rss_bytes = 0  # known after `close`
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings, trace, first, last), daemon=True)
        with _interrupts_later():
            self._process.start()
        theirs.close()

    def begin(self, until_s: float, sent: list[Sent]) -> None:
        self._send((until_s, sent))

    def finish(self) -> list[News]:
        """Raises `RuntimeError` with the traceback of what went wrong there, `ResourceError` when the process is gone;
        so do `begin` and `close`."""
        news: list[News] = self._receive()
        return news

    def close(self) -> StepTotals:
        self._send(None)
        totals: StepTotals
        totals, self.peak_rss_bytes = self._receive()
        self._process.join(_JOIN_S)
        self._pipe.close()
        return totals

    def kill(self) -> None:
        """Ends the process whatever it does. Idempotent, also after `close`."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_JOIN_S)

    def _send(self, order: Any) -> None:
        try:
            self._pipe.send(order)
        except OSError:
            while self._pipe.poll():  # it failed, and said why before it ended
                self._receive()
            raise self._killed() from None

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._killed() from None
        if isinstance(answer, str):
            raise RuntimeError(f"a worker of the simulation failed:\n{answer}")
        return answer

    def _killed(self) -> ResourceError:
        self._process.join(_JOIN_S)
        return ResourceError(
            f"a worker of the simulation was killed (exit code {self._process.exitcode}); if the machine ran out of "
            "memory, simulate fewer replicas or requests"
        )


@contextmanager
def collections_paused() -> Iterator[None]:
    """Nothing that a simulation makes is in a reference cycle: a collection only walks millions of live objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C takes effect after the block, and a process that is started in it never sees one: the parent decides what
    it means. Blocked signals are inherited; the handler is for those that another thread of this process gets."""
    if current_thread() is not main_thread():
        yield
        return
    resource_tracker.ensure_running()  # or the first start would start it, which unblocks SIGINT again
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


def peak_rss_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _receive_orders(pipe: Connection, orders: SimpleQueue[Any]) -> None:
    """In a thread of its own: orders are taken while a window runs. Otherwise long ones and long news would wait for
    each other, both sides sending and neither reading."""
    order: Any = ()
    while order is not None:
        try:
            order = pipe.recv()
        except (EOFError, OSError):  # the parent is gone
            order = None
        except Exception as error:  # noqa: BLE001 - the other thread tells the parent
            orders.put(error)
            return
        orders.put(order)


def _serve(pipe: Connection, settings: ClusterSettings, trace: Trace, first: int, last: int) -> None:
    orders: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_receive_orders, args=(pipe, orders), daemon=True).start()
    try:
        shard = LocalShard(settings, trace, first, last)
        pipe.send(shard.finish())
        with collections_paused():
            while (order := orders.get()) is not None:
                if isinstance(order, Exception):
                    raise order
                shard.begin(*order)
                pipe.send(shard.finish())
        pipe.send((shard.close(), peak_rss_bytes()))
    except (BrokenPipeError, ConnectionResetError):
        return
    except Exception:  # noqa: BLE001 - whatever it was, the parent reports it
        pipe.send(traceback.format_exc())
