"""`brimful simulate routing`: a table for people, one JSON line for programs, one line for bad input."""

from __future__ import annotations

import json

import pytest

from deployments.cli.commands import run


def test_the_last_line_is_json_and_the_rest_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "simulate routing --shape W2 --replicas 8 --report-delay 0 --routers 1 --seeds 1 --length 0.05 --workers 1"
    )
    assert run(command.split()) in (0, 1)
    shown = capsys.readouterr()
    *lines, last = shown.out.splitlines()
    found = json.loads(last)
    (cell,) = found["cells"]
    assert (cell["shape"], cell["num_replicas"], cell["report_delay_s"], cell["num_routers"]) == ("W2", 8, 0.0, 1)
    rows = {row["policy"] for row in cell["policies"]}
    assert rows == {"cost_s", "round_robin", "power_of_two", "least_in_flight", "session_affinity"}
    assert [speed["num_replicas"] for speed in found["decisions"]] == [64, 1000]
    assert found["bursts"][0]["max_over_mean"] == 1.0
    assert [goal["met"] is None for goal in found["goals"]] == [False, False, True, False, False]
    assert any(line.startswith("cost_s ") for line in lines)
    assert "simulating: 5/5 runs" in shown.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shape W9", "--shape = 'W9' is not allowed: one of W2, W4, W8-shared-prefix"),
        ("--policy best", "--policy = 'best' is not allowed: one of cost_s, "),
        ("--replicas 0", "--replicas = 0 is not allowed"),
        ("--routers 300", "--routers = 300 is not allowed"),
        ("--report-delay 61", "--report-delay = 61.0 is not allowed"),
        ("--seeds 0", "--seeds = 0 is not allowed"),
        ("--length 0", "--length = 0.0 is not allowed"),
        ("--workers 0", "--workers = 0 is not allowed"),
        ("--cost nowhere", "--cost = 'nowhere' is not allowed"),
    ],
)
def test_bad_input_is_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "routing", *flags.split()]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""
