"""Folders that are complete or absent: killed builders, concurrent builders, full disks."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replica.errors import ResourceError
from replica.model.cache_folder import build_folder, default_cache_dir, folder_lock, require_free_bytes

_BUILDER = """
import sys, time
from pathlib import Path
from replica.model.cache_folder import build_folder, folder_lock
target = Path(sys.argv[1])
def build(folder):
    (folder / "weights").write_text("half")
    print("building", flush=True)
    sys.stdin.readline()
    (folder / "weights").write_text("whole")
with folder_lock(target, progress=lambda line: print(line, flush=True)):
    build_folder(target, build, progress=print)
print("done", flush=True)
"""


def _start(target: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILDER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _write(text: str, target: Path, said: list[str] | None = None) -> None:
    def build(folder: Path) -> None:
        (folder / "weights").write_text(text)

    build_folder(target, build, progress=(said if said is not None else []).append)


def test_a_builder_killed_half_way_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "model"
    builder = _start(target)
    assert builder.stdout is not None and builder.stdout.readline() == "building\n"
    os.kill(builder.pid, signal.SIGKILL)
    builder.communicate()
    assert not target.exists()
    said: list[str] = []
    with folder_lock(target, progress=said.append):
        _write("whole", target, said)
    assert len(said) == 1 and "left by an interrupted run" in said[0]
    assert (target / "weights").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


def test_a_second_builder_waits_and_says_so(tmp_path: Path) -> None:
    target = tmp_path / "model"
    first = _start(target)
    assert first.stdout is not None and first.stdout.readline() == "building\n"
    second = _start(target)
    assert second.stdout is not None
    assert second.stdout.readline() == "another process is preparing model; waiting for it, 0 s\n"
    assert first.communicate("\n")[0] == "done\n"
    assert second.communicate("\n")[0] == "building\ndone\n"
    assert (target / "weights").read_text() == "whole"


def test_a_new_build_replaces_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    _write("old", target)
    (target / "stray").touch()
    _write("new", target)
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [("weights", "new")]


def test_a_failing_build_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    _write("old", target)

    def fail(folder: Path) -> None:
        (folder / "weights").write_text("new")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build_folder(target, fail, progress=lambda _: None)
    assert (target / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_clear_line(tmp_path: Path, error: Exception) -> None:
    def fail(folder: Path) -> None:
        raise error

    with pytest.raises(ResourceError, match=r"No space left on device; free space there or set --download-dir"):
        build_folder(tmp_path / "model", fail, progress=lambda _: None)


def test_a_place_that_is_no_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="can't write the model cache /proc/"):
        _write("x", Path("/proc/brimful/models/m"))


def test_too_small_a_disk_is_named_with_both_numbers(tmp_path: Path) -> None:
    require_free_bytes(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(ResourceError, match=r"1000000\.0 GB are needed"):
        require_free_bytes(tmp_path, 10**15)


def test_the_users_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "brimful"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "brimful"


def test_waiting_is_bounded_by_the_holder_only(tmp_path: Path) -> None:
    """The lock of a dead holder is free at once."""
    target = tmp_path / "model"
    builder = _start(target)
    assert builder.stdout is not None and builder.stdout.readline() == "building\n"
    os.kill(builder.pid, signal.SIGKILL)
    builder.communicate()
    started = time.monotonic()
    with folder_lock(target, progress=pytest.fail):
        assert time.monotonic() - started < 60
