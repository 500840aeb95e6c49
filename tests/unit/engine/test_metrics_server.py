"""The metric port: the first free one of the range, a clear error when there is none."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from replica.errors import ResourceError
from replica.metrics import REPLICA_METRICS, Metrics
from replica.metrics_server import serve_metrics


def free_range(size: int) -> range:
    """Consecutive ports that are free now."""
    for first in range(20_000, 60_000, size):
        sockets = [socket.socket() for _ in range(size)]
        try:
            for port, sock in enumerate(sockets, first):
                sock.bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for sock in sockets:
                sock.close()
        return range(first, first + size)
    raise AssertionError("no free ports")


def test_two_processes_of_a_machine_get_two_ports_and_a_third_a_clear_error() -> None:
    metrics = Metrics(REPLICA_METRICS, {"model_name": "m", "replica": "r"})
    metrics.set("num_requests_running", 3)
    ports = free_range(2)
    servers = [serve_metrics(metrics.registry, "127.0.0.1", ports) for _ in range(2)]
    try:
        assert [port for _, port in servers] == list(ports)
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/metrics") as response:
            text = response.read().decode()
        assert 'brimful_num_requests_running{model_name="m",replica="r"} 3.0' in text
        with pytest.raises(ResourceError, match=f"no free port .* in {ports[0]}-{ports[1]}"):
            serve_metrics(metrics.registry, "127.0.0.1", ports)
    finally:
        for server, _ in servers:
            server.shutdown()
            server.server_close()


def test_an_address_of_another_machine_is_named_in_the_error() -> None:
    metrics = Metrics(REPLICA_METRICS, {"model_name": "m", "replica": "r"})
    with pytest.raises(ResourceError, match=r"192\.0\.2\.1"):
        serve_metrics(metrics.registry, "192.0.2.1", range(20_000, 20_010))
