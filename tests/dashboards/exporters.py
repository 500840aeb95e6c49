"""A small cluster of exporters made of the real metric tables, and a real Prometheus that discovers and scrapes it.

Every scrape of `/metrics` first counts some work, so that rates are there after a few scrapes, whatever their pace.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from replica.metrics import Metrics, MetricSpec

LABEL_VALUES = {
    "reason": ("budget", "seqs", "blocks", "long_prefill"),
    "kind": ("prefill", "decode", "recomputed"),
    "finished_reason": ("stop", "length", "abort", "error", "rejected", "timeout"),
    "status": ("200", "400", "503"),
    "model_name": ("m",),
}


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""For 127.0.0.1, whatever proxy the environment names."""


class Exporter:
    """One process: counts a fixed amount of work a scrape. Gauges stand at `level`."""

    def __init__(self, specs: tuple[MetricSpec, ...], common: dict[str, str], level: float) -> None:
        self._specs = specs
        self._metrics = Metrics(specs, common)
        self._level = level
        self._lock = threading.Lock()

    def scrape(self) -> bytes:
        with self._lock:
            for spec in self._specs:
                for labels in _label_sets(spec):
                    self._count(spec, labels)
            return generate_latest(self._metrics.registry)

    def _count(self, spec: MetricSpec, labels: dict[str, str]) -> None:
        if spec.kind == "gauge":
            ratio = spec.name.endswith(("_ratio", "_perc"))
            self._metrics.set(spec.name, self._level / 100 if ratio else self._level, **labels)
        elif spec.kind == "counter":
            self._metrics.inc(spec.name, 0.5, **labels)
        else:
            self._metrics.observe(spec.name, spec.buckets[1], **labels)


def _label_sets(spec: MetricSpec) -> list[dict[str, str]]:
    sets: list[dict[str, str]] = [{}]
    for label in spec.labels:
        sets = [{**chosen, label: value} for chosen in sets for value in LABEL_VALUES.get(label, ("a", "b"))]
    return sets


@contextmanager
def serving(routes: dict[str, Any]) -> Iterator[int]:
    """An HTTP server on a free port of 127.0.0.1: path -> function that gives (content type, body)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, body = routes[self.path]()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            del args  # pytest's output is no access log

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def discovery(ports: list[int]) -> tuple[str, bytes]:
    """The answer of the ingress to Prometheus' HTTP service discovery."""
    groups = [{"targets": [f"127.0.0.1:{port}"], "labels": {}} for port in ports]
    return "application/json", json.dumps(groups).encode()


class Prometheus:
    """A running Prometheus. `query` asks it; `wait_for` asks until an answer is good enough."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Samples of an instant query; raises `ValueError` with Prometheus' words for bad PromQL."""
        query = urllib.parse.urlencode({"query": expr})
        try:
            with _DIRECT.open(f"{self._url}/api/v1/query?{query}", timeout=10) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == 503:  # starting
                raise
            with error:
                raise ValueError(f"{expr}: {error.read().decode()}") from error
        samples: list[dict[str, Any]] = answer["data"]["result"]
        return samples

    def values(self, expr: str) -> list[float]:
        return [float(sample["value"][1]) for sample in self.query(expr)]

    def wait_for(self, expr: str, least: float, limit_s: float = 60.0) -> None:
        """Until `expr` has a value of at least `least`."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                if any(value >= least for value in self.values(expr)):
                    return
            except urllib.error.URLError:  # not listening yet, or starting
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expr} stayed under {least} for {limit_s} s")
            threading.Event().wait(0.1)


@contextmanager
def prometheus(binary: str, config: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    """Prometheus with this configuration, its files under `folder`; ended on leaving."""
    path = folder / "prometheus.json"  # JSON is YAML
    path.write_text(json.dumps(config), encoding="utf-8")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(timeout=20)
