"""Every message between minisgl's processes, and the codec that turns them into bytes.

One message is one frame: a MessagePack array of the message's tag and its fields in order. The set of messages is
closed (`MESSAGES`) and every field states its type and bounds, so that `decode` of any bytes whatever returns one of
these classes or raises `ProtocolError`. A class is never chosen by a name on the wire, and nothing is ever unpickled.

Lists of integers travel as raw little-endian bytes (`packed`): a consumer views them with `numpy.frombuffer`.
`Hello` and `Refused` keep their layout in every version, so that two versions can tell each other apart.

    frontend -> engine   Hello, AddRequests, Abort, Control
    engine -> frontend   Welcome, Refused, Outputs, Rejected, Stats, Pong, EngineFailed
    engine -> worker     Configure, Step, Control, Stop          (channel `steps`)
    worker -> engine     Ready, Result, Heartbeat, Digest, Failed, Stopped   (channel `results`)
"""

from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import msgpack

from minisgl.errors import ProtocolError
from minisgl.wire_fields import (
    Check,
    as_flag,
    as_integer,
    as_number,
    as_optional,
    as_packed,
    as_sequence,
    as_text,
    as_u64,
)

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 * 2**20

# A token of a Result whose row met a non-finite logit carries this bit beside its (valid) id.
FAILED_ROW_BIT = 1 << 31


def _wire(check: Check) -> Any:
    return field(metadata={"check": check})


def _record(cls: type) -> Check:
    def check(value: Any) -> Any:
        return _build(cls, value)

    return check


# --------------------------------------------------------------------------------------------------------------------
# frontend -> engine


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a frontend. Its layout never changes."""

    protocol_version: int = _wire(as_integer())
    package_version: str = _wire(as_text)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen; `SamplingParams` as the engine and the worker need it."""

    temperature: float = _wire(as_number)  # 0.0 = greedy
    top_k: int = _wire(as_integer(0, 2**31 - 1))  # 0 = all
    top_p: float = _wire(as_number)
    min_p: float = _wire(as_number)
    presence_penalty: float = _wire(as_number)
    frequency_penalty: float = _wire(as_number)
    repetition_penalty: float = _wire(as_number)
    min_tokens: int = _wire(as_integer())
    stop_ids: bytes = _wire(as_packed(4))  # [n] i32, the model's end ids included unless ignored
    bias_ids: bytes = _wire(as_packed(4))  # [n] i32
    bias_values: bytes = _wire(as_packed(4))  # [n] f32
    num_logprobs: int | None = _wire(as_optional(as_integer(0, 20)))  # None = no log-probabilities


@dataclass(frozen=True, slots=True)
class NewRequest:
    """One prompt and its samples; sample i has the id request_id + i."""

    request_id: int = _wire(as_integer(0, 2**63 - 1))
    prompt_ids: bytes = _wire(as_packed(4))  # [num_prompt_tokens] i32
    seeds: bytes = _wire(as_packed(8))  # [num_samples] u64
    max_tokens: int = _wire(as_integer(1))
    sampling: Sampling = _wire(_record(Sampling))
    stream: bool = _wire(as_flag)  # False: one output, at the end


@dataclass(frozen=True, slots=True)
class AddRequests:
    requests: tuple[NewRequest, ...] = _wire(as_sequence(_record(NewRequest), 2**16))


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: bytes = _wire(as_packed(8))  # [n] u64; unknown ids are ignored


class ControlAction(IntEnum):
    PING = 1  # frontend: I am alive; answered by Pong
    STATS = 2  # frontend: answered by Stats
    GOODBYE = 3  # frontend: I leave; its requests are aborted
    PROBE = 4  # engine -> worker: count this message, so that an idle main loop shows that it turns


@dataclass(frozen=True, slots=True)
class Control:
    action: int = _wire(as_integer(1, 4))


# --------------------------------------------------------------------------------------------------------------------
# engine -> frontend


@dataclass(frozen=True, slots=True)
class Welcome:
    epoch: int = _wire(as_u64)  # random per engine process
    model: str = _wire(as_text)
    vocab_size: int = _wire(as_integer(1))
    context_limit_tokens: int = _wire(as_integer(1))
    page_size: int = _wire(as_integer(1))
    num_pages: int = _wire(as_integer(1))
    window: int = _wire(as_integer(1))  # requests that one frontend may have outstanding
    base_seed: int = _wire(as_u64)  # mixed with a counter, seeds requests that state none


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine will not talk to this frontend. Its layout never changes."""

    protocol_version: int = _wire(as_integer())
    package_version: str = _wire(as_text)
    text: str = _wire(as_text)


@dataclass(frozen=True, slots=True)
class Outputs:
    """New tokens of this frontend's requests, columnar: entry i owns the next num_tokens[i] of `tokens`.

    An entry with finish STOP ended by a stop id, which is its last token. Requests that asked for k log-probabilities
    own, for each token, the next k + 1 items of `logprob_ids` and `logprob_values`: the chosen token, then the k best.
    """

    sequence: int = _wire(as_u64)  # consecutive per frontend; a gap means a lost message
    request_ids: bytes = _wire(as_packed(8))  # [n] u64
    num_tokens: bytes = _wire(as_packed(4))  # [n] i32
    finish_reasons: bytes = _wire(as_packed(1))  # [n] u8, 0 = goes on
    cached_tokens: bytes = _wire(as_packed(4))  # [n] i32, prompt tokens taken from the prefix cache; set when finished
    tokens: bytes = _wire(as_packed(4))  # [sum(num_tokens)] i32
    errors: tuple[str, ...] = _wire(as_sequence(as_text))  # one per entry with finish ERROR
    logprob_ids: bytes = _wire(as_packed(4))  # i32
    logprob_values: bytes = _wire(as_packed(4))  # f32


class RejectReason(IntEnum):
    INVALID = 1
    OVERLOADED = 2
    DRAINING = 3


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request (with all its samples) was not admitted; this is its one terminal message."""

    request_id: int = _wire(as_integer(0, 2**63 - 1))
    reason: int = _wire(as_integer(1, 3))
    text: str = _wire(as_text)


@dataclass(frozen=True, slots=True)
class Stats:
    num_waiting: int = _wire(as_integer())
    num_running: int = _wire(as_integer())
    num_draining: int = _wire(as_integer())
    num_pages_free: int = _wire(as_integer())
    num_pages_cached: int = _wire(as_integer())  # in the prefix cache and used by no request
    num_pages_used: int = _wire(as_integer())
    prefix_hit_tokens: int = _wire(as_u64)
    prompt_tokens: int = _wire(as_u64)  # of admitted requests, cached ones included
    output_tokens: int = _wire(as_u64)
    num_preemptions: int = _wire(as_u64)
    num_steps: int = _wire(as_u64)
    tokens_per_s: float = _wire(as_number)  # output tokens over the last seconds


@dataclass(frozen=True, slots=True)
class Pong:
    epoch: int = _wire(as_u64)
    num_steps: int = _wire(as_u64)


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine is about to end because of a fault; every outstanding request fails with this text."""

    text: str = _wire(as_text)


# --------------------------------------------------------------------------------------------------------------------
# engine -> worker


@dataclass(frozen=True, slots=True)
class Configure:
    """The first message on `steps`: with it, a recording of the channel can be replayed on a worker alone."""

    protocol_version: int = _wire(as_integer())
    package_version: str = _wire(as_text)
    rank: int = _wire(as_integer())
    config_json: str = _wire(as_text)  # EngineConfig.to_wire() as JSON
    rendezvous: str = _wire(as_text)  # file:// URL for torch.distributed; empty for one rank


@dataclass(frozen=True, slots=True)
class Admit:
    """Overwrites the whole state of `slot`."""

    slot: int = _wire(as_integer())
    token_ids: bytes = _wire(as_packed(4))  # [n] i32: the prompt, and after preemption the tokens generated so far
    num_prompt_tokens: int = _wire(as_integer(1))  # of them, the user's prompt
    num_cached_tokens: int = _wire(as_integer())  # leading tokens whose KV is already in the pages
    page_ids: bytes = _wire(as_packed(4))  # [m] i32, for positions 0, page_size, ...
    seed: int = _wire(as_u64)
    sampling: Sampling = _wire(_record(Sampling))


@dataclass(frozen=True, slots=True)
class Step:
    """One batch: apply admits, then page grants, then the decode set, then run. See docs/ARCHITECTURE.md.

    The Result has one token per sampling row: the decode rows (if `run_decode`), in the order of the decode set, then
    the prefill rows that are the last chunk of their prompt, in the order of `prefills`.
    """

    step_id: int = _wire(as_integer(0, 2**63 - 1))  # consecutive from 0
    admits: tuple[Admit, ...] = _wire(as_sequence(_record(Admit), 2**16))
    page_grants: bytes = _wire(as_packed(4, 3))  # [n, 3] i32: slot, index in its page table, page id
    decode_slots: bytes | None = _wire(as_optional(as_packed(4)))  # [n] i32: replaces the decode set; None = unchanged
    run_decode: bool = _wire(as_flag)
    prefills: bytes = _wire(as_packed(4, 4))  # [n, 4] i32: slot, first position, number of tokens, last chunk? (0 or 1)


@dataclass(frozen=True, slots=True)
class Stop:
    """After the last step: finish what is queued, answer Stopped, exit 0."""


# --------------------------------------------------------------------------------------------------------------------
# worker -> engine


@dataclass(frozen=True, slots=True)
class Ready:
    rank: int = _wire(as_integer())
    num_pages: int = _wire(as_integer(1))
    vocab_size: int = _wire(as_integer(1))
    max_seq_len: int = _wire(as_integer(1))
    protocol_version: int = _wire(as_integer())
    package_version: str = _wire(as_text)
    summary: str = _wire(as_text)  # one line for the log: device, dtype, backends, memory, load time


@dataclass(frozen=True, slots=True)
class Result:
    step_id: int = _wire(as_integer(0, 2**63 - 1))
    tokens: bytes = _wire(as_packed(4))  # [num_sampling_rows] u32; FAILED_ROW_BIT marks a row with a non-finite logit
    # For each sampling row that asked for k log-probabilities, k + 1 items: the chosen token, then the k best.
    logprob_ids: bytes = _wire(as_packed(4))  # i32
    logprob_values: bytes = _wire(as_packed(4))  # f32


@dataclass(frozen=True, slots=True)
class Heartbeat:
    num_handled: int = _wire(as_u64)  # messages of `steps` that the main loop has finished with
    num_collectives: int = _wire(as_u64)  # exchanges with other ranks entered so far; who waits has entered one more


@dataclass(frozen=True, slots=True)
class Digest:
    """Sent by every rank after the same steps, where there are several: all must have drawn the same tokens."""

    step_id: int = _wire(as_integer(0, 2**63 - 1))
    value: int = _wire(as_integer(0, 2**32 - 1))  # CRC-32 of the tokens of all Results up to and with this step's


@dataclass(frozen=True, slots=True)
class Failed:
    step_id: int | None = _wire(as_optional(as_integer(0, 2**63 - 1)))  # None: not in a step
    rank: int = _wire(as_integer())
    kind: str = _wire(as_text)  # class name of the exception
    text: str = _wire(as_text)


@dataclass(frozen=True, slots=True)
class Stopped:
    rank: int = _wire(as_integer())


# --------------------------------------------------------------------------------------------------------------------
# Codec

MESSAGES: dict[int, type] = {
    1: Hello, 2: AddRequests, 3: Abort, 4: Control,
    16: Welcome, 17: Refused, 18: Outputs, 19: Rejected, 20: Stats, 21: Pong, 22: EngineFailed,
    32: Configure, 33: Step, 34: Stop,
    48: Ready, 49: Result, 50: Heartbeat, 51: Failed, 52: Stopped, 53: Digest,
}  # fmt: skip
Message = (
    Hello | AddRequests | Abort | Control
    | Welcome | Refused | Outputs | Rejected | Stats | Pong | EngineFailed
    | Configure | Step | Stop
    | Ready | Result | Heartbeat | Failed | Stopped | Digest
)  # fmt: skip

_TAGS = {cls: tag for tag, cls in MESSAGES.items()}
_RECORDS = (*MESSAGES.values(), Sampling, NewRequest, Admit)
_CHECKS: dict[type, tuple[Check, ...]] = {cls: tuple(f.metadata["check"] for f in fields(cls)) for cls in _RECORDS}
_NAMES: dict[type, tuple[str, ...]] = {cls: tuple(f.name for f in fields(cls)) for cls in _RECORDS}


def encode(message: Message) -> bytes:
    """The frame of a message. Values are the sender's own and are not checked again, only the size.

    Raises:
        ValueError: the frame would be larger than `MAX_FRAME_BYTES`, which the peer would drop without a word.
    """
    frame: bytes = msgpack.packb([_TAGS[type(message)], *_flatten(message)])
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> Message:
    """The message of a frame, whatever the bytes are.

    Raises:
        ProtocolError: anything that `encode` of this version would not have written. Nothing else escapes.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    try:
        values = msgpack.unpackb(frame, raw=False, use_list=True)
    except Exception as error:  # msgpack raises a dozen kinds: ValueError, StackError, UnicodeDecodeError, ...
        raise ProtocolError(f"not MessagePack: {type(error).__name__}") from None
    if type(values) is not list or not values or type(values[0]) is not int:
        raise ProtocolError("not an array that begins with a tag")
    cls = MESSAGES.get(values[0])
    if cls is None:
        raise ProtocolError(f"unknown tag {values[0]}")
    return _build(cls, values[1:])  # type: ignore[no-any-return]


def _flatten(record: Any) -> list[Any]:
    values = []
    for name in _NAMES[type(record)]:
        value = getattr(record, name)
        if type(value) is tuple:
            value = [_flatten(item) if type(item) in _NAMES else item for item in value]
        elif type(value) in _NAMES:
            value = _flatten(value)
        values.append(value)
    return values


def _build(cls: type, values: Any) -> Any:
    checks = _CHECKS[cls]
    if type(values) is not list or len(values) != len(checks):
        raise ProtocolError(f"{cls.__name__} needs {len(checks)} fields")
    return cls(*[check(value) for check, value in zip(checks, values, strict=True)])
