"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_replica import FakeFactory


@pytest.fixture
def factory(tmp_path: Path) -> FakeFactory:
    return FakeFactory(tmp_path)
