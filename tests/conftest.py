"""Fixtures for all tests."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import settings

# A slow machine is no failure: limits on time are pytest's.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# Without a GPU Triton's kernels are interpreted. Triton asks when it is first imported, by whichever test comes first.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
