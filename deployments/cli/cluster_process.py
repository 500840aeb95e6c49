"""The process that owns Ray: `python -m deployments.cli.cluster_process SETTINGS`, started by `cluster.py` alone.

It is apart from `brimful serve` so that Ray's and Serve's chatter goes to a log file, so that Ctrl-C at the terminal
doesn't reach Ray's processes before the drain, and so that the cluster is taken down in order even when the program at
the terminal is killed: the end of stdin means "stop". Ray's servers die with this process (kernel's doing).

    stdin    one JSON line a command: {"deploy": <arguments of deployments.app:build>} once, {"stop": true}
    EVENTS   (a file descriptor) one JSON line an event: {"event": "cluster" | "progress" | "running" | "failed" |
             "stopped", "text": ...}
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deployments.cli.run_folder import RunFolder
from replica.errors import SettingError, StartupError

POLL_S = 0.25
# For Serve to delete the application, which is drained by then.
DELETE_LIMIT_S = 15.0
# For joining a cluster whose address accepts connections; Ray itself tries on for minutes.
CONNECT_LIMIT_S = 30.0
OBJECT_STORE_BYTES = 200 * 2**20
# How an error of our tree ends a traceback that Serve reports as text.
_OUR_ERROR = re.compile(
    r"replica\.errors\.(?:StartupError|SettingError|ModelNotFound|ModelUnsupported|ResourceError): (.+)"
)
_ANY_ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|OutOfMemory\w*): .+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What a cluster process is told. `address`: join that Ray cluster; None: start a private one in `folder`.

    `ray_dashboard`: with Ray's own dashboard; `num_gpus`: what the largest replica needs whose device is `cuda`,
    or `auto`: refuse a machine with fewer (private cluster only: others may get their GPUs with demand).
    """

    folder: str
    address: str | None
    host: str
    port: int
    proxy_location: str
    drain_timeout_s: float
    ray_dashboard: bool
    num_gpus: dict[str, int]
    events_fd: int

    def dumps(self) -> str:
        return json.dumps(asdict(self))


class StopRequested(Exception):
    """The program at the terminal said stop, or is gone."""


class ClusterProcess:
    """Cluster up, application up, watch, drain, down. All of it on the main thread; a second one reads commands."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._parent = os.getppid()
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._events = os.fdopen(settings.events_fd, "w", buffering=1, encoding="utf-8")
        os.set_inheritable(settings.events_fd, False)

    def main(self) -> int:
        threading.Thread(target=self._read_commands, daemon=True).start()
        folder = RunFolder(Path(self._settings.folder))
        try:
            self._start_cluster()
            self._tell("cluster", "")
            if self._deploy(self._next_command()["deploy"]):
                self._watch()
        except StopRequested:
            pass
        except StartupError as error:
            self._tell("failed", error.message)
        finally:
            self._take_down()
            self._tell("stopped", "")
            if self._settings.address is None and os.getppid() != self._parent:
                folder.remove()  # nobody else is left to do it
        return 0

    def _start_cluster(self) -> None:
        import ray
        from ray import serve

        settings = self._settings
        if settings.address is not None:
            self._connect(settings.address)
        else:
            _init_ray(
                "a local Ray can't be started",
                include_dashboard=settings.ray_dashboard,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(RunFolder(Path(settings.folder)).ray_path),
            )
            require_gpus(ray.cluster_resources(), **settings.num_gpus)  # type: ignore[no-untyped-call]
        self._stop_if_asked()
        self._tell("progress", "starting the HTTP proxy")
        serve.start(proxy_location=settings.proxy_location, http_options={"host": settings.host, "port": settings.port})
        if settings.address is not None:
            from ray.serve.context import _get_global_client

            # A Serve that ran already keeps listening where it does.
            client = _get_global_client()
            assert client is not None, "serve.start has just connected"
            check_listens((settings.host, settings.port), (client.http_config.host, client.http_config.port))
        self._stop_if_asked()

    def _connect(self, address: str) -> None:
        """Join a cluster. Raises `StartupError` when there is none; `failed` is told when Ray tries on for too long."""
        reason = f"no Ray cluster answers at --address {address}"
        late = threading.Timer(CONNECT_LIMIT_S, self._tell, ("failed", f"{reason} within {CONNECT_LIMIT_S:.0f} s"))
        late.daemon = True
        late.start()
        try:
            _init_ray(reason, address=address, log_to_driver=False)
        finally:
            late.cancel()

    def _deploy(self, args: dict[str, Any]) -> bool:
        """Start the application; true when it runs, false when it can't (told as an event)."""
        from ray import serve

        from deployments.app import APP_NAME, build

        try:
            application = build(args)
        except StartupError as error:
            self._tell("failed", error.message)
            return False
        serve.run_many(
            [serve.RunTarget(application, name=APP_NAME, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        while True:
            self._stop_if_asked()
            app = serve.status().applications.get(APP_NAME)
            if app is None:
                time.sleep(POLL_S)
                continue
            messages = [deployment.message for deployment in app.deployments.values()] + [app.message]
            reason = _reason(messages, final=app.status in ("DEPLOY_FAILED", "UNHEALTHY"))
            if reason is not None:
                self._tell("failed", reason)
                return False
            if app.status == "RUNNING":
                self._tell("running", "")
                return True
            self._tell("progress", _progress(app.deployments))
            time.sleep(POLL_S)

    def _watch(self) -> None:
        """Until the command to stop comes, then drain. Serve replaces what dies; nothing to do here."""
        with suppress(StopRequested):
            self._next_command()
        from ray import serve

        from deployments.app import APP_NAME
        from deployments.cli.drain import INGRESS, ServeApplication, drain

        if (app := serve.status().applications.get(APP_NAME)) is not None:
            replicas = [name for name in app.deployments if name != INGRESS]
            limit_s = self._settings.drain_timeout_s
            drain(ServeApplication(APP_NAME), replicas, limit_s, time.monotonic, time.sleep)

    def _take_down(self) -> None:
        """Delete the application, then take down Serve and Ray (only ours)."""
        ray, serve = sys.modules.get("ray"), sys.modules.get("ray.serve")
        if ray is None or serve is None or not ray.is_initialized():
            return
        from deployments.app import APP_NAME

        deadline_s = time.monotonic() + DELETE_LIMIT_S
        if APP_NAME in serve.status().applications:
            serve.delete(APP_NAME, _blocking=False)
            while APP_NAME in serve.status().applications and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
        if self._settings.address is None:
            serve.shutdown()
        ray.shutdown()

    def _next_command(self) -> dict[str, Any]:
        command = self._commands.get()
        if "stop" in command:
            raise StopRequested
        return command

    def _stop_if_asked(self) -> None:
        if not self._commands.empty():
            self._next_command()

    def _read_commands(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        self._commands.put({"stop": True})

    def _tell(self, event: str, text: str) -> None:
        with suppress(BrokenPipeError):  # the program at the terminal is gone; stdin's end tells so too
            self._events.write(json.dumps({"event": event, "text": text}) + "\n")


def require_gpus(resources: Mapping[str, float], *, cuda: int, auto: int) -> None:
    """Raises `SettingError` when Ray has found fewer GPUs than the largest replica takes, for which it would wait for
    ever. `auto` is the CPU on a machine without any."""
    num_gpus = int(resources.get("GPU", 0))
    if cuda and not num_gpus:
        raise SettingError("--device", "cuda", "it needs a GPU, and this machine shows none; use auto or cpu")
    largest = max(cuda, auto if num_gpus else 0)
    if largest > num_gpus:
        raise SettingError("--tensor-parallel-size", largest, f"this machine shows {num_gpus} GPUs")


def check_listens(wanted: tuple[str, int], running: tuple[str, int]) -> None:
    """Raises `SettingError` when the Serve of a cluster listens elsewhere: only whoever starts Serve can say where."""
    for flag, ours, theirs in zip(("--host", "--port"), wanted, running, strict=True):
        if ours != theirs:
            raise SettingError(flag, ours, f"Serve already runs on that Ray cluster: {flag} {theirs}")


def _init_ray(failure: str, **how: Any) -> None:
    """`ray.init`; what goes wrong is a `StartupError` of one line, with the whole story in the log."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(namespace="serve", **how)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [type(error).__name__]
        raise StartupError(f"{failure}: {lines[0]}") from error


def _progress(deployments: dict[str, Any]) -> str:
    """`starting replica 1/2` from Serve's view of the deployments."""
    wanted = up = 0
    for name, deployment in deployments.items():
        if name == "ingress":
            continue
        states = {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items()}
        wanted += sum(states.values())
        up += states.get("RUNNING", 0)
    if up < wanted:
        return f"starting replica {up + 1}/{wanted}"
    return "starting the ingress" if wanted else "starting the application"


def _reason(messages: list[str], *, final: bool) -> str | None:
    """Why the application can't start: at once for an error of ours, which no retry cures; else when Serve gave up."""
    text = "\n".join(messages)
    if ours := _OUR_ERROR.findall(text):
        return str(ours[-1]).strip()
    if not final:
        return None
    found = _ANY_ERROR.findall(text)
    return str(found[-1]) if found else (text.strip().splitlines() or ["unknown reason"])[-1]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(ClusterProcess(ClusterSettings(**json.loads(sys.argv[1]))).main())
