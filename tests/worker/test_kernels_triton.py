"""Runs the GPU tests of the kernels through Triton's interpreter, on the CPU.

Each file runs in a process of its own: the interpreter is chosen by the environment before Triton is first imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240


@pytest.mark.time_limit(TIMEOUT_S + 10)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("name", "selection"),
    [
        ("test_kernels.py", "sample or noise"),
        ("test_kernels.py", "linear"),
        ("test_kernels.py", "not (sample or noise or linear)"),
        ("test_kernels_moe.py", "sparse_mlp or broken"),
        ("test_kernels_attention.py", "decode"),
        ("test_kernels_attention.py", "not decode"),
        ("test_attention_backends.py", "group5-dim128-page1 or alone or windows or pair"),
    ],
)
def test_kernels_run_interpreted_equal_their_plain_twins(name, selection):
    # The interpreter computes with numpy, which warns of the infinities that the kernels handle on purpose.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    result = subprocess.run(
        [*command, "-k", selection, str(ROOT / "tests" / "gpu" / name)],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
