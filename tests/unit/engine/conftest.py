"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_replica import FakeFactory


@pytest.fixture(params=["waits", "plans ahead"])
def factory(tmp_path: Path, request: pytest.FixtureRequest) -> FakeFactory:
    """An engine that waits for each step, and one with two steps in flight: what a client sees is the same."""
    return FakeFactory(tmp_path, faults={"is_async": request.param == "plans ahead"})
