"""Length-prefixed pickle frames over a stream socket: how a replica and its engine process talk.

Only ever used between a process and the child it started itself, over an unnamed socket pair: what arrives is as
trusted as our own memory, which pickle requires.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct(">Q")
_READ_BYTES = 1 << 18


class PeerGone(ConnectionError):
    """The other process closed its end, or died."""


def pack(message: object) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages; bytes of an unfinished frame wait here."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[object]:
        """Yields every message that is complete now, oldest first."""
        self._bytes += received
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            message = pickle.loads(bytes(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
            yield message


class Channel:
    """The engine's end: one thread, which waits only when it wants to.

    `post` never blocks: what the socket doesn't take stays here, and messages posted meanwhile leave together as one
    frame (a list). `receive` waits for messages, at most `timeout_s`, and pushes out what is still to be sent.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader()
        self._partial = b""
        self._queued: list[object] = []

    def post(self, message: object) -> None:
        """Raises `PeerGone`."""
        self._queued.append(message)
        self._push()

    def receive(self, timeout_s: float) -> list[object]:
        """Every message that has arrived; none after `timeout_s` without any. Raises `PeerGone`."""
        ready = self._wait(select.POLLIN | (select.POLLOUT if self._has_output else 0), timeout_s)
        if ready & select.POLLOUT:
            self._push()
        if not ready & ~select.POLLOUT:
            return []
        try:
            received = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not received:
            raise PeerGone("the other end was closed")
        return [part for message in self._reader.feed(received) for part in _as_list(message)]

    def flush(self, timeout_s: float) -> None:
        """Waits until everything posted has left, at most `timeout_s` between two writes. Raises `PeerGone`."""
        while self._has_output:
            if not self._wait(select.POLLOUT, timeout_s):
                raise PeerGone("the other end doesn't read")
            self._push()

    def close(self) -> None:
        """Hang up: the other end gets `PeerGone`."""
        self._socket.close()

    def _wait(self, events: int, timeout_s: float) -> int:
        """What of `events` (or an error or hang-up) came within `timeout_s`; 0 for nothing. `poll`, because a socket
        inherited from a large process may have a number that `select` can't take."""
        poller = select.poll()
        poller.register(self._socket, events)
        return sum(ready for _, ready in poller.poll(timeout_s * 1000))

    @property
    def _has_output(self) -> bool:
        return bool(self._partial or self._queued)

    def _push(self) -> None:
        while self._has_output:
            if not self._partial:
                self._partial = pack(self._queued)
                self._queued = []
            try:
                sent = self._socket.send(self._partial)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerGone(str(error)) from error
            self._partial = self._partial[sent:]


def _as_list(message: object) -> list[object]:
    return message if isinstance(message, list) else [message]
