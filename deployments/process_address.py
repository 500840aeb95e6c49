"""Under which address other machines reach a port of this process."""

from __future__ import annotations

import ray.util

EVERY_ADDRESS = ("0.0.0.0", "::", "")


def metrics_address(host: str, port: int) -> str:
    """`host:port` as a scraper must use it: a process that listens everywhere is reached at its node's address."""
    reachable: str = host
    if host in EVERY_ADDRESS:
        reachable = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
