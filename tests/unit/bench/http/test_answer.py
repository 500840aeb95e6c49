"""Arrival times of events, from responses cut anywhere."""

from __future__ import annotations

import json

import pytest

from bench.http.answer import StreamTimes, events_of, stream_times

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def text(content: str) -> str:
    return json.dumps({"choices": [{"text": content}]})


USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
END = json.dumps({"choices": [{"text": "", "finish_reason": "length"}]})


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def chunk(*data: str) -> bytes:
    body = b"".join(map(event, data))
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


STREAM = HEAD + chunk(text("a")) + chunk(text("b"), text("c"), END) + chunk(USAGE, "[DONE]") + b"0\r\n\r\n"


def cut(raw: bytes, *places: int) -> list[tuple[float, bytes]]:
    """Pieces that end at these places and at the end, received at 1, 2, 3, ... seconds."""
    ends = [*places, len(raw)]
    begins = [0, *places]
    return [(float(number + 1), raw[begin:end]) for number, (begin, end) in enumerate(zip(begins, ends, strict=True))]


def test_every_event_with_text_counts_when_its_last_byte_came() -> None:
    first = len(HEAD + chunk(text("a")))
    assert stream_times(cut(STREAM, first), 0.5) == StreamTimes([0.5, 1.5, 1.5], 3)
    assert stream_times(cut(STREAM, first - 3), 0.5) == StreamTimes([1.5, 1.5, 1.5], 3)
    inside = STREAM.index(event(text("c")))
    assert stream_times(cut(STREAM, first, inside), 0.5) == StreamTimes([0.5, 1.5, 2.5], 3)


def test_wherever_a_response_is_cut_it_has_the_same_events() -> None:
    whole = [data for _, data in events_of(cut(STREAM))[1]]
    assert whole == [text("a"), text("b"), text("c"), END, USAGE, "[DONE]"]
    for place in range(1, len(STREAM)):
        status, events = events_of(cut(STREAM, place))
        assert (status, [data for _, data in events]) == (200, whole)


def test_an_event_over_two_chunks_came_with_the_second() -> None:
    data = event(text("a"))
    halves = [f"{len(half):x}\r\n".encode() + half + b"\r\n" for half in (data[:9], data[9:])]
    raw = HEAD + b"".join(halves) + chunk(USAGE, "[DONE]") + b"0\r\n\r\n"
    assert stream_times(cut(raw, len(HEAD + halves[0])), 0.0).events_s == [2.0]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"HTTP/1.1 503 Unavailable\r\ncontent-length: 2\r\n\r\n{}", "status 503"),
        (HEAD + chunk(text("a"), '{"error": {"message": "gone"}}') + b"0\r\n\r\n", "gone"),
        (HEAD + chunk(text("a"), USAGE) + b"0\r\n\r\n", "done: False"),
        (HEAD + chunk(text("a"), "[DONE]") + b"0\r\n\r\n", "0 tokens"),
        (HEAD + chunk(text("a")), "broke off"),
        (b"", "no HTTP response"),
    ],
)
def test_any_other_answer_is_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        stream_times(cut(raw), 0.0)
