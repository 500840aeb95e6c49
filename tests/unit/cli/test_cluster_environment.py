"""The environment that Ray's processes and the replicas get."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli.cluster import _environment
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


def test_answers_go_to_the_proxy_by_grpc_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_SERVE_PROXY_USE_GRPC", raising=False)
    assert _environment(RunFolder(tmp_path), private=True)["RAY_SERVE_PROXY_USE_GRPC"] == "1"
    monkeypatch.setenv("RAY_SERVE_PROXY_USE_GRPC", "0")
    assert _environment(RunFolder(tmp_path), private=True)["RAY_SERVE_PROXY_USE_GRPC"] == "0"
