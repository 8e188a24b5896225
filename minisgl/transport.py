"""Channels that carry protocol messages between processes. The only module that imports zmq.

    ServerChannel (ROUTER)  one engine, many frontends      <->  ClientChannel (DEALER)
    PairChannel             one engine, one worker, one direction of work: `steps` or `results`
    memory_pair()           the in-memory twin of two connected PairChannels, for tests

A channel belongs to one thread. Sending never blocks: a send that would is `ChannelBlocked` (PairChannel,
ClientChannel) or False (ServerChannel). Frames larger than `MAX_FRAME_BYTES` never leave `encode`, since ZeroMQ would
drop them silently.
"""

import fcntl
import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import zmq

from minisgl.errors import AddressInUse, EngineStartError, MinisglError, ProtocolError
from minisgl.protocol import MAX_FRAME_BYTES, Message, decode, encode

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
Pollable = Socket | int  # what `Readiness` waits for: a channel's socket, or a file descriptor

LINGER_MS = 1000  # how long close() may wait to deliver what was sent; -1, ZeroMQ's default here, hangs for ever
PAIR_HIGH_WATER = 4096  # messages; the engine keeps far fewer in flight, so reaching it means that the peer is stuck
ROUTER_HIGH_WATER = 4096
MAX_IPC_PATH_BYTES = 107  # sun_path of a Unix socket


class ChannelBlocked(MinisglError):
    """The peer does not take messages any more."""


class PeerGone(MinisglError):
    """The peer has closed its end."""


class Channel(Protocol):
    """One end of a connection to one peer."""

    def send(self, message: Message) -> None: ...
    def receive(self, timeout_s: float | None = 0.0) -> Message | None: ...
    def close(self) -> None: ...


class PairChannel:
    """One end of a PAIR connection. `fileno` goes to `wait_readable`."""

    def __init__(self, context: Context, address: str, *, bind: bool):
        self._socket = _make_socket(context, zmq.PAIR, PAIR_HIGH_WATER)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    def send(self, message: Message) -> None:
        """Raises ChannelBlocked when the peer has stopped reading, ValueError when the message is too large."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message, so that several ranks get the same bytes."""
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            raise ChannelBlocked("the peer has stopped reading") from None

    def receive_frame(self, timeout_s: float | None = 0.0) -> bytes | None:
        """The next frame as it came, or None when none came within `timeout_s` (None = wait for ever)."""
        if not _poll(self._socket, timeout_s):
            return None
        return bytes(self._socket.recv())

    def receive(self, timeout_s: float | None = 0.0) -> Message | None:
        """The next message, or None when none came within `timeout_s`. Raises ProtocolError for a malformed frame."""
        frame = self.receive_frame(timeout_s)
        return None if frame is None else decode(frame)

    @property
    def pollable(self) -> Socket:
        return self._socket

    def close(self) -> None:
        self._socket.close(LINGER_MS)


class ClientChannel(PairChannel):
    """A frontend's end: connects to an engine's address. The engine may not be there; `Hello` and a deadline tell."""

    def __init__(self, context: Context, address: str):
        check_address(address)
        self._socket = _make_socket(context, zmq.DEALER, ROUTER_HIGH_WATER)
        self._socket.connect(address)


class ServerChannel:
    """The engine's end: bound to an address that no other engine may hold.

    An `ipc://` bind does not fail on a live address, it takes the new clients away; so a lock file beside the socket is
    held for as long as the process lives. The kernel frees it however the process ends.

    Raises:
        AddressInUse: another engine serves the address.
        EngineStartError: the address cannot be bound; the text says why.
    """

    def __init__(self, context: Context, address: str):
        check_address(address)
        self._lock_fd: int | None = None
        self._ipc_path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        if self._ipc_path is not None:
            self._lock_fd = _lock_address(self._ipc_path)
            self._ipc_path.unlink(missing_ok=True)  # left by an engine that was killed: we hold its lock
        self._socket = _make_socket(context, zmq.ROUTER, ROUTER_HIGH_WATER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a vanished client is an error code, not a silent drop
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            if self._lock_fd is not None:
                os.close(self._lock_fd)
            kind = AddressInUse if error.errno == zmq.EADDRINUSE else EngineStartError
            raise kind(f"cannot serve at {address}: {error}") from None
        if self._ipc_path is not None:
            self._ipc_path.chmod(0o600)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, client: bytes, message: Message) -> bool:
        """False when the client does not read at the moment; the message is then not delivered.

        Raises:
            PeerGone: the client has left.
        """
        try:
            self._socket.send_multipart([client, encode(message)], zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise PeerGone(f"the client is gone: {error}") from None
        return True

    def receive(self) -> tuple[bytes, Message | ProtocolError] | None:
        """The next (client, message) that waits, or None. A malformed frame comes as the error that it is."""
        try:
            parts = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        client = parts[0]
        if len(parts) != 2:
            return client, ProtocolError(f"{len(parts) - 1} frames in one message, expected 1")
        try:
            return client, decode(parts[1])
        except ProtocolError as error:
            return client, error

    @property
    def pollable(self) -> Socket:
        return self._socket

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.close(LINGER_MS)
        if self._ipc_path is not None and self._lock_fd is not None:
            self._ipc_path.unlink(missing_ok=True)
            _lock_path(self._ipc_path).unlink(missing_ok=True)
            os.close(self._lock_fd)


class Waker:
    """Wakes a thread that waits in `wait_readable`. `wake` may be called from any thread."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def wake(self) -> None:
        try:
            self._sender.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # full: the thread is about to wake anyway; closed: nobody waits

    def clear(self) -> None:
        """Forget the wakes so far; called by the woken thread before it looks at its work."""
        try:
            while self._receiver.recv(4096):
                pass
        except (BlockingIOError, OSError):
            pass

    @property
    def pollable(self) -> int:
        return self._receiver.fileno()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class Readiness:
    """A fixed set of things to wait for: channels, wakers, and plain file descriptors (pidfds, pipes)."""

    def __init__(self, pollables: Iterable[Pollable]):
        self._poller = zmq.Poller()
        for pollable in pollables:
            self._poller.register(pollable, zmq.POLLIN)

    def add(self, pollable: Pollable) -> None:
        self._poller.register(pollable, zmq.POLLIN)

    def remove(self, pollable: Pollable) -> None:
        self._poller.unregister(pollable)

    def wait(self, timeout_s: float | None) -> set[Pollable]:
        """Those that can be read, within `timeout_s` (None = wait for ever)."""
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000))
        return {pollable for pollable, _ in self._poller.poll(timeout_ms)}


class MemoryChannel:
    """One end of `memory_pair`. Messages still pass through the codec, so a test sees what the wire would carry."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes]):
        self._inbox, self._outbox = inbox, outbox

    def send(self, message: Message) -> None:
        if len(self._outbox) >= PAIR_HIGH_WATER:
            raise ChannelBlocked("the peer has stopped reading")
        self._outbox.append(encode(message))

    def receive(self, timeout_s: float | None = 0.0) -> Message | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._inbox:
            if end is not None and time.monotonic() >= end:
                return None
            time.sleep(0.001)
        return decode(self._inbox.popleft())

    def close(self) -> None:
        self._inbox.clear()


def memory_pair() -> tuple[MemoryChannel, MemoryChannel]:
    """Two connected channels within one process."""
    there: deque[bytes] = deque()
    back: deque[bytes] = deque()
    return MemoryChannel(there, back), MemoryChannel(back, there)


def make_context() -> Context:
    """One per process that uses channels; `destroy(linger)` ends it. Never inherited across a fork."""
    return Context(io_threads=1)


def check_address(address: str) -> None:
    """Raises ValueError for anything but `ipc:///path` and `tcp://HOST:PORT` with an explicit host.

    A wildcard host is refused: the socket would be open to every machine in reach, without authentication.
    """
    if address.startswith("ipc:///"):
        path = address.removeprefix("ipc://")
        if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
            raise ValueError(
                f"socket path {path} has {len(os.fsencode(path))} bytes, limit {MAX_IPC_PATH_BYTES}; "
                "use a shorter folder"
            )
        return
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if host in ("", "*", "0.0.0.0", "[::]", "::"):
            raise ValueError(
                f"address {address} would listen on every interface; name one, such as tcp://127.0.0.1:{port or 'PORT'}"
            )
        if port.isdecimal() and int(port) < 2**16:
            return
    raise ValueError(f"address must be ipc:///path or tcp://127.0.0.1:PORT, got {address!r}")


def _make_socket(context: Context, kind: int, high_water: int) -> Socket:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, LINGER_MS)
    made.setsockopt(zmq.SNDHWM, high_water)
    made.setsockopt(zmq.RCVHWM, high_water)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    made.setsockopt(zmq.HANDSHAKE_IVL, 3000)
    return made


def _poll(pollable: Socket, timeout_s: float | None) -> bool:
    return bool(pollable.poll(None if timeout_s is None else max(0, int(timeout_s * 1000))))


def _lock_path(ipc_path: Path) -> Path:
    return ipc_path.with_name(ipc_path.name + ".lock")


def _lock_address(ipc_path: Path) -> int:
    """Take the lock of an ipc address; the file holds our process id for the message of those who come later."""
    path = _lock_path(ipc_path)
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise EngineStartError(f"cannot serve at ipc://{ipc_path}: {path}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise AddressInUse(
                f"ipc://{ipc_path} is served by another engine (process {holder or 'unknown'})"
            ) from None
        # The previous holder may have removed the file between our open and our lock: then lock the new one.
        try:
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                break
        except FileNotFoundError:
            pass
        os.close(fd)
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd
