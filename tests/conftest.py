"""Fixtures for all tests."""

from __future__ import annotations

import socket

import pytest
from hypothesis import settings

# A slow machine is no failure: limits on time are pytest's.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
