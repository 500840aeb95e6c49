"""The preStop hook: it asks Ray to drain this node and stays until no replica runs here, or its time is up."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

HOOK = Path(__file__).resolve().parents[2] / "k8s" / "image" / "drain_node.sh"
REPLICA = b"ray::ServeReplica:brimful:replica-0\0"


class Pod:
    """A folder that stands for /proc, and a `ray` that notes how it was called and gives `answer` as exit status."""

    def __init__(self, folder: Path, answer: int = 0) -> None:
        self.processes = folder / "proc"
        self.called = folder / "called"
        ray = folder / "bin" / "ray"
        ray.parent.mkdir()
        ray.write_text(
            f'#!/bin/sh\necho "$@" > {self.called}.new && mv {self.called}.new {self.called}\nexit {answer}\n'
        )
        ray.chmod(0o755)
        self._path = f"{ray.parent}:/usr/bin:/bin"

    def runs(self, pid: int, command_line: bytes) -> Path:
        path = self.processes / str(pid) / "cmdline"
        path.parent.mkdir(parents=True)
        path.write_bytes(command_line)
        return path

    def stop(self, limit_s: int) -> subprocess.Popen[str]:
        command = ["/bin/sh", str(HOOK), str(limit_s), str(self.processes)]
        return subprocess.Popen(command, env={"PATH": self._path}, stderr=subprocess.PIPE, text=True)


def wait_until_drain_was_asked(pod: Pod) -> None:
    for _ in range(1000):
        if pod.called.exists():
            return
        threading.Event().wait(0.01)
    raise TimeoutError("the hook didn't call ray")


def test_without_replicas_it_drains_and_ends(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.runs(7, b"/usr/bin/raylet\0")
    with pod.stop(60) as hook:
        assert hook.wait(timeout=20) == 0
    assert pod.called.read_text() == (
        "drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message the pod is being stopped "
        "--deadline-remaining-seconds 60\n"
    )


def test_it_stays_until_the_last_replica_has_gone(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    replicas = [pod.runs(pid, REPLICA) for pid in (7, 123)]
    with pod.stop(60) as hook:
        wait_until_drain_was_asked(pod)
        replicas[0].unlink()
        with pytest.raises(subprocess.TimeoutExpired):
            hook.wait(timeout=1.5)
        replicas[1].unlink()
        assert hook.wait(timeout=20) == 0


def test_it_gives_up_when_its_time_is_over(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.runs(7, REPLICA)
    with pod.stop(1) as hook:
        assert hook.wait(timeout=20) == 1
        assert hook.stderr is not None
        assert hook.stderr.read() == "replicas still run after 1 s\n"


def test_a_refused_drain_is_a_failure(tmp_path: Path) -> None:
    with Pod(tmp_path, answer=1).stop(60) as hook:
        assert hook.wait(timeout=20) == 1
