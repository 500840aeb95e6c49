"""Serves a process's metric registry over HTTP on the first free port of a range."""

from __future__ import annotations

import errno
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from replica.errors import ResourceError


def serve_metrics(registry: CollectorRegistry, host: str, port_range: range) -> tuple[WSGIServer, int]:
    """Starts the server (daemon thread) and says on which port; `server.shutdown()` and `server.server_close()` end it.

    Raises `ResourceError` when no port of the range is free or `host` is no address of this machine.
    """
    for port in port_range:
        try:
            server, _ = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            raise ResourceError(f"can't serve metrics on {host}:{port}: {error}") from error
        return server, port
    raise ResourceError(
        f"no free port for metrics on {host} in {port_range.start}-{port_range.stop - 1}: free one or widen the range"
    )
