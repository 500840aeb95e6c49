"""`brimful simulate fit` and `validate` on the command line: errors, a fit from a file, verdicts, a real process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.fit.engine import MeasuredEngine, Order, fixed_request
from bench.fit.mirror import measured_steps
from bench.simulate.requests import QUEUE_WITHOUT_BOUNDS
from bench.simulate.step_cost import load_cost
from deployments.cli import real_engine as real_engine_module
from deployments.cli.commands import run
from deployments.cli.real_engine import real_engine
from deployments.cli.simulate_fit import engine_config
from replica.config import EngineConfig
from replica.errors import StartupError
from tests.fake_replica import FakeFactory, small_config
from tests.faults.engine.factories import FailingFactory, SlowFactory, dying_factory
from tests.unit.bench.fit.engines import CURVED, engine

SMALL = "--max-num-seqs 8 --max-num-batched-tokens 64"
UseEngine = Callable[[MeasuredEngine], None]


@pytest.fixture
def use_engine(monkeypatch: pytest.MonkeyPatch) -> UseEngine:
    """From now on the commands measure this engine."""

    def use(measured: MeasuredEngine) -> None:
        @contextmanager
        def substitute(config: EngineConfig, progress: Callable[[str], None]) -> Iterator[MeasuredEngine]:
            progress("loading")
            yield measured

        monkeypatch.setattr(real_engine_module, "real_engine", substitute)

    return use


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fit --rounds 0", "--rounds = 0 is not allowed: at least 1"),
        ("fit --device tpu", "--device = 'tpu' is not allowed: cpu or cuda"),
        ("fit --max-num-seqs 0", "--max-num-seqs = 0 is not allowed: "),
        ("fit --max-num-batched-tokens 4", "--max-num-batched-tokens = 4 is not allowed: at least max_num_seqs + 1"),
        ("fit --num-threads 0", "--num-threads = 0 is not allowed: "),
        ("fit --refit /no/such/file", "--refit = '/no/such/file' is not allowed: a file of measured points"),
        ("fit --save /no/such/folder/c.json", "--save = '/no/such/folder/c.json' is not allowed: a file in a folder"),
        ("fit --save-points /", "--save-points = '/' is not allowed: a file in a folder"),
        ("validate --cost nothing", "--cost = 'nothing' is not allowed: a preset ("),
        ("validate --seconds 0", "--seconds = 0.0 is not allowed: from 1 to 3600"),
        ("validate --seconds nan", "--seconds = nan is not allowed: from 1 to 3600"),
        ("validate --rounds 2", "--rounds = 2 is not allowed: odd, from 1 to 99"),
        ("validate --load W9", "--load = 'W9' is not allowed: one of steady, spread, shared"),
        ("validate --no-such-flag", "No such option: --no-such-flag"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1


def test_fit_writes_the_cost_and_the_points_and_fits_the_points_again(
    tmp_path: Path, use_engine: UseEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    use_engine(engine(CURVED.of_plan))
    cost, points = tmp_path / "cost.json", tmp_path / "points.json"
    assert run(f"simulate fit {SMALL} --rounds 1 --name here --save {cost} --save-points {points}".split()) == 0
    found = last_line(capsys)
    assert (found["command"], found["num_points"]) == ("simulate fit", len(json.loads(points.read_text())["points"]))
    assert load_cost(str(cost)).device == "cpu"
    assert load_cost(str(cost)).decode_seq_s == pytest.approx(CURVED.decode_seq_s, rel=1e-6)
    again = tmp_path / "again.json"
    assert run(f"simulate fit --refit {points} --name here --save {again}".split()) == 0
    assert again.read_text() == cost.read_text()


@pytest.mark.parametrize("flag", ["--save", "--save-points"])
def test_a_file_that_cant_be_written_is_an_error_of_its_flag(
    flag: str,
    tmp_path: Path,
    use_engine: UseEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_engine(engine(CURVED.of_plan))
    monkeypatch.chdir(tmp_path)
    assert run(f"simulate fit {SMALL} --rounds 1 --name here {flag} /dev/full".split()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {flag} = '/dev/full' is not allowed: a file that can be written (No space left on device)"
    )


@pytest.mark.parametrize(
    "change",
    [{"seconds": 5e-324}, {"seconds": 1e308}, {"num_prefill_pairs": float("inf")}, {"n": 10**400}, {"n": 0},
     {"num_decode_seqs": 1e308}, {"noise": float("nan")}, {"num_chunks": -1}],
    ids=str,
)  # fmt: skip
def test_no_points_file_is_more_than_an_error(
    change: dict[str, float], tmp_path: Path, use_engine: UseEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    use_engine(engine(CURVED.of_plan))
    points, cost = tmp_path / "points.json", tmp_path / "cost.json"
    assert run(f"simulate fit {SMALL} --rounds 1 --name here --save {cost} --save-points {points}".split()) == 0
    given = json.loads(points.read_text())
    given["points"][0] |= change
    points.write_text(json.dumps(given))
    capsys.readouterr()
    assert run(f"simulate fit --refit {points} --save {cost}".split()) == 2
    assert capsys.readouterr().err.startswith(f"error: --refit = '{points}' is not allowed: ")


def test_a_file_with_too_few_points_to_fit_is_named_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "points.json"
    path.write_text('{"source": "x", "kv_granule_tokens": 1, "points": []}')
    assert run(["simulate", "fit", "--refit", str(path), "--save", str(tmp_path / "cost.json")]) == 2
    error = f"error: --refit = {str(path)!r} is not allowed: a file with at least two points that differ\n"
    assert capsys.readouterr().err == error


def test_validate_ends_with_0_where_both_agree_and_1_where_not(
    tmp_path: Path, use_engine: UseEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    CURVED.save(tmp_path / "cost.json")
    line = f"simulate validate {SMALL} --cost {tmp_path / 'cost.json'} --seconds 2 --load steady --load spread".split()
    use_engine(engine(CURVED.slowed(1.1).of_plan))
    assert run(line) == 0
    agreed = last_line(capsys)
    assert (agreed["agrees"], [load["load"] for load in agreed["loads"]]) == (True, ["steady", "spread"])  # type: ignore[attr-defined]
    use_engine(engine(replace(CURVED, decode_seq_s=20e-3, chunk_s=40e-3).of_plan))
    assert run(line) == 1
    assert last_line(capsys)["agrees"] is False


def test_an_engine_that_is_measured_refuses_nobody_and_lets_nobody_expire() -> None:
    limits = engine_config("embedded", 64, 512, None, "cpu").scheduler
    assert QUEUE_WITHOUT_BOUNDS.items() <= asdict(limits).items()
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (64, 512)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_play_on_an_engine_process_is_explained_by_its_scheduler(tmp_path: Path, is_async: bool) -> None:
    lines: list[str] = []
    factory = SlowFactory(tmp_path, faults={"is_async": is_async})
    with real_engine(small_config(), lines.append, factory) as measured:
        assert measured.is_async is is_async
        orders = [Order(0.0, tuple(fixed_request(f"r{i}", (1 + i, 2, 3, 4), 6) for i in range(3)))]
        orders.append(Order(0.05, (fixed_request("late", (9, 9), 3),)))
        heard: list[int] = []
        played = measured.play(orders, heard.append)
        steps = list(measured_steps(measured, orders, played))
    assert lines == []
    assert heard[-1] == 4
    assert sum(sum(step.plan.samples) for step in steps) == 3 * 6 + 3
    # This device is busy in `submit`: with two steps in flight one's time is told as another's.
    assert is_async or all(step.seconds > 0.01 for step in steps if step.seconds is not None)


@pytest.mark.parametrize("factory", [dying_factory, FailingFactory(StartupError("no such model"))])
def test_an_engine_that_cant_start_is_a_startup_error(factory: FakeFactory) -> None:
    with pytest.raises(StartupError), real_engine(small_config(), lambda _: None, factory):
        raise AssertionError


def test_an_engine_that_dies_while_it_is_measured_is_a_startup_error(tmp_path: Path) -> None:
    factory = SlowFactory(tmp_path, faults={"num_sound_steps": 2})
    died = pytest.raises(StartupError, match="the engine of this replica failed")
    with real_engine(small_config(), lambda _: None, factory) as measured, died:
        measured.play([Order(0.0, (fixed_request("r", (1, 2), 6),))], lambda _: None)


def test_an_order_that_cant_be_sent_ends_the_play(tmp_path: Path) -> None:
    bad = Order(0.0, (fixed_request("r", (1, 2), 6),), budgets=(("a", 1, 2),))  # type: ignore[arg-type]
    with real_engine(small_config(), lambda _: None, SlowFactory(tmp_path)) as measured:
        with pytest.raises(ValueError, match="dictionary update sequence"):
            measured.play([bad], lambda _: None)
        assert measured.play([Order(0.0, (fixed_request("r", (1, 2), 6),))], lambda _: None).updates


def test_an_engine_that_falls_silent_ends_the_play(tmp_path: Path) -> None:
    factory = SlowFactory(tmp_path, faults={"step_s": 2.0})
    silent = pytest.raises(StartupError, match=r"the engine said nothing for 0\.2 s while it was")
    with real_engine(small_config(), lambda _: None, factory) as measured, silent:
        measured.silence_s = 0.2
        measured.play([Order(0.0, (fixed_request("r", (1, 2), 1),))], lambda _: None)
