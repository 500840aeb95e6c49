"""Tables, ratios and goals from known times."""

from __future__ import annotations

import pytest

from bench.engine_speed import report
from bench.engine_speed.limits import MachineLimits, StepLoad
from bench.engine_speed.rows import PREFILL, Row
from tests.unit.bench.engine_speed.fakes import measured

ROW = Row(8, 128, 64)
LIMITS = MachineLimits(10e9, 100e9)
STEPS = [StepLoad(10e9, 0.0), StepLoad(0.0, 200e9)]
"""1 s and 2 s at these limits."""


def test_the_engines_table_has_rates_steps_and_the_share_of_the_limit() -> None:
    found = measured(ROW, limits=LIMITS, steps=STEPS, brimful=[4.0, 5.0, 6.0])
    assert report.engine_table(found)[2] == "| 8 x 128/64 | 102.4 | 410 | 2 | 5.00 | 3.00 | 60% | 40% |"
    assert report.engine_table(found)[-1].startswith(
        "limits: 10.0 GB/s of weight streaming (10.0 to 10.0), 100 GFLOP/s of float32 matrix product (100 to 100)"
    )
    assert report.engine_rows(found) == [
        {
            "num_seqs": 8,
            "prompt_tokens": 128,
            "output_tokens": 64,
            "output_tokens_per_s": 102.4,
            "prefill_tokens_per_s": 409.6,
            "num_steps": 2,
            "seconds": [4.0, 5.0, 6.0],
            "floor_s": 3.0,
            "share_of_limit": 0.6,
        }
    ]


def test_a_disturbed_run_says_so() -> None:
    found = measured(ROW, limits=LIMITS, steps=STEPS, brimful=[4.0])
    found.disturbance = 0.15
    assert report.disturbance_lines(found) == []
    found.disturbance = 1.26
    assert report.engine_table(found)[-1] == (
        "**the machine did other work: up to 1.3 cores of it during a run; measure again**"
    )


def test_a_row_of_prompts_alone_has_no_output_rate() -> None:
    found = measured(PREFILL, limits=LIMITS, steps=STEPS, brimful=[4.0])
    assert report.engine_table(found)[2].startswith("| 8 x 1024/1 | - | 4096 |")
    assert report.engine_rows(found)[0]["output_tokens_per_s"] is None


@pytest.mark.parametrize(("seconds", "met"), [(5.0, True), (5.1, False)])
def test_the_share_of_the_limit_is_a_goal(seconds: float, met: bool) -> None:
    found = measured(ROW, limits=LIMITS, steps=STEPS, brimful=[seconds])
    assert report.engine_goals(found, None) == {
        "at least 60% of the machine's limit at 8 x 128/64": met,
        "at most 8% of a step outside the forward at 64 sequences": None,
    }


@pytest.mark.parametrize(("share", "met"), [(0.08, True), (0.081, False)])
def test_the_share_outside_the_forward_is_a_goal(share: float, met: bool) -> None:
    found = measured(ROW, limits=LIMITS, steps=STEPS, brimful=[4.0])
    assert list(report.engine_goals(found, share).values()) == [True, met]


def test_peers_stand_beside_us_with_ratios_and_rounds() -> None:
    found = measured(ROW, limits=LIMITS, steps=[], brimful=[4.0, 4.0, 4.4], vllm=[6.0, 6.0, 6.6], transformers=[16.0])
    found.busy_beside = 0.012
    names = ["vllm", "transformers"]
    lines = report.peers_table(found, names)
    assert lines[0] == (
        "| sequences x prompt/output | brimful | vllm | brimful / vllm | goal "
        "| transformers | brimful / transformers | goal |"
    )
    assert lines[2] == ("| 8 x 128/64 | 128.0 (3, 10%) | 85.3 (3, 10%) | 1.50 | 1.3 | 32.0 (1, 0%) | 4.00 | 3 |")
    assert lines[-1] == "the sides that waited used at most 1.2% of one core meanwhile"
    assert report.peers_goals(found, names) == {
        "at least 1.3 x vllm at 8 x 128/64": True,
        "at least 3 x transformers at 8 x 128/64": True,
        "the sides that wait are idle": True,
    }
    entry = report.peers_rows(found, names)[0]
    assert (entry["brimful"], entry["vllm"], entry["over_vllm"], entry["over_transformers"]) == (128.0, 85.33, 1.5, 4.0)
    assert entry["vllm_seconds"] == [6.0, 6.0, 6.6]


def test_a_ratio_below_its_goal_and_a_busy_side_are_misses() -> None:
    found = measured(PREFILL, limits=LIMITS, steps=[], brimful=[4.0], vllm=[5.0])
    found.busy_beside = 0.06
    assert report.peers_goals(found, ["vllm"]) == {
        "at least 1.3 x vllm at 1024 token prompts": False,
        "the sides that wait are idle": False,
    }


def test_a_peer_that_wasnt_measured_meets_and_misses_nothing() -> None:
    found = measured(ROW, limits=LIMITS, steps=[], brimful=[4.0])
    assert report.peers_goals(found, ["transformers"])["at least 3 x transformers at 8 x 128/64"] is None
    assert "| - | - | 3 |" in report.peers_table(found, ["transformers"])[2]


def test_rows_that_arent_in_the_goals_have_none() -> None:
    assert report.goal_of(Row(16, 1024, 16), "vllm") is None
    assert report.goal_of(Row(8, 1, 1), "vllm") is None
    assert [report.goal_of(Row(seqs, 128, 128), "vllm") for seqs in (1, 8, 32, 64)] == [1.3] * 4


def test_goals_are_told_in_words() -> None:
    assert report.goal_lines({"a": True, "b": False, "c": None}) == [
        "met           a",
        "NOT MET       b",
        "not measured  c",
    ]
