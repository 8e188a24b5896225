"""A model that lies on this machine is served without a single network call, by any of the processes."""

import os
import subprocess
import sys
from pathlib import Path

from model_folders import write_folder
from tokenizers_made_here import make_byte_tokenizer

ROOT = Path(__file__).parents[2]
# Every Python process imports this when it starts, the engine and the worker too.
WATCH = """
import os, sys

def watch(event, arguments):
    is_lookup = event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyname_ex")
    is_call = event in ("socket.connect", "socket.sendto", "socket.sendmsg") and isinstance(arguments[-1], tuple)
    if is_lookup or is_call:
        with open(os.environ["CALLS_FILE"], "a") as file:
            file.write(f"{sys.argv[:1]} {event} {arguments[1:] if is_call else arguments}\\n")
        raise OSError("this test has no network")

sys.addaudithook(watch)
with open(os.environ["CALLS_FILE"] + ".watched", "a") as file:
    file.write(" ".join(sys.orig_argv) + "\\n")
"""
PROGRAM = """
import sys
from minisgl.llm import LLM
from minisgl.core import SamplingParams

if __name__ == "__main__":
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(sys.argv[1], device="cpu", num_pages=16) as llm:
        (result,) = llm.generate(["abc"], params)
        answer = llm.chat([{"role": "user", "content": "abc"}], params)
        print("tokens", len(result["token_ids"]) + len(answer["token_ids"]))
"""


def serve(model: str, folder: Path, **environment: str) -> tuple[str, list[str]]:
    """Load and run a model in a program of its own; returns its output and the network calls, all of which fail."""
    watched = folder / "watched"
    watched.mkdir(exist_ok=True)
    (watched / "sitecustomize.py").write_text(WATCH)
    calls = folder / "calls"
    calls.write_text("")
    kept = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    path = os.pathsep.join([str(watched), str(ROOT)])
    environment = {**kept, "PYTHONPATH": path, "CALLS_FILE": str(calls), **environment}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model], env=environment, capture_output=True, text=True, timeout=80
    )
    return done.stdout + done.stderr, calls.read_text().splitlines()


def cache_repository(home: Path, name: str) -> None:
    """A Hub repository as the client of the Hub keeps it."""
    revision = "0" * 40
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    write_folder(repository / "snapshots" / revision, make_byte_tokenizer())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)


def test_local_folder_is_served_without_a_network_call(tmp_path: Path) -> None:
    output, calls = serve(str(write_folder(tmp_path / "m", make_byte_tokenizer())), tmp_path)
    assert "tokens 4" in output and not calls, output
    programs = (tmp_path / "calls.watched").read_text()
    assert "-m minisgl.engine" in programs and "-m minisgl_worker" in programs, programs


def test_hub_id_is_served_from_the_cache_without_a_network_call_when_offline(tmp_path: Path) -> None:
    cache_repository(tmp_path / "home", "someone/tiny")
    output, calls = serve("someone/tiny", tmp_path, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    assert "tokens 4" in output and not calls, output
    output, calls = serve("someone/gone", tmp_path, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    assert "ModelLoadError" in output and "someone/gone" in output and not calls


def test_hub_id_is_asked_of_the_network_when_online(tmp_path: Path) -> None:
    """So the two tests above would have seen a call."""
    cache_repository(tmp_path / "home", "someone/tiny")
    _, calls = serve("someone/tiny", tmp_path, HF_HOME=str(tmp_path / "home"))
    assert any("getaddrinfo" in call for call in calls)
