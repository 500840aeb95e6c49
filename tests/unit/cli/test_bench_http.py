"""`brimful bench http` on the command line: errors, the document, a service that doesn't come up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.cli import bench_http
from deployments.cli.bench_service import running_service
from deployments.cli.commands import run
from replica.config import EngineConfig
from replica.errors import StartupError
from tests.unit.bench.fit.engines import engine
from tests.unit.bench.http.fakes import FakeSide


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rounds 0", "--rounds = 0 is not allowed: at least 1"),
        ("--row 8x8", "--row = ['8x8'] is not allowed: such as 8x128/64: sequences, prompt and output tokens"),
        ("--save /no/such/folder", "--save = '/no/such/folder' is not allowed: a folder that exists"),
        ("--num-threads -1", "--num-threads = -1 is not allowed: "),
        ("--model /no/such/model", "there is no model folder /no/such/model; check --model"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "http", *line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith(f"error: {message}")


def test_the_engine_and_both_ways_in_are_measured_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[str] = []

    @contextmanager
    def real_engine(config: EngineConfig, progress: Callable[[str], None]) -> Iterator[Any]:
        assert (config.scheduler.max_num_seqs, config.model.device, config.model.num_threads) == (64, "cpu", 1)
        measured: Any = engine(lambda plan: 0.25)
        measured.pid, measured.card = 0, SimpleNamespace(name="tiny")
        yield measured

    monkeypatch.setattr("deployments.cli.real_engine.real_engine", real_engine)
    monkeypatch.setattr(bench_http, "settle", lambda: None)
    monkeypatch.setattr(
        bench_http, "_behind_http", lambda *_: [FakeSide("http", log), FakeSide("http without the proxy", log)]
    )
    assert (
        run(["bench", "http", "--row", "2x8/4", "--rounds", "2", "--num-threads", "1"]) == 1
    )  # the fake's gaps are four times longer
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("NOT MET       http: p50 between tokens at most 1.2 x at 2 x 8/4") for line in shown)
    found = json.loads(shown[-1])
    assert (found["bench"], found["model"], len(found["rows"])) == ("http", "tiny", 1)
    row = found["rows"][0]
    assert (row["engine"]["tokens_per_s"], row["http"]["tokens_per_s"], row["http"]["gap_p50_ratio"]) == (8.0, 4.0, 4.0)
    assert row["http without the proxy"]["throughput_ratio"] == 0.5
    assert len(log) == 2 * (1 + 2)


def test_a_service_that_does_not_come_up_is_told_with_its_own_words() -> None:
    told: list[str] = []
    flags = ["--model", "/no/such/model"]
    failed = pytest.raises(StartupError, match="didn't come up: error: there is no model folder /no/such/model")
    with failed, running_service(flags, told.append, {}):
        raise AssertionError
    assert told[-1].startswith("service: error: ")
