"""Steps made by hand, as a scheduler would send them, against transformers' greedy tokens."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.config import EngineConfig
from minisgl.errors import ModelLoadError
from minisgl.protocol import FAILED_ROW_BIT
from minisgl_worker.memory import available_memory_bytes, fit_pages
from minisgl_worker.model_runner import ModelRunner, StepHandle
from minisgl_worker.parallel import ParallelGroup, choose_device, share_cpu_threads
from tests.worker.checkpoints import VOCAB_SIZE, make_admit, make_step, read_tokens, write_checkpoint

PAGE_SIZE = 4
NUM_PAGES = 24
LENGTHS = {"A": 9, "B": 21, "C": 5, "D": 14, "E": 10}
PROMPTS = {name: random.Random(name).choices(range(VOCAB_SIZE), k=length) for name, length in LENGTHS.items()}
PROMPTS["E"][:8] = PROMPTS["A"][:8]  # two pages in common


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("runner") / "m", request.param)


def make_runner(folder: Path, **options: object) -> ModelRunner:
    torch.set_num_threads(1)
    values = {"device": "cpu", "num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "max_running_req": 4, **options}
    return ModelRunner(EngineConfig.from_options(folder, values))


def expect_greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@dataclass
class Driver:
    """Sends steps, with `depth` of them in flight, and sorts the tokens that come back by request."""

    runner: ModelRunner
    depth: int
    owners: dict[int, str] = field(default_factory=dict)  # slot -> request
    decode_set: list[int] = field(default_factory=list)
    in_flight: list[tuple[StepHandle, list[str]]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_steps: int = 0

    def step(
        self, admits: dict[int, tuple[str, list[int], int]] | None = None, decode: list[int] | None = None,
        run: bool = True, chunks: tuple[tuple[int, int, int, int], ...] = (), grants: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """admits: slot -> (request, page ids, cached tokens)."""
        made = []
        for slot, (name, pages, num_cached) in (admits or {}).items():
            self.owners[slot] = name
            made.append(make_admit(slot, PROMPTS[name], pages, num_cached=num_cached))
        self.decode_set = self.decode_set if decode is None else decode
        rows = [*(self.decode_set if run else []), *(slot for slot, _, _, is_last in chunks if is_last)]
        flat = tuple(value for chunk in chunks for value in chunk)
        made_step = make_step(
            self.num_steps, admits=tuple(made), decode=decode, run_decode=run, prefills=flat, grants=grants
        )
        self.num_steps += 1
        self.in_flight.append((self.runner.execute(made_step), [self.owners[slot] for slot in rows]))
        if len(self.in_flight) >= self.depth:
            self.take()

    def take(self) -> None:
        handle, names = self.in_flight.pop(0)
        result = handle.result()
        assert result.step_id == self.num_steps - 1 - len(self.in_flight)
        for name, token in zip(names, read_tokens(result.tokens), strict=True):
            self.tokens.setdefault(name, []).append(token)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_of_hand_made_steps_equal_those_of_transformers(folder: Path, depth: int) -> None:
    """Chunked prompts, chunks beside decode rows, pages granted late and out of order, a held step, reused slots and
    pages, a shared prefix; the engine never sends a token back."""
    driver = Driver(make_runner(folder), depth)
    a, b, c, d, e = [7, 2, 9, 15], [0, 1, 3, 4, 5, 6, 20, 21], [10, 11, 12, 13], [9, 22, 23, 8, 17], [7, 2, 14, 16]
    driver.step({0: ("A", a[:3], 0), 1: ("B", b[:6], 0)}, run=False, chunks=((0, 0, 9, 1), (1, 0, 8, 0)))
    driver.step(decode=[0], chunks=((1, 8, 8, 0),))
    driver.step({2: ("C", c[:2], 0)}, chunks=((1, 16, 5, 1), (2, 0, 5, 1)))
    driver.step(decode=[2, 0, 1])
    driver.step(grants=(0, 3, a[3]))
    driver.step(run=False)  # everybody waits
    driver.step(grants=(2, 2, c[2], 1, 6, b[6]))
    # E shares the first two pages of A, which goes on
    driver.step({3: ("E", e[:3], 8)}, chunks=((3, 8, 2, 1),))
    driver.step(decode=[3, 1, 2, 0])
    # A is done: D takes its slot, and one of its pages that it shares with nobody
    driver.step(decode=[1, 3, 2])
    driver.step({0: ("D", d[:4], 0)}, chunks=((0, 0, 3, 0),), grants=(3, 3, e[3], 1, 7, b[7], 2, 3, c[3]))
    driver.step(run=False, chunks=((0, 3, 11, 1),))
    for _ in range(2):
        driver.step(decode=[0, 3, 1, 2])
    driver.step(grants=(0, 4, d[4]))
    while driver.in_flight:
        driver.take()
    assert {name: len(tokens) for name, tokens in driver.tokens.items()} == {"A": 8, "B": 11, "C": 11, "D": 4, "E": 7}
    for name, tokens in driver.tokens.items():
        assert tokens == expect_greedy(folder, PROMPTS[name], len(tokens)), name


def test_step_without_sampling_rows_is_answered(folder: Path) -> None:
    runner = make_runner(folder)
    admit = make_admit(0, PROMPTS["A"], [0, 1, 2])
    for step in (make_step(0, admits=(admit,), prefills=(0, 0, 4, 0)), make_step(1)):
        result = runner.execute(step).result()
        assert (result.step_id, result.tokens, result.logprob_ids) == (step.step_id, b"", b"")


def test_row_with_a_non_finite_logit_fails_alone_and_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    """One token's embedding is NaN: a prompt that holds it fails, and its pages serve the next request all the same."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    expected_a, expected_c = (expect_greedy(folder, PROMPTS[name], n) for name, n in (("A", 5), ("C", 3)))
    used = {*PROMPTS["A"], *PROMPTS["C"], *expected_a, *expected_c}
    poison = next(token for token in range(10, VOCAB_SIZE) if token not in used)
    weights["model.embed_tokens.weight"][poison] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    runner = make_runner(tmp_path)
    admits = (make_admit(0, PROMPTS["A"], [0, 1, 2]), make_admit(1, [3, poison, 4, 5, 6, 7, 8], [3, 4]))
    steps = [
        make_step(0, admits=admits, prefills=(0, 0, 9, 1, 1, 0, 7, 1)),
        make_step(1, decode=[0, 1], run_decode=True),
        # positions 6 and 7 of the second page still hold what the failed request left
        make_step(2, admits=(make_admit(1, PROMPTS["C"], [3, 4]),), decode=[0], run_decode=True, prefills=(1, 0, 5, 1)),
        make_step(3, decode=[1, 0], run_decode=True),
        make_step(4, decode=[0, 1], run_decode=True, grants=(0, 3, 5)),
    ]
    results = [read_tokens(runner.execute(step).result().tokens) for step in steps]
    failing = [results[0][1], results[1][1]]
    assert all(token & FAILED_ROW_BIT and (token & ~FAILED_ROW_BIT) < VOCAB_SIZE for token in failing)
    healthy = [results[0][0], results[1][0], results[2][0], results[3][1], results[4][0]]
    assert healthy == expected_a and [results[2][1], results[3][0], results[4][1]] == expected_c


def test_pool_takes_what_requests_can_use_and_no_more(folder: Path) -> None:
    runner = make_runner(folder, num_pages=None, max_seq_len=64, max_running_req=3)
    assert runner.num_pages == 3 * 16 and runner.max_seq_len == 64
    assert make_runner(folder, max_seq_len=10**6).max_seq_len == 256, "the model's own limit"


def test_pool_on_a_cpu_takes_a_share_of_the_memory_that_is_available() -> None:
    config = EngineConfig(model="m", memory_ratio=0.5)
    share = available_memory_bytes() * 0.25 * 0.5
    page_bytes = 2**20
    one, two = (fit_pages(page_bytes, 0, 10**9, config, torch.device("cpu"), ranks) for ranks in (1, 2))
    assert abs(one / (share / page_bytes) - 1) < 0.2 and abs(two / one - 0.5) < 0.1


def test_pool_without_room_for_a_page_is_an_error_with_the_bytes() -> None:
    with pytest.raises(ModelLoadError, match=rf"page of 16 tokens takes {2**60}; raise memory_ratio"):
        fit_pages(2**60, 0, 100, EngineConfig(model="m"), torch.device("cpu"), 1)


def test_cpu_threads_are_shared_among_the_ranks() -> None:
    before = torch.get_num_threads()
    try:
        for num_ranks, expected in ((1, 4), (2, 2), (3, 1), (9, 1)):
            torch.set_num_threads(4)
            share_cpu_threads(num_ranks)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_device_that_is_not_there_is_refused() -> None:
    assert choose_device("auto", ParallelGroup()) == torch.device("cpu")
    for size in (1, 4):
        text = f"cuda has 0 visible NVIDIA GPUs.*, tp_size {size} needs one for each rank; use device=cpu$"
        with pytest.raises(ModelLoadError, match=text):
            choose_device("cuda", ParallelGroup(0, size))
