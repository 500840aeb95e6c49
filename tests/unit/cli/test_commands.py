"""Every error of the command line is one line on stderr with a non-zero exit code, before anything slow begins."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.cli.commands import run


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def only_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1
    return text.removesuffix("\n")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    shown = capsys.readouterr()
    commands = ("serve", "chat", "status", "limits", "route", "models", "dashboards")
    assert [word for word in commands if word not in shown.out] == []
    assert shown.err == ""


@pytest.mark.parametrize(
    "command", ["serve", "chat", "status", "limits", "route", "models prepare", "dashboards publish"]
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    assert f"Usage: brimful {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --max-model-len 0", "error: --max-model-len = 0 is not allowed: it must be at least 1"),
        ("serve --dtype int3", "error: --dtype = 'int3' is not allowed: it must be 'auto', 'float32', "),
        ("serve --tensor-parallel-size 0", "error: --tensor-parallel-size = 0 is not allowed: it must be at least 1"),
        ("serve --metrics-port-range 8-9", "error: --metrics-port-range = '8-9' is not allowed: "),
        ("serve --host no.such.host.invalid", "error: --host no.such.host.invalid is no address of this machine"),
        ("serve --port many", "error: Invalid value for '--port': "),
        ("serve --no-such-flag 3", "error: No such option: --no-such-flag"),
        ("serve --revision main", "error: --revision = 'main' is not allowed: only for a model of the hub"),
        ("serve --revision main --model ./m.gguf", "error: --revision = 'main' is not allowed: only for a model of"),
        ("serve --device cpu --gpu-memory-utilization 0.5", "error: --gpu-memory-utilization = 0.5 is not allowed: "),
        ("serve --device cuda --num-threads 2", "error: --num-threads = 2 is not allowed: only on device cpu"),
        ("serve --lease-timeout-s 2", "error: --lease-timeout-s = 2.0 is not allowed: it must be at least 3"),
        ("status --url http://127.0.0.1:port", "error: --url = 'http://127.0.0.1:port' is not allowed: a URL such as "),
        ("chat --url http://127.0.0.1:port", "error: --url = 'http://127.0.0.1:port' is not allowed: a URL such as "),
        ("status --url 127.0.0.1", "error: --url = '127.0.0.1' is not allowed: a URL such as http://127.0.0.1:8000"),
        ("limits --url 127.0.0.1", "error: --url = '127.0.0.1' is not allowed: a URL such as http://127.0.0.1:8000"),
        ("route hello --url 127.0.0.1", "error: --url = '127.0.0.1' is not allowed: a URL such as http://127.0.0.1:80"),
        ("route", "error: Missing argument 'prompt'."),
        ("route hello --max-tokens many", "error: Invalid value for '--max-tokens': "),
        ("limits --max-num-seqs many", "error: Invalid value for '--max-num-seqs': "),
        ("limits --max-num-partial-prefills 2.5", "error: --max-num-partial-prefills = '2.5' is not allowed: a "),
        ("serve extra", "error: Got unexpected extra argument"),
        ("no-such-command", "error: No such command 'no-such-command'."),
        ("models", "error: Missing command."),
        ("dashboards publish --url nonsense", "error: "),
    ],
)
def test_a_bad_command_line_is_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    shown = capsys.readouterr()
    assert only_line(shown.err).startswith(message)
    assert shown.out == ""


@pytest.mark.parametrize("command", ["status", "chat", "limits", "route hello", "route hello --model m --explain"])
def test_nobody_at_the_url_is_one_line(command: str, free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port}"
    assert run([*command.split(), "--url", url]) == 2
    assert only_line(capsys.readouterr().err).startswith(f"error: no brimful answers at {url}")


def test_stdin_that_is_no_text_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert run(["route", "-"]) == 2
    assert only_line(capsys.readouterr().err) == "error: PROMPT = '-' is not allowed: UTF-8 text on stdin"


def test_a_taken_port_is_one_line(taken_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", str(taken_port)]) == 2
    shown = capsys.readouterr()
    assert only_line(shown.err) == f"error: port {taken_port} on 127.0.0.1 is taken; choose another with --port"
    assert shown.out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("applications: [", "error: config = "),
        ("3", "error: config = '"),
        ("applications: []", "error: applications[0] = None is not allowed: it must be set"),
        (
            "applications: [{import_path: 'deployments.app:build', args: {modles: []}}]",
            "error: applications[0].args.modles = [] is not allowed: no such setting",
        ),
    ],
)
def test_a_malformed_file_is_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    assert run(["serve", "--config", str(file)]) == 2
    assert only_line(capsys.readouterr().err).startswith(message)


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in only_line(capsys.readouterr().err)


def test_the_program_loads_neither_torch_nor_ray_to_show_help() -> None:
    code = (
        "import sys; from deployments.cli.commands import run; run(['serve', '--help']);"
        "import deployments.cli.serve, deployments.cli.chat, deployments.cli.status, deployments.cli.limits;"
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules], file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stderr == "[]\n"
