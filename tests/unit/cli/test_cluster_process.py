"""What Serve's status texts say about a start that goes on or fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from deployments.cli.cluster_process import _init_ray, _progress, _reason, check_listens, require_gpus
from replica.errors import SettingError, StartupError

RETRYING = """A replica failed to start with exception. Retrying 2 more time(s). Error:
ray::ServeReplica:brimful:replica-0.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)
  File "app.py", line 29, in __init__
    raise ModelUnsupported("this architecture isn't supported: choose another")
replica.errors.ModelUnsupported: this architecture isn't supported: choose another"""
OTHER = """The deployment failed to start 3 times in a row. Error:
  File "torch/nn.py", line 1, in empty
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"""


@dataclass
class Deployment:
    replica_states: dict[str, int] = field(default_factory=dict)


def test_an_error_of_ours_needs_no_retry() -> None:
    assert _reason(["", RETRYING], final=False) == "this architecture isn't supported: choose another"


def test_any_other_error_counts_when_serve_has_given_up() -> None:
    assert _reason([OTHER], final=False) is None
    assert _reason([OTHER], final=True) == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(("messages", "reason"), [(["", "it broke"], "it broke"), ([""], "unknown reason")])
def test_a_failure_without_an_error_shows_what_there_is(messages: list[str], reason: str) -> None:
    assert _reason(messages, final=True) == reason


@pytest.mark.parametrize(
    ("deployments", "text"),
    [
        ({}, "starting the application"),
        ({"ingress": Deployment({"STARTING": 1}), "replica-0": Deployment({"STARTING": 2})}, "starting replica 1/2"),
        ({"replica-0": Deployment({"STARTING": 1, "RUNNING": 1})}, "starting replica 2/2"),
        ({"ingress": Deployment({"STARTING": 1}), "replica-0": Deployment({"RUNNING": 2})}, "starting the ingress"),
    ],
)
def test_progress_counts_replicas(deployments: dict[str, Any], text: str) -> None:
    assert _progress(deployments) == text


@pytest.mark.parametrize(
    ("running", "message"),
    [
        (("127.0.0.1", 8001), "--port = 8000 is not allowed: Serve already runs on that Ray cluster: --port 8001"),
        (
            ("0.0.0.0", 8000),
            "--host = '127.0.0.1' is not allowed: Serve already runs on that Ray cluster: --host 0.0.0.0",
        ),
    ],
)
def test_a_serve_that_already_listens_elsewhere_is_told_at_once(running: tuple[str, int], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_listens(("127.0.0.1", 8000), running)
    assert caught.value.message == message


def test_a_serve_that_listens_where_wanted_is_taken() -> None:
    check_listens(("127.0.0.1", 8000), ("127.0.0.1", 8000))


def test_cuda_on_a_machine_without_a_gpu_is_refused() -> None:
    require_gpus({"CPU": 2.0, "GPU": 1.0}, cuda=1, auto=0)
    for resources in ({"CPU": 2.0}, {"GPU": 0.0}):
        with pytest.raises(SettingError, match=r"^--device = 'cuda' is not allowed: it needs a GPU, and this machine"):
            require_gpus(resources, cuda=1, auto=0)


def test_a_replica_over_more_gpus_than_the_machine_has_is_refused() -> None:
    require_gpus({"GPU": 2.0}, cuda=2, auto=2)
    require_gpus({"GPU": 0.0}, cuda=0, auto=4)  # on the CPU
    for shards in ({"cuda": 3, "auto": 1}, {"cuda": 0, "auto": 3}):
        with pytest.raises(SettingError) as refused:
            require_gpus({"GPU": 2.0}, **shards)
        assert refused.value.message == "--tensor-parallel-size = 3 is not allowed: this machine shows 2 GPUs"


def test_a_ray_that_cannot_start_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartupError) as refused:
        _init_ray("a local Ray can't be started", no_such_argument=1)
    assert refused.value.message.startswith("a local Ray can't be started: ")
    assert "\n" not in refused.value.message
    assert "Traceback" in capsys.readouterr().err
