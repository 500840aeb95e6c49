"""A cluster in virtual time: the same result in any number of processes, every request once, exact times at rest."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from typing import Any

import pytest

from bench.simulate.capacity import capacity
from bench.simulate.cluster import Pace, simulate_cluster
from bench.simulate.outcome import Objectives, Outcome
from bench.simulate.settings import ClusterSettings
from bench.simulate.shard import Sent
from bench.simulate.shard_process import RemoteShard
from bench.simulate.step_cost import StepCost
from bench.traces.generate import fixed_lengths, generate
from bench.traces.trace import Trace, seconds
from replica.config import SchedulerConfig
from replica.errors import ResourceError, SettingError
from replica.model.api import ModelShape
from router.config import RouterConfig

COST = StepCost(fixed_s=0.01, prefill_token_s=1e-5, decode_seq_s=1e-4, kv_token_s=1e-7, prefill_pair_s=0.0)
SETTINGS = ClusterSettings(
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256, queue_timeout_s=1e9),
    shape=ModelShape(512, 16, 1000, 4096, ()),
    cost=COST,
    network_delay_s=0.001,
    report_delay_s=0.05,
)


def quiet(_: Pace) -> None:
    pass


def play(settings: ClusterSettings, trace: Trace) -> Outcome:
    return simulate_cluster(settings, trace, quiet)


def found(outcome: Outcome) -> dict[str, Any]:
    columns = outcome.requests
    rows = [list(column) for column in (columns.first_token_s, columns.end_s, columns.replica)]
    return outcome.summary(Objectives(1.0, 0.05)) | {"rows": json.dumps(rows), "bins": outcome.steps.bins()}


def test_one_request_takes_its_steps_and_the_network_both_ways() -> None:
    trace = replace(fixed_lengths(1, 0, prompt_tokens=100, output_tokens=2), arrival_s=seconds_of(3.0))
    outcome = play(SETTINGS, trace)
    first_s = 3.0 + 0.001 + 0.01 + 100 * 1e-5 + 0.001
    end_s = first_s + 0.01 + 1e-4 + 101 * 1e-7
    assert outcome.requests.first_token_s[0] == pytest.approx(first_s, abs=1e-12)
    assert outcome.requests.end_s[0] == pytest.approx(end_s, abs=1e-12)
    assert outcome.steps.num_steps == 2


def test_the_result_does_not_depend_on_the_number_of_processes() -> None:
    trace = generate("W2", 60, 1, 40.0).scaled(8)
    settings = replace(SETTINGS, num_replicas=5, num_routers=2)
    alone = found(play(settings, trace))
    assert alone == found(play(replace(settings, num_workers=2), trace))
    assert alone["num_finished"] == 60


def test_nothing_comes_late_in_the_widest_window() -> None:
    """Narrower windows hand everything over sooner and change nothing; in wider ones news is missed."""
    trace = generate("W2", 80, 1, 60.0).scaled(8)
    settings = replace(SETTINGS, num_replicas=4)
    widest = found(play(settings, trace))
    assert found(simulate_cluster(settings, trace, quiet, window_s=settings.streams_back_s / 7)) == widest
    assert found(simulate_cluster(settings, trace, quiet, window_s=settings.streams_back_s * 2)) != widest


def test_the_same_seed_gives_the_same_result_and_another_one_other_choices() -> None:
    trace = generate("W2", 100, 1, 60.0).scaled(8)
    settings = replace(SETTINGS, num_replicas=4)
    assert found(play(settings, trace)) == found(play(settings, trace))
    drawing = replace(settings, router=RouterConfig(policy="power_of_two"))
    assert found(play(drawing, trace))["rows"] != found(play(replace(drawing, seed=1), trace))["rows"]


def test_every_request_ends_once_also_where_most_are_refused_or_expire() -> None:
    scheduler = replace(SETTINGS.scheduler, max_num_queued_seqs=20, queue_timeout_s=0.5)
    trace = generate("W2", 300, 2, 300.0).scaled(4)
    outcome = play(replace(SETTINGS, scheduler=scheduler, num_replicas=2), trace)
    summary = found(outcome)
    assert summary["num_refused"] > 0 and summary["num_timed_out"] > 0
    assert summary["num_finished"] + summary["num_refused"] + summary["num_timed_out"] == 300
    finished = outcome.requests.finished()
    made = [n for n, done in zip(trace.output_tokens, finished, strict=True) if done]
    assert outcome.steps.num_output_tokens == sum(made) == sum(outcome.requests.num_output_tokens)
    assert outcome.steps.itl.total == sum(made) - len(made)


def test_requests_spread_over_replicas_although_reports_are_late() -> None:
    """All at once, before any report tells of them: only the router's own ledger keeps them apart."""
    trace = fixed_lengths(64, 0, prompt_tokens=32, output_tokens=20)
    outcome = play(replace(SETTINGS, num_replicas=8, report_delay_s=5.0), trace)
    counts = [outcome.requests.replica.count(index) for index in range(8)]
    assert (min(counts), max(counts)) == (8, 8)


def test_routers_that_know_nothing_of_each_other_spread_less_evenly() -> None:
    trace = fixed_lengths(64, 0, prompt_tokens=32, output_tokens=20)
    outcome = play(replace(SETTINGS, num_replicas=8, num_routers=16), trace)
    assert found(outcome)["routing"]["requests_max_over_mean"] > 1.0


def test_shared_prefixes_are_found_again_where_the_router_sends_them() -> None:
    """A handful of prefixes, few enough for each to live on few replicas: affinity saves most of the prefill."""
    trace = generate("W8-prefix-repetition", 100, 0, 20.0)
    settings = replace(SETTINGS, num_replicas=8)
    sticky = play(replace(settings, router=RouterConfig(weights={"prefix_affinity": 20.0})), trace).steps
    spread = play(replace(settings, router=RouterConfig(policy="round_robin")), trace).steps
    without = replace(settings.scheduler, enable_prefix_caching=False)
    uncached = play(replace(settings, scheduler=without), trace).steps
    assert uncached.num_prefill_tokens == sum(trace.prompt_tokens)
    assert sticky.num_prefill_tokens < spread.num_prefill_tokens < uncached.num_prefill_tokens


def test_a_long_silence_between_requests_costs_no_windows() -> None:
    trace = replace(fixed_lengths(2, 0, prompt_tokens=10, output_tokens=1), arrival_s=seconds_of(0.0, 5000.0))
    windows: list[Pace] = []
    outcome = simulate_cluster(SETTINGS, trace, windows.append)
    assert len(windows) < 30
    assert outcome.requests.end_s[1] == pytest.approx(5000.0 + 0.012 + 10 * 1e-5)


def test_capacity_is_the_pace_with_a_full_queue() -> None:
    """64 requests, 4 at a time, all alike: rounds of one prefill step and 9 decode steps."""
    cost = StepCost(1.0, 0.0, 0.0, 0.0, 0.0)
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    settings = replace(SETTINGS, scheduler=scheduler, cost=cost)
    trace = fixed_lengths(64, 0, prompt_tokens=8, output_tokens=10)
    assert capacity(settings, trace, lambda _, __: None) == pytest.approx(4 / 10, rel=0.05)


def test_a_worker_that_fails_is_told_with_its_reason() -> None:
    trace = replace(fixed_lengths(4, 0, prompt_tokens=10, output_tokens=1), block_ids=((),) * 3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"a worker of the simulation failed(.|\n)*IndexError"):
        play(replace(SETTINGS, num_replicas=2, num_workers=2, router=RouterConfig(prefix_caching=False)), trace)


def test_a_worker_that_is_killed_is_one_line_about_memory() -> None:
    """Killed between two windows: by then an order to it breaks the pipe."""
    before = set(multiprocessing.active_children())

    def kill_one(_: Pace) -> None:
        worker = next(child for child in multiprocessing.active_children() if child not in before)
        worker.kill()
        worker.join()

    trace = fixed_lengths(4, 0, prompt_tokens=10, output_tokens=100)
    with pytest.raises(ResourceError) as killed:
        simulate_cluster(replace(SETTINGS, num_replicas=2, num_workers=2), trace, kill_one)
    assert killed.value.message.startswith("a worker of the simulation was killed (exit code -9); if the machine ran")
    assert "\n" not in killed.value.message


def test_a_worker_that_is_killed_while_it_is_waited_for_is_told_too() -> None:
    shard = RemoteShard(SETTINGS, fixed_lengths(1, 0, prompt_tokens=10, output_tokens=1), 0, 1)
    shard.finish()
    shard.kill()
    with pytest.raises(ResourceError, match="was killed"):
        shard.finish()
    with pytest.raises(ResourceError, match="was killed"):
        shard.close()


def test_long_orders_and_long_news_do_not_wait_for_each_other() -> None:
    """Both sides send more than a pipe holds before either reads: the window's refusals, and the next one's orders."""
    trace = fixed_lengths(40_000, 0, prompt_tokens=100, output_tokens=1)
    small = replace(SETTINGS, shape=ModelShape(4, 16, 1000, 64, ()))
    shard = RemoteShard(small, trace, 0, 1)
    try:
        assert [news.replica for news in shard.finish()] == [0]
        for first in (0, 20_000):
            shard.begin(1e-9 + first, [Sent(0.0, number, 0) for number in range(first, first + 20_000)])
        ended = [request for _ in range(2) for news in shard.finish() for request in news.ended]
        assert [request.number for request in ended] == list(range(40_000))
    finally:
        shard.kill()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_replicas": 0}, "num_replicas = 0 is not allowed"),
        ({"num_routers": 0}, "num_routers = 0 is not allowed"),
        ({"num_workers": 65}, "num_workers = 65 is not allowed"),
        ({"report_delay_s": 0.0}, "report_delay = 0.0 is not allowed"),
        ({"network_delay_s": -1.0}, "network_delay = -1.0 is not allowed"),
        ({"scheduler": SchedulerConfig(enable_chunked_prefill=False)}, "max_num_batched_tokens = 512 is not allowed"),
    ],
)
def test_impossible_clusters_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        replace(SETTINGS, **change)


def seconds_of(*values: float) -> Any:
    import numpy as np

    return seconds(np.array(values))
