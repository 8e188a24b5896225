"""The frontend against a scripted engine: results, streams, errors, and the ways in which an engine can let it down."""

import asyncio
import gc
import os
import signal
import threading
import time
from array import array
from pathlib import Path

import pytest
from fake_engine import VOCAB, FakeEngine, running_engine
from model_folders import write_folder
from tokenizers_made_here import make_byte_tokenizer, make_piece_tokenizer

from minisgl import __version__
from minisgl.core import FinishReason, SamplingParams
from minisgl.errors import (
    EngineDead,
    EngineUnreachable,
    InvalidRequest,
    MinisglError,
    ModelLoadError,
    Overloaded,
    ProtocolMismatch,
)
from minisgl.llm import LLM
from minisgl.protocol import (
    PROTOCOL_VERSION,
    EngineFailed,
    Outputs,
    Pong,
    Ready,
    Refused,
    Rejected,
    RejectReason,
)
from minisgl.request_builder import mix

EOS = 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "bytes", make_byte_tokenizer())


@pytest.fixture
def engine(tmp_path, folder):
    with running_engine(f"ipc://{tmp_path}/engine.sock", model=str(folder)) as engine:
        yield engine


@pytest.fixture
def llm(engine):
    with LLM(engine=engine.address) as llm:
        yield llm


def text_params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 3, "ignore_eos": True, **changes})


# --------------------------------------------------------------------------------------------------------------------
# generate


def test_generate_gives_results_in_prompt_order(llm):
    results = llm.generate(["a", [98], "xyz"], [text_params(max_tokens=n) for n in (3, 1, 2)])
    assert [r["token_ids"] for r in results] == [[98, 99, 100], [99], [123, 124]]
    assert [r["text"] for r in results] == ["bcd", "c", "{|"]
    assert [r["prompt_tokens"] for r in results] == [1, 1, 3]
    assert {r["finish_reason"] for r in results} == {"length"} and {r["stop_reason"] for r in results} == {None}


def test_generate_reports_cached_tokens(engine, llm):
    engine.num_cached_tokens = 5
    assert llm.generate([[97]], text_params())[0]["cached_tokens"] == 5
    assert llm.generate(["a"], text_params(stop="c"))[0]["cached_tokens"] == 5


def test_generate_of_one_prompt_needs_no_list(llm):
    assert [r["token_ids"] for r in llm.generate("a", text_params())] == [[98, 99, 100]]
    assert [r["token_ids"] for r in llm.generate([1, 2], text_params())] == [[3, 4, 5]]
    assert llm.generate([], text_params()) == []


def test_generate_stays_within_the_window(engine, llm):
    prompts = [[i % 256] for i in range(1000)]
    results = llm.generate(prompts, text_params(max_tokens=1))
    assert [r["token_ids"][0] for r in results] == [i % 256 + 1 for i in range(1000)]
    assert 1 < engine.max_outstanding <= engine.window


def test_generate_of_several_threads_shares_the_window(engine, llm):
    results: dict[int, list[int]] = {}

    def call(start: int) -> None:
        answers = llm.generate([[start + i] for i in range(30)], text_params(stop="never seen"))
        results[start] = [r["token_ids"][0] for r in answers]

    threads = [threading.Thread(target=call, args=(start,)) for start in (0, 50, 100, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {start: [start + i + 1 for i in range(30)] for start in (0, 50, 100, 150)}
    assert engine.max_outstanding <= engine.window


def test_generate_asks_for_one_message_unless_there_are_stop_strings(engine, llm):
    llm.generate(["a", "b"], [text_params(), text_params(stop="x")])
    assert [request.stream for request in engine.requests()] == [False, True]


def test_generate_ends_at_the_models_end_ids_and_hides_them(llm):
    result = llm.generate([[EOS - 2]], SamplingParams(max_tokens=9))[0]
    assert (result["token_ids"], result["finish_reason"], result["stop_reason"]) == ([256], "stop", None)
    assert llm.generate([[EOS - 2]], text_params())[0]["token_ids"] == [256, 257, 258]


def test_generate_names_the_stop_id_that_was_asked_for(llm):
    result = llm.generate(["a"], text_params(max_tokens=9, stop_token_ids=[100]))[0]
    assert (result["text"], result["finish_reason"], result["stop_reason"]) == ("bc", "stop", 100)


def test_generate_cuts_at_a_stop_string_and_stops_the_engine(engine, llm):
    result = llm.generate(["a"], text_params(max_tokens=400, stop=["ef", "zz"]))[0]
    assert (result["text"], result["token_ids"]) == ("bcd", [98, 99, 100])
    assert (result["finish_reason"], result["stop_reason"]) == ("stop", "ef")
    assert engine.aborted() == {engine.requests()[0].request_id} and not engine.running


def test_generate_with_n_gives_all_samples(engine, llm):
    result = llm.generate(["a"], text_params(n=3, seed=4))[0]
    assert [o["token_ids"][0] for o in result["outputs"]] == [98, 108, 118]
    assert {key: result[key] for key in result["outputs"][0]} == result["outputs"][0]
    assert array("Q", engine.requests()[0].seeds).tolist() == [mix(4, i) for i in range(3)]


def test_generate_with_logprobs_gives_one_entry_for_each_token(llm):
    result = llm.generate(["a"], text_params(max_tokens=2, logprobs=1))[0]
    assert result["logprobs"] == [
        {"token_id": 98, "logprob": 0.0, "top": [(99, -0.5)]},
        {"token_id": 99, "logprob": 0.0, "top": [(100, -0.5)]},
    ]
    assert "logprobs" not in llm.generate(["a"], text_params())[0]


@pytest.mark.parametrize("prompts", [[[1], [2], [VOCAB]], [[1], [2], []], [[1], [2], None]])
def test_generate_of_one_bad_prompt_sends_nothing(engine, llm, prompts):
    with pytest.raises(InvalidRequest, match="prompt 2"):
        llm.generate(prompts, text_params())
    assert engine.requests() == []
    assert llm.generate([[1]], text_params())[0]["token_ids"] == [2, 3, 4]


def test_generate_shows_progress(llm, capfd):
    llm.generate([[1]] * 5, text_params(), use_tqdm=True)
    shown = capfd.readouterr().err
    assert "5/5" in shown and "tok/s" in shown


def test_generate_interrupted_aborts_and_goes_on(engine, llm):
    engine.is_paused = True
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1]] * 20, text_params())
    engine.wait_for(lambda: len(engine.aborted()) == engine.window)
    engine.is_paused = False
    assert llm.generate([[1]], text_params())[0]["token_ids"] == [2, 3, 4]


# --------------------------------------------------------------------------------------------------------------------
# Refusals of the engine


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


# --------------------------------------------------------------------------------------------------------------------
# chat, stream, agenerate, abort, stats


def test_chat_renders_the_template_without_bos(engine, tmp_path):
    folder = write_folder(tmp_path / "pieces", make_piece_tokenizer())
    with LLM(str(folder), engine=engine.address) as llm:
        bos = llm.tokenizer.bos_token_id
        llm.chat([{"role": "user", "content": "ab"}], text_params())
        llm.generate("ab", text_params())
        chat_ids, plain_ids = (array("i", request.prompt_ids).tolist() for request in engine.requests())
    assert bos not in chat_ids and plain_ids[0] == bos
    assert llm.tokenizer.decode(chat_ids) == "<user>ab<"


def test_chat_takes_one_conversation_or_many(llm):
    one = [{"role": "user", "content": "hi"}]
    assert llm.chat(one, text_params())["text"] == "=>?"
    assert [r["text"] for r in llm.chat([one, one], text_params())] == ["=>?", "=>?"]


@pytest.mark.parametrize("messages", [[], "hi", [{"content": "hi"}], [{"role": 1}], [5], None, [[]]])
def test_chat_of_something_else_is_refused(llm, messages):
    with pytest.raises(InvalidRequest, match="message"):
        llm.chat(messages, text_params())


def test_chat_without_a_template_is_refused(llm):
    llm.tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{% for %}", "{{ x.y.z }}"]
)
def test_chat_with_a_template_that_fails_is_refused(llm, template):
    llm.tokenizer.chat_template = template
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_stream_joins_to_the_whole(llm):
    deltas = list(llm.stream("a", text_params(max_tokens=5, logprobs=0)))
    assert [d["text"] for d in deltas] == ["b", "c", "d", "e", "f"]
    assert [d["finish_reason"] for d in deltas] == [None] * 4 + ["length"]
    assert [entry["token_id"] for d in deltas for entry in d["logprobs"]] == [98, 99, 100, 101, 102]
    assert {key: deltas[-1][key] for key in ("stop_reason", "prompt_tokens", "index")} == {
        "stop_reason": None,
        "prompt_tokens": 1,
        "index": 0,
    }


def test_stream_with_n_tells_the_samples_apart(llm):
    texts = ["", ""]
    for delta in llm.stream("a", text_params(n=2)):
        texts[delta["index"]] += delta["text"]
    assert texts == ["bcd", "lmn"]


def test_stream_with_a_stop_string_ends_in_the_engine_too(engine, llm):
    deltas = list(llm.stream("a", text_params(max_tokens=400, stop="de")))
    assert "".join(d["text"] for d in deltas) == "bc"
    assert (deltas[-1]["finish_reason"], deltas[-1]["stop_reason"]) == ("stop", "de")
    assert engine.aborted() == {engine.requests()[0].request_id} and not engine.running


def test_stream_checks_at_once(engine, llm):
    with pytest.raises(InvalidRequest):
        llm.stream([VOCAB])
    with pytest.raises(InvalidRequest):
        llm.stream("a", {"temperature": 1})
    assert engine.requests() == []


@pytest.mark.parametrize("leave", ["close", "del"])
def test_stream_left_early_is_aborted(engine, llm, leave):
    stream = llm.stream("a", text_params(max_tokens=500))
    next(stream)
    if leave == "close":
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    engine.wait_for(lambda: not engine.running)


def test_abort_ends_a_stream_with_its_last_delta(engine, llm):
    stream = llm.stream("a", text_params(max_tokens=500, n=2))
    next(stream)
    engine.is_paused = True
    llm.abort(stream.request_id)
    llm.abort(10**9)
    assert [d["finish_reason"] for d in stream if d["finish_reason"]] == ["abort", "abort"]
    llm.abort(stream.request_id)


def test_abort_of_a_stream_that_waits_for_the_window_ends_it(engine, llm):
    engine.is_paused = True
    streams = [llm.stream("a", text_params()) for _ in range(engine.window + 1)]
    llm.abort(streams[-1].request_id)
    assert [d["finish_reason"] for d in streams[-1]] == ["abort"]
    engine.wait_for(lambda: len(engine.requests()) == engine.window)


def test_agenerate_serves_many_coroutines(llm):
    async def read(prompt: str) -> str:
        return "".join([delta["text"] async for delta in llm.agenerate(prompt, text_params())])

    async def main() -> list[str]:
        return await asyncio.gather(*(read(chr(97 + i)) for i in range(20)))

    assert asyncio.run(main()) == [bytes(range(98 + i, 101 + i)).decode() for i in range(20)]


def test_agenerate_cancelled_is_aborted(engine, llm):
    async def read() -> None:
        async for _ in llm.agenerate("a", text_params(max_tokens=500)):
            engine.is_paused = True

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(), 0.3)

    asyncio.run(main())
    gc.collect()
    engine.wait_for(lambda: not engine.running)


def test_agenerate_of_a_dead_engine_raises(engine, llm):
    async def main() -> None:
        engine.is_paused = True
        stream = llm.agenerate("a", text_params())
        engine.send(EngineFailed("the worker of rank 0 was killed by SIGKILL"))
        with pytest.raises(EngineDead, match="SIGKILL"):
            await stream.__anext__()

    asyncio.run(main())


def test_stats_are_the_engines(llm):
    stats = llm.stats()
    assert (stats["waiting"], stats["running"], stats["draining"]) == (1, 2, 3)
    assert (stats["pages_free"], stats["pages_cached"], stats["pages_used"]) == (4, 5, 6)
    assert (stats["prefix_hit_tokens"], stats["preemptions"], stats["tokens_per_s"]) == (7, 10, 12.5)


# --------------------------------------------------------------------------------------------------------------------
# Connecting


@pytest.mark.parametrize(
    "kind, options, match",
    [
        (TypeError, {"page_sise": 16}, "page_sise.*page_size"),
        (TypeError, {"max_num_seq": 16}, "max_num_seq.*max_num_seqs"),
        (ValueError, {"page_size": 0}, "page_size.*0"),
        (ValueError, {"dtype": "int8"}, "dtype.*int8"),
    ],
)
def test_bad_option_is_named_before_anything_else(kind, options, match):
    with pytest.raises(kind, match=match):
        LLM("nowhere", **options)


def test_options_beside_an_address_are_refused():
    for options in ({"page_size": 16}, {"dtype": "float32"}, {"max_num_seqs": 4}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}.*engine="):
            LLM(engine="ipc:///nowhere", **options)
    with pytest.raises(TypeError, match=r"page_sise.*page_size"):
        LLM(engine="ipc:///nowhere", page_sise=16)
    with pytest.raises(TypeError, match="model_path"):
        LLM()


def test_missing_model_is_named_at_once(tmp_path):
    started = time.monotonic()
    with pytest.raises(ModelLoadError, match="no_such_model"):
        LLM(str(tmp_path / "no_such_model"))
    assert time.monotonic() - started < 1


def test_attach_to_nobody_is_unreachable_within_the_bound(tmp_path):
    started = time.monotonic()
    with pytest.raises(EngineUnreachable, match=r"engine\.sock"):
        LLM(engine=f"ipc://{tmp_path}/engine.sock")
    assert 4 < time.monotonic() - started < 8


@pytest.mark.parametrize("address", ["engine.sock", "tcp://*:80", "tcp://127.0.0.1", "http://localhost"])
def test_attach_to_a_bad_address_is_a_value_error(address):
    with pytest.raises(ValueError, match="address"):
        LLM(engine=address)


def test_attach_to_another_version_names_both(engine):
    engine.refuse = Refused(PROTOCOL_VERSION + 1, "9.9.9", "no")
    with pytest.raises(ProtocolMismatch) as caught:
        LLM(engine=engine.address)
    for part in (str(PROTOCOL_VERSION + 1), "9.9.9", str(PROTOCOL_VERSION), __version__):
        assert part in str(caught.value)


def test_attach_refused_by_the_same_version_says_why(engine):
    engine.refuse = Refused(PROTOCOL_VERSION, __version__, "too many clients")
    with pytest.raises(EngineUnreachable, match="too many clients"):
        LLM(engine=engine.address)


def test_attach_with_another_model_is_refused(engine, tmp_path):
    other = write_folder(tmp_path / "other", vocab_size=1000)
    with pytest.raises(ModelLoadError, match=r"1000.*320"):
        LLM(str(other), engine=engine.address)


def test_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    small = write_folder(tmp_path / "small", make_byte_tokenizer(), vocab_size=258, eos_token_id=257)
    with pytest.raises(ModelLoadError, match="258"):
        LLM(str(small))


def test_folder_without_a_tokenizer_serves_ids(engine, tmp_path):
    with LLM(str(write_folder(tmp_path / "ids")), engine=engine.address) as llm:
        result = llm.generate([[1]], text_params())[0]
        assert (result["text"], result["token_ids"]) == ("", [2, 3, 4])
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.generate("a")
        with pytest.raises(ModelLoadError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_broken_tokenizer_is_named(engine, tmp_path):
    broken = write_folder(tmp_path / "broken", make_byte_tokenizer())
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="broken"):
        LLM(str(broken), engine=engine.address)


# --------------------------------------------------------------------------------------------------------------------
# Faults


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
    next(stream)
    engine.is_silent = True
    threading.Timer(2.0, lambda: setattr(engine, "is_silent", False)).start()
    assert "".join(d["text"] for d in stream) == bytes(range(99, 118)).decode("latin-1")


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
