"""Drivers: answers, errors with the last words, and nothing left when the block ends."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from bench.peers.driver import DriverFailed, cpu_seconds, driver

LOOP = "from bench.peers.driver_loop import serve\n"
ECHO = LOOP + "serve(lambda: ('1.0', lambda order: {'got': order['x']}))"
WITH_CHILD = (
    "import subprocess, sys\n"
    + LOOP
    + "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
    "serve(lambda: ('1.0', lambda order: {'pid': child.pid}))"
)


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_driver_answers_and_its_noise_stays_out() -> None:
    program = LOOP + "def load():\n    print('noise')\n    return '1.0', lambda order: {'got': order['x']}\nserve(load)"
    with driver("echo", command(program)) as echo:
        assert echo.version == "1.0"
        assert [echo.ask(x=1), echo.ask(x=[2])] == [{"got": 1}, {"got": [2]}]


def test_its_environment_is_the_given_one() -> None:
    program = LOOP + "import os\nserve(lambda: (os.environ['WHICH'], lambda order: {}))"
    with driver("echo", command(program), {"WHICH": "this"}) as echo:
        assert echo.version == "this"


def test_an_exception_is_told_in_one_line() -> None:
    program = LOOP + "serve(lambda: ('1.0', lambda order: 1 / 0))"
    told = pytest.raises(DriverFailed, match=r"^echo: ZeroDivisionError: division by zero$")
    with told, driver("echo", command(program)) as echo:
        echo.ask(x=1)


def test_an_end_without_an_answer_shows_the_last_words() -> None:
    told = pytest.raises(DriverFailed, match="echo: it ended early:\nsome last words")
    with told, driver("echo", command("import sys; sys.exit('some last words')")):
        pass


def test_an_interpreter_that_is_not_there_is_told() -> None:
    told = pytest.raises(DriverFailed, match="echo: cannot run no-such-python: No such file")
    with told, driver("echo", ["no-such-python"]):
        pass


@pytest.mark.parametrize("interrupted", [False, True])
def test_nothing_outlives_the_block(interrupted: bool) -> None:
    pids: list[int] = []
    try:
        with driver("parent", command(WITH_CHILD)) as parent:
            pids += [parent.pid, parent.ask(x=1)["pid"]]
            if interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert alive == []


def test_cpu_time_is_that_of_the_whole_tree() -> None:
    with driver("parent", command(WITH_CHILD)) as parent:
        assert cpu_seconds(parent.pid) > 0.0
    assert cpu_seconds(parent.pid) == 0.0


def test_drivers_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with driver("echo", command(ECHO)) as echo:
        assert echo.ask(x=3) == {"got": 3}
