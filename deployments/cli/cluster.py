"""The cluster process as `brimful serve` holds it: start it, follow its events, stop it, end it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.cli.cluster_process import ClusterSettings
from deployments.cli.run_folder import MARKER, RunFolder
from deployments.config import ServeConfig

SERVE_ENVIRONMENT = {
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "-1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""How Serve carries a token (`bench/http` measures it). Its proxy gets what an ingress process streams by gRPC, which
costs a third of a Ray object a message; without a limit, because one that is exceeded cuts the answer off: the largest
bodies are ours to bound. Our code runs on Serve's own event loop in each process, so that no message has to change
threads: nothing of ours blocks that loop, what takes long is done elsewhere. What the user has set stays."""


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """`kind`: cluster, progress, running, failed, stopped (see `cluster_process.py`), or `gone`: the process ended."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class RayChoice:
    """On which Ray: a running cluster at `address`, or (None) a private one, with Ray's own `dashboard` or without."""

    address: str | None = None
    dashboard: bool = False


@dataclass(slots=True)
class Cluster:
    """A running cluster process."""

    process: asyncio.subprocess.Process
    _events: asyncio.StreamReader
    _transport: asyncio.BaseTransport = field(repr=False)

    @classmethod
    async def start(cls, folder: RunFolder, config: ServeConfig, ray: RayChoice, log: Path) -> Cluster:
        """Start it in a session of its own; all it prints goes to `log`, which is emptied first."""
        read_fd, write_fd = os.pipe()
        settings = ClusterSettings(
            folder=str(folder.path),
            address=ray.address,
            host=config.http.host,
            port=config.http.port,
            proxy_location=config.proxy_location,
            drain_timeout_s=config.app.drain_timeout_s,
            ray_dashboard=ray.dashboard,
            num_gpus={
                device: max((m.tensor_parallel_size for m in config.app.models if m.device == device), default=0)
                for device in ("cuda", "auto")
            },
            events_fd=write_fd,
        )
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "deployments.cli.cluster_process", settings.dumps()),
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=_environment(folder, private=ray.address is None),
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        os.close(write_fd)
        folder.add_owner(process.pid)
        folder.set_session(process.pid)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        return cls(process, reader, transport)

    async def events(self) -> AsyncIterator[ClusterEvent]:
        """Its events as they come; `gone` is the last one."""
        while line := await self._events.readline():
            event = json.loads(line)
            yield ClusterEvent(event["event"], event["text"])
        yield ClusterEvent("gone", "")

    def deploy(self, args: dict[str, Any]) -> None:
        self._send({"deploy": args})

    def stop(self) -> None:
        """Ask it to drain, take the cluster down and exit."""
        self._send({"stop": True})

    async def end(self) -> None:
        """End it at once. Ray's servers die with it; `RunFolder.remove` ends the rest."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self._transport.close()

    def _send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps(command).encode() + b"\n")


def _environment(folder: RunFolder, *, private: bool) -> dict[str, str]:
    """The environment of the cluster process and thus of every Ray process and replica.

    A private cluster: authentication on, with this run's own token; node address 127.0.0.1 (Ray has no setting of its
    own for that: a switch for systems without cluster support makes it stay on the loopback); no usage reports; all
    temporary files in the run's folder. Without what would make uvicorn believe any client about who it is.
    """
    environment = dict(os.environ)
    environment.pop("FORWARDED_ALLOW_IPS", None)
    environment[MARKER] = str(folder.path)
    environment["TMPDIR"] = str(folder.temporary_path)
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    environment |= {name: environment.get(name, value) for name, value in SERVE_ENVIRONMENT.items()}
    if private:
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_NAMESPACE"):
            environment.pop(name, None)
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN_PATH"] = str(folder.token_path)
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        environment["RAY_TMPDIR"] = str(folder.path)
    return environment
