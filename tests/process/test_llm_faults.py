"""Every way in which an engine can refuse a request or let its frontends down."""

import asyncio
import gc
import os
import threading
import time
from array import array

import pytest
from fake_engine import FakeEngine, text_params

from minisgl.core import FinishReason
from minisgl.errors import (
    EngineDead,
    EngineUnreachable,
    InvalidRequest,
    MinisglError,
    Overloaded,
)
from minisgl.llm import LLM
from minisgl.protocol import (
    EngineFailed,
    Outputs,
    Pong,
    Ready,
    Rejected,
    RejectReason,
)


def reject_prompt(first_id: int, reason: RejectReason, times: int = 10**9):
    left = [times]

    def reject(request):
        if array("i", request.prompt_ids)[0] == first_id and left[0] > 0:
            left[0] -= 1
            return Rejected(request.request_id, reason, "it is too much")
        return None

    return reject


@pytest.mark.parametrize(
    "reason, kind",
    [
        (RejectReason.INVALID, InvalidRequest),
        (RejectReason.OVERLOADED, Overloaded),
        (RejectReason.DRAINING, EngineUnreachable),
    ],
)
def test_rejected_prompt_is_an_error_of_its_kind(engine, llm, reason, kind):
    engine.reject = reject_prompt(7, reason)
    with pytest.raises(kind):
        llm.generate([[7]], text_params(n=2))
    with pytest.raises(kind, match="too much"):
        next(llm.stream([7], text_params(n=2)))
    assert llm.generate([[1]], text_params())[0]["token_ids"] == [2, 3, 4]


def test_rejected_prompt_is_named_and_the_others_are_aborted(engine, llm):
    engine.is_paused = True
    engine.reject = reject_prompt(7, RejectReason.INVALID)
    with pytest.raises(InvalidRequest, match=r"prompt 3: it is too much"):
        llm.generate([[1], [2], [3], [7]], text_params())
    engine.wait_for(lambda: len(engine.aborted()) == 3)


def test_overload_by_others_is_waited_out_while_own_prompts_run(engine, llm):
    engine.reject = reject_prompt(7, RejectReason.OVERLOADED, times=3)
    results = llm.generate([[1], [7], [2], [7], [3]], text_params(n=2))
    assert [r["token_ids"][0] for r in results] == [2, 8, 3, 8, 4]
    assert len(engine.requests()) == 5 + 3


def make_error(engine: FakeEngine, request_id: int, text: str) -> Outputs:
    return Outputs(
        0, array("Q", [request_id]).tobytes(), array("i", [0]).tobytes(), bytes([FinishReason.ERROR]),
        array("i", [0]).tobytes(), b"", (text,), b"", b"",
    )  # fmt: skip


def test_failed_sample_is_an_error_that_names_the_prompt(engine, llm):
    engine.is_paused = True
    threading.Timer(0.2, lambda: engine.send(make_error(engine, 1, "its logits are not finite"))).start()
    with pytest.raises(MinisglError, match="prompt 0: its logits are not finite"):
        llm.generate([[1], [2]], text_params())


def test_failed_sample_of_a_stream_ends_the_others_too(engine, llm):
    engine.is_paused = True
    stream = llm.stream([1], text_params(n=2))
    engine.wait_for(lambda: len(engine.running) == 2)
    engine.send(make_error(engine, stream.request_id, "its logits are not finite"))
    with pytest.raises(MinisglError, match="not finite"):
        next(stream)
    engine.wait_for(lambda: stream.request_id + 1 in engine.aborted())
    assert list(stream) == []


@pytest.mark.parametrize("is_async", [False, True])
def test_tokens_before_a_failure_are_given_out(engine, llm, is_async):
    """However many arrive at once: here the token of one sample and the failure of the other, in one message."""
    engine.is_paused = True

    async def read() -> list[int]:
        stream = llm.agenerate([1], text_params(n=2)) if is_async else llm.stream([1], text_params(n=2))
        engine.wait_for(lambda: len(engine.running) == 2)
        first = stream.request_id
        engine.send(
            Outputs(
                0, array("Q", [first, first + 1]).tobytes(), array("i", [1, 0]).tobytes(),
                bytes([0, FinishReason.ERROR]), bytes(8), array("i", [98]).tobytes(), ("not finite",), b"", b"",
            )
        )  # fmt: skip
        token_ids: list[int] = []
        with pytest.raises(MinisglError, match="not finite"):
            while True:
                delta = (await anext(stream)) if is_async else next(stream)
                token_ids += delta["token_ids"]
        with pytest.raises(StopAsyncIteration if is_async else StopIteration):
            (await anext(stream)) if is_async else next(stream)
        return token_ids

    assert asyncio.run(read()) == [98]


def expect_death(engine: FakeEngine, llm: LLM, match: str, within_s: float = 1.5) -> None:
    """The waiting call and every later one raise EngineDead with the cause."""
    started = time.monotonic()
    with pytest.raises(EngineDead, match=match):
        llm.generate([[1]] * 3, text_params())
    assert time.monotonic() - started < within_s
    for call in (lambda: llm.generate([[1]]), lambda: llm.stream([1]), llm.stats, lambda: llm.generate([])):
        with pytest.raises(EngineDead, match=match):
            call()


def test_failed_engine_is_sticky_with_its_cause(engine, llm):
    engine.is_paused = True
    engine.send(EngineFailed("worker of rank 1 was killed by SIGKILL"))
    expect_death(engine, llm, "rank 1 was killed by SIGKILL")


def test_lost_message_is_an_error_and_never_wrong_text(engine, llm):
    stream = llm.stream("a", text_params(max_tokens=100))
    assert next(stream)["text"] == "b"
    engine.sequence_step = 2
    with pytest.raises(EngineDead, match="lost"):
        for delta in stream:
            assert delta["finish_reason"] is None
    expect_death(engine, llm, "lost")


def test_repeated_message_is_an_error(engine, llm):
    llm.generate([[1]], text_params())
    engine.sequence_step = 0
    llm.generate([[1]], text_params())
    expect_death(engine, llm, "lost")


def test_another_engine_at_the_address_is_noticed(engine, llm):
    engine.is_paused = True
    engine.epoch += 1
    expect_death(engine, llm, "replaced", within_s=3)


def test_answer_of_an_earlier_engine_is_noticed(engine, llm):
    engine.is_paused = True
    engine.send(Pong(engine.epoch - 1, 0))
    expect_death(engine, llm, "replaced")


def test_silent_engine_counts_as_dead_after_the_lease(engine, llm):
    engine.is_silent = True
    started = time.monotonic()
    expect_death(engine, llm, "not answered", within_s=6)
    assert time.monotonic() - started > 2


def test_pause_shorter_than_the_lease_loses_nothing(engine, llm):
    stream = llm.stream("a", text_params(max_tokens=20))
    first = next(stream)["text"]
    engine.is_silent = True
    threading.Timer(2.0, lambda: setattr(engine, "is_silent", False)).start()
    assert first + "".join(d["text"] for d in stream) == bytes(range(98, 118)).decode("latin-1")


@pytest.mark.parametrize(
    "message",
    [
        Ready(0, 1, 1, 1, 1, "1", "x"),
        Outputs(0, bytes(8), bytes(4), b"\0", bytes(4), b"", (), b"", b""),
        Outputs(0, (1).to_bytes(8, "little"), bytes(4), b"\0", bytes(4), bytes(4), (), b"", b""),
        Outputs(0, (1).to_bytes(8, "little"), bytes(4), b"\x09", bytes(4), b"", (), b"", b""),
        Outputs(0, (1).to_bytes(8, "little"), bytes(4), b"\x04", bytes(4), b"", (), b"", b""),
        Outputs(0, (1).to_bytes(8, "little"), b"", b"", b"", b"", (), b"", b""),
    ],
    ids=["not for us", "unknown request", "tokens left over", "unknown reason", "no error text", "short columns"],
)
def test_senseless_message_is_an_error(engine, llm, message):
    engine.is_paused = True
    threading.Timer(0.3, lambda: engine.send(message)).start()
    expect_death(engine, llm, "sent", within_s=3)


def test_closed_llm_says_so(engine, llm):
    stream = llm.stream("a", text_params(max_tokens=500))
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([[1]])
    with pytest.raises(EngineDead, match="closed"):
        for _ in stream:
            pass


def test_closed_llm_releases_a_waiting_thread(engine, llm):
    engine.is_paused = True
    caught: list[BaseException] = []

    def call() -> None:
        try:
            llm.generate([[1]], text_params())
        except EngineDead as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    engine.wait_for(lambda: bool(engine.requests()))
    llm.close()
    thread.join(5)
    assert caught and not thread.is_alive()


def test_dropped_llm_ends_its_thread_and_says_goodbye(engine):
    llm = LLM(engine=engine.address)
    assert any(thread.name == "minisgl-client" for thread in threading.enumerate())
    del llm
    gc.collect()
    assert not any(thread.name == "minisgl-client" for thread in threading.enumerate())
    engine.wait_for(lambda: any(getattr(message, "action", 0) == 3 for message in engine.received))


def test_forked_child_gets_a_clear_error_and_harms_nothing(engine, llm):
    llm.generate([[1]], text_params())
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[1]], text_params())
        except EngineUnreachable as error:
            llm.close()
            os._exit(0 if str(os.getppid()) in str(error) else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert llm.generate([[1]], text_params())[0]["token_ids"] == [2, 3, 4]
