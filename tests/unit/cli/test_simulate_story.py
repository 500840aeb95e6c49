"""`brimful simulate story` on the command line: errors, verdicts, what is printed, the real engine's way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.fit.engine import MeasuredEngine
from bench.simulate.step_cost import StepCost
from bench.story import experiment
from bench.story.experiment import real_size, virtual_engines
from deployments.cli import real_engine as real_engine_module
from deployments.cli.commands import run
from replica.config import EngineConfig

CPU_LIKE = StepCost(0.05, 0.002, 0.005, 0.0, 0.0, name="cpu-like")
PER_TOKEN = StepCost(0.001, 0.002, 0.005, 0.0, 0.0, name="per-token")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated story in the size of the real one."""
    monkeypatch.setattr(experiment, "simulated_size", real_size)


def real_engines_cost(cost: StepCost, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on real engines are virtual ones at this cost."""

    @contextmanager
    def substitute(config: EngineConfig, progress: Callable[[str], None]) -> Iterator[MeasuredEngine]:
        progress("loading")
        with virtual_engines(cost)(config) as engine:
            yield engine

    monkeypatch.setattr(real_engine_module, "real_engine", substitute)


def result_in(out: str) -> dict[str, Any]:
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--cost nothing", "--cost = 'nothing' is not allowed: a preset ("),
        ("--engine imagined", "Invalid value for '--engine': "),
        ("--seed one", "Invalid value for '--seed': "),
        ("--seed -1", "--seed = -1 is not allowed: at least 0"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "story", *line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1


@pytest.mark.usefixtures("small")
def test_the_story_is_told_the_same_way_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for _ in range(2):
        assert run(["simulate", "story", "--seed", "7"]) == 0
        shown = capsys.readouterr()
        result = result_in(shown.out)
        assert result.pop("wall_s") >= 0
        told.append(([*shown.out.splitlines()[:-1]], result))
        assert "W7, continuous: " in shown.err
    assert told[0] == told[1]
    lines, result = told[0]
    assert max(len(line) for line in lines if not line.startswith("->")) <= 132
    assert result["passed"] is True
    assert (result["engine"], result["cost"], result["seed"]) == ("simulated", "h100-8b", 7)
    assert [row["name"] for row in result["spreads"]] == ["equal", "+-50%", "W2", "W7"]
    assert [knob["name"] for knob in result["knobs"]] == ["max_num_seqs", "chunked prefill", "watermark"]
    readings = [line.removeprefix("-> ") for line in lines if line.startswith("->")]
    assert readings == [part["reading"]["text"] for part in (result["door"], *result["knobs"])]


def test_the_real_engine_is_held_against_the_given_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    CPU_LIKE.save(tmp_path / "cost.json")
    line = ["simulate", "story", "--engine", "real", "--cost", str(tmp_path / "cost.json")]
    real_engines_cost(CPU_LIKE, monkeypatch)
    assert run(line) == 0
    explained = result_in(capsys.readouterr().out)
    assert (explained["engine"], explained["cost"], explained["passed"]) == ("real", "cpu-like", True)
    real_engines_cost(PER_TOKEN, monkeypatch)
    assert run(line) == 1
    shown = capsys.readouterr().out
    assert "\nFAIL W7: gain in undisturbed seconds is explained: 1.0" in shown
    failed = [check["name"] for check in result_in(shown)["checks"] if not check["passed"]]
    assert failed == [f"{name}: gain in undisturbed seconds is explained" for name in ("+-50%", "W2", "W7")]
