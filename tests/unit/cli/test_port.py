"""A port is claimed before anything slow begins."""

from __future__ import annotations

import socket

import pytest

from deployments.cli.port import claim_port, is_listening, reachable
from replica.errors import ResourceError


def test_a_free_port_is_claimed_once(free_port: int) -> None:
    with claim_port("127.0.0.1", free_port), pytest.raises(ResourceError, match=f"starting on port {free_port}"):
        claim_port("127.0.0.1", free_port)
    claim_port("127.0.0.1", free_port).close()


def test_a_claim_leaves_the_port_to_the_proxy(free_port: int) -> None:
    with claim_port("127.0.0.1", free_port), socket.socket() as proxy:
        assert not is_listening("127.0.0.1", free_port)
        proxy.bind(("127.0.0.1", free_port))
        proxy.listen()
        assert is_listening("127.0.0.1", free_port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_with_a_listener_is_taken(host: str, free_port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", free_port))
        listener.listen()
        with pytest.raises(ResourceError, match=f"port {free_port} on {host} is taken"):
            claim_port(host, free_port)


def test_a_foreign_address_is_refused(free_port: int) -> None:
    with pytest.raises(ResourceError, match=r"--host 203\.0\.113\.1 is no address of this machine"):
        claim_port("203.0.113.1", free_port)


@pytest.mark.parametrize(("host", "here"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("192.0.2.2", "192.0.2.2")])
def test_a_service_on_all_addresses_is_reached_on_the_loopback(host: str, here: str) -> None:
    assert reachable(host) == here
