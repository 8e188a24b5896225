"""What must never appear in the code: ways in which bytes from outside become objects or commands."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("minisgl", "minisgl_worker")
TOOLS = ("scripts", "benchmarks", "examples")

MODULES = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
# It pickles what it sends and, when it spawns, runs the user's script a second time. Tools have no user's script.
PACKAGE_MODULES = (*MODULES, "multiprocessing")
BUILTINS = ("eval", "exec", "compile", "__import__")
METHODS = (
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)
CALLS = ("torch.load", "torch.save", "torch.package", "numpy.load", "np.load", "os.system", "os.popen", "yaml.load")
TRUE_ARGUMENTS = ("trust_remote_code", "allow_pickle", "shell")


def find_dangers(source: str, modules: tuple[str, ...] = PACKAGE_MODULES) -> list[str]:
    """One line for each use of something above."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in modules]
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in full if name.split(".")[0] in modules or name in CALLS]
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            names = [node.id]
        elif isinstance(node, ast.Attribute) and (node.attr in METHODS or ast.unparse(node) in CALLS):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.keyword) and node.arg in TRUE_ARGUMENTS:
            is_false = isinstance(node.value, ast.Constant) and node.value.value is False
            names = [] if is_false else [f"{node.arg}={ast.unparse(node.value)}"]
        found += [f"line {node.lineno}: {name}" for name in names]
    return found


@pytest.mark.parametrize("folder", [*PACKAGES, *TOOLS])
def test_find_dangers_in_all_code_none(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    modules = PACKAGE_MODULES if folder in PACKAGES else MODULES
    found = [f"{path.relative_to(ROOT)}: {line}" for path in files for line in find_dangers(path.read_text(), modules)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source, expected",
    [
        ("import pickle", "pickle"),
        ("def f():\n    from marshal import loads", "marshal.loads"),
        ("import multiprocessing.connection", "multiprocessing.connection"),
        ("from torch import load", "torch.load"),
        ("value = torch.load(path)", "torch.load"),
        ("read = torch.load", "torch.load"),
        ("x = eval(text)", "eval"),
        ("run = exec", "exec"),
        ("socket.recv_pyobj()", "socket.recv_pyobj"),
        ("dist.all_gather_object(a, b)", "dist.all_gather_object"),
        ("np.load(path, mmap_mode='r')", "np.load"),
        ("f(path, allow_pickle=True)", "allow_pickle=True"),
        ("subprocess.run(line, shell=flag)", "shell=flag"),
        ("AutoTokenizer.from_pretrained(p, trust_remote_code=True)", "trust_remote_code=True"),
    ],
)
def test_find_dangers_in_a_planted_line_is_found(source, expected):
    assert [danger.split(": ")[1] for danger in find_dangers(source)] == [expected]


@pytest.mark.parametrize("source", ["model.eval()", "re.compile(p)", "f(trust_remote_code=False)", "json.load(file)"])
def test_find_dangers_in_a_harmless_line_none(source):
    assert find_dangers(source) == []
