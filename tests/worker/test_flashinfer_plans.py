"""The FlashInfer backends' part on the host, with a stand-in for the package that computes in plain torch."""

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from minisgl_worker.attention.base import AttentionSetup
from tests.attention_cases import Requests, check_eager, check_replays

FAKE = Path(__file__).parents[1] / "fake_flashinfer"
LENGTHS = [1, 2, 15, 16, 17, 64, 65, 130]


def forget_package() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]
    for name in ("flashinfer", "jit"):
        sys.modules.pop(f"minisgl_worker.attention.{name}", None)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the backends, which imports the stand-in."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    forget_package()
    monkeypatch.syspath_prepend(FAKE)
    yield importlib.import_module("minisgl_worker.attention.flashinfer")
    forget_package()


def make_setup(windows: tuple[int | None, ...], page_size: int) -> AttentionSetup:
    return AttentionSetup(10, 2, 64, windows, torch.bfloat16, page_size, 16, 160, torch.device("cpu"))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("windows", [(None, None), (None, 24, 7), (5,)])
def test_eager_steps_and_replays_in_turn_equal_reference(backends, windows, page_size: int) -> None:
    setup = make_setup(windows, page_size)
    requests = Requests(setup, [*LENGTHS, 90, 65])
    backend = backends.FlashInferAttention(setup, "fa2")
    for size in (3, 8, 3):
        check_eager(backend, requests, requests.batch([3, 0, 7], [(8, 40), (9, 65)]))
        check_replays(backend, requests, [requests.host_rows([*range(i, i + size - 1), -1]) for i in range(2)])
        check_replays(backend, requests, [requests.host_rows([7] * size), requests.host_rows([7] * size, [1] * size)])
    check_eager(backend, requests, requests.batch([], [(8, 1)]))
    check_eager(backend, requests, requests.batch([2], []))


def test_each_step_is_planned_once_per_window_and_fully_only_at_first(backends) -> None:
    import flashinfer

    setup = make_setup((None, 24, None, 24), 16)
    requests = Requests(setup, LENGTHS)
    backend = backends.FlashInferAttention(setup, "fa3")
    steps = [requests.host_rows([i, -1]) for i in range(3)]
    check_replays(backend, requests, steps)
    check_eager(backend, requests, requests.batch([1, 2, 3], [(4, 5)]))
    assert flashinfer.PLANS == [("decode", 2)] * 2 + [("fast", 2)] * 4 + [("prefill", 4)] * 2


def test_kernels_are_compiled_at_start_one_for_each_use_of_windows_and_announced(backends, caplog) -> None:
    from flashinfer.jit import SPECS

    with caplog.at_level(logging.WARNING):
        backends.FlashInferAttention(make_setup((None, 24, 7), 16), "fa2")
    names = ["fa2 head size 64, windows False", "fa2 head size 64, windows True"]
    assert [spec.name for spec in SPECS] == names and all(spec.is_compiled for spec in SPECS)
    assert [f"attention kernel {name}, once: about 25 s" in caplog.text for name in names] == [True, True]


def test_plans_of_steps_in_flight_lie_in_different_places(backends) -> None:
    setup = make_setup((None,), 16)
    requests = Requests(setup, LENGTHS)
    backend = backends.FlashInferAttention(setup, "fa2")
    places = []
    for i in range(8):
        backend.plan_replay(requests.host_rows([i]))
        places.append(backend._current[None]._pin_memory_int_workspace_buffer.data_ptr())
    assert len(set(places)) == 8
