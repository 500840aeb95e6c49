"""What the person at the terminal sees: progress on stdout, an error as one line on stderr."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable
from typing import TextIO

HEARTBEAT_S = 10.0
_WIPE = "\r\033[K"


class Console:
    """Progress of one piece of work after the other, each with the time it has taken so far.

    On a terminal the current line is rewritten; elsewhere (a file, CI) a line is printed when the text changes, and
    again every `HEARTBEAT_S` while it doesn't. Somebody calls `tick` a few times a second.
    """

    def __init__(self, out: TextIO = sys.stdout, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._terminal = out.isatty()
        self._text = ""
        self._since_s = 0.0
        self._shown_at_s = 0.0

    def doing(self, text: str) -> None:
        """The current work, such as `starting replica 1/2`; its clock goes on while the first two words stay, or the
        first one where a colon ends it: `simulating: 9 s left`."""
        if text == self._text:
            return
        if _work(text) != _work(self._text):
            self._since_s = self._clock()
        self._text = text
        self._show()

    def tick(self) -> None:
        """Show how long the current work has taken."""
        if self._text and (self._terminal or self._clock() - self._shown_at_s >= HEARTBEAT_S):
            self._show()

    def line(self, text: str = "") -> None:
        """A line that stays; ends the current work."""
        self._text = ""
        if self._terminal:
            self._out.write(_WIPE)
        self._out.write(text + "\n")
        self._out.flush()

    def _show(self) -> None:
        self._shown_at_s = self._clock()
        text = f"  {self._shown_at_s - self._since_s:3.0f} s  {self._text}"
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            self._out.write(f"{_WIPE}{text[: columns - 1]}")
        else:
            self._out.write(text + "\n")
        self._out.flush()


def _work(text: str) -> list[str]:
    words = text.split(" ")
    return words[:1] if words[0].endswith(":") else words[:2]


class Pause:
    """Between two lines of progress: short on a terminal, where a line is written over the last one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._length_s = 0.5 if sys.stderr.isatty() else HEARTBEAT_S
        self._next_s = clock() + min(2.0, self._length_s)

    def is_over(self) -> bool:
        """Then the next one begins."""
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._length_s
        return True


def seldom(doing: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """`doing` for what is told far more often than anybody reads: of texts that are alike up to a colon only some."""
    pause, alike = Pause(clock), ""

    def tell(text: str) -> None:
        nonlocal alike
        if (begin := text.partition(": ")[0]) != alike or pause.is_over():
            alike = begin
            doing(text)

    return tell


def result_lines(lines: Iterable[str]) -> None:
    """Lines of a result on stdout, in the place of a line of progress that a terminal shows."""
    _wipe()
    for line in lines:
        print(line)


def error_line(message: str) -> None:
    """`message` as the one line that an error is."""
    _wipe()
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)


def _wipe() -> None:
    if sys.stderr.isatty():
        sys.stderr.write(_WIPE)
        sys.stderr.flush()
