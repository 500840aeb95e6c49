"""`brimful serve` as a person runs it: a real start, a real answer, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from deployments.cli.port import is_listening

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
CHAT: dict[str, Any] = {
    "model": "embedded",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 16,
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Machine:
    """A home, a cache and a temporary folder of its own, and a mark on every process started in it."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.home.mkdir()
        # Short: Ray's sockets lie below it.
        self.temporary = Path(tempfile.mkdtemp(prefix="b"))
        self.mark = f"BRIMFUL_TEST={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        own = {
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(root / "cache"),
            "TMPDIR": str(self.temporary),
            name: value,
        }
        self.environment = {**os.environ, **own}
        self.models = root / "cache" / "brimful" / "models"

    def processes(self) -> list[psutil.Process]:
        mark = b"\0" + self.mark.encode() + b"\0"
        return [process for process in psutil.process_iter() if mark in b"\0" + environ_of(process)]

    def leftovers(self) -> list[str]:
        """What a run left: processes, temporary files, and Ray's folder in the home folder (its token is there)."""
        found = [f"process {process.pid}: {command_of(process)}" for process in self.processes()]
        found += [str(path) for path in self.temporary.iterdir()]
        return found + [str(path) for path in self.home.glob(".ray")]

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


class Serve:
    """One `brimful serve`; its output is collected in files."""

    def __init__(self, machine: Machine, folder: Path, port: int, *flags: str) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        number = len(list(folder.glob("out-*")))
        self.out, self.err = folder / f"out-{number}", folder / f"err-{number}"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "deployments.cli", "serve", "--port", str(port)),
                    *("--metrics-port-range", "9700-9799", *flags),
                ],
                env=machine.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def until(self, shown: str) -> None:
        """Wait until its output holds `shown`; fails when it ends before."""
        wait_for(lambda: shown in self.out.read_text() or self.process.poll() is not None, START_LIMIT_S)
        assert shown in self.out.read_text(), self.out.read_text() + self.err.read_text()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_LIMIT_S)

    def ask(self) -> str:
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=CHAT, timeout=120, trust_env=False)
        return str(answer.json()["choices"][0]["message"]["content"])

    def ask_streaming(self) -> list[str]:
        """The same question through the official client: the pieces of its text as they came."""
        with (
            openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
            client.chat.completions.create(**CHAT, stream=True) as stream,
        ):
            return [chunk.choices[0].delta.content or "" for chunk in stream]


def environ_of(process: psutil.Process) -> bytes:
    """Raw: processes that change their title (Ray's) overwrite the first entries."""
    try:
        return Path("/proc", str(process.pid), "environ").read_bytes()
    except OSError:
        return b""


def command_of(process: psutil.Process) -> str:
    try:
        return Path("/proc", str(process.pid), "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "(gone)"


def wait_for(holds: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine"))
    yield made
    made.close()


@pytest.fixture
def serve(machine: Machine, tmp_path: Path, free_port: int) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*flags: str) -> Serve:
        started.append(Serve(machine, tmp_path, free_port, *flags))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
    wait_for(lambda: machine.processes() == [], STOP_LIMIT_S)


def test_a_first_start_fetches_the_model_answers_and_leaves_nothing_after_ctrl_c(
    machine: Machine, serve: Callable[..., Serve]
) -> None:
    service = serve()
    service.until("Ctrl-C drains and stops")
    assert "fetching" in service.out.read_text()
    whole = service.ask()
    assert "Paris" in whole
    pieces = service.ask_streaming()
    assert "".join(pieces) == whole
    assert sum(piece != "" for piece in pieces) > 1
    assert {host for process in machine.processes() for host in listening_on(process)} == {"127.0.0.1"}
    assert service.end(signal.SIGINT) == 0
    assert machine.leftovers() == []
    assert not is_listening("127.0.0.1", service.port)
    assert service.err.read_text() == ""


def test_a_later_start_takes_the_prepared_model_and_the_printed_curl_answers(
    machine: Machine, serve: Callable[..., Serve], capsys: pytest.CaptureFixture[str]
) -> None:
    (card,) = machine.models.glob("*/brimful.json")
    before = card.stat()
    started_s = time.monotonic()
    service = serve("--replicas", "2")
    service.until("Ctrl-C drains and stops")
    with capsys.disabled():
        print(f"\na later start took {time.monotonic() - started_s:.0f} s (promised: 60 s on 2 idle cores)")
    shown = service.out.read_text()
    assert card.stat() == before
    assert "fetching" not in shown
    assert re.search(r"embedded: 2 replicas, each with \d+ KV blocks of \d+ tokens, 64 sequences and 512 tokens", shown)
    (curl,) = [line.strip() for line in shown.splitlines() if line.strip().startswith("curl ")]
    answer = subprocess.run(["bash", "-c", curl + " -sS"], capture_output=True, text=True, check=True)
    assert "Paris" in json.loads(answer.stdout)["choices"][0]["message"]["content"]
    status = [sys.executable, "-m", "deployments.cli", "status", "--json", "--url", service.url]
    replicas = json.loads(subprocess.check_output(status))["models"][0]["up"]
    assert [replica["state"] for replica in replicas] == ["ready", "ready"]
    assert service.end(signal.SIGTERM) == 0
    assert machine.leftovers() == []


def test_a_stream_that_is_open_at_ctrl_c_is_finished(machine: Machine, serve: Callable[..., Serve]) -> None:
    service = serve("--drain-timeout-s", "240")
    service.until("Ctrl-C drains and stops")
    body = {"model": "embedded", "prompt": "Once", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=120, trust_env=False) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        service.process.send_signal(signal.SIGINT)
        events = [line for line in (first, *lines) if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert service.process.wait(STOP_LIMIT_S) == 0
    assert machine.leftovers() == []


def test_a_stream_that_outlasts_the_drain_limit_ends_in_an_error_event(
    machine: Machine, serve: Callable[..., Serve]
) -> None:
    service = serve("--drain-timeout-s", "0")
    service.until("Ctrl-C drains and stops")
    body = {"model": "embedded", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=120, trust_env=False) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        service.process.send_signal(signal.SIGINT)
        events = [line for line in (first, *lines) if line.startswith("data: ")]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert service.process.wait(STOP_LIMIT_S) == 0
    assert machine.leftovers() == []


@pytest.mark.parametrize("moment", ["starting Ray", "starting the HTTP proxy", "starting replica 1/1"])
def test_a_start_that_is_stopped_leaves_nothing(moment: str, machine: Machine, serve: Callable[..., Serve]) -> None:
    service = serve()
    service.until(moment)
    assert service.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert machine.leftovers() == []
    assert service.err.read_text() == ""


def test_a_program_killed_outright_leaves_nothing(machine: Machine, serve: Callable[..., Serve]) -> None:
    service = serve()
    service.until("Ctrl-C drains and stops")
    service.end(signal.SIGKILL)
    wait_for(lambda: machine.leftovers() == [], STOP_LIMIT_S)


def test_a_model_that_is_missing_is_one_line(machine: Machine, serve: Callable[..., Serve]) -> None:
    service = serve("--model", "./no-such-model")
    assert service.process.wait(STOP_LIMIT_S) == 2
    assert service.err.read_text() == "error: there is no model folder ./no-such-model; check --model\n"
    assert machine.leftovers() == []


def test_a_replica_that_cannot_start_says_why_in_one_line(machine: Machine, serve: Callable[..., Serve]) -> None:
    service = serve("--kv-cache-memory-bytes", "1000")
    assert service.process.wait(START_LIMIT_S) == 2
    line = service.err.read_text()
    assert line.count("\n") == 1
    assert line.startswith("error: no room for the KV cache: ")
    assert machine.leftovers() == []


def listening_on(process: psutil.Process) -> set[str]:
    """Addresses on which a process accepts connections from outside itself."""
    try:
        connections = process.net_connections("inet")
    except psutil.Error:
        return set()
    found = {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}
