"""The engine in virtual time, and HTTP through the real load client against a server of two lines."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.engine_speed.rows import Row, prompts
from bench.http.processes import REST, Process, sums
from bench.http.sides import EngineSide, HttpSide
from bench.peers.driver import DriverFailed, driver
from tests.unit.bench.fit.engines import engine

ROW = Row(3, 8, 2)


def test_the_engine_s_tokens_count_at_the_end_of_their_steps() -> None:
    run = EngineSide(engine(lambda plan: 0.5), 0).run(ROW, prompts(ROW, 1000, 0))
    assert [stream.events_s for stream in run.streams] == [[0.5, 1.0]] * 3
    assert (run.seconds, run.num_tokens) == (1.0, 6)


def test_the_service_s_cpu_time_is_told_by_kind() -> None:
    assert sums(
        [
            Process(1, 0, "python -m deployments.cli serve", 1.0),
            Process(2, 1, "raylet", 2.0),
            Process(3, 2, "ray::ProxyActor", 4.0),
            Process(4, 2, "ray::ServeReplica:brimful:ingress", 8.0),
            Process(5, 2, "ray::ServeReplica:brimful:replica-0.handle_request", 16.0),
            Process(6, 5, "python -c spawn", 32.0),
            Process(7, 6, "python -c tracker", 64.0),
        ]
    ) == {"engine": 96.0, "replica": 16.0, "ingress": 8.0, "proxy": 4.0, REST: 3.0}


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    asked = json.loads(await reader.readexactly(int(length.split()[1])))
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    documents: list[dict[str, object]] = [{"choices": [{"text": "x"}]}] * asked["max_tokens"]
    documents += [{"choices": [], "usage": {"completion_tokens": len(asked["prompt"])}}]
    for data in [*map(json.dumps, documents), "[DONE]"]:
        writer.write(f"data: {data}\n\n".encode())
    await writer.drain()
    writer.close()


@contextmanager
def served() -> Iterator[int]:
    """The port of a server that streams as many events as asked for, and claims as many tokens as the prompt has."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(_answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_the_load_client_times_all_streams_and_tells_its_own_cpu_time() -> None:
    command = [sys.executable, "-m", "bench.http.client_driver"]
    with served() as port, driver("the load client", command) as client:
        side = HttpSide("http", ("127.0.0.1", port), "m", client, lambda: {"proxy": 1.0})
        row = Row(3, 2, 2)
        run = side.run(row, prompts(row, 1000, 0))
        assert [(len(stream.events_s), stream.num_tokens) for stream in run.streams] == [(2, 2)] * 3
        assert run.cpu_seconds["proxy"] == 0.0
        assert 0.0 < run.cpu_seconds["client"] < 5.0
        assert 0.0 < run.seconds < 5.0
        with pytest.raises(DriverFailed, match="3 answers of 8 to 8 tokens"):
            side.run(ROW, prompts(ROW, 1000, 0))


def test_a_service_that_is_gone_is_told_in_one_line() -> None:
    command = [sys.executable, "-m", "bench.http.client_driver"]
    with served() as port:
        pass
    with driver("the load client", command) as client, pytest.raises(DriverFailed, match="the load client: Conn"):
        HttpSide("http", ("127.0.0.1", port), "m", client, dict).run(ROW, prompts(ROW, 1000, 0))
