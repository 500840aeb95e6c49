"""`brimful serve` as a measurement needs it: up while a block runs, its progress passed on, ended with the block."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from replica.errors import StartupError

START_LIMIT_S = 600.0
STOP_LIMIT_S = 60.0
_READY = "Ctrl-C drains"
"""Begins the last line that the command prints when it is ready."""


@contextmanager
def running_service(
    flags: Sequence[str],
    progress: Callable[[str], None],
    environment: Mapping[str, str],
    start_limit_s: float = START_LIMIT_S,
) -> Iterator[subprocess.Popen[str]]:
    """Its process, with `environment` put over this one's. Raises `StartupError`.

    It is in a session of its own: Ctrl-C at the terminal is ours, and the end of the block passes it on. SIGTERM and
    SIGHUP leave the block, too, as `SystemExit`. A command that doesn't end then is killed, and its cluster ends by
    itself. For the main thread.
    """
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    process = subprocess.Popen(
        [sys.executable, "-m", "deployments.cli", "serve", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        _wait_until_ready(lines, progress, time.monotonic() + start_limit_s)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        process.kill()
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _wait_until_ready(lines: queue.SimpleQueue[str | None], progress: Callable[[str], None], deadline_s: float) -> None:
    last = ""
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise StartupError(f"the service wasn't ready in time: {last}") from None
        if line is None:
            raise StartupError(f"the service didn't come up: {last}")
        if line.startswith(_READY):
            return
        last = line.strip() or last
        progress(f"service: {last}")


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def free_port(host: str) -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
