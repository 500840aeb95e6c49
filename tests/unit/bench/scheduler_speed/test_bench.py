"""The scheduler's benchmark: one JSON line, goals judged, a peer that fails is told in one line."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from typing import Literal

import pytest

from bench.scheduler_speed import report
from bench.scheduler_speed.__main__ import main
from bench.scheduler_speed.measure import CaseTimes
from bench.scheduler_speed.own_scheduler import OwnScheduler
from bench.scheduler_speed.report import goals
from bench.scheduler_speed.waiting_memory import bytes_per_waiting_request
from bench.scheduler_speed.workload import BLOCK_SIZE, StepTimes, Workload, unsettle_memory

Reason = Literal["seqs", "blocks"]
SMALL = ["--widths", "2,3", "--waiting", "0,4", "--rounds", "2", "--steps", "3", "--memory-requests", "10"]


def test_a_waiting_request_weighs_less_than_two_kilobytes_beside_its_tokens() -> None:
    assert bytes_per_waiting_request(2000) < 2000


def test_the_last_line_is_a_json_document_with_every_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "MAX_WAITING_SLOWDOWN", 1e6)  # three steps and ten requests say nothing
    monkeypatch.setattr(report, "MAX_BYTES_PER_WAITING", 1e6)
    assert main(SMALL) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    seqs, blocks = (
        [(case["running"], case["waiting"]) for case in found["cases"] if case["waiting_for"] == reason]
        for reason in ("seqs", "blocks")
    )
    assert (seqs, blocks) == ([(2, 0), (2, 4), (3, 0), (3, 4)], [(2, 2), (2, 4), (3, 2), (3, 4)])
    assert all(case["ours"]["step_us"] > 0 and case["peer"] is None for case in found["cases"])
    assert found["goals"]["at most 0.1 of the peer at 256"] is None


def test_a_goal_that_is_not_met_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "MAX_BYTES_PER_WAITING", 1.0)
    assert main(SMALL) == 1
    shown = capsys.readouterr().out
    assert "NOT MET       under 1 bytes a waiting request" in shown
    assert json.loads(shown.splitlines()[-1])["goals"]["under 1 bytes a waiting request"] is False


def test_a_peer_without_its_packages_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--peer-python", sys.executable]) == 1
    assert "No module named 'vllm'" in capsys.readouterr().err


def test_an_interpreter_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--peer-python", "no-such-python"]) == 1
    assert "cannot run no-such-python" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [["--rounds", "0"], ["--widths", "5000"], ["--steps", "4000"], ["--widths", "x"]])
def test_bad_counts_are_refused(bad: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(bad)
    assert refused.value.code == 2


def test_no_two_prompts_share_a_block() -> None:
    workload = Workload(300, 0)
    firsts = {tuple(workload.prompt_ids(number)[:BLOCK_SIZE]) for number in range(300)}
    assert len(firsts) == 300


@pytest.mark.parametrize(("reason", "other"), [("seqs", "blocks"), ("blocks", "seqs")])
def test_whoever_waits_does_so_for_what_the_workload_says_in_every_step(reason: Reason, other: Reason) -> None:
    side = OwnScheduler()
    try:
        side.start(Workload(3, 40, reason))
        side.run_round(2 * BLOCK_SIZE)
        side._workload = Workload(3, 40, other)
        with pytest.raises(RuntimeError, match=f"3 decodes, and who waits does so for .*'{reason}': 40"):
            side.run_round(1)
    finally:
        unsettle_memory()


def test_the_garbage_collector_looks_at_everything_again_afterwards() -> None:
    before = gc.get_freeze_count()
    main(SMALL)
    assert gc.get_freeze_count() == before


def case(running: int, waiting: int, ours_us: float, peer_us: float, reason: Reason = "seqs") -> CaseTimes:
    return CaseTimes(Workload(running, waiting, reason), [StepTimes(ours_us, 0.0)], [StepTimes(peer_us, 0.0)])


def test_goals_hold_only_when_every_case_meets_them() -> None:
    good = [case(1024, 0, 800.0, 20_000.0), case(1024, 10_000, 900.0, 20_000.0)]
    assert list(goals(good, 1500.0).values()) == [None, None, True, True, True, True]
    blocked = [case(1024, 2, 850.0, 20_000.0, "blocks"), case(1024, 10_000, 990.0, 20_000.0, "blocks")]
    assert list(goals(good + blocked, 1500.0).values()) == [None, None, True, True, False, True]
    disturbed = replace(blocked[0], ours=[StepTimes(3000.0, 0.0), StepTimes(950.0, 0.0), StepTimes(900.0, 0.0)])
    assert goals([*good, disturbed, blocked[1]], 1500.0)["cost flat in the number waiting"] is True
    slow = [case(1024, 0, 1100.0, 20_000.0), case(1024, 10_000, 2100.0, 20_000.0)]
    assert list(goals(slow, 2500.0).values()) == [None, None, False, False, False, False]
