"""Ratios, goals and documents from runs whose times are known."""

from __future__ import annotations

from bench.engine_speed.rows import Row
from bench.http import report
from bench.http.measure import Measured
from bench.http.sides import Run
from tests.unit.bench.http.fakes import measured, run_of

ONE = Row(1, 8, 4)
MANY = Row(32, 8, 4)


def steady(first_s: float, gap_s: float, num_streams: int = 1, **cpu: float) -> Run:
    streams = [[first_s + gap_s * number for number in range(4)]] * num_streams
    return run_of(*streams, tokens_per_event=1, **cpu)


def of(row: Row, engine: Run, http: Run) -> Measured:
    return measured(row, engine=[engine], http=[http])


def failed(found: Measured) -> list[str]:
    return [name for name, met in report.goals(found, ["http"]).items() if not met]


def test_a_single_stream_s_goals_are_the_first_token_and_the_gaps() -> None:
    assert failed(of(ONE, steady(0.02, 0.01), steady(0.034, 0.0119))) == []
    assert failed(of(ONE, steady(0.02, 0.01), steady(0.036, 0.011))) == [
        "http: first token at most 15 ms later at 1 x 8/4"
    ]
    assert failed(of(ONE, steady(0.02, 0.01), steady(0.03, 0.021))) == [
        "http: p50 between tokens at most 1.2 x at 1 x 8/4",
        "http: p99 between tokens at most 2 x at 1 x 8/4",
    ]


def test_of_many_streams_the_tokens_a_second_count_and_not_the_first_token() -> None:
    assert failed(of(MANY, steady(0.1, 0.1, 32), steady(0.14, 0.1, 32))) == []
    assert failed(of(MANY, steady(0.1, 0.1, 32), steady(0.16, 0.1, 32))) == [
        "http: at least 90% of the engine's tokens/s at 32 x 8/4"
    ]


def test_tokens_held_back_show_as_longer_gaps() -> None:
    """The same tokens in half as many events, as fast in all."""
    held = run_of([0.2, 0.4], tokens_per_event=2)
    assert "http: p50 between tokens at most 1.2 x at 1 x 8/4" in failed(of(ONE, steady(0.1, 0.1), held))


def test_answers_of_one_token_have_no_goal_between_tokens() -> None:
    row = Row(32, 8, 1)
    assert list(report.goals(of(row, run_of([0.1]), run_of([0.1])), ["http"])) == [
        "http: at least 90% of the engine's tokens/s at 32 x 8/1"
    ]


def test_the_document_and_the_tables_say_the_same() -> None:
    found = of(ONE, steady(0.1, 0.1, engine=0.4), steady(0.11, 0.12, engine=0.4, client=0.047))
    (row,) = report.rows_json(found, ["http"])
    assert row["engine"]["tokens_per_s"] == 10.0
    assert row["engine"]["cpu_ms_per_token"] == {"engine": 100.0}
    assert "throughput_ratio" not in row["engine"]
    http = row["http"]
    assert (http["throughput_ratio"], http["added_first_token_p50_ms"]) == (round(0.4 / 0.47, 4), 10.0)
    assert (http["gap_p50_ratio"], http["gap_p99_ratio"], http["tokens_per_event"]) == (1.2, 1.2, 1.0)
    assert http["load_client_cores"] == 0.1
    told = report.tables(found, ["http"])
    assert "| 1 x 8/4 | http | 8.5 | 85.1% | 110.0 | +10.0 | 120.0 | 1.20 | 120.0 | 1.20 | 1.00 | 0.100 |" in told
    assert "| 1 x 8/4 | engine | 100.00 |  |" in told
    assert not [line for line in told if "measure again" in line]
    found.disturbance = 0.5
    assert "up to 0.5 cores" in report.tables(found, ["http"])[-1]
