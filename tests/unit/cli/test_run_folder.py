"""The run's folder: private, found again when left over, and the way to all processes of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.cli import run_folder
from deployments.cli.run_folder import MARKER, RunFolder, remove_stale
from replica.errors import ResourceError

WAITS = "print('up', flush=True); input()"
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + WAITS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    monkeypatch.setattr(run_folder, "MAX_PATH_BYTES", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = RunFolder.create()
    yield made
    made.remove()


@contextmanager
def process(code: str, environment: dict[str, str], *, session: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that is up and waits until its stdin ends."""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=session,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        try:
            yield child
        finally:
            child.kill()


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_only_its_owner_can_read_it(folder: RunFolder) -> None:
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.token_path.stat().st_mode & 0o777 == 0o600
    assert len(folder.token_path.read_text()) == 64


def test_removing_ends_the_processes_of_the_run_and_no_other(folder: RunFolder) -> None:
    with process(WAITS, {MARKER: str(folder.path)}) as ours, process(WAITS, {MARKER: str(folder.path) + "x"}) as other:
        folder.remove()
        assert ours.poll() is not None
        assert other.poll() is None
    assert not folder.path.exists()


def test_a_process_of_the_runs_session_needs_no_mark(folder: RunFolder) -> None:
    with process(WAITS, {}, session=True) as ours:
        folder.set_session(ours.pid)
        assert [found.pid for found in folder.processes()] == [ours.pid]
        folder.remove()
        assert ours.poll() is not None


def test_a_process_that_ignores_sigterm_is_killed(folder: RunFolder) -> None:
    with process(IGNORES_SIGTERM, {MARKER: str(folder.path)}) as ours:
        folder.remove(grace_s=0.1)
        assert ours.poll() is not None


def test_a_folder_of_a_living_run_is_kept(folder: RunFolder) -> None:
    assert remove_stale(folder.path.parent) == []
    assert folder.path.exists()


def test_a_folder_whose_owners_are_dead_is_removed_with_the_rest_of_its_run(folder: RunFolder) -> None:
    (folder.path / "owner.json").write_text(f'{{"{dead_pid()}": 1.0}}')
    with process(WAITS, {MARKER: str(folder.path)}) as left_over:
        assert remove_stale(folder.path.parent) == [folder.path]
        assert left_over.poll() is not None
    assert not folder.path.exists()


def test_an_owners_number_that_another_process_has_now_does_not_count(folder: RunFolder) -> None:
    (folder.path / "owner.json").write_text(f'{{"{os.getpid()}": 1.0}}')
    assert remove_stale(folder.path.parent) == [folder.path]


def test_the_session_of_a_left_over_folder_is_not_trusted(folder: RunFolder) -> None:
    """Its number may belong to somebody else by now."""
    (folder.path / "owner.json").write_text(f'{{"{dead_pid()}": 1.0}}')
    with process(WAITS, {}, session=True) as other:
        folder.set_session(other.pid)
        assert remove_stale(folder.path.parent) == [folder.path]
        assert other.poll() is None


def test_a_folder_that_is_being_made_is_kept(folder: RunFolder) -> None:
    (folder.path / "owner.json").unlink()
    assert remove_stale(folder.path.parent) == []


def test_a_temporary_folder_too_long_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ResourceError, match="too long for sockets: set TMPDIR"):
        RunFolder.create()
    assert list(tmp_path.iterdir()) == []
