"""Where a number was measured: commit and machine."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_commit() -> str:
    """Short commit id of this checkout, with "+" where files differ from it; "unknown" outside of one."""
    commit = _run("git", "rev-parse", "--short=10", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+" if _run("git", "status", "--porcelain") else "")


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, GPUs, and versions."""
    gpus = _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "cpu": _read_cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus.splitlines(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _find_version(name) for name in ("torch", "minisgl")},
    }


def _read_cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _run(*command: str) -> str:
    """Its output, or nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
