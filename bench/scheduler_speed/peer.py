"""The peer's process: orders in, times out, one JSON document a line. Ended with the block that opened it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bench.scheduler_speed.workload import StepTimes, Workload

_ROOT = Path(__file__).resolve().parents[2]
_DRIVER = "bench.scheduler_speed.vllm_driver"
_LAST_WORDS = 12
"""Lines of the peer's own output that an error shows."""


class PeerFailed(RuntimeError):
    """The peer's interpreter, its packages or its scheduler don't work; the message has its last words."""


class PeerProcess:
    """A `Side` in another interpreter. `version` is the peer's own."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process = process
        self._log = log
        self.version = str(self._answer()["ready"])

    def start(self, workload: Workload) -> None:
        self._ask(start=[workload.num_running, workload.num_waiting])

    def run_round(self, num_steps: int) -> StepTimes:
        return StepTimes(*self._ask(round=num_steps)["times"])

    def _ask(self, **order: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(self._last_words()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return "the peer ended early:\n" + "\n".join(self._log.read().splitlines()[-_LAST_WORDS:])


@contextmanager
def peer_process(python: str) -> Iterator[PeerProcess]:
    """Starts the driver under this interpreter. Raises PeerFailed when it can't run."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            process = subprocess.Popen(
                [python, "-m", _DRIVER],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        except OSError as error:
            raise PeerFailed(f"cannot run {python}: {error.strerror}") from None
        with process:
            try:
                yield PeerProcess(process, log)
            finally:
                assert process.stdin is not None
                process.kill()
