"""`brimful serve`: bring the service up, say where it is, wait for Ctrl-C, drain, leave nothing behind.

Bringing up: settings and port are checked first, in milliseconds. Then the models are prepared and Ray is started side
by side, each in a process of its own; when both are done the application is deployed; it counts as up when every model
has generated a token over HTTP. Whatever fails on the way ends in one line that says why.

Ending: the first Ctrl-C (or SIGTERM) drains: streams finish, up to the drain limit. The second ends at once; so does
the first while the service is still starting. In every case the run's processes are ended and its folder is removed.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import Coroutine
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from deployments.cli.cluster import Cluster, RayChoice
from deployments.cli.console import Console
from deployments.cli.log_tail import LogTail
from deployments.cli.port import claim_port, reachable
from deployments.cli.preparation import prepare_model
from deployments.cli.ray_address import AUTO, require_reachable
from deployments.cli.readiness import until_ready
from deployments.cli.run_folder import RunFolder
from deployments.cli.status import fetch_status, program_name, summary
from deployments.config import ModelSettings, ServeConfig
from replica.errors import SettingError, StartupError
from replica.model.cache_folder import default_cache_dir
from replica.model_card import ModelCard

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_S = 0.5
# Beyond the drain limit: what taking down Serve and Ray may take before the run is ended by force.
TAKE_DOWN_S = 30.0
# The application runs, a first token may still take a compilation or a self-test.
READY_LIMIT_S = 300.0
LOG_TAIL_LINES = 20


def serve(config: ServeConfig, ray: RayChoice, console: Console) -> int:
    """Run the service until it is told to stop; returns the exit code. Raises `StartupError` when it can't start."""
    if ray.address is not None:
        console.doing(_connecting(ray.address))
        require_reachable(ray.address)
    with claim_port(config.http.host, config.http.port) if ray.address is None else nullcontext():
        folder = RunFolder.create()
        try:
            code = asyncio.run(_Run(config, ray, console, folder).run())
        finally:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # this short work must not be cut off
            folder.remove()
    console.line("stopped")
    return code


class _Run:
    """One run. `stops` counts Ctrl-C and SIGTERM."""

    def __init__(self, config: ServeConfig, ray: RayChoice, console: Console, folder: RunFolder) -> None:
        self._config = config
        self._ray = ray
        self._console = console
        self._folder = folder
        self._log = _log_file(config.http.port)
        self._url = f"http://{_bracketed(reachable(config.http.host))}:{config.http.port}"
        self._stops: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(number, self._stops.put_nowait, number)
        ticking = asyncio.create_task(self._tick())
        cluster = await Cluster.start(self._folder, self._config, self._ray, self._log)
        try:
            stopped = await self._unless_stopped(self._bring_up(cluster))
            if stopped:
                self._console.line(f"{stopped.name} while starting: ending what was started")
                return 128 + stopped
            program = program_name(sys.argv[0], shutil.which("brimful"), Path.cwd())
            self._console.line(summary(await fetch_status(self._url), self._url, self._config, program))
            if self._ray.dashboard:
                self._console.line(f"Ray's dashboard: http://127.0.0.1:8265 (token: {self._folder.token_path})")
            self._console.line(f"log: {self._log}\nCtrl-C drains and stops")
            stopped = await self._unless_stopped(cluster.process.wait())
            if not stopped:
                raise self._crash()
            return await self._drain(cluster)
        finally:
            ticking.cancel()
            await cluster.end()

    async def _bring_up(self, cluster: Cluster) -> None:
        """Raises `StartupError` with the reason when the service can't come up."""
        preparing = asyncio.create_task(self._prepare_models())
        deployed = asyncio.create_task(self._deploy(cluster, preparing))
        try:
            done, _ = await asyncio.wait((preparing, deployed), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in (preparing, deployed):
                task.cancel()
            await asyncio.gather(preparing, deployed, return_exceptions=True)

    async def _prepare_models(self) -> None:
        if self._ray.address is not None:
            self._console.doing(_connecting(self._ray.address))
            return  # the replicas' machines prepare their models themselves
        for model in self._config.app.models:
            await self._prepare(model)
        self._console.doing("starting Ray")

    async def _prepare(self, model: ModelSettings) -> None:
        self._console.doing(f"preparing {model.name}")
        temporary = self._folder.temporary_path
        card = await prepare_model(
            model, temporary, lambda text: self._console.doing(f"preparing {model.name}: {text}")
        )
        require_context(model, card)

    async def _deploy(self, cluster: Cluster, preparing: asyncio.Task[None]) -> None:
        tail = LogTail(self._log)
        async for event in cluster.events():
            if event.kind == "cluster":
                await asyncio.shield(preparing)
                cluster.deploy(self._config.app.model_dump(mode="json", exclude_unset=True))
                self._console.doing("starting the application")
            elif event.kind == "progress" and preparing.done():
                self._console.doing(": ".join(filter(None, (event.text, tail.newest()))))
            elif event.kind == "failed":
                raise StartupError(event.text)
            elif event.kind == "running":
                self._console.doing("waiting for a first token")
                await self._until_ready(cluster)
                return
            elif event.kind == "gone":
                raise self._crash()

    async def _until_ready(self, cluster: Cluster) -> None:
        ready = asyncio.create_task(until_ready(self._url, self._config.app))
        gone = asyncio.create_task(cluster.process.wait())
        try:
            await asyncio.wait((ready, gone), timeout=READY_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise self._crash()
            if not ready.done():
                raise StartupError(
                    f"started, but no token after {READY_LIMIT_S:.0f} s; the reason may be in {self._log}"
                )
            try:
                ready.result()
            except StartupError as error:
                raise StartupError(f"{error.message}; the reason may be in {self._log}") from None
        finally:
            ready.cancel()
            gone.cancel()

    async def _drain(self, cluster: Cluster) -> int:
        limit_s = self._config.app.drain_timeout_s
        self._console.doing(f"draining: streams may finish for {limit_s:.0f} s, a second Ctrl-C stops at once")
        cluster.stop()
        stopped = await self._unless_stopped(_limited(cluster.process.wait(), limit_s + TAKE_DOWN_S))
        return 128 + stopped if stopped else 0

    async def _unless_stopped(self, work: Coroutine[Any, Any, object]) -> signal.Signals | None:
        """Do `work`, unless a stop comes first: then cancel it and return the signal."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stops.get())
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            stop.cancel()
            task.result()
            return None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return stop.result()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._console.tick()

    def _crash(self) -> StartupError:
        """The cluster process ended by itself: the end of its log may say why."""
        self._console.line(_tail(self._log))
        return StartupError(f"the cluster process ended by itself; above is the end of {self._log}")


async def _limited(work: Coroutine[Any, Any, object], limit_s: float) -> None:
    try:
        await asyncio.wait_for(work, limit_s)
    except TimeoutError:
        return  # the caller ends what is left by force


def require_context(model: ModelSettings, card: ModelCard) -> None:
    """Raises `SettingError` for a `max_model_len` beyond the model's own limit, minutes before its replica would."""
    if model.max_model_len is not None and model.max_model_len > card.max_position:
        allowed = f"the own limit of {model.name} is {card.max_position} tokens"
        raise SettingError("--max-model-len", model.max_model_len, allowed)


def _connecting(address: str) -> str:
    return f"connecting to the Ray cluster at {address}" if address != AUTO else "connecting to this machine's Ray"


def _log_file(port: int) -> Path:
    """Kept after the run, emptied by the next one on the same port."""
    folder = default_cache_dir() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot make the log folder {folder}: {error.strerror}") from None
    return folder / f"serve-{port}.log"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join("  " + line[:300] for line in lines[-LOG_TAIL_LINES:])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
