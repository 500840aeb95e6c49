"""`brimful bench http` with a tiny model: it measures, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.tiny_chat_model import save_tiny_chat_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def start(folder: Path) -> subprocess.Popen[str]:
    model = save_tiny_chat_model(folder)
    command = [sys.executable, "-m", "deployments.cli", "bench", "http", "--quick", "--model", str(model)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ, start_new_session=True
    )


def test_it_ends_with_one_line_of_json_about_both_sides(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode in (0, 1), err  # a goal may be missed: steps of a tiny model are shorter than a message
    document = json.loads(out.splitlines()[-1])
    assert [row["num_streams"] for row in document["rows"]] == [1, 8]
    for row in document["rows"]:
        assert row["http"]["tokens_per_s"] > 0
        assert {"engine", "replica", "ingress", "proxy", "client"} <= row["http"]["cpu_ms_per_token"].keys()
    assert "warming up" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_ctrl_c_leaves_no_process_and_no_folder(number: signal.Signals, code: int, tmp_path: Path) -> None:
    runs = Path(tempfile.gettempdir()).glob(f"brimful-{os.getuid()}-*")
    before = set(runs)
    with start(tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "service: " in line:
                break
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        process.send_signal(number)
        for _ in process.stderr:
            pass
        assert process.wait(90) == code
    deadline_s = time.monotonic() + 10
    while any(child.is_running() for child in started) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not [child for child in started if child.is_running()]
    assert set(Path(tempfile.gettempdir()).glob(f"brimful-{os.getuid()}-*")) <= before
