"""Channels over real sockets, and their in-memory twin."""

import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from waiting import wait_until

from minisgl.errors import AddressInUse, EngineStartError, ProtocolError
from minisgl.protocol import MAX_FRAME_BYTES, Abort, Heartbeat, Hello, Pong, Stop
from minisgl.transport import (
    ChannelBlocked,
    ClientChannel,
    PairChannel,
    PeerGone,
    Readiness,
    ServerChannel,
    Waker,
    check_address,
    make_context,
    memory_pair,
)

WAIT_S = 3.0


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = make_context()
    yield made
    made.destroy(0)


def real_pair(tmp_path: Path, context: zmq.Context):
    address = f"ipc://{tmp_path}/pair"
    ends = PairChannel(context, address, bind=True), PairChannel(context, address, bind=False)
    wait_until(lambda: can_send(ends[0]), WAIT_S)
    assert ends[1].receive(1.0) == Stop()
    return ends


def can_send(channel: PairChannel) -> bool:
    try:
        channel.send(Stop())
    except ChannelBlocked:
        return False
    return True


@pytest.mark.parametrize("kind", ["sockets", "memory"])
def test_pair_carries_messages_in_order_both_ways(kind: str, tmp_path: Path, context: zmq.Context) -> None:
    left, right = memory_pair() if kind == "memory" else real_pair(tmp_path, context)
    for i in range(100):
        left.send(Heartbeat(i, 0))
        right.send(Pong(i, i))
    assert [right.receive(1.0) for _ in range(100)] == [Heartbeat(i, 0) for i in range(100)]
    assert [left.receive(1.0) for _ in range(100)] == [Pong(i, i) for i in range(100)]
    started = time.monotonic()
    assert left.receive(0.0) is None and left.receive(0.05) is None
    assert 0.04 < time.monotonic() - started < 1
    left.close()
    right.close()


@pytest.mark.parametrize("kind", ["sockets", "memory"])
def test_pair_whose_peer_stopped_reading_blocks_no_one(kind: str, tmp_path: Path, context: zmq.Context) -> None:
    left, right = memory_pair() if kind == "memory" else real_pair(tmp_path, context)
    started = time.monotonic()
    with pytest.raises(ChannelBlocked):
        for i in range(100_000):
            left.send(Heartbeat(i, 0))
    assert time.monotonic() - started < 20
    left.close()
    right.close()


def test_message_over_the_limit_is_refused_by_the_sender(tmp_path: Path, context: zmq.Context) -> None:
    left, right = real_pair(tmp_path, context)
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES)):
        left.send(Abort(bytes(MAX_FRAME_BYTES)))
    left.send(Heartbeat(1, 0))  # the channel is unharmed
    assert right.receive(1.0) == Heartbeat(1, 0)
    left.close()
    right.close()


def test_server_answers_each_client_and_notices_who_left(tmp_path: Path, context: zmq.Context) -> None:
    address = f"ipc://{tmp_path}/server"
    server = ServerChannel(context, address)
    clients = [ClientChannel(context, address) for _ in range(3)]
    for i, client in enumerate(clients):
        client.send(Hello(i, "x"))
    names: dict[int, bytes] = {}

    def greet_one() -> bool:
        if (received := server.receive()) is not None:
            name, message = received
            assert isinstance(message, Hello)
            names[message.protocol_version] = name
        return len(names) == 3

    wait_until(greet_one, WAIT_S)
    for i in range(3):
        assert server.send(names[i], Pong(i, 0))
        assert clients[i].receive(1.0) == Pong(i, 0)
    clients[1].close()

    def is_gone() -> bool:
        try:
            server.send(names[1], Pong(1, 0))
        except PeerGone:
            return True
        return False

    wait_until(is_gone, WAIT_S)
    assert server.send(names[2], Pong(2, 1))
    for closing in (server, *clients):
        closing.close()


def test_server_gets_a_malformed_frame_as_an_error(tmp_path: Path, context: zmq.Context) -> None:
    address = f"ipc://{tmp_path}/server"
    server = ServerChannel(context, address)
    raw = context.socket(zmq.DEALER)
    raw.connect(address)
    raw.send(b"junk")
    raw.send_multipart([b"a", b"b"])
    received: list[object] = []

    def take_one() -> bool:
        if (got := server.receive()) is not None:
            received.append(got[1])
        return len(received) == 2

    wait_until(take_one, WAIT_S)
    assert all(isinstance(message, ProtocolError) for message in received)
    raw.close(0)
    server.close()


def test_address_in_use_is_refused_and_free_after_close(tmp_path: Path, context: zmq.Context) -> None:
    address = f"ipc://{tmp_path}/server"
    first = ServerChannel(context, address)
    assert stat.S_IMODE((tmp_path / "server").stat().st_mode) == 0o600
    with pytest.raises(AddressInUse, match=str(os.getpid())):
        ServerChannel(context, address)
    first.close()
    assert list(tmp_path.iterdir()) == []
    ServerChannel(context, address).close()


def test_address_of_a_killed_server_is_taken_over(tmp_path: Path, context: zmq.Context) -> None:
    (tmp_path / "server").write_bytes(b"")
    (tmp_path / "server.lock").write_text("999999")
    ServerChannel(context, f"ipc://{tmp_path}/server").close()


def test_folder_that_is_missing_is_a_start_error(tmp_path: Path, context: zmq.Context) -> None:
    with pytest.raises(EngineStartError, match="No such file"):
        ServerChannel(context, f"ipc://{tmp_path}/none/server")


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://127.0.0.1:80", "tcp://[::1]:80"])
def test_good_address_is_accepted(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address", ["", "ipc://relative", "tcp://*:1", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://h", "tcp://h:-1", "udp://h:1",
                "ipc:///" + "x" * 107],
)  # fmt: skip
def test_bad_address_is_a_value_error(address: str) -> None:
    with pytest.raises(ValueError):
        check_address(address)


def test_waker_wakes_a_waiting_thread_and_forgets_when_cleared() -> None:
    waker = Waker()
    readiness = Readiness([waker.pollable])
    threading.Timer(0.1, waker.wake).start()
    started = time.monotonic()
    assert readiness.wait(5) == {waker.pollable}
    assert time.monotonic() - started < 2
    waker.clear()
    assert readiness.wait(0) == set()
    waker.close()
    waker.wake()  # harmless
