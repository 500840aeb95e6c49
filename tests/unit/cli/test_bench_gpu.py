"""`brimful bench gpu` on the CPU: the whole path in tiny sizes, and the errors."""

from __future__ import annotations

import json

import pytest

from deployments.cli.commands import run


def test_the_whole_path_in_tiny_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "gpu", "--device", "cpu", "--repeats", "1", "--attention-backend", "gather"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["command"], found["device"], found["model"]) == ("bench gpu", "cpu", "tiny")
    assert [step["tokens"] for step in found["steps"]] == [1, 3, 64, 32]
    assert all(0 < step["share"] < 1 and step["step_ms"] > 0 for step in found["steps"])
    assert "attention: gather, blocks of 128 tokens" in found["said"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--repeats 0", "--repeats = 0 is not allowed: at least 1"),
        ("--model huge", "--model = 'huge' is not allowed: tiny, llama-1b, llama-8b"),
        ("--device tpu", "device = 'tpu' is not allowed"),
        ("--attention-backend fast", "attention_backend = 'fast' is not allowed"),
    ],
)
def test_errors_are_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    device = [] if "--device" in flags else ["--device", "cpu"]
    assert run(["bench", "gpu", *device, *flags.split()]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
