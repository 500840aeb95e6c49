"""Nobody at the URL is said in the same words whoever asked."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from deployments.cli.chat import Conversation
from deployments.cli.no_answer import no_answer
from deployments.cli.status import fetch_status
from replica.errors import Unavailable


def test_status_and_chat_say_a_refused_connection_alike(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    with pytest.raises(Unavailable) as status:
        asyncio.run(fetch_status(url))
    with httpx.Client(base_url=url, trust_env=False) as client, pytest.raises(Unavailable) as chat:
        Conversation(client, None, {}, None)
    expected = f"no brimful answers at {url} (nothing accepts a connection there; is it running?)"
    assert (status.value.message, chat.value.message) == (expected, expected)


def test_a_status_code_is_told_without_a_lecture_on_http() -> None:
    response = httpx.Response(404, request=httpx.Request("GET", "http://service/status"))
    with pytest.raises(httpx.HTTPStatusError) as caught:
        response.raise_for_status()
    assert no_answer("http://service", caught.value).message == "no brimful answers at http://service (HTTP 404)"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (httpx.ConnectTimeout("slow"), "no connection in time"),
        (httpx.ReadTimeout("slow"), "it takes a connection, but doesn't answer in time"),
        (httpx.RemoteProtocolError("gone"), "gone"),
        (ValueError("no JSON"), "what answers there isn't brimful"),
    ],
)
def test_other_reasons(error: Exception, reason: str) -> None:
    assert no_answer("http://service", error).message == f"no brimful answers at http://service ({reason})"


def test_a_port_that_cant_be_is_no_answer_either() -> None:
    with pytest.raises(Unavailable, match=r"at http://127\.0\.0\.1:99999 .Port out of range 0-65535"):
        asyncio.run(fetch_status("http://127.0.0.1:99999"))
