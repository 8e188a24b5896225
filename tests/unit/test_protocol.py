"""The wire: golden bytes of every message, and that no bytes whatever do harm."""

import dataclasses
import random
import time

import msgpack
import pytest

from minisgl.errors import ProtocolError
from minisgl.protocol import (
    MAX_FRAME_BYTES,
    MESSAGES,
    Abort,
    AddRequests,
    Admit,
    Configure,
    Control,
    ControlAction,
    Digest,
    EngineFailed,
    Failed,
    Heartbeat,
    Hello,
    Message,
    NewRequest,
    Outputs,
    Pong,
    Ready,
    Refused,
    Rejected,
    Result,
    Sampling,
    Stats,
    Step,
    Stop,
    Stopped,
    Welcome,
    decode,
    encode,
)

SAMPLING = Sampling(0.5, 3, 0.75, 0.25, 1.0, -1.0, 1.5, 2, b"\x02\0\0\0", b"\x07\0\0\0", b"\0\0\x80?", 4)
# Changing a line of this table changes the wire: raise PROTOCOL_VERSION with it.
GOLDEN: list[tuple[Message, str]] = [
    (Hello(1, "0.1"), "930101a3302e31"),
    (
        AddRequests((NewRequest(9, b"\x01\0\0\0", b"\x05" + bytes(7), 10, SAMPLING, True),)),
        "920291" "9609c40401000000c40805000000000000000a"
        "9ccb3fe000000000000003cb3fe8000000000000cb3fd0000000000000cb3ff0000000000000cbbff0000000000000"
        "cb3ff800000000000002c40402000000c40407000000c4040000803f04" "c3",
    ),
    (Abort(b"\x09" + bytes(7)), "9203c4080900000000000000"),
    (Control(ControlAction.PING), "920401"),
    (Welcome(1, "m", 320, 512, 16, 64, 100, 7), "9910" "01a16d" "cd0140" "cd0200" "10" "40" "64" "07"),
    (Refused(1, "0.1", "no"), "941101a3302e31a26e6f"),
    (
        Outputs(3, bytes(8), b"\x01\0\0\0", b"\x01", b"\x10\0\0\0", b"\x05\0\0\0", ("bad",), b"\x05\0\0\0", bytes(4)),
        "9a1203c4080000000000000000c40401000000c40101c40410000000c4040500000091a3626164c40405000000c40400000000",
    ),
    (Rejected(9, 2, "full"), "94130902a466756c6c"),
    (Stats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0.5), "9d140102030405060708090a0bcb3fe0000000000000"),
    (Pong(1, 2), "93150102"),
    (EngineFailed("x"), "9216a178"),
    (Configure(1, "0.1", 0, "{}", ""), "962001a3302e3100a27b7da0"),
    (
        Step(4, (Admit(1, bytes(4), 1, 0, bytes(4), 6, dataclasses.replace(SAMPLING, num_logprobs=None)),), bytes(12),
             b"\x01\0\0\0", True, bytes(16)),
        "9721049197" "01c4040000000001" "00c4040000000006"
        "9ccb3fe000000000000003cb3fe8000000000000cb3fd0000000000000cb3ff0000000000000cbbff0000000000000"
        "cb3ff800000000000002c40402000000c40407000000c4040000803fc0"
        "c40c000000000000000000000000c40401000000c3c41000000000000000000000000000000000",
    ),
    (Step(5, (), b"", None, True, b""), "97210590c400c0c3c400"),
    (Stop(), "9122"),
    (Ready(0, 64, 320, 512, 1, "0.1", "cpu"), "98300040cd0140cd020001a3302e31a3637075"),
    (Result(4, b"\x01\0\0\x80", b"", b""), "953104c40401000080c400c400"),
    (Heartbeat(5, 6), "93320506"),
    (Digest(4, 2**32 - 1), "933504ceffffffff"),
    (Failed(None, 1, "E", "t"), "9533c001a145a174"),
    (Stopped(1), "923401"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_encode_gives_the_golden_bytes_and_decode_the_message(message: Message, golden: str) -> None:
    assert encode(message).hex() == golden
    assert decode(bytes.fromhex(golden)) == message


def test_golden_table_has_every_message() -> None:
    assert {type(message) for message, _ in GOLDEN} == set(MESSAGES.values())


def test_decode_random_bytes_raises_protocol_error_only() -> None:
    draw = random.Random(0)
    accepted = 0
    for _ in range(5000):
        frame = draw.randbytes(draw.randrange(1, 60))
        try:
            decode(frame)
            accepted += 1
        except ProtocolError:
            pass
    assert accepted < 50


def test_decode_mutated_frames_raises_protocol_error_or_gives_a_message() -> None:
    draw = random.Random(1)
    frames = [encode(message) for message, _ in GOLDEN]
    refused = 0
    for _ in range(10_000):
        frame = bytearray(draw.choice(frames))
        for _ in range(draw.randint(1, 4)):
            match draw.randrange(3):
                case 0:
                    frame[draw.randrange(len(frame))] = draw.randrange(256)
                case 1:
                    del frame[draw.randrange(len(frame)) :]
                    frame += b"\x01"
                case _:
                    frame.insert(draw.randrange(len(frame) + 1), draw.randrange(256))
        try:
            assert type(decode(bytes(frame))) in MESSAGES.values()
        except ProtocolError:
            refused += 1
    assert refused > 5000


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x91\xc3",
        b"\x91\x7f",  # unknown tag
        b"\x91\xa5Hello",
        b"\x81\x01\x02",
        b"\x91" * 100_000 + b"\x01",  # nested deeply
        b"\xdd\xff\xff\xff\xff\x01",  # claims 2^32 - 1 items
        b"\xdf\xff\xff\xff\xff\x01",
        b"\xc6\xff\xff\xff\xff\x01",
        encode(Stop()) + b"\x01",  # trailing bytes
        b"\x92\x22\x01",  # a field too many
        b"\x91\x32",  # a field too few
    ],
    ids=lambda frame: frame[:8].hex() or "empty",
)
def test_decode_malformed_frame_raises_quickly(frame: bytes) -> None:
    started = time.perf_counter()
    with pytest.raises(ProtocolError):
        decode(frame)
    assert time.perf_counter() - started < 0.1


@pytest.mark.parametrize(
    ("tag", "fields"),
    [
        (50, [-1]), (50, [1.0]), (50, [True]), (50, ["1"]), (50, [None]),
        (3, ["text"]), (3, [b"1234567"]), (3, [[1]]),
        (4, [0]), (4, [9]),
        (1, [1, b"0.1"]), (1, [1, "x" * (2**16 + 1)]),
        (20, [1] * 11 + [float("nan")]), (20, [1] * 11 + [float("inf")]), (20, [1] * 11 + [1]),
        (33, [0, [], bytes(8), None, True, b""]), (33, [0, [[1]], b"", None, True, b""]),
        (33, [0, [], b"", None, 1, b""]),
        (33, [-1, [], b"", None, True, b""]), (33, [0, {}, b"", None, True, b""]),
        (2, [[[1] * 5]]), (2, [["abc"]]),
        (19, [1, 7, "reason"]),
    ],
)  # fmt: skip
def test_decode_field_out_of_its_bounds_raises(tag: int, fields: list[object]) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb([tag, *fields]))


def test_encode_message_over_the_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES)):
        encode(Abort(bytes(MAX_FRAME_BYTES)))
    with pytest.raises(ProtocolError):
        decode(bytes(MAX_FRAME_BYTES + 1))
