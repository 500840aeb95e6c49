"""Every metric of the replica table is written, and gauges follow updates in which no step ran."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from replica.metrics import REPLICA_METRICS, Metrics, MetricSpec
from replica.model.fake import FakeModel
from replica.recorder import Recorder
from replica.service import ReplicaService
from tests.fake_replica import EngineDriver, FakeFactory, answer, fake_shape, request_of, running, small_config


def values(service: ReplicaService) -> dict[tuple[str, str], float]:
    return {
        (
            sample.name,
            sample.labels.get("kind", sample.labels.get("reason", sample.labels.get("finished_reason", ""))),
        ): (sample.value)
        for family in service.metrics.registry.collect()
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


async def test_every_metric_of_the_table_has_a_series_from_the_start(tmp_path: Path) -> None:
    async with running(small_config(), FakeFactory(tmp_path)) as service:
        names = {name for name, _ in values(service)}
        for spec in REPLICA_METRICS:
            series = spec.series + ("_count" if spec.kind == "histogram" else "")
            assert series in names, series
        reasons = {label for name, label in values(service) if name == "brimful_request_success_total"}
        assert reasons == {"stop", "length", "abort", "error", "rejected", "timeout"}
        waiting = {label for name, label in values(service) if name == "brimful_num_requests_waiting_by_reason"}
        assert waiting == {"budget", "seqs", "blocks", "long_prefill"}


async def test_one_request_moves_each_metric_by_what_it_did(tmp_path: Path) -> None:
    async with running(small_config(), FakeFactory(tmp_path)) as service:
        await answer(service, request_of("a", num_prompt=20, max_tokens=5))
        got = values(service)
        assert got["brimful_step_tokens_total", "prefill"] == 20
        assert got["brimful_step_tokens_total", "decode"] == 4
        assert got["brimful_iteration_tokens_total_sum", ""] == 24
        assert got["brimful_iteration_tokens_total_count", ""] == 6
        assert got["brimful_prompt_tokens_total", ""] == 20
        assert got["brimful_generation_tokens_total", ""] == 5
        assert got["brimful_time_to_first_token_seconds_count", ""] == 1
        assert got["brimful_inter_token_latency_seconds_count", ""] == 4
        assert got["brimful_request_queue_time_seconds_count", ""] == 1
        assert got["brimful_e2e_request_latency_seconds_count", ""] == 1
        assert got["brimful_request_success_total", "length"] == 1
        assert got["brimful_kv_cache_blocks", ""] == 64
        await answer(service, request_of("b", num_prompt=20, max_tokens=5))
        again = values(service)
        assert again["brimful_prefix_cache_hits_total", ""] == 16
        assert again["brimful_prompt_tokens_total", ""] == 40


async def test_prompt_tokens_of_several_answers_are_counted_once(tmp_path: Path) -> None:
    async with running(small_config(), FakeFactory(tmp_path)) as service:
        await answer(service, request_of("a", n=3, max_tokens=5))
        got = values(service)
        assert got["brimful_prompt_tokens_total", ""] == 5
        assert got["brimful_time_to_first_token_seconds_count", ""] == 3
        assert got["brimful_request_success_total", "length"] == 3


async def test_gauges_fall_when_waiting_and_running_are_aborted_without_a_step(tmp_path: Path) -> None:
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    async with running(small_config(), FakeFactory(tmp_path)) as service:
        recorder = Recorder(service.metrics)
        driver.submit(*(request_of(f"r{i}", num_prompt=12) for i in range(6)))
        driver.clock.now_s += 1.0
        recorder.update(driver.step())
        got = values(service)
        assert got["brimful_num_requests_running", ""] + got["brimful_num_requests_waiting", ""] == 6
        assert got["brimful_kv_cache_usage_perc", ""] > 0
        assert got["brimful_oldest_waiting_seconds", ""] > 1.0
        for i in range(6):
            driver.engine.end(f"r{i}")
        recorder.update(driver.step())
        got = values(service)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "oldest_waiting_seconds"):
            assert got[f"brimful_{gauge}", ""] == 0.0
        by_reason = [value for (name, _), value in got.items() if name == "brimful_num_requests_waiting_by_reason"]
        assert by_reason == [0.0] * 4


def test_a_metric_that_is_in_no_table_or_of_another_kind_is_an_error() -> None:
    metrics = Metrics(REPLICA_METRICS, {"model_name": "m", "replica": "r"})
    with pytest.raises(KeyError):
        metrics.inc("generation_token")
    with pytest.raises(TypeError, match="no counter"):
        metrics.inc("num_requests_running")
    with pytest.raises(TypeError, match="no gauge"):
        metrics.set("generation_tokens", 1)
    with pytest.raises(TypeError, match="no histogram"):
        metrics.observe("generation_tokens", 1)
    with pytest.raises(ValueError, match="Incorrect label names"):
        metrics.inc("request_success", reason="stop")


def test_metrics_of_a_process_without_common_labels_have_series_too() -> None:
    metrics = Metrics((MetricSpec("things", "counter", "Things."),), {})
    metrics.inc("things", 2)
    assert metrics.registry.get_sample_value("brimful_things_total") == 2


def test_a_dead_engine_holds_nothing_and_its_size_stays_known() -> None:
    metrics = Metrics(REPLICA_METRICS, {"model_name": "m", "replica": "r"})
    recorder = Recorder(metrics)
    driver = EngineDriver(small_config(), FakeModel(fake_shape()))
    driver.submit(request_of("done", num_prompt=8, max_tokens=1, first=50))
    driver.run()
    driver.submit(*(request_of(f"r{i}", num_prompt=12) for i in range(6)))
    recorder.update(driver.step())

    def gauge(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"brimful_{name}", {"model_name": "m", "replica": "r"})

    assert gauge("kv_cache_cached_ratio") != 0
    recorder.dead()
    held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_cache_cached_ratio")
    assert [gauge(name) for name in held] == [0.0] * 4
    assert gauge("kv_cache_blocks") == 64


async def test_gauges_of_limits_follow_a_live_change_also_while_nothing_runs(tmp_path: Path) -> None:
    async with running(small_config(), FakeFactory(tmp_path)) as service:
        service.set_budgets(max_num_seqs=2, max_num_batched_tokens=8)
        async with asyncio.timeout(10):
            while service.limits()["in_force"] != {"max_num_seqs": 2, "max_num_batched_tokens": 8}:
                await asyncio.sleep(0)
        got = values(service)
        assert (got["brimful_max_num_seqs", ""], got["brimful_max_num_batched_tokens", ""]) == (2, 8)
