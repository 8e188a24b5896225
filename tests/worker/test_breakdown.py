"""The breakdown of a step's time: it adds up, and names what it should."""

import pytest
import torch

from minisgl.protocol import Step
from minisgl_worker.breakdown import IDLE, OTHER, add_up_spans, choose_windows, classify
from minisgl_worker.kernels import native
from tests.worker.checkpoints import make_step

CHUNK = (0, 0, 1, 1)


def steps(kinds: str) -> list[Step]:
    """`p`: a step with a prompt, `d`: decode rows alone."""
    return [make_step(i, prefills=CHUNK if kind == "p" else ()) for i, kind in enumerate(kinds)]


def test_spans_that_overlap_count_once_and_gaps_are_idle() -> None:
    spans = [("_decode_kernel", 1.0, 3.0), ("nvjet_gemm", 2.0, 4.0), ("_rms_norm_kernel", 6.0, 7.0)]
    found = add_up_spans("decode steps", 2, spans[::-1])
    assert found.seconds == 6.0
    assert found.parts == {"attention": 2.0, "matmuls": 1.0, OTHER: 1.0, IDLE: 2.0}
    assert "3000.000 ms each" in found.format() and "33.3%" in found.format()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("_prefill_kernel", "attention"), ("native::attend", "attention"), ("aten::mm", "matmuls"),
        ("native::linear", "matmuls"), ("nvjet_tst_128x256", "matmuls"), ("_scan_kernel", "sampling"),
        ("ncclDevKernel_AllReduce", "collectives"), ("Memcpy HtoD", "copies"), ("_rms_norm_kernel", OTHER),
    ],
)  # fmt: skip
def test_names_belong_to_their_part(name: str, part: str) -> None:
    assert classify(name) == part


@pytest.mark.parametrize("kinds", ["p", "d", "pd", "dp", "p" * 40 + "d" * 100, "d" * 200, "pd" * 50, "ddpdd"])
def test_windows_are_in_order_and_of_one_kind(kinds: str) -> None:
    end = 0
    for label, start, stop in choose_windows(steps(kinds)):
        assert end <= start < stop <= len(kinds)
        assert set(kinds[start:stop]) == {"p" if label == "steps with prompts" else "d"}
        end = stop
    assert end > 0


def test_native_kernels_show_by_name_in_a_profile() -> None:
    x = torch.ones(2, 32)
    kernels = native.kernels_for(x)
    if kernels is None:
        pytest.skip("no C++ compiler on this machine")
    with torch.profiler.profile() as profile:
        kernels.rms_norm(x, x[0], 1e-5)
    assert "native::norm" in {event.key for event in profile.key_averages()}
    assert kernels.rms_norm(x, x[0], 0.0).eq(1).all()
