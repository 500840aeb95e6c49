"""Runs pip for `make` and turns its hundreds of lines into progress: what, how far, how long.

Standard library only, since it runs before anything is installed: `python install_progress.py TARGET`.
Exit code: pip's. On failure the end of pip's own output is shown, and the file that holds all of it is named.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

HEARTBEAT_S = 15.0
TAIL_LINES = 15
LOG = Path(sys.prefix) / "install.log"

_FILE = re.compile(
    r"\s*(?:Downloading|Using cached|Processing) (?:\S*/)?"
    r"([A-Za-z0-9_.]+)-([0-9][^-\s]*)\S*(?:\.whl|\.tar\.gz|\.zip)(?: \(([0-9.]+ ?[kMG]?B)\))?(?:\s|$)"
)
_INSTALLING = re.compile(r"Installing collected packages: (.*)")


class Progress:
    """What pip is doing now. On a terminal one line is rewritten; elsewhere a line is printed every `HEARTBEAT_S`."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.num_packages = 0
        self.doing = "asking the package index"
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def take(self, line: str) -> None:
        """Learn from one line of pip's output."""
        if found := _FILE.match(line):
            self.num_packages += 1
            self.doing = f"fetching {found[1]} {found[2]}" + (f" ({found[3]})" if found[3] else "")
        elif found := _INSTALLING.match(line):
            self.doing = f"unpacking {len(found[1].split(', '))} packages (takes a minute or two)"

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        if sys.stdout.isatty():
            print("\r\033[K", end="")

    def _tick(self) -> None:
        terminal = sys.stdout.isatty()
        while not self._done.wait(0.5 if terminal else HEARTBEAT_S):
            text = f"  {time.monotonic() - self.started_s:4.0f} s  {self.num_packages} packages so far: {self.doing}"
            print(f"\r\033[K{text[:110]}" if terminal else text, end="" if terminal else "\n", flush=True)


def main(target: str) -> int:
    """Install `target` with the pins of constraints.txt; returns pip's exit code."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-c", "constraints.txt"]
    print(f"Installing the pinned dependencies of {target} (the first time: minutes of download)", flush=True)
    started_s = time.monotonic()
    with LOG.open("w", encoding="utf-8") as log, Progress() as progress:
        pip = subprocess.Popen(
            [*command, "-e", target],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            progress.take(line)
        code = pip.wait()
    if code:
        tail = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        print("\n".join(tail), file=sys.stderr)
        print(f"error: pip failed with exit code {code}; all of its output: {LOG}", file=sys.stderr)
    else:
        print(f"Installed in {time.monotonic() - started_s:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
