"""Where a step's time goes: steps that are alike, means by part, the share outside the forward."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from bench.engine_speed.profile import detokenise_s, kinds, outside_share, profile_json, profile_table, read_steps
from tests.fake_replica import write_model


def step(num_rows: int, num_tokens: int, *, idle: bool = False, **parts: float) -> dict[str, object]:
    return {"num_rows": num_rows, "num_tokens": num_tokens, "idle": idle, "parts": parts}


def test_pauses_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"steps": [step(1, 1, mlp=1.0), step(1, 1, idle=True, mlp=9.0)]}))
    assert read_steps(path) == [step(1, 1, mlp=1.0)]


def test_steps_that_are_alike_are_averaged_and_text_counts_as_outside() -> None:
    steps = [
        step(64, 64, mlp=0.06, plan=0.002, sampling=0.002),
        step(64, 64, mlp=0.10, plan=0.004, sampling=0.0),
        step(3, 512, mlp=0.5),
        step(64, 100, mlp=7.0),
    ]
    found = kinds(steps, detokenise_s=1e-4)
    assert [(kind.name, kind.num_steps) for kind in found] == [("64 decodes", 2), ("512 tokens of prefill", 1)]
    decodes = found[0]
    assert decodes.parts["mlp"] == pytest.approx(0.08)
    assert decodes.parts["detokenising"] == pytest.approx(0.0064)
    assert decodes.seconds == pytest.approx(0.0904)
    assert outside_share(found, 64) == pytest.approx(0.0104 / 0.0904)
    assert outside_share(found, 8) is None


def test_the_table_has_a_line_for_every_part_and_the_sums() -> None:
    lines = profile_table(kinds([step(1, 1, mlp=0.03, plan=0.01)], 0.0))
    assert lines[0] == "| part of a step, ms | 1 decodes (1 steps) |"
    assert "| mlp | 30.00 (75.0%) |" in lines
    assert lines[-2:] == ["| **all** | 40.00 |", "| **outside** | 10.00 (25.0%) |"]


def test_the_document_has_milliseconds() -> None:
    entry = profile_json(kinds([step(8, 8, mlp=0.03, commit=0.01)], 0.0))[0]
    assert (entry["step"], entry["ms"], entry["outside_share"], entry["parts_ms"]["mlp"]) == (
        "8 decodes",
        40.0,
        0.25,
        30.0,
    )


def test_text_is_timed_as_a_replica_makes_it(tmp_path: Path) -> None:
    write_model(tmp_path)
    ticks = count()
    assert detokenise_s(tmp_path, [[1, 2, 3, 4], [5, 6, 7, 8]], lambda: float(next(ticks))) == 1 / 8
