"""Keeps a Serve replica's own port off the network when its node is on the loopback.

Ray binds its servers to the node's address, but Ray Serve (2.60) opens the port on which replicas call each other on
all addresses, always (`ray/serve/_private/replica.py`, `"[::]:0"`); there is no setting for it. The port asks for the
cluster's token, but a service for this machine only has no business on the network.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import ray
from ray.serve._private import replica as serve_replica

_OPEN_PORT = "add_port_to_grpc_server"
_ALL_ADDRESSES = "[::]"


def keep_serve_port_local() -> None:
    """Call it in a replica's constructor: Serve opens the port later. Does nothing where the node isn't local."""
    node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if not ipaddress.ip_address(node).is_loopback:
        return
    open_port = getattr(serve_replica, _OPEN_PORT)

    def open_local_port(server: Any, address: str) -> int:
        return int(open_port(server, address.replace(_ALL_ADDRESSES, node)))

    setattr(serve_replica, _OPEN_PORT, open_local_port)
