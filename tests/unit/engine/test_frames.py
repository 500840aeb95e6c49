"""The wire between a replica and its engine process: whole messages whatever the socket does, and nobody waits."""

from __future__ import annotations

import socket

import pytest

from replica.frames import Channel, FrameReader, PeerGone, pack


def test_messages_survive_any_cut_of_the_byte_stream() -> None:
    messages = [{"a": 1}, "x" * 1000, [1, 2]]
    stream = b"".join(map(pack, messages))
    for size in (1, 7, 64, len(stream)):
        reader = FrameReader()
        got = [m for at in range(0, len(stream), size) for m in reader.feed(stream[at : at + size])]
        assert got == messages


def test_posting_never_blocks_and_what_waited_arrives_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Channel(ours), Channel(theirs)
        numbers = [(number, b"x" * 10_000) for number in range(300)]
        for message in numbers:
            sender.post(message)
        got: list[object] = []
        while len(got) < len(numbers):
            assert sender.receive(0.0) == []
            got += receiver.receive(0.0)
        assert got == numbers


def test_messages_posted_while_the_socket_is_full_leave_as_one_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = Channel(ours)
        sender.post(b"x" * 1_000_000)
        for number in range(3):
            sender.post(number)
        reader = FrameReader()
        frames: list[object] = []
        theirs.setblocking(False)
        while len(frames) < 2:
            frames += list(reader.feed(theirs.recv(1 << 20)))
            sender.receive(0.0)
        assert frames[1] == [0, 1, 2]


def test_nothing_to_receive_is_an_empty_list() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert Channel(ours).receive(0.0) == []


def test_a_closed_peer_shows_when_receiving_posting_and_flushing() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(ours)
        theirs.close()
        with pytest.raises(PeerGone):
            channel.receive(0.0)
        with pytest.raises(PeerGone):
            channel.post("x")
        with pytest.raises(PeerGone):
            channel.flush(0.0)


def test_flushing_gives_up_on_a_peer_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        channel.post(b"x" * 10_000_000)
        with pytest.raises(PeerGone, match="doesn't read"):
            channel.flush(0.01)
