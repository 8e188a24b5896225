"""`LLM` against a scripted engine: results, streams and what a caller may do."""

import asyncio
import gc
import os
import signal
import threading
from array import array

import pytest
from fake_engine import VOCAB, text_params
from model_folders import write_folder
from tokenizers_made_here import make_byte_tokenizer, make_piece_tokenizer

from minisgl.core import SamplingParams
from minisgl.errors import (
    EngineDead,
    InvalidRequest,
)
from minisgl.llm import LLM
from minisgl.protocol import (
    EngineFailed,
)
from minisgl.request_builder import mix

EOS = 257


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


def test_generate_ends_at_the_tokenizers_end_id_too(engine, tmp_path):
    folder = write_folder(tmp_path / "model", make_byte_tokenizer(), eos_token_id=None)
    with LLM(str(folder), engine=engine.address) as llm:
        assert llm.generate([[EOS - 2]], SamplingParams(max_tokens=9))[0]["token_ids"] == [256]


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


def test_chat_renders_the_template_without_bos(engine, tmp_path):
    folder = write_folder(tmp_path / "pieces", make_piece_tokenizer())
    with LLM(str(folder), engine=engine.address) as llm:
        bos = llm.tokenizer.bos_token_id
        llm.chat([{"role": "user", "content": "ab"}], text_params())
        llm.generate("ab", text_params())
        chat_ids, plain_ids = (array("i", request.prompt_ids).tolist() for request in engine.requests())
    assert bos not in chat_ids and plain_ids[0] == bos
    assert llm.tokenizer.decode(chat_ids) == "<user>ab<"


def test_chat_joins_text_parts_and_refuses_others(engine, llm):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    llm.chat([{"role": "user", "content": parts}], text_params())
    llm.chat([{"role": "user", "content": "ab"}], text_params())
    joined, plain = engine.requests()
    assert joined.prompt_ids == plain.prompt_ids
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, "a", {"type": "text"}, {"type": "text", "text": 1}):
        with pytest.raises(InvalidRequest, match="parts"):
            llm.chat([{"role": "user", "content": [part]}], text_params())
    assert len(engine.requests()) == 2


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


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]], ("a",), ["a", [1]]])
def test_stream_of_a_list_of_prompts_says_that_it_wants_one(engine, llm, prompts):
    text = rf"one prompt is wanted, .* got a list of {len(prompts)} prompts; call once for each, or use generate"
    with pytest.raises(InvalidRequest, match=text):
        llm.stream(prompts)
    with pytest.raises(InvalidRequest, match=text):
        llm.agenerate(prompts)
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
