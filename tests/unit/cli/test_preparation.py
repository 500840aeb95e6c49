"""What comes out of the process that prepares a model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.cli.preparation import prepare_model
from deployments.config import ModelSettings
from replica.errors import ModelNotFound


def test_the_reason_of_a_failure_is_raised_and_is_no_progress(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    settings = ModelSettings(model=str(tmp_path / "empty"), download_dir=str(tmp_path / "cache"))
    said: list[str] = []
    with pytest.raises(ModelNotFound) as caught:
        asyncio.run(prepare_model(settings, tmp_path, said.append))
    assert caught.value.message == f"{tmp_path / 'empty'} has no config.json: it is not a transformers model folder"
    assert said == []
