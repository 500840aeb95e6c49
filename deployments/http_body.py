"""Reading a request's body and noticing that its client has left, at the level of ASGI messages."""

from __future__ import annotations

import asyncio

from ray.exceptions import RayActorError, TaskCancelledError
from starlette.types import Message, Receive, Scope

from replica.errors import BodyTooLarge, InvalidRequest


class ClientLeft(Exception):
    """The client closed the connection; nobody reads an answer."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises `BodyTooLarge` as soon as that is known, without reading the rest, `InvalidRequest` when
    it isn't complete after `timeout_s`, and `ClientLeft`.
    """
    declared = _content_length(scope)
    if declared is not None and declared > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes)
    except TimeoutError:
        raise InvalidRequest(f"the request body didn't arrive within {timeout_s:g} s") from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await _message(receive)
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


async def client_left(receive: Receive) -> None:
    """Returns when the client has left. Only after the body was read: whatever else arrives is dropped."""
    while (await _message(receive))["type"] != "http.disconnect":
        pass


async def _message(receive: Receive) -> Message:
    """The next ASGI message. Two ways of losing the client come as an error of the call that brings the messages here:
    Serve may cancel it when the client leaves, and the proxy that holds the connection may die."""
    try:
        return await receive()
    except (TaskCancelledError, RayActorError):
        return {"type": "http.disconnect"}


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return None


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {max_bytes} bytes")
