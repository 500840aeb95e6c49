"""When the events of a streamed answer came, read from the bytes of its connection and the times of their arrival.

Standard library only: the load client keeps bytes while it works and reads them afterwards, so that its own reading
delays nothing that it measures.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

Pieces = Sequence[tuple[float, bytes]]
"""(when it was received, bytes), in order, of one whole HTTP response."""


class StreamTimes(NamedTuple):
    """Of one stream: seconds from sending to each event that brought text, and how many tokens these were."""

    events_s: list[float]
    num_tokens: int


def stream_times(pieces: Pieces, sent_s: float) -> StreamTimes:
    """Of a completion that was streamed to its end. Raises ValueError for any other answer."""
    status, events = events_of(pieces)
    if status != 200:
        raise ValueError(f"status {status}: {b''.join(data for _, data in pieces)[-300:]!r}")
    times, num_tokens, done = list[float](), 0, False
    for at_s, data in events:
        if data == "[DONE]":
            done = True
            continue
        document: dict[str, Any] = json.loads(data)
        if "error" in document:
            raise ValueError(f"the stream ended with an error: {data[:300]}")
        if any(choice["text"] for choice in document["choices"]):
            times.append(at_s - sent_s)
        if document.get("usage"):
            num_tokens = document["usage"]["completion_tokens"]
    if not done or not times or not num_tokens:
        raise ValueError(f"not a whole stream with its usage: {len(times)} events, {num_tokens} tokens, done: {done}")
    return StreamTimes(times, num_tokens)


def events_of(pieces: Pieces) -> tuple[int, list[tuple[float, str]]]:
    """The response's status, and the data of its server-sent events with the times at which they were complete."""
    raw = b"".join(data for _, data in pieces)
    raw_ends = list(accumulate(len(data) for _, data in pieces))
    head, end_of_head, _ = raw.partition(b"\r\n\r\n")
    if not end_of_head:
        raise ValueError(f"no HTTP response: {raw[:100]!r}")
    begin = len(head) + len(end_of_head)
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    parts = _chunks(raw, begin) if is_chunked else [(begin, raw[begin:])]
    body = b"".join(data for _, data in parts)
    body_ends = list(accumulate(len(data) for _, data in parts))
    found, done = list[tuple[float, str]](), 0
    while (end := body.find(b"\n\n", done)) >= 0:
        part = bisect_left(body_ends, end + 2)
        last_byte = parts[part][0] + len(parts[part][1]) - (body_ends[part] - (end + 2))
        data = body[done:end].removeprefix(b"data: ").decode()
        found.append((pieces[bisect_left(raw_ends, last_byte)][0], data))
        done = end + 2
    return int(head.split()[1]), found


def _chunks(raw: bytes, begin: int) -> list[tuple[int, bytes]]:
    """(place in `raw`, bytes) of every chunk of a body in chunked transfer encoding."""
    found = list[tuple[int, bytes]]()
    while True:
        end_of_line = raw.find(b"\r\n", begin)
        if end_of_line < 0:
            raise ValueError("the response broke off")
        size = int(raw[begin:end_of_line], 16)
        begin = end_of_line + 2
        if size == 0:
            return found
        found.append((begin, raw[begin : begin + size]))
        begin += size + 2
