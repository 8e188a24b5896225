"""Who may import whom. `LAYERS` is the table; an AST walk of both packages enforces it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("minisgl", "minisgl_worker")

BASE = ("minisgl", "minisgl.core", "minisgl.errors")
MODEL = (
    *("minisgl.model_folder", "minisgl.model_config", "minisgl.families", "minisgl.rope_config", "minisgl.checkpoint"),
    *("minisgl.safetensors_files", "minisgl.gguf_header", "minisgl.gguf_config", "minisgl.json_file"),
    "minisgl.sharding",
)
REQUIREMENTS = ("minisgl.requirements",)
WIRE = ("minisgl.config", "minisgl.wire_fields", "minisgl.protocol", "minisgl.transport")
LIFELINE = ("minisgl.lifeline",)
SCHEDULER = ("minisgl.scheduler", "minisgl.scheduler.*")
TEXT = ("minisgl.tokenizer", "minisgl.detokenizer", "minisgl.gguf_tokenizer")
ENGINE = ("minisgl.engine", "minisgl.frontends", "minisgl.worker_group")
FRONTEND = (
    *("minisgl.llm", "minisgl.batch_call", "minisgl.streams", "minisgl.completion", "minisgl.request_builder"),
    *("minisgl.client", "minisgl.connection", "minisgl.mailbox", "minisgl.outputs"),
)
SERVER = ("minisgl.server", "minisgl.server.*")
COMMANDS = ("minisgl.cli", "minisgl.__main__")
CHAT = ("minisgl.chat",)
WORKER = ("minisgl_worker", "minisgl_worker.*")
# Modules of the worker whose libraries a machine without a GPU may lack: others import them only when they use them.
OPTIONAL = (
    "minisgl_worker.kernels.*_triton",
    *("minisgl_worker.attention.triton", "minisgl_worker.attention.flashinfer", "minisgl_worker.attention.xqa"),
    "minisgl_worker.attention.jit",
)


@dataclass(frozen=True)
class Layer:
    """What `modules` may import beside the standard library. Names may be patterns."""

    modules: tuple[str, ...]
    own: tuple[str, ...] = ()  # modules of this project
    third_party: tuple[str, ...] = ()  # at the top of the file
    deferred: tuple[str, ...] = ()  # within functions: what is heavy or optional, or imports it


LAYERS = (
    Layer(modules=BASE),
    Layer(modules=("minisgl.config",), own=BASE),
    Layer(modules=REQUIREMENTS, own=(*BASE, *MODEL, "minisgl.config")),
    Layer(modules=("minisgl.wire_fields",), own=BASE),
    Layer(modules=("minisgl.protocol",), own=(*BASE, "minisgl.wire_fields"), third_party=("msgpack",)),
    Layer(modules=("minisgl.transport",), own=(*BASE, "minisgl.protocol"), third_party=("zmq",)),
    Layer(modules=MODEL, own=(*BASE, *MODEL), deferred=("gguf", "huggingface_hub")),
    Layer(
        modules=SCHEDULER,
        own=(*BASE, *MODEL, "minisgl.config", "minisgl.protocol", *SCHEDULER),
        third_party=("numpy",),
    ),
    Layer(
        modules=TEXT,
        own=(*BASE, *MODEL, *WIRE, *TEXT),
        third_party=("numpy",),
        deferred=("transformers", "tokenizers", "minisgl.gguf_tokenizer"),
    ),
    Layer(modules=LIFELINE),
    Layer(modules=("minisgl.supervisor",), own=(*BASE, *MODEL, *WIRE, *LIFELINE)),
    Layer(
        modules=ENGINE,
        own=(*BASE, *MODEL, *REQUIREMENTS, *WIRE, *LIFELINE, *SCHEDULER, "minisgl.supervisor", *ENGINE),
        third_party=("numpy",),
    ),
    Layer(
        modules=FRONTEND,
        own=(*BASE, *MODEL, *REQUIREMENTS, *WIRE, *TEXT, "minisgl.supervisor", *FRONTEND),
        third_party=("numpy",),
        deferred=("tqdm",),
    ),
    Layer(
        modules=SERVER,
        own=(*BASE, *MODEL, *WIRE, *TEXT, *FRONTEND, *SERVER),
        third_party=("fastapi", "starlette", "uvicorn", "prometheus_client"),
    ),
    # Help and version answer at once: whatever a command needs is imported when it runs.
    Layer(
        modules=COMMANDS,
        own=(*BASE, "minisgl.config", *COMMANDS),
        deferred=(*SERVER, *FRONTEND, *CHAT),
    ),
    Layer(modules=CHAT, own=(*BASE, *FRONTEND), third_party=("prompt_toolkit", "rich")),
    Layer(
        modules=OPTIONAL,
        own=(*BASE, *MODEL, *WIRE, *WORKER),
        third_party=("numpy", "torch", "triton", "flashinfer"),
    ),
    Layer(
        modules=WORKER,
        own=(*BASE, *MODEL, *REQUIREMENTS, *WIRE, *LIFELINE, *WORKER),
        third_party=("numpy", "torch", "tqdm"),
        # Its process watches for the end of its parent, and sends heartbeats, before it imports torch.
        deferred=(
            *("gguf", *OPTIONAL, "minisgl_worker.attention.*"),
            *(
                "minisgl_worker.worker",
                "minisgl_worker.replay",
                "minisgl_worker.model_runner",
                "minisgl_worker.parallel",
            ),
        ),
    ),
)

# The scheduler decides from what it is told: time and chance are arguments.
FORBIDDEN_STANDARD_MODULES = {
    "minisgl.scheduler.*": ("time", "datetime", "random", "threading", "socket", "asyncio", "subprocess", "logging"),
}


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    is_deferred: bool


def find_modules() -> dict[str, Path]:
    """Dotted name of every module of both packages -> its file."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def find_imports(source: str, modules: set[str]) -> Iterator[Import]:
    """Every import statement, and each dynamic import as the target "dynamic import"."""
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while todo:
        node, is_deferred = todo.pop()
        inside = is_deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        todo.extend((child, inside) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, is_deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in modules else base, node.lineno, is_deferred)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("__import__", "import_module"):
            yield Import("dynamic import", node.lineno, is_deferred)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def find_layer(module: str) -> Layer | None:
    return next((layer for layer in LAYERS if matches(module, layer.modules)), None)


def find_violations(module: str, source: str, modules: set[str]) -> list[str]:
    layer = find_layer(module)
    if layer is None:
        return [f"{module} is in no layer; add it to LAYERS"]
    bad_standard = {
        n for pattern, names in FORBIDDEN_STANDARD_MODULES.items() if fnmatchcase(module, pattern) for n in names
    }
    found = []
    for item in find_imports(source, modules):
        top = item.target.split(".")[0]
        if top in PACKAGES and item.is_deferred:
            is_allowed = matches(item.target, layer.deferred)
        elif top in PACKAGES:
            is_optional = matches(item.target, OPTIONAL) and not matches(module, OPTIONAL)
            is_allowed = matches(item.target, layer.own) and not is_optional
        elif item.target != "dynamic import" and top in sys.stdlib_module_names:
            is_allowed = top not in bad_standard
        else:
            is_allowed = top in layer.third_party or (item.is_deferred and top in layer.deferred)
        if not is_allowed:
            found.append(f"{module}:{item.line}: {'deferred ' if item.is_deferred else ''}{item.target}")
    return found


def test_find_violations_in_both_packages_none():
    modules = find_modules()
    assert {"minisgl.core", "minisgl.scheduler", "minisgl_worker"} <= modules.keys()
    found = [v for name, path in modules.items() for v in find_violations(name, path.read_text(), set(modules))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "module, source, expected",
    [
        ("minisgl.core", "import numpy", "minisgl.core:1: numpy"),
        ("minisgl.config", "from minisgl.transport import Channel", "minisgl.config:1: minisgl.transport"),
        ("minisgl.protocol", "import zmq", "minisgl.protocol:1: zmq"),
        ("minisgl.model_folder", "import huggingface_hub", "minisgl.model_folder:1: huggingface_hub"),
        ("minisgl.model_folder", "def f():\n    import torch", "minisgl.model_folder:2: deferred torch"),
        ("minisgl.scheduler.policy", "import time", "minisgl.scheduler.policy:1: time"),
        ("minisgl.scheduler.policy", "from minisgl import transport", "minisgl.scheduler.policy:1: minisgl.transport"),
        ("minisgl.engine", "import minisgl.tokenizer", "minisgl.engine:1: minisgl.tokenizer"),
        ("minisgl.engine", "def f():\n    import minisgl.supervisor", "minisgl.engine:2: deferred minisgl.supervisor"),
        ("minisgl.engine", "if x:\n    import torch.cuda", "minisgl.engine:2: torch.cuda"),
        ("minisgl.engine", "import importlib\nimportlib.import_module('torch')", "minisgl.engine:2: dynamic import"),
        ("minisgl.llm", "from minisgl.scheduler.policy import P", "minisgl.llm:1: minisgl.scheduler.policy"),
        ("minisgl.llm", "from .core import SamplingParams", "minisgl.llm:1: .core"),
        ("minisgl.llm", "async def f():\n    import minisgl_worker", "minisgl.llm:2: deferred minisgl_worker"),
        (
            "minisgl_worker.worker",
            "from minisgl.supervisor import spawn",
            "minisgl_worker.worker:1: minisgl.supervisor",
        ),
        ("minisgl_worker.worker", "import transformers", "minisgl_worker.worker:1: transformers"),
        ("minisgl_worker.worker", "def f():\n    import triton", "minisgl_worker.worker:2: deferred triton"),
        (
            "minisgl_worker.kernels.norm",
            "from minisgl_worker.kernels import norm_triton",
            "minisgl_worker.kernels.norm:1: minisgl_worker.kernels.norm_triton",
        ),
        ("minisgl.other", "", "minisgl.other is in no layer; add it to LAYERS"),
    ],
)
def test_find_violations_in_a_planted_module_is_found(module, source, expected):
    modules = {"minisgl.transport", "minisgl.scheduler.policy", "minisgl_worker.kernels.norm_triton"}
    assert find_violations(module, source, modules) == [expected]


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=20
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("module", ["minisgl.core", "minisgl.errors", "minisgl.protocol", "minisgl.llm"])
def test_import_of_a_light_module_pulls_no_torch(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'minisgl_worker'}} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"


def test_engine_help_is_fast_and_pulls_no_torch():
    code = """
import runpy, sys, time
try:
    runpy.run_module("minisgl.engine", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(sorted({"torch", "transformers", "minisgl_worker"} & set(sys.modules)))
print(time.process_time())  # processor time, so that a busy machine does not count
"""
    *help_text, heavy, seconds = run_python(code, "--help").splitlines()
    assert any("--model" in line for line in help_text)
    assert heavy == "[]"
    assert float(seconds) < 1.0
