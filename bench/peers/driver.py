"""A driver's process: orders in, answers out, one JSON document a line. Ended with the block that opened it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

_ROOT = Path(__file__).resolve().parents[2]
_LAST_WORDS = 12
"""Lines of the driver's own output that an error shows."""
_GRACE_S = 10.0


class DriverFailed(RuntimeError):
    """The driver's interpreter, its packages or what it drives don't work; the message has its last words."""


class Driver:
    """Waits for the driver to be ready. `version` is of what it drives."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._name = name
        self._process = process
        self._log = log
        self.version = str(self._answer()["ready"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **order: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise DriverFailed(self._last_words()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise DriverFailed(f"{self._name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return "it ended early:\n" + "\n".join(self._log.read().splitlines()[-_LAST_WORDS:])


@contextmanager
def driver(name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Driver]:
    """Runs `command` (interpreter, -m, module, ...) in the root of the project, in a process group of its own, so that
    all that it starts ends with it. `environment` None: this process's own. Raises `DriverFailed` when it can't run."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env=None if environment is None else dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
            )
        except OSError as error:
            raise DriverFailed(f"{name}: cannot run {command[0]}: {error.strerror}") from None
        try:
            yield Driver(name, process, log)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """The end of its orders ends a driver; a stuck one, and whatever it left behind, is killed."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def machine_cpu_seconds() -> float:
    """CPU time that everything on this machine has used so far, but for this process."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - own.user - own.system)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and all that it started have used so far."""
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
