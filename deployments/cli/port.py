"""Is the port free? Asked before anything slow is started, and held against a second start."""

from __future__ import annotations

import errno
import socket
import sys

from replica.errors import ResourceError


def claim_port(host: str, port: int) -> socket.socket:
    """A claim on `port` that no other `brimful serve` gets while the returned socket is open.

    It doesn't bind the port itself (Serve's proxy will). Raises `ResourceError` when `host` isn't an address of this
    machine, somebody listens on `port`, or another start has claimed it.
    """
    _require_free(host, port)
    claim = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            claim.bind(f"\0brimful-port-{port}")  # a name in the kernel, not a file: nothing to clean up
        except OSError:
            claim.close()
            raise ResourceError(f"another brimful is starting on port {port}; choose another with --port") from None
    return claim


def is_listening(host: str, port: int) -> bool:
    """Somebody accepts connections there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((reachable(host), port)) == 0


def reachable(host: str) -> str:
    """Where this machine reaches a service that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _require_free(host: str, port: int) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ResourceError(f"--host {host} is no address of this machine ({error.strerror})") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Old connections of an earlier run that fade out don't count as taken; a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ResourceError(f"port {port} on {host} is taken; choose another with --port") from None
            if error.errno == errno.EACCES:
                raise ResourceError(f"port {port} needs root; choose another with --port") from None
            raise ResourceError(f"--host {host} is no address of this machine ({error.strerror})") from None
