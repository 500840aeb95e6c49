"""Processes of ours that must not outlive whoever started them: a replica's engine, and the other ranks of its model.

Each talks to its parent over one end of a socket pair (`frames.py`), begins with the module named at its start, and is
killed by the kernel when its parent dies (Linux); elsewhere the closed socket ends it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from replica.errors import ResourceError
from replica.frames import PeerGone

_PR_SET_PDEATHSIG = 1
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
"""How CPU threads wait for each other: see `spawn`."""
_CODE = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[4]); "
    "importlib.import_module(sys.argv[1]).main(int(sys.argv[2]))"
)


def spawn(
    module: str, socket_end: socket.socket, label: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Runs `module.main(fd)` in a new process, which finds our modules where we do. `label` is for whoever reads a
    process list; `environment` is put over ours.

    CPU threads that wait for each other inside a product soon sleep rather than spin (unless the operator says
    otherwise): the replica's asyncio side, the ingress and the HTTP proxy need the same cores, and one that spins for
    another that isn't scheduled makes steps many times longer. Spinning for well under a millisecond (GNU OpenMP's
    count) is cheaper than a sleep between two small products.
    """
    command = [sys.executable, "-c", _CODE, module, str(socket_end.fileno()), label, json.dumps(sys.path)]
    try:
        return subprocess.Popen(
            command,
            pass_fds=[socket_end.fileno()],
            stdin=subprocess.DEVNULL,
            env={**({} if "OMP_WAIT_POLICY" in os.environ else WAITING), **os.environ, **(environment or {})},
        )
    except OSError as error:
        raise ResourceError(f"the process '{label}' can't be started: {error}") from error


def live_and_die_with_parent(parent_pid: int) -> None:
    """In the child. Asks Linux to kill this process when the thread that started it ends. Raises `PeerGone` when the
    parent is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise PeerGone("the parent died before its child was up")


def leave_signals_to_parent() -> None:
    """In the child. What a terminal or a service supervisor sends to the whole process group is the parent's to act
    on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
