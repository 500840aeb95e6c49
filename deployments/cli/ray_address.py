"""Is there a Ray cluster at `--address`? Asked before anything slow is started: Ray itself retries for minutes."""

from __future__ import annotations

import socket

from replica.errors import ResourceError, SettingError

AUTO = "auto"
REACH_LIMIT_S = 5.0


def require_reachable(address: str) -> None:
    """Raises `SettingError` for what is no address of a cluster, `ResourceError` when nobody listens there.

    `auto` passes: only Ray can find the cluster it means.
    """
    if address == AUTO:
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingError("--address", address, "host:port of a Ray cluster, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_LIMIT_S).close()
    except OSError as error:
        raise ResourceError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); check --address (`ray start --head` "
            "says it), or leave it out for a private cluster"
        ) from None
