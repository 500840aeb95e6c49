"""A conversation over the HTTP API, against a service that speaks HTTP in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from deployments.cli.chat import Conversation, talk
from replica.errors import InvalidRequest, Unavailable, UnknownModel


def stream_of(*pieces: str) -> bytes:
    chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


class Service:
    """Answers `/v1/models` and streams `reply` to every chat request; keeps the requests."""

    def __init__(self, reply: Callable[[], httpx.Response]) -> None:
        self.reply = reply
        self.bodies: list[dict[str, object]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "embedded"}]})
        self.bodies.append(json.loads(request.content))
        return self.reply()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://service", transport=httpx.MockTransport(self))


def test_an_answer_streams_and_is_remembered() -> None:
    service = Service(lambda: httpx.Response(200, content=stream_of("Pa", "ris")))
    conversation = Conversation(service.client(), None, {"temperature": 0}, "Be brief.")
    assert list(conversation.ask("Capital of France?")) == ["Pa", "ris"]
    list(conversation.ask("And of Italy?"))
    system = {"role": "system", "content": "Be brief."}
    first = {"role": "user", "content": "Capital of France?"}
    answer = {"role": "assistant", "content": "Paris"}
    assert service.bodies == [
        {"model": "embedded", "messages": [system, first], "stream": True, "temperature": 0},
        {
            "model": "embedded",
            "messages": [system, first, answer, {"role": "user", "content": "And of Italy?"}],
            "stream": True,
            "temperature": 0,
        },
    ]


def test_an_answer_cut_short_closes_the_stream_and_is_remembered_as_far_as_it_came() -> None:
    closed: list[bool] = []

    class Pieces(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield stream_of("Pa")
            yield stream_of("ris")

        def close(self) -> None:
            closed.append(True)

    service = Service(lambda: httpx.Response(200, stream=Pieces()))
    conversation = Conversation(service.client(), "embedded", {}, None)
    pieces = conversation.ask("Capital of France?")
    assert next(pieces) == "Pa"
    pieces.close()
    assert closed == [True]
    list(conversation.ask("Go on"))
    messages = service.bodies[1]["messages"]
    assert isinstance(messages, list)
    assert messages[1] == {"role": "assistant", "content": "Pa"}


def test_a_refusal_shows_the_services_own_words_and_is_not_remembered() -> None:
    refusal = httpx.Response(400, json={"error": {"message": "the prompt has 9000 tokens, the limit is 8192"}})
    service = Service(lambda: refusal)
    conversation = Conversation(service.client(), "embedded", {}, None)
    with pytest.raises(InvalidRequest, match="the prompt has 9000 tokens, the limit is 8192"):
        list(conversation.ask("long"))
    service.reply = lambda: httpx.Response(200, content=stream_of("yes"))
    list(conversation.ask("short"))
    assert service.bodies[1]["messages"] == [{"role": "user", "content": "short"}]


def test_an_error_inside_the_stream_is_raised() -> None:
    content = stream_of("Pa").replace(b"data: [DONE]", b'data: {"error": {"message": "the replica is gone"}}')
    conversation = Conversation(Service(lambda: httpx.Response(200, content=content)).client(), "embedded", {}, None)
    pieces = conversation.ask("Capital of France?")
    assert next(pieces) == "Pa"
    with pytest.raises(InvalidRequest, match="the replica is gone"):
        next(pieces)


def test_a_service_without_models_or_without_an_answer_is_said() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(Unavailable, match="no brimful answers at http://service"):
        Conversation(httpx.Client(base_url="http://service", transport=httpx.MockTransport(refuse)), None, {}, None)

    def empty(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": []})

    with pytest.raises(UnknownModel, match="serves no model"):
        Conversation(httpx.Client(base_url="http://service", transport=httpx.MockTransport(empty)), None, {}, None)


def test_a_script_learns_from_the_exit_code_that_a_question_was_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = [
        httpx.Response(400, json={"error": {"message": "no"}}),
        *(httpx.Response(200, content=stream_of("yes")) for _ in range(2)),
    ]
    conversation = Conversation(Service(lambda: replies.pop(0)).client(), None, {}, None)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert talk(conversation, "http://service") == 1
    assert capsys.readouterr() == ("yes\n", "\n[no]\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("three\n"))
    assert talk(conversation, "http://service") == 0
