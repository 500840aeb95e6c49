"""`brimful simulate victims`: a table for people, one JSON line for programs, one line for bad input."""

from __future__ import annotations

import json

import pytest

from bench.victims import study
from deployments.cli.commands import run
from deployments.cli.simulate_cost import given_cost


@pytest.fixture
def small_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(study.LOADS, "W1", study.LOADS["W1"]._replace(num_requests=60))


@pytest.mark.usefixtures("small_loads")
def test_the_last_line_is_json_and_the_rest_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate victims --shape W1 --share 1.2 --rule fewest-computed --seeds 1"
    assert run(command.split()) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert [row["rule"] for row in found["loads"][0]["rules"]] == ["newest", "fewest-computed"]
    assert (found["loads"][0]["shape"], found["loads"][0]["share"]) == ("W1", 1.2)
    assert any(line.startswith("newest ") for line in lines)
    assert lines[-1].startswith("better than newest under every load that ran (1), seed 0: ")


@pytest.mark.usefixtures("small_loads")
def test_the_traces_are_those_of_the_seeds_from_the_first_on(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate victims --shape W1 --share 1.2 --rule newest --first-seed 7 --seeds 2"
    assert run(command.split()) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    setup = study.Setup(study.LOADS["W1"], study.PRESSED, True, given_cost("h100-8b"), 1.2)
    (expected,) = study.compare(setup, ("newest",), (7, 8))
    assert found["loads"][0]["rules"] == [expected._asdict()]
    assert (found["first_seed"], found["seeds"]) == (7, 2)
    assert lines[-1] == "better than newest under every load that ran (1), seeds 7 to 8: none"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shape W9", "--shape = 'W9' is not allowed: one of W1, W2, W4"),
        ("--rule oldest", "--rule = 'oldest' is not allowed: one of newest, "),
        ("--regime mild", "--regime = 'mild' is not allowed: one of shipped, pressed"),
        ("--share 0", "--share = 0.0 is not allowed"),
        ("--seeds 0", "--seeds = 0 is not allowed"),
        ("--first-seed -1", "--first-seed = -1 is not allowed: from 0 to 999999 with --seeds 2"),
        ("--first-seed 1000000", "--first-seed = 1000000 is not allowed: from 0 to 999999 with --seeds 2"),
        ("--cost nowhere", "--cost = 'nowhere' is not allowed"),
    ],
)
def test_bad_input_is_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "victims", *flags.split()]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""
