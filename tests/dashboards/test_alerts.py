"""Each alert fires on its fault and stays silent beside it, judged by promtool on the committed rule file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.alerts import alerts
from dashboards.generate import GENERATED

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian package prometheus) isn't installed")

OURS = 'model_name="m",replica="r1"'


def series(name: str, values: str, labels: str = "") -> dict[str, str]:
    matchers = f"{OURS},{labels}" if labels else OURS
    return {"series": f"brimful_{name}{{{matchers}}}", "values": values}


LIMITS = [series("max_num_seqs", "8x30"), series("max_num_batched_tokens", "512x30")]
"""A gauge that stays: value x repetitions, one a minute."""


def steps(tokens_a_minute: int, steps_a_minute: int = 100) -> list[dict[str, str]]:
    return [
        series("iteration_tokens_total_sum", f"0+{tokens_a_minute}x30"),
        series("iteration_tokens_total_count", f"0+{steps_a_minute}x30"),
    ]


def queue(waiting: str, running: str, tokens_a_minute: int) -> list[dict[str, str]]:
    load = [series("num_requests_waiting", waiting), series("num_requests_running", running)]
    return [*LIMITS, *load, *steps(tokens_a_minute)]


def kv(usage: str, preemptions: str) -> list[dict[str, str]]:
    return [series("kv_cache_usage_perc", usage), series("num_preemptions_total", preemptions)]


def ends(stop: str, bad: str, reason: str) -> list[dict[str, str]]:
    return [
        series("request_success_total", stop, 'finished_reason="stop"'),
        series("request_success_total", bad, f'finished_reason="{reason}"'),
    ]


def http(ok: str, failed: str, cut: str = "0x30") -> list[dict[str, str]]:
    route = 'route="/v1/chat/completions"'
    return [
        {"series": f'brimful_http_requests_total{{{route},status="200"}}', "values": ok},
        {"series": f'brimful_http_requests_total{{{route},status="503"}}', "values": failed},
        {"series": f"brimful_http_stream_errors_total{{{route}}}", "values": cut},
    ]


FIRES: dict[str, tuple[str, list[dict[str, str]], str]] = {
    "queue grows while steps are narrow": (
        "BrimfulQueueGrowsWhileStepsAreNarrow",
        queue("1+2x30", "2x30", 5_000),
        OURS,
    ),
    "queue stays while steps are narrow": (
        "BrimfulQueueGrowsWhileStepsAreNarrow",
        queue("5x30", "3x30", 5_000),
        OURS,
    ),
    "full KV cache with preemptions": ("BrimfulKvCacheAtLimit", kv("0.97x30", "0+1x30"), OURS),
    "no replica at all": ("BrimfulNoReplicas", [{"series": "up", "values": "1x30"}], ""),
    "replica went away": ("BrimfulNoReplicas", [series("max_num_seqs", "8x5 stale")], ""),
    "a tenth ends in errors": ("BrimfulErrorRatio", ends("0+90x30", "0+10x30", "error"), 'model_name="m"'),
    "a tenth is refused": ("BrimfulErrorRatio", ends("0+90x30", "0+10x30", "rejected"), 'model_name="m"'),
    "a tenth times out": ("BrimfulErrorRatio", ends("0+90x30", "0+10x30", "timeout"), 'model_name="m"'),
    "a tenth answered with 503": ("BrimfulHttpErrors", http("0+90x30", "0+10x30"), ""),
    "a tenth of the streams cut": ("BrimfulHttpErrors", http("0+100x30", "0x30", "0+10x30"), ""),
}

SILENT: dict[str, tuple[str, list[dict[str, str]]]] = {
    "queue grows but steps are full of tokens": (
        "BrimfulQueueGrowsWhileStepsAreNarrow",
        queue("1+2x30", "2x30", 40_000),
    ),
    "queue grows but all places are taken": ("BrimfulQueueGrowsWhileStepsAreNarrow", queue("1+2x30", "8x30", 5_000)),
    "queue shrinks": ("BrimfulQueueGrowsWhileStepsAreNarrow", queue("90-3x29", "2x30", 5_000)),
    "queue is emptied now and then": ("BrimfulQueueGrowsWhileStepsAreNarrow", queue("3 0 4 " * 10, "2x30", 5_000)),
    "no traffic": ("BrimfulQueueGrowsWhileStepsAreNarrow", queue("0x30", "0x30", 0)),
    "full KV cache, nothing preempted": ("BrimfulKvCacheAtLimit", kv("0.99x30", "7x30")),
    "preemptions below the limit": ("BrimfulKvCacheAtLimit", kv("0.9x30", "0+1x30")),
    "a replica is there": ("BrimfulNoReplicas", [series("max_num_seqs", "8x30")]),
    "few errors": ("BrimfulErrorRatio", ends("0+97x30", "0+3x30", "error")),
    "many aborts": ("BrimfulErrorRatio", ends("0+50x30", "0+50x30", "abort")),
    "nothing ends": ("BrimfulErrorRatio", ends("9x30", "9x30", "error")),
    "few failures over HTTP": ("BrimfulHttpErrors", http("0+97x30", "0+3x30", "0+3x30")),
    "no HTTP traffic": ("BrimfulHttpErrors", http("5x30", "5x30", "5x30")),
}


def promtool(tmp_path: Path, alert: str, inputs: list[dict[str, str]], expected: list[dict[str, Any]]) -> str:
    """promtool's complaint, empty when exactly `expected` fires at minute 20."""
    case = {
        "rule_files": [str(GENERATED / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": inputs,
                "alert_rule_test": [{"eval_time": "20m", "alertname": alert, "exp_alerts": expected}],
            }
        ],
    }
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case), encoding="utf-8")
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("case", FIRES)
def test_alert_fires(tmp_path: Path, case: str) -> None:
    alert, inputs, labels = FIRES[case]
    rule = next(a for a in alerts() if a.name == alert)
    found = dict(part.split("=") for part in labels.split(",") if part)
    found = {name: value.strip('"') for name, value in found.items()}
    summary = rule.summary
    for name, value in found.items():
        summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
    expected = {
        "exp_labels": {"severity": rule.severity, **found},
        "exp_annotations": {**rule.json()["annotations"], "summary": summary},
    }
    assert promtool(tmp_path, alert, inputs, [expected]) == ""


@needs_promtool
@pytest.mark.parametrize("case", SILENT)
def test_alert_stays_silent(tmp_path: Path, case: str) -> None:
    alert, inputs = SILENT[case]
    assert promtool(tmp_path, alert, inputs, []) == ""


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    names = {alert.name for alert in alerts()}
    assert {case[0] for case in FIRES.values()} == names
    assert {case[0] for case in SILENT.values()} == names
