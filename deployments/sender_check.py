"""Who may do what isn't for everybody who reaches the service, as `ingress.limits_from` says.

By default clients on the machine where the request entered, and no browser: a web page can make one send requests to
127.0.0.1, and browsers name the page in `Origin`. What came through a proxy is refused wherever it came from: whom a
proxy names isn't believed. A proxy that sets none of `PROXY_HEADERS` (nginx's bare proxy_pass, socat, ssh -R) can't be
told from a client on its machine: behind one, set `limits_from: nowhere`.
"""

from __future__ import annotations

import ipaddress
from typing import Literal

from starlette.requests import Request

from replica.errors import Forbidden

PROXY_HEADERS = ("x-forwarded-for", "x-real-ip", "forwarded", "via")
LimitsFrom = Literal["this-machine", "anywhere", "nowhere"]


def check_sender(request: Request, limits_from: LimitsFrom, what: str, done: str) -> None:
    """Raises `Forbidden`, with what would allow it: `what` ("limits") can't be `done` ("changed")."""
    if limits_from == "anywhere":
        return
    unless = "unless ingress.limits_from is anywhere"
    if limits_from == "nowhere":
        raise Forbidden(f"{what} can't be {done} here: ingress.limits_from is nowhere")
    if "origin" in request.headers:
        raise Forbidden(f"{what} can't be {done} by a web page, {unless}")
    if through := next((name for name in PROXY_HEADERS if name in request.headers), None):
        raise Forbidden(f"{what} can't be {done} through a proxy ({through}), {unless}")
    if not _is_this_machine(request.client.host if request.client else ""):
        raise Forbidden(f"{what} can be {done} only from the machine itself, {unless}")


def _is_this_machine(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
