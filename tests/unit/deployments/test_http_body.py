"""Bodies: bounded in size and time, and a client that leaves is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, TaskCancelledError
from starlette.types import Message, Receive, Scope

from deployments.http_body import ClientLeft, client_left, read_body
from replica.errors import BodyTooLarge, InvalidRequest


def scope(**headers: str) -> Scope:
    return {"type": "http", "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]}


def receiving(messages: Iterable[Message]) -> Receive:
    """Gives the messages one by one, then nothing any more."""
    left = iter(messages)

    async def receive() -> Message:
        for message in left:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


LEFT: Message = {"type": "http.disconnect"}


async def test_parts_are_joined() -> None:
    assert await read_body(scope(), receiving([part(b"ab"), part(b""), part(b"c", False)]), 3, 1) == b"abc"


async def test_a_declared_length_above_the_limit_is_refused_before_reading() -> None:
    with pytest.raises(BodyTooLarge, match="larger than 3 bytes"):
        await read_body(scope(content_length="4"), receiving([]), 3, 1)


async def test_an_undeclared_body_is_refused_when_it_passes_the_limit() -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(scope(), receiving([part(b"ab"), part(b"cd")]), 3, 1)


async def test_a_body_of_exactly_the_limit_is_taken() -> None:
    assert await read_body(scope(content_length="3"), receiving([part(b"abc", False)]), 3, 1) == b"abc"


async def test_a_body_that_stops_arriving_is_refused_in_time() -> None:
    with pytest.raises(InvalidRequest, match=r"within 0\.01 s"):
        await read_body(scope(), receiving([part(b"ab")]), 3, 0.01)


async def test_a_client_that_leaves_within_its_body_is_noticed() -> None:
    with pytest.raises(ClientLeft):
        await read_body(scope(), receiving([part(b"ab"), LEFT]), 3, 1)


async def test_a_client_that_leaves_after_its_body_is_noticed() -> None:
    await client_left(receiving([part(b"", False), LEFT]))


@pytest.mark.parametrize("error", [TaskCancelledError(), ActorDiedError(), ActorUnavailableError("gone", None)])
async def test_a_client_has_left_when_serve_cancels_the_call_for_its_body_or_its_proxy_is_gone(error: RayError) -> None:
    async def receive() -> Message:
        raise error

    with pytest.raises(ClientLeft):
        await read_body(scope(), receive, 3, 1)
    await asyncio.wait_for(client_left(receive), 1)
