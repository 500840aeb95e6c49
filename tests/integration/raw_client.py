"""An HTTP client that leaves when it is told to: it closes its socket in the middle of things."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit


class RawClient:
    """One connection and one POST on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, url: str) -> RawClient:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    async def post(self, path: str, body: dict[str, Any], cut_at: int | None = None) -> None:
        """Send a request, or only the first `cut_at` bytes of its body."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        self._writer.write(head.encode() + b"\r\n\r\n" + content[:cut_at])
        await self._writer.drain()

    async def read_until(self, text: bytes) -> bytes:
        return await self._reader.readuntil(text)

    async def leave(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # it is closed all the same
