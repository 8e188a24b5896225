"""One `LLM` and the engine it started (with a fake worker): shared by threads and event loops, interrupted, and given
very many prompts."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from model_folders import write_folder

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.supervisor import ChildProcess, spawn

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"num_pages": 2048, "max_running_req": 512}


def spawn_with_fake_worker(module: str, arguments: list[str]) -> ChildProcess:
    """In place of `minisgl.llm.spawn`."""
    return spawn(module, [*arguments, "--worker-module", "tests.process.fake_worker"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "m", vocab_size=100)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minisgl.llm.spawn", spawn_with_fake_worker)
        llm = LLM(str(folder), **OPTIONS)
    with llm:
        yield llm


def tokens_after(num_prompt_tokens: int, num_tokens: int) -> list[int]:
    """What the fake worker generates after any prompt of this length."""
    return [10 + length % 90 for length in range(num_prompt_tokens, num_prompt_tokens + num_tokens)]


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def generate_lists(llm: LLM, seed: int) -> None:
    lengths = [1 + (seed * 7 + i) % 30 for i in range(40)]
    results = llm.generate([[seed] * length for length in lengths], [params(1 + length % 9) for length in lengths])
    assert [r["token_ids"] for r in results] == [tokens_after(length, 1 + length % 9) for length in lengths]


def read_streams(llm: LLM, seed: int) -> None:
    for length in range(1 + seed, 9 + seed):
        deltas = list(llm.stream([seed] * length, params(12)))
        assert [token for delta in deltas for token in delta["token_ids"]] == tokens_after(length, 12)


def run_event_loop(llm: LLM, seed: int) -> None:
    async def read(length: int) -> list[int]:
        return [t async for delta in llm.agenerate([seed] * length, params(12)) for t in delta["token_ids"]]

    async def main() -> None:
        lengths = range(1 + seed, 25 + seed)
        assert await asyncio.gather(*map(read, lengths)) == [tokens_after(length, 12) for length in lengths]

    asyncio.run(main())


def leave_streams(llm: LLM, seed: int) -> None:
    for _ in range(8):
        for delta in llm.stream([seed], params(500)):
            assert delta["token_ids"][0] >= 10
            break


def test_threads_and_event_loops_share_one_llm(llm: LLM) -> None:
    """Four of each kind of caller at once; each gets its own tokens, and nothing is left in the engine."""
    kinds: list[Callable[[LLM, int], None]] = [generate_lists, read_streams, run_event_loop, leave_streams]
    calls = [(kind, seed) for seed in range(4) for kind in kinds]
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(kind, llm, seed) for kind, seed in calls]:
            future.result(timeout=60)
    assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    waited = threading.Event()
    for _ in range(200):
        stats = llm.stats()
        if (stats["running"], stats["waiting"], stats["draining"], stats["pages_used"]) == (0, 0, 0, 0):
            return
        waited.wait(0.05)
    raise AssertionError(f"the engine is not idle: {stats}")


def test_twenty_thousand_prompts_take_little_more_memory_than_their_results(llm: LLM) -> None:
    """Requests are made as the window has room. All at once they would take over a kilobyte each."""
    num_prompts = 20_000
    prompts = [[i % 100, *[7] * (i % 12)] for i in range(num_prompts)]
    llm.generate(prompts[:600], params(2))
    engine_bytes = children_peak_bytes()
    tracemalloc.start()
    try:
        results = llm.generate(prompts, params(2))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [r["token_ids"] for r in results] == [tokens_after(len(prompt), 2) for prompt in prompts]
    print(f"{(peak - held) / num_prompts:.0f} bytes per prompt beside its result")
    assert peak - held < 350 * num_prompts
    assert children_peak_bytes() - engine_bytes < 16 << 20
    assert_idle(llm)


def children_peak_bytes() -> int:
    """The most memory that the engine and its worker ever held, in sum."""
    engines = children_of(os.getpid())
    processes = engines + [worker for engine in engines for worker in children_of(engine)]
    lines = [line for pid in processes for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    assert len(peaks) == 2, "an engine and its worker run"
    return sum(peaks)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


INTERRUPTED = """
import sys
sys.path.insert(0, "tests")
import minisgl.llm
from minisgl.core import SamplingParams
from tests.process.test_llm_sharing import spawn_with_fake_worker

minisgl.llm.spawn = spawn_with_fake_worker
with minisgl.llm.LLM(sys.argv[1], num_pages=2048, max_running_req=64) as llm:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for _ in range(2):
        print("ready", flush=True)
        try:
            llm.generate([[1]] * 5000, params)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    print(llm.generate([[1] * 5], SamplingParams(max_tokens=3, ignore_eos=True))[0]["token_ids"], flush=True)
"""


def test_interrupt_of_the_whole_process_group_ends_the_call_and_not_the_engine(folder: Path) -> None:
    """As Ctrl-C in a terminal, twice in a row."""
    command = [sys.executable, "-c", INTERRUPTED, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stdout is not None
        try:
            for _ in range(2):
                assert program.stdout.readline() == "ready\n"
                threading.Event().wait(0.7)
                os.killpg(program.pid, signal.SIGINT)
                assert program.stdout.readline() == "interrupted\n"
            assert program.stdout.readline() == f"{tokens_after(5, 3)}\n"
            assert program.wait(20) == 0
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
