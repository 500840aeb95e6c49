"""Folders that are either complete or absent: built beside their place under a lock, then moved there in one rename."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from replica.errors import ResourceError
from replica.model.api import Progress

_HEARTBEAT_S = 5.0
_LOCK_POLL_S = 0.2


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/brimful`, or `~/.cache/brimful`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "brimful"


def build_folder(target: Path, build: Callable[[Path], None], *, progress: Progress) -> None:
    """Replace `target` by what `build` writes into a temporary folder beside it.

    Call it with `folder_lock(target)` held. A kill at any point leaves the old `target` or none, never half of one,
    and at most a temporary folder that the next call removes. Raises `ResourceError` when the disk is full or can't be
    written.
    """
    _make_parent(target)
    with disk_errors(target.parent):
        for leftover in target.parent.glob(f".{target.name}.tmp-*"):
            progress(f"removing {leftover.name}, left by an interrupted run")
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        try:
            content = temporary / "new"
            content.mkdir()
            build(content)
            if target.exists():
                target.replace(temporary / "old")
            content.replace(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def folder_lock(target: Path, *, progress: Progress) -> Iterator[None]:
    """Hold the right to build `target`, across processes; says so while another one holds it.

    The kernel drops the lock when its holder dies, so a killed holder blocks nobody.
    """
    _make_parent(target)
    with disk_errors(target.parent):
        lock = (target.parent / f".{target.name}.lock").open("w")
    with lock:
        started = time.monotonic()
        said = -_HEARTBEAT_S
        while not _try_lock(lock.fileno()):
            waited = time.monotonic() - started
            if waited - said >= _HEARTBEAT_S:
                progress(f"another process is preparing {target.name}; waiting for it, {waited:.0f} s")
                said = waited
            time.sleep(_LOCK_POLL_S)
        yield


def _make_parent(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _disk_error(target.parent, error.strerror or str(error)) from error


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def heartbeat(progress: Progress, what: Callable[[], str]) -> Iterator[None]:
    """Report `what()` and the seconds so far, at once and then every five seconds until the block ends."""
    started = time.monotonic()
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_HEARTBEAT_S):
            progress(f"{what()}, {time.monotonic() - started:.0f} s")

    progress(what())
    thread = threading.Thread(target=beat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into one line. Writers in compiled code report a full disk only as text."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise _disk_error(folder, error.strerror or str(error)) from error
        raise
    except Exception as error:
        if "No space left on device" in str(error):
            raise _disk_error(folder, "No space left on device") from error
        raise


def require_free_bytes(folder: Path, num_bytes: int) -> None:
    """Raise `ResourceError` unless the disk that will hold `folder` has `num_bytes` free."""
    present = folder
    while not present.exists():
        present = present.parent
    free = shutil.disk_usage(present).free
    if free < num_bytes:
        raise _disk_error(folder, f"{num_bytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")


def _disk_error(folder: Path, reason: str) -> ResourceError:
    return ResourceError(f"can't write the model cache {folder}: {reason}; free space there or set --download-dir")
