"""`brimful chat`: a conversation in the terminal, streamed over the HTTP API like any client's.

Ctrl-C stops the answer that is being written (what has arrived stays part of the conversation), Ctrl-D leaves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from typing import Any, TextIO

import httpx

from deployments.cli.no_answer import no_answer
from replica.errors import InvalidRequest, Unavailable, UnknownModel

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0


class Conversation:
    """The turns so far, and the service that continues them."""

    def __init__(self, client: httpx.Client, model: str | None, options: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._options = options
        self._messages = [{"role": "system", "content": system}] if system else []
        self.model = model or self._first_model()

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer to `text`, piece by piece. Closed early, the pieces so far are what the model remembers.

        Raises `InvalidRequest` with the service's own words when it refuses, `Unavailable` when it can't be reached.
        """
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self._messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self._messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {"model": self.model, "messages": self._messages, "stream": True, **self._options}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    raise InvalidRequest(_message_of(answer))
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield _piece_of(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            raise Unavailable(f"the connection to {self._client.base_url} broke ({error})") from None

    def _first_model(self) -> str:
        try:
            models = self._client.get("/v1/models").raise_for_status().json()["data"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise no_answer(str(self._client.base_url).rstrip("/"), error) from None
        if not models:
            raise UnknownModel(f"{self._client.base_url} serves no model")
        return str(models[0]["id"])


def chat(url: str, model: str | None, system: str | None, options: dict[str, Any]) -> int:
    """A conversation with the service at `url`. Returns the exit code."""
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=url, timeout=timeout, trust_env=False) as client:
        return talk(Conversation(client, model, options, system), url)


def talk(conversation: Conversation, url: str) -> int:
    """Read questions from stdin until its end, stream answers to stdout. Returns the exit code: 1 when stdin isn't a
    terminal and a question was left without an answer."""
    terminal, all_answered = sys.stdin.isatty(), True
    if terminal:
        print(f"{conversation.model} at {url}. Ctrl-C stops an answer, Ctrl-D leaves.")
    while (question := _read_question(terminal)) is not None:
        if question.strip():
            all_answered &= _answer(conversation, question, sys.stdout if terminal else sys.stderr)
    return 0 if terminal or all_answered else 1


def _read_question(terminal: bool) -> str | None:
    """The next line, None at the end of input. Ctrl-C while typing drops the line."""
    while True:
        try:
            return input("\n> " if terminal else "")
        except EOFError:
            if terminal:
                print()
            return None
        except KeyboardInterrupt:
            print()


def _answer(conversation: Conversation, question: str, errors: TextIO) -> bool:
    """Whether there was one."""
    pieces = conversation.ask(question)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except InvalidRequest as error:
        print(f"\n[{error.message}]", file=errors)
        return False
    finally:
        # Closes the connection: the service aborts the rest of the answer.
        pieces.close()
    return True


def _piece_of(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise InvalidRequest(str(chunk["error"].get("message", "the service reported an error")))
    return "".join(choice.get("delta", {}).get("content") or "" for choice in chunk.get("choices", []))


def _message_of(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code}: {answer.text[:300]}"
