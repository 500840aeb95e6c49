"""The step cost: its terms, its curve, its file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.simulate.step_cost import H100_8B, StepCost, StepWork, load_cost, on_curve, preset_names
from replica.errors import SettingError

CURVE = ((1, 0.0), (2, 0.5), (4, 0.25), (8, 1.25))
COST = StepCost(1.0, 0.25, 0.5, 0.125, 0.0625, chunk_s=2.0, token_curve=CURVE, name="c", source="s")


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(0, 0.0), (1, 0.0), (2, 0.5), (3, 0.375), (4, 0.25), (6, 0.75), (8, 1.25), (10, 1.75)],
)
def test_a_curve_is_straight_between_knots_and_goes_on_after_the_last(num_tokens: int, seconds: float) -> None:
    assert on_curve(CURVE, num_tokens) == seconds


def test_a_curve_that_falls_at_its_end_never_gets_negative() -> None:
    assert on_curve(((1, 1.0), (2, 0.5)), 100) == 0.0


def test_every_term_counts_once() -> None:
    work = StepWork(num_prefill_tokens=4, num_decode_seqs=2, num_kv_tokens_read=8, num_prefill_pairs=16.0, num_chunks=1)
    assert COST.seconds(work) == 1.0 + 4 * 0.25 + 2 * 0.5 + 8 * 0.125 + 16 * 0.0625 + 2.0 + 0.75


def test_a_cost_comes_back_from_its_file(tmp_path: Path) -> None:
    COST.save(tmp_path / "cost.json")
    assert load_cost(str(tmp_path / "cost.json")) == COST


def test_a_file_without_the_newer_terms_is_a_linear_cost(tmp_path: Path) -> None:
    old = {name: value for name, value in asdict(COST).items() if name not in ("chunk_s", "token_curve")}
    (tmp_path / "cost.json").write_text(json.dumps(old))
    assert load_cost(str(tmp_path / "cost.json")) == replace(COST, chunk_s=0.0, token_curve=())


@pytest.mark.parametrize(
    "curve",
    [[[1, 0.0]], [[2, 0.0], [1, 1.0]], [[1, 0.0], [2, -1.0]], [[1.5, 0], [2, 1]], [1, 2], [[1, "a"], [2, 1]], 7, "x"],
)
def test_a_curve_that_is_none_is_one_clear_error(tmp_path: Path, curve: object) -> None:
    (tmp_path / "cost.json").write_text(json.dumps(asdict(COST) | {"token_curve": curve}))
    with pytest.raises(SettingError, match=r"cost\.token_curve"):
        load_cost(str(tmp_path / "cost.json"))


@pytest.mark.parametrize(
    ("name", "device", "kind"), [("laptop", "cpu", "cpu"), ("cpu-x", "", "cpu"), ("x", "", "cuda")]
)
def test_the_device_is_read_from_the_name_only_where_nothing_says_it(name: str, device: str, kind: str) -> None:
    assert replace(H100_8B, name=name, device=device).kind_of_device == kind


def test_presets_load_by_name() -> None:
    assert H100_8B.name in preset_names()
    assert [load_cost(name).name for name in preset_names()] == preset_names()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "9" * 5000,
        "\x00\xff",
        json.dumps(asdict(COST) | {"fixed_s": 1e308}),
        json.dumps(asdict(COST) | {"fixed_s": 10**400}),
        json.dumps(asdict(COST) | {"token_curve": [[1, 0.1], [2, 1e308]]}),
        json.dumps(asdict(COST) | {"token_curve": [[1, 0.1], [10**400, 0.1]]}),
        json.dumps(asdict(COST) | {"kv_granule_tokens": 10**400}),
        json.dumps(asdict(COST) | {"name": "\ud800"}),
        json.dumps(asdict(COST) | {"name": "\x1b[2J"}),
        json.dumps(asdict(COST) | {"reference_ratio": 0}),
    ],
    ids=range(11),
)
def test_no_cost_file_is_more_than_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(SettingError, match="is not allowed"):
        load_cost(str(tmp_path / "cost.json"))


def test_a_cost_that_cant_be_written_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    COST.save(tmp_path / "cost.json")
    before = (tmp_path / "cost.json").read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace(COST, fixed_s=1.0).save(tmp_path / "cost.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("cost.json", before)]
