"""`brimful bench engine` and `peers` on the command line: errors, tables, goals, kept files, a real process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engine_speed.limits import MachineLimits, ModelLoad
from bench.engine_speed.sides import OwnSide
from deployments.cli import bench_engine, bench_peers
from deployments.cli.bench_common import measured_config
from deployments.cli.commands import run
from replica.config import EngineConfig
from tests.integration.tiny_chat_model import save_tiny_chat_model
from tests.unit.bench.fit.engines import engine

MODEL = ModelLoad(body_weights=1000, head_weights=0, weight_bytes=1, kv_bytes_per_token=0, ops_per_pair=0)
BUSY_PEER = """
from bench.peers.driver_loop import serve
def answer(order):
    return {"seconds": 1.0, "outputs": [[0] * order["num_output_tokens"] for _ in order["prompts"]]}
serve(lambda: ("9.9", answer))
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("engine --rounds 0", "--rounds = 0 is not allowed: at least 1"),
        ("engine --row 8x8", "--row = ['8x8'] is not allowed: such as 8x128/64: sequences, prompt and output tokens"),
        ("engine --save /no/such/folder", "--save = '/no/such/folder' is not allowed: a folder that exists"),
        ("engine --num-threads 0", "--num-threads = 0 is not allowed: "),
        ("engine --model /no/such/model", "there is no model folder /no/such/model; check --model"),
        ("peers --transformers-rounds 0", "--peer-python = '' is not allowed: an interpreter with vllm"),
        ("peers --rounds x", "Invalid value for '--rounds'"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith(f"error: {message}")


def test_what_is_measured_is_what_is_shipped_without_a_prefix_cache() -> None:
    config = measured_config("embedded", None)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (64, 512)
    assert (config.model.device, config.model.dtype, config.scheduler.enable_prefix_caching) == ("cpu", "auto", False)


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands measure an engine in virtual time, on a machine that does 1 byte and 1 operation a second."""

    @contextmanager
    def real_engine(config: EngineConfig, progress: Callable[[str], None], *_: object) -> Iterator[Any]:
        progress("loading")
        measured: Any = engine(lambda plan: 0.0)
        measured.pid, measured.card = 0, SimpleNamespace(name="tiny", weights_dir="nowhere", folder="nowhere")
        yield measured

    @contextmanager
    def limits_meter(_: int | None) -> Iterator[Callable[[], MachineLimits]]:
        yield lambda: MachineLimits(1e15, 1e15)

    monkeypatch.setattr("deployments.cli.real_engine.real_engine", real_engine)
    for module in (bench_engine, bench_peers):
        monkeypatch.setattr(module, "limits_meter", limits_meter)
        monkeypatch.setattr(module, "settle", lambda: None)
        monkeypatch.setattr(module, "own_side", lambda running: OwnSide(running, running.pid, MODEL))


@pytest.mark.usefixtures("virtual")
def test_the_engine_is_measured_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"bench engine --row 2x8/4 --rounds 2 --no-profile --save {tmp_path} --label before"
    assert run(line.split()) == 1  # far from such limits
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].startswith("| 2 x 8/4 | ")
    assert any(line.startswith("NOT MET       at least 60% of the machine's limit at 2 x 8/4") for line in shown)
    found = json.loads(shown[-1])
    assert (found["bench"], found["model"], found["rows"][0]["num_steps"]) == ("engine", "tiny", 4)
    kept = sorted(tmp_path.iterdir())
    assert [path.suffix for path in kept] == [".json", ".md"]
    assert kept[0].name.endswith("-engine-before.json")
    assert json.loads(kept[0].read_text()) == found


@pytest.mark.usefixtures("virtual")
def test_peers_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from bench.engine_speed.sides import PeerSide
    from bench.peers.driver import driver

    def peer(name: str) -> Callable[..., PeerSide]:
        return lambda stack, *_: PeerSide(name, stack.enter_context(driver(name, [sys.executable, "-c", BUSY_PEER])))

    monkeypatch.setattr(bench_peers, "_vllm", peer("vllm"))
    monkeypatch.setattr(bench_peers, "_transformers", peer("transformers"))
    assert run(["bench", "peers", "--peer-python", "some", "--row", "8x8/4", "--rounds", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = found["rows"][0]
    assert (row["vllm"], row["transformers"], row["goal_over_vllm"]) == (32.0, 32.0, 1.3)
    assert (len(row["brimful_seconds"]), len(row["vllm_seconds"]), len(row["transformers_seconds"])) == (2, 2, 1)
    assert (found["versions"]["vllm"], found["versions"]["transformers"]) == ("9.9", "9.9")


@pytest.mark.usefixtures("virtual")
def test_a_peer_that_isnt_there_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "peers", "--peer-python", "no-such-python", "--transformers-rounds", "0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: a peer failed: vllm: cannot run no-such-python: No such file or directory"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_model_is_measured_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engine, profile, limits and transformers, each in its own process."""
    folder = save_tiny_chat_model(tmp_path / "model")
    assert run(f"bench engine --model {folder} --row 2x8/4 --rounds 1 --num-threads 1".split()) in (0, 1)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["limits"]["bandwidth_gb_s"] > 0.1
    assert 0 < found["rows"][0]["share_of_limit"] < 1
    assert [kind["step"] for kind in found["profile"]] == [
        *("1 decodes", "8 decodes", "64 decodes", "512 tokens of prefill"),
    ]
    assert all(0 < kind["outside_share"] < 1 for kind in found["profile"])
    assert run(f"bench peers --model {folder} --row 2x8/4 --rounds 1 --num-threads 1".split()) in (0, 1)
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]
    assert row["transformers"] > 0
