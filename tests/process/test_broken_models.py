"""A broken model is one ModelLoadError that names the file and what is wrong, before any process is started."""

import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from model_folders import STRING, list_tensors, write_folder, write_gguf, write_json, write_safetensors
from tokenizers_made_here import make_byte_tokenizer

from minisgl.errors import ModelLoadError
from minisgl.llm import LLM

ROOT = Path(__file__).parents[2]
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def shard(folder: Path) -> dict[str, str]:
    """Cut the weights into a.safetensors and b.safetensors with an index; returns its map."""
    tensors = list_tensors(folder)
    (folder / WEIGHTS).unlink()
    names = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
    for file, part in names.items():
        write_safetensors(folder / file, {name: tensors[name] for name in part})
    weight_map = {name: file for file, part in names.items() for name in part}
    write_json(folder / INDEX, {"weight_map": weight_map})
    return weight_map


def change_config(folder: Path, **changes: object) -> None:
    write_json(folder / "config.json", {**json.loads((folder / "config.json").read_text()), **changes})


def change_tensors(folder: Path, **changes: tuple[int, ...] | None) -> None:
    tensors = {**list_tensors(folder), **{name.replace("__", "."): shape for name, shape in changes.items()}}
    write_safetensors(folder / WEIGHTS, {name: shape for name, shape in tensors.items() if shape is not None})


def cut_shard(folder: Path) -> None:
    shard(folder)
    os.truncate(folder / "b.safetensors", (folder / "b.safetensors").stat().st_size - 100)


def lose_shard(folder: Path) -> None:
    shard(folder)
    (folder / "a.safetensors").unlink()


def name_absent_file(folder: Path) -> None:
    write_json(folder / INDEX, {"weight_map": {**shard(folder), "model.norm.weight": "c.safetensors"}})


def change_dtype(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes().replace(b'"F32"', b'"I32"', 1))


def leave_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": 1}))


def put_pipe(name: str) -> Callable[[Path], None]:
    """A pipe that nobody writes to."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def cut_gguf(folder: Path) -> None:
    path = write_gguf(folder / "m.gguf")
    os.truncate(path, path.stat().st_size // 2)


def change_gguf_type(folder: Path) -> None:
    path, name = write_gguf(folder / "m.gguf"), b"blk.0.attn_q.weight"
    data = bytearray(path.read_bytes())
    place = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and both sizes
    data[place : place + 4] = struct.pack("<I", 34)
    path.write_bytes(data)


BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json does not exist"]),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{'a': 1}"), ["config.json is not valid JSON"]),
    "config is a pipe": (put_pipe("config.json"), ["config.json is not a file"]),
    "architecture": (
        lambda f: change_config(f, architectures=["PhiForCausalLM"]),
        ["config.json", "PhiForCausalLM", "supported are LlamaForCausalLM", "Qwen3MoeForCausalLM"],
    ),
    "rotary kind": (
        lambda f: change_config(f, rope_parameters={"rope_type": "longrope"}),
        ["config.json", "rope_parameters.rope_type is 'longrope'", "default, linear, dynamic, llama3, yarn"],
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ["has no weights: no .safetensors file"]),
    "pickle alone": (leave_pickle, ["only pytorch_model.bin", "never read", "save_pretrained"]),
    "weights are a pipe": (put_pipe(WEIGHTS), [f"{WEIGHTS} is not a file"]),
    "cut shard": (cut_shard, ["b.safetensors has", "but its header says", "cut off"]),
    "lost shard": (lose_shard, [INDEX, "do not exist: a.safetensors"]),
    "index names an absent file": (name_absent_file, [INDEX, "do not exist: c.safetensors"]),
    "dtype": (change_dtype, ["model.embed_tokens.weight (I32)", "supported are F64, F32, F16, BF16"]),
    "shape": (
        lambda f: change_tensors(f, model__layers__1__mlp__up_proj__weight=(3, 64)),
        ["model.layers.1.mlp.up_proj.weight has the shape (3, 64), expected (128, 64)"],
    ),
    "missing tensor": (
        lambda f: change_tensors(f, model__layers__1__mlp__up_proj__weight=None),
        ["lacks 1 tensors: model.layers.1.mlp.up_proj.weight"],
    ),
    "extra tensor": (lambda f: change_tensors(f, model__more=(3,)), ["has no place for: model.more"]),
    "cut GGUF": (cut_gguf, ["m.gguf cannot be read as GGUF", "ends at byte"]),
    "GGUF type": (change_gguf_type, ["m.gguf", "'blk.0.attn_q.weight'", "type 34; supported are F32, F16, BF16, Q4_0"]),
    "GGUF architecture": (
        lambda f: write_gguf(f / "m.gguf", general__architecture=(STRING, "phi3")),
        ["m.gguf", "'phi3' is not supported; supported are llama, mistral", "qwen3moe"],
    ),
}


def break_model(folder: Path, name: str) -> tuple[Path, list[str]]:
    """-> (the broken model, what its error must say)"""
    write_folder(folder)
    change, parts = BROKEN[name]
    change(folder)
    return (folder / "m.gguf" if (folder / "m.gguf").exists() else folder), parts


@pytest.mark.time_limit(20)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_model_is_named_before_a_process_starts(tmp_path: Path, monkeypatch, name: str) -> None:
    model, parts = break_model(tmp_path / "m", name)
    monkeypatch.setattr(subprocess, "Popen", None)
    started = time.process_time()
    with pytest.raises(ModelLoadError) as caught:
        LLM(model, device="cpu")
    assert time.process_time() - started < 2  # of this process alone: others may keep the machine busy
    for part in (str(model), *parts):
        assert part in str(caught.value)


def test_number_of_ranks_that_does_not_fit_is_refused_before_a_process_starts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    for changes, num_ranks, text in (
        ({}, 3, "4 attention heads do not divide over tp_size 3"),
        ({"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 3}, 2, "3 KV heads do not divide over"),
        (
            {"num_attention_heads": 6, "hidden_size": 96, "intermediate_size": 126},
            3,
            "2 KV heads do not divide over tp_size 3",
        ),
        ({"intermediate_size": 126}, 4, r"126 MLP columns \(intermediate_size\) do not divide over tp_size 4"),
    ):
        with pytest.raises(ModelLoadError, match=text):
            LLM(write_folder(tmp_path, **changes), device="cpu", tp_size=num_ranks)


@pytest.mark.parametrize(
    ("vocab_size", "text", "match"),
    [
        (320, "{", "cannot load the tokenizer of .*JSONDecodeError"),
        (200, None, "tokenizer does not fit the model: its largest token id is 258, .* vocabulary has 200 ids"),
    ],
)
def test_tokenizer_that_does_not_fit_is_named_and_leaves_no_process(
    tmp_path: Path, vocab_size: int, text: str | None, match: str
) -> None:
    """It is loaded while the engine starts, which is ended then."""
    folder = write_folder(tmp_path / "m", make_byte_tokenizer(), vocab_size=vocab_size)
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelLoadError, match=match):
        LLM(folder, device="cpu")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [child for child in children if "minisgl" in Path(f"/proc/{child}/cmdline").read_text()]


@pytest.mark.parametrize("name", ["architecture", "cut shard", "pickle alone", "GGUF type"])
def test_engine_of_a_broken_model_exits_with_3_and_one_line(tmp_path: Path, name: str) -> None:
    model, parts = break_model(tmp_path / "m", name)
    command = [sys.executable, "-m", "minisgl.engine", "--model", str(model), "--address", f"ipc://{tmp_path}/engine"]
    done = subprocess.run([*command, "--device", "cpu"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1), done.stderr
    assert all(part in done.stderr for part in (str(model), *parts))
