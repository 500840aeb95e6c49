"""The environment that Ray's processes and the replicas get."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli.cluster import SERVE_ENVIRONMENT, _environment
from deployments.cli.run_folder import RunFolder


@pytest.mark.parametrize("private", [True, False])
def test_uvicorn_is_not_told_to_believe_what_clients_say_of_themselves(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setenv("HANDED_ON", "yes")
    environment = _environment(RunFolder(tmp_path), private=private)
    assert environment["HANDED_ON"] == "yes"
    assert "FORWARDED_ALLOW_IPS" not in environment


@pytest.mark.parametrize("name", SERVE_ENVIRONMENT)
def test_serve_carries_tokens_the_cheapest_way_unless_the_user_says_otherwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert _environment(RunFolder(tmp_path), private=True)[name] == SERVE_ENVIRONMENT[name]
    monkeypatch.setenv(name, "7")
    assert _environment(RunFolder(tmp_path), private=True)[name] == "7"
