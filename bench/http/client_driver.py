"""The load client, in a process of its own: all requests at once, each on a connection that was open before.

    python -m bench.http.client_driver     (from the root of the project)

In: {"host", "port", "path", "bodies": [JSON documents], "limit_s"}. Out: {"streams": [[seconds to each event], tokens]
for each body, "seconds": from the first sending to the last event, "cpu_seconds": what this process used meanwhile}.
It only keeps what comes and when; it is read after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from bench.http.answer import stream_times
from bench.peers.driver_loop import Answer, serve


class Connection(asyncio.Protocol):
    """One request and all that came back. `over` when the peer has closed it."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.sent_s = 0.0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self.sent_s = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))

    def connection_lost(self, _: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def request_of(host: str, path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def run(order: dict[str, Any]) -> dict[str, Any]:
    """Raises TimeoutError after `limit_s`, ValueError for an answer that isn't a whole stream, OSError."""
    loop = asyncio.get_running_loop()
    requests = [request_of(order["host"], order["path"], body) for body in order["bodies"]]
    connections = list[Connection]()
    try:
        async with asyncio.timeout(order["limit_s"]):
            for _ in requests:
                _, connection = await loop.create_connection(Connection, order["host"], order["port"])
                connections.append(connection)
            used_s = time.process_time()
            for connection, request in zip(connections, requests, strict=True):
                connection.send(request)
            await asyncio.gather(*(connection.over for connection in connections))
            used_s = time.process_time() - used_s
    finally:
        for connection in connections:
            connection.close()
    streams = [stream_times(connection.pieces, connection.sent_s) for connection in connections]
    began_s = connections[0].sent_s
    ended_s = max(
        connection.sent_s + stream.events_s[-1] for connection, stream in zip(connections, streams, strict=True)
    )
    return {"streams": streams, "seconds": ended_s - began_s, "cpu_seconds": used_s}


def main() -> None:
    def load() -> tuple[str, Answer]:
        return "1", lambda order: asyncio.run(run(order))

    serve(load)


if __name__ == "__main__":
    main()
