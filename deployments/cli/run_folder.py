"""The private folder of one run of `brimful serve`, and the processes that belong to the run.

    <temporary folder>/brimful-<uid>-xxxxxxxx/     mode 0700; removed with all it holds when the run ends
      owner.json     who may remove it: process ids of this run, each with its time of birth
      session        the session (setsid) in which the cluster process and all of Ray run
      auth_token     the key of this run's Ray cluster, mode 0600
      ray/           Ray's sessions: sockets, logs
      tmp/           TMPDIR of every process of the run

Every process of the run carries the folder's path in its environment (`MARKER`) and, unless it left it, is in the
run's session, so that ending a run can find all of its processes and never touches another's. A run of which every
process was ended with kill -9 leaves its folder behind, and may leave Ray's agents; the next start ends and removes
them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from replica.errors import ResourceError

MARKER = "BRIMFUL_RUN"
OWNER_FILE = "owner.json"
# A folder this young without an owner file is being made by another start, not left over.
YOUNG_S = 60.0
# Unix socket paths end at 107 bytes; Ray appends `/ray/session_<date>_<pid>/sockets/plasma_store`, up to 68.
MAX_PATH_BYTES = 38


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder. `create` makes it, `remove` ends the run's processes and removes it; both may be repeated."""

    path: Path

    @classmethod
    def create(cls) -> RunFolder:
        """Make a new folder owned by this process. Raises `ResourceError` when Ray's sockets wouldn't fit below it."""
        base = Path(tempfile.gettempdir())
        remove_stale(base)
        try:
            path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
        except OSError as error:
            raise ResourceError(f"cannot make a folder in {base} ({error.strerror}); set TMPDIR to another") from None
        folder = cls(path)
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            path.rmdir()
            raise ResourceError(f"the temporary folder's path {base} is too long for sockets: set TMPDIR to a shorter")
        folder.add_owner(os.getpid())
        folder.temporary_path.mkdir()
        token = os.open(folder.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(token, "w") as file:
            file.write(secrets.token_hex(32))
        return folder

    @property
    def token_path(self) -> Path:
        return self.path / "auth_token"

    @property
    def temporary_path(self) -> Path:
        return self.path / "tmp"

    @property
    def ray_path(self) -> Path:
        return self.path / "ray"

    def add_owner(self, pid: int) -> None:
        """While process `pid` lives, no other start removes the folder."""
        file = self.path / OWNER_FILE
        owners = json.loads(file.read_text()) if file.exists() else {}
        owners[str(pid)] = psutil.Process(pid).create_time()
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(owners))
        fresh.replace(file)

    def processes(self) -> list[psutil.Process]:
        """All living processes of this run but the calling one."""
        mark = f"\0{MARKER}={self.path}\0".encode()
        session = self._session()
        return [
            process
            for process in psutil.process_iter()
            if process.pid != os.getpid() and (_in_session(process.pid, session) or mark in _environ(process))
        ]

    def set_session(self, leader_pid: int) -> None:
        (self.path / "session").write_text(str(leader_pid))

    def _session(self) -> int | None:
        try:
            return int((self.path / "session").read_text())
        except OSError:
            return None  # not started yet

    def end_processes(self, grace_s: float = 1.0) -> None:
        """End what is left of the run: SIGTERM, and SIGKILL for what still lives after `grace_s`."""
        left = self.processes()
        for process in left:
            _signal(process, kill=False)
        psutil.wait_procs(left, timeout=grace_s)
        while left := self.processes():
            for process in left:
                _signal(process, kill=True)
            psutil.wait_procs(left, timeout=1.0)

    def remove(self, grace_s: float = 1.0) -> None:
        self.end_processes(grace_s)
        shutil.rmtree(self.path, ignore_errors=True)


def remove_stale(base: Path) -> list[Path]:
    """End what is left of this user's runs in `base` whose owners are all dead; returns their folders, now removed."""
    removed = []
    for path in base.glob(_prefix() + "*"):
        try:
            stale = path.lstat().st_uid == os.getuid() and path.is_dir() and not _owned(path)
        except OSError:
            continue  # its run ended this moment
        if stale:
            # Its session's number may be another's by now; the mark can't be.
            (path / "session").unlink(missing_ok=True)
            RunFolder(path).remove()
            removed.append(path)
    return removed


def _owned(path: Path) -> bool:
    try:
        owners = json.loads((path / OWNER_FILE).read_text())
    except (OSError, ValueError):
        return time.time() - path.lstat().st_mtime < YOUNG_S
    return any(_lives(int(pid), born_s) for pid, born_s in owners.items())


def _lives(pid: int, born_s: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - born_s) < 1.0
    except psutil.Error:
        return False


def _environ(process: psutil.Process) -> bytes:
    """The raw environment; empty for a process that is gone or another user's.

    Raw, because processes that set their title (Ray's do) overwrite the first entries, where parsers then stop.
    """
    try:
        return b"\0" + Path("/proc", str(process.pid), "environ").read_bytes()
    except OSError:
        return b""


def _in_session(pid: int, session: int | None) -> bool:
    try:
        return os.getsid(pid) == session
    except OSError:
        return False


def _prefix() -> str:
    return f"brimful-{os.getuid()}-"


def _signal(process: psutil.Process, *, kill: bool) -> None:
    with suppress(psutil.Error):  # gone meanwhile
        process.kill() if kill else process.terminate()
