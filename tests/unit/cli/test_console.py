"""Progress says what is done and for how long, on a terminal and in a file."""

from __future__ import annotations

import io
import sys

import pytest

from deployments.cli.console import Console, error_line, result_lines, seldom


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_file_gets_a_line_a_change_and_a_heartbeat() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(out, clock)
    console.doing("starting Ray")
    console.doing("starting Ray")
    clock.now_s += 9
    console.tick()
    assert out.getvalue() == "    0 s  starting Ray\n"
    clock.now_s += 1
    console.tick()
    assert out.getvalue() == "    0 s  starting Ray\n   10 s  starting Ray\n"


def test_the_clock_goes_on_while_the_work_is_the_same() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(out, clock)
    console.doing("starting replica 1/2")
    clock.now_s += 7
    console.doing("starting replica 2/2")
    clock.now_s += 1
    console.doing("waiting for a first token")
    console.doing("simulating: 9 s left")
    clock.now_s += 2
    console.doing("simulating: 7 s left")
    assert out.getvalue() == (
        "    0 s  starting replica 1/2\n    7 s  starting replica 2/2\n    0 s  waiting for a first token\n"
        "    0 s  simulating: 9 s left\n    2 s  simulating: 7 s left\n"
    )


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    out, clock = Terminal(), Clock()
    console = Console(out, clock)
    console.doing("starting Ray")
    clock.now_s += 3
    console.tick()
    console.line("ready")
    assert out.getvalue() == "\r\033[K    0 s  starting Ray\r\033[K    3 s  starting Ray\r\033[Kready\n"
    console.tick()
    assert out.getvalue().endswith("ready\n")


def test_what_is_told_often_is_shown_seldom_but_new_work_at_once() -> None:
    clock, shown = Clock(), list[str]()
    tell = seldom(shown.append, clock)
    for number in range(5):
        tell(f"fixed: {number}/5")
    clock.now_s += 2
    tell("fixed: 5/5")
    tell("continuous: 0/5")
    tell("continuous: 1/5")
    clock.now_s += 10
    tell("continuous: 2/5")
    assert shown == ["fixed: 0/5", "fixed: 5/5", "continuous: 0/5", "continuous: 2/5"]


def test_results_and_errors_take_the_place_of_the_line_of_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result_lines(["a table"])
    error_line("no")
    assert capsys.readouterr() == ("a table\n", "error: no\n")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    result_lines(["a table"])
    error_line("no")
    assert terminal.getvalue() == "\r\033[K\r\033[Kerror: no\n"
