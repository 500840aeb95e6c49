"""`brimful simulate`: tables, one JSON line last, errors in one line."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.simulate.cluster import Pace
from bench.simulate.step_cost import H100_8B
from deployments.cli import main, simulate_cluster
from deployments.cli.commands import run

SMALL = ["simulate", "--num-requests", "30", "--length-scale", "16", "--block-size", "16", "--replicas", "2"]


def result_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


WEIGHTS = {"cost_s": 1.0, "kv_headroom": 0.0, "queue_depth": 0.0, "prefix_affinity": 0.0}


def test_the_last_line_is_json_with_settings_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--max-num-seqs", "4", "--router-queue-depth", "2"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out.splitlines()[-1])
    assert found["num_finished"] == 30
    assert found["settings"]["max_num_seqs"] == 4
    assert found["settings"]["router_weights"] == WEIGHTS | {"queue_depth": 2.0}
    assert found["settings"]["load"] == 0.8
    assert found["settings"]["rate"] == pytest.approx(0.8 * 2 * found["settings"]["capacity_per_replica"])
    assert set(found["ttft_s"]) == {"mean", "p50", "p90", "p95", "p99"}
    for word in ("time to first token", "end to end", "goodput", "preemptions", "queue", "tokens per step", "routing"):
        assert word in shown.out
    assert "drawing 30 requests of W2" in shown.err


def test_the_same_flags_give_the_same_result(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = result_of(SMALL, capsys), result_of(SMALL, capsys)
    for found in (first, second):
        del found["wall_s"], found["peak_rss_mb"]
    assert first == second


def test_limits_follow_the_device_of_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    gpu, cpu = result_of(SMALL, capsys), result_of([*SMALL, "--cost", "cpu-smollm2"], capsys)
    assert (gpu["settings"]["max_num_seqs"], gpu["settings"]["max_num_batched_tokens"]) == (256, 8192)
    assert (cpu["settings"]["max_num_seqs"], cpu["settings"]["max_num_batched_tokens"]) == (64, 512)


def test_the_device_is_what_the_cost_file_says_not_how_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "laptop.json"
    replace(H100_8B, name="laptop", device="cpu").save(path)
    found = result_of([*SMALL, "--cost", str(path)], capsys)
    assert (found["settings"]["max_num_seqs"], found["settings"]["num_blocks"]) == (64, 1456)
    path.write_text(path.read_text().replace('"cpu"', '"tpu"'))
    assert run([*SMALL, "--cost", str(path)]) == 2
    assert "error: cost.device = 'tpu' is not allowed: cpu or cuda" in capsys.readouterr().err


def test_all_requests_can_be_there_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = result_of([*SMALL, "--all-present", "--batching", "static", "--max-num-seqs", "3"], capsys)
    assert found["num_finished"] == 30
    assert (found["settings"]["rate"], found["max_waiting"]) == (None, 13)


def test_a_killed_worker_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(multiprocessing.active_children())

    def kill_one(_: Pace) -> None:
        worker = next(child for child in multiprocessing.active_children() if child not in before)
        worker.kill()
        worker.join()

    monkeypatch.setattr(simulate_cluster, "_Progress", lambda _: kill_one)
    assert run([*SMALL, "--workers", "2"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith("error: a worker of the simulation was killed (exit code -9); ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "--rate = 0.0 is not allowed: at least 0.001"),
        (["--load", "1e-200"], "--load = 1e-200 is not allowed: at least 0.001"),
        (["--cost", "/dev/zero"], "error: --cost = '/dev/zero' is not allowed: a preset ("),
        (["--cost", "x" * 5000], "error: --cost = '"),
        (["--rate", "1", "--load", "1"], "--load = 1.0 is not allowed: not together with --rate"),
        (["--rate", "nan"], "--rate = nan is not allowed"),
        (["--num-requests", "0"], "--num-requests = 0 is not allowed"),
        (["--shape", "W99"], "error: --shape = 'W99' is not allowed: one of "),
        (["--cost", "no-such"], "error: --cost = 'no-such' is not allowed: a preset ("),
        (["--replicas", "0"], "error: --replicas = 0 is not allowed: from 1 to 100000"),
        (["--routers", "1001"], "error: --routers = 1001 is not allowed: from 1 to 1000"),
        (["--workers", "65"], "error: --workers = 65 is not allowed: from 1 to 64"),
        (["--report-delay", "0"], "error: --report-delay = 0.0 is not allowed: from 0.001"),
        (["--network-delay", "-1"], "error: --network-delay = -1.0 is not allowed: from 0"),
        (["--rate", "1e9"], "error: --rate = 1000000000.0 is not allowed: at least 0.001, less than 1e9"),
        (["--slo-ttft", "nan"], "error: --slo-ttft = nan is not allowed: more than 0 seconds, less than 1e9"),
        (["--slo-itl", "0"], "--slo-itl = 0.0 is not allowed"),
        (["--seed", "-1"], "--seed = -1 is not allowed"),
        (
            ["--max-num-seqs", "9", "--max-num-batched-tokens", "9"],
            "error: --max-num-batched-tokens = 9 is not allowed",
        ),
        (["--no-enable-chunked-prefill"], "error: max_num_batched_tokens = 8192 is not allowed"),
        (["--router-kv-headroom", "101"], "error: --router-kv-headroom = 101.0 is not allowed: from 0 to 100"),
        (
            ["--num-blocks", "1", "--block-size", "1"],
            "error: --num-blocks = 1 is not allowed: no request of the trace fits",
        ),
        (["--seed", "1", "story"], "--seed = 1 is not allowed: put flags of story after its name"),
    ],
    ids=str,
)
def test_a_bad_flag_is_one_line_and_exit_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    error = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert message in error[0]
    assert "Traceback" not in shown.err


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("bench.traces.generate.generate", exhausted)
    assert run(["simulate", "--num-requests", "9"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: there isn't memory enough for that; ask for")


def test_an_interrupt_while_modules_load_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deployments.cli.commands.run", interrupted)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
