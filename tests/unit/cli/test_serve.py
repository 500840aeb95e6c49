"""What `brimful serve` refuses before it starts anything slow."""

from __future__ import annotations

import io

import pytest

from deployments.cli.cluster import RayChoice
from deployments.cli.console import Console
from deployments.cli.serve import require_context, serve
from deployments.config import ModelSettings, ServeConfig
from replica.errors import ResourceError, SettingError
from replica.model_card import ModelCard


def card(max_position: int) -> ModelCard:
    return ModelCard("m", None, "m", "", "", "", max_position, 10, (1,), None, {})


def test_a_context_beyond_the_models_own_limit_is_refused_once_the_model_is_prepared() -> None:
    require_context(ModelSettings(), card(8192))
    require_context(ModelSettings(max_model_len=8192), card(8192))
    with pytest.raises(SettingError) as caught:
        require_context(ModelSettings(max_model_len=8193), card(8192))
    expected = "--max-model-len = 8193 is not allowed: the own limit of embedded is 8192 tokens"
    assert caught.value.message == expected


def test_a_ray_address_where_nobody_listens_is_told_at_once(free_port: int) -> None:
    out = io.StringIO()
    address = f"127.0.0.1:{free_port}"
    with pytest.raises(ResourceError, match=f"^no Ray cluster answers at {address} .Connection refused.; check --addr"):
        serve(ServeConfig(), RayChoice(address), Console(out))
    assert out.getvalue() == f"    0 s  connecting to the Ray cluster at {address}\n"


@pytest.mark.parametrize("address", ["local", "host", "host:port", ":6379", "host:0", "host:99999"])
def test_what_is_no_address_of_a_cluster_is_refused(address: str) -> None:
    with pytest.raises(SettingError, match=r"^--address = .* is not allowed: host:port of a Ray cluster, or auto"):
        serve(ServeConfig(), RayChoice(address), Console(io.StringIO()))
