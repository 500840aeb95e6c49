"""The newest word of a starting replica, out of the log that all processes of the cluster print to."""

from __future__ import annotations

import re
from pathlib import Path

# How a replica's line looks there: "(ServeReplica:brimful:replica-0 pid=1) INFO ... -- starting: loading the weights".
_STARTING = re.compile(r"-- starting: (.+?)(?:\x1b\[\d+m.*)?$", re.MULTILINE)


class LogTail:
    """Reads on where it stopped, so that asking often is cheap."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_bytes = 0
        self._newest = ""

    def newest(self) -> str:
        """What a replica said last about its start; empty as long as none has spoken."""
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        if found := _STARTING.findall(whole.decode(errors="replace")):
            self._newest = found[-1].strip()
        return self._newest
