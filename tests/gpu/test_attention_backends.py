"""One test for all attention backends, against the plain twins of the kernels.

On a GPU all backends run. Where TRITON_INTERPRET=1 is set, `torch` and `triton` run on the CPU, with shorter rows.
Kernels of FlashInfer that have to be compiled first are left out unless MINISGL_TEST_JIT=1 is set: each takes 10 to 85
seconds.
"""

import os
import random

import pytest
import torch

from minisgl.errors import ModelLoadError
from minisgl.requirements import ATTENTION
from minisgl_worker.attention import BACKENDS, PairedAttention, make_backend
from minisgl_worker.attention.base import AttentionBackend, AttentionSetup
from tests.attention_cases import Requests, check_eager, check_replays

pytestmark = pytest.mark.gpu
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAY_COMPILE = os.environ.get("MINISGL_TEST_JIT") == "1"
# The interpreter's bf16 is approximate, its fp16 exact.
DTYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16
NAMES = ["torch", "triton"] if IS_INTERPRETED else list(BACKENDS)
LENGTHS = [1, 2, 15, 16, 17, 31, 63, 64, 65, 130] if IS_INTERPRETED else [1, 2, 15, 16, 17, 63, 64, 65, 333, 1024, 4000]
# (length, tokens computed now): whole prompts, chunks after a prefix, and last tokens.
PROMPTS = [(1, 1), (65, 65), (90, 40), (33, 1)] if IS_INTERPRETED else [
    (1, 1), (65, 65), (700, 700), (167, 130), (1203, 3), (4000, 1000), (2048, 64), (33, 1),
]  # fmt: skip
SHAPES = [(group, head_dim, 16) for group in range(1, 9) for head_dim in (64, 128)]
SHAPES += [(2, 128, 1), (5, 128, 1), (2, 128, 64), (5, 128, 64), (3, 64, 1), (3, 64, 64)]
IDS = [f"group{group}-dim{head_dim}-page{page_size}" for group, head_dim, page_size in SHAPES]


@pytest.fixture(autouse=True)
def device():
    """Where the tests run; a GPU lane without a GPU fails."""
    assert IS_INTERPRETED or torch.cuda.is_available(), "no NVIDIA GPU, and TRITON_INTERPRET is not 1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


def is_ready(name: str, group: int, head_dim: int, page_size: int, has_window: bool = False) -> bool:
    """Whether a backend serves a shape, with kernels that come compiled or that Triton compiles in a second."""
    if name == "trtllm" and page_size == 1:
        return False
    ready = {
        "fi": not has_window,
        "fa": head_dim == 128,
        "trtllm": head_dim == 128 and group in (2, 5) and page_size in (16, 64),
    }
    return MAY_COMPILE or ready.get(name, True)


def make_setup(
    device: torch.device, group: int, head_dim: int, page_size: int, *, num_kv_heads: int = 2, max_rows: int = 64,
    max_seq_len: int = 4096, windows: tuple[int | None, ...] = (None, None),
) -> AttentionSetup:  # fmt: skip
    return AttentionSetup(
        group * num_kv_heads, num_kv_heads, head_dim, windows, DTYPE, page_size, max_rows, max_seq_len, device
    )


def make(name: str, setup: AttentionSetup) -> AttentionBackend:
    return BACKENDS[name](setup) if IS_INTERPRETED else make_backend((name, name), setup)[1]


def pick(name: str, shapes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [shape for shape in shapes if is_ready(name, *shape)]


EVERY_SHAPE = [
    pytest.param(name, shape, id=f"{name}-{IDS[SHAPES.index(shape)]}") for name in NAMES for shape in pick(name, SHAPES)
]
EVERY_NAME = [pytest.param(name, id=name) for name in NAMES]


@pytest.mark.parametrize(("name", "shape"), EVERY_SHAPE)
def test_mixed_batch_of_any_shape_equals_reference(device, name, shape) -> None:
    """Decode rows of many lengths, whole prompts, and chunks of prompts, in one step; then the next step's batch."""
    setup = make_setup(device, *shape)
    requests = Requests(setup, LENGTHS + [length for length, _ in PROMPTS])
    backend = make(name, setup)
    decode = list(range(len(LENGTHS)))
    prefills = [(len(LENGTHS) + i, count) for i, (_, count) in enumerate(PROMPTS)]
    check_eager(backend, requests, requests.batch(decode, prefills))
    check_eager(backend, requests, requests.batch(decode[:1:-1], prefills[::-1][:3]))


@pytest.mark.parametrize("name", EVERY_NAME)
def test_decode_rows_alone_and_prompts_alone_equal_reference(device, name) -> None:
    setup = make_setup(device, 2, 128, 16)
    requests = Requests(setup, LENGTHS)
    backend = make(name, setup)
    check_eager(backend, requests, requests.batch([5], []))
    check_eager(backend, requests, requests.batch(list(range(len(LENGTHS))), []))
    check_eager(backend, requests, requests.batch([], [(8, 1)]))
    check_eager(backend, requests, requests.batch([], [(i, int(requests.lengths[i])) for i in range(len(LENGTHS))]))


@pytest.mark.parametrize("shape", [(2, 128, 16), (5, 128, 64), (4, 64, 16)], ids=["group2", "group5", "dim64"])
@pytest.mark.parametrize("name", EVERY_NAME)
def test_graph_replayed_with_other_rows_and_lengths_equals_reference(device, name, shape) -> None:
    """The device is held up, so that the host prepares several steps before the first one runs."""
    if not is_ready(name, *shape):
        pytest.skip("its kernel would have to be compiled: MINISGL_TEST_JIT=1")
    setup = make_setup(device, *shape)
    requests = Requests(setup, LENGTHS, width=-(-setup.max_seq_len // setup.page_size))
    rng, num = random.Random(0), len(LENGTHS)
    steps = [requests.host_rows([0] * 8), requests.host_rows(list(range(num - 8, num)))]
    steps.append(requests.host_rows([num - 1, *[-1] * 7]))  # one row, the others pad
    for num_rows in (3, 8, 7, 8, 1):
        slots = rng.sample(range(num), num_rows)
        lengths = [rng.randint(1, LENGTHS[slot]) for slot in slots] + [1] * (8 - num_rows)
        steps.append(requests.host_rows(slots + [-1] * (8 - num_rows), lengths))
    check_replays(make(name, setup), requests, steps + steps[::-1], delay=200_000_000)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_graphs_of_several_sizes_and_eager_steps_do_not_disturb_each_other(device, name) -> None:
    setup = make_setup(device, 2, 128, 16)
    requests = Requests(setup, LENGTHS, width=-(-setup.max_seq_len // setup.page_size))
    backend = make(name, setup)
    for sizes in ((8, 1), (3, 8)):
        for size in sizes:
            steps = [requests.host_rows(list(range(i, i + size))) for i in range(len(LENGTHS) - size)]
            check_replays(backend, requests, steps)
        check_eager(backend, requests, requests.batch([7, 2], [(9, 20)]))


@pytest.mark.skipif(IS_INTERPRETED, reason="too long for the interpreter")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "torch"])
def test_one_long_row_among_255_short_ones_equals_reference(device, name) -> None:
    setup = make_setup(device, 2, 128, 16, num_kv_heads=8, max_rows=256, max_seq_len=40_960, windows=(None,))
    lengths = [40_960, *(1 + 7 * i % 50 for i in range(255))]
    requests = Requests(setup, lengths, width=2560)
    order = random.Random(0).sample(range(256), 256)
    short = [min(lengths[request], 3) for request in order]
    steps = [requests.host_rows(order), requests.host_rows(order, short), requests.host_rows(order[::-1])]
    check_replays(make(name, setup), requests, steps)
    check_eager(make(name, setup), requests, requests.batch(order, []))


@pytest.mark.parametrize("name", EVERY_NAME)
def test_sliding_windows_are_honoured_or_refused_by_name(device, name) -> None:
    setup = make_setup(device, 2, 128, 16, windows=(None, 24, 100))
    if not ATTENTION[name].has_windows:
        with pytest.raises(ModelLoadError, match=f"{name} has no sliding windows"):
            make(name, setup)
        return
    if not is_ready(name, 2, 128, 16, has_window=True):
        pytest.skip("its kernel would have to be compiled: MINISGL_TEST_JIT=1")
    requests = Requests(setup, LENGTHS + [length for length, _ in PROMPTS], width=256)
    backend, num = make(name, setup), len(LENGTHS)
    prefills = [(num + i, count) for i, (_, count) in enumerate(PROMPTS)]
    check_eager(backend, requests, requests.batch(list(range(num)), prefills))
    check_replays(backend, requests, [requests.host_rows(list(range(i, i + 6))) for i in range(num - 6)])


@pytest.mark.parametrize("prefill", NAMES)
@pytest.mark.parametrize("decode", NAMES)
def test_pair_of_backends_equals_reference(device, prefill, decode) -> None:
    setup = make_setup(device, 5, 128, 16)
    requests = Requests(setup, LENGTHS, width=256)
    backend = PairedAttention(make(prefill, setup), make(decode, setup))
    check_eager(backend, requests, requests.batch([3, 7, 8], [(9, 100), (5, 5)]))
    check_replays(backend, requests, [requests.host_rows([1, 9, -1]), requests.host_rows([8, 8, 2])])
