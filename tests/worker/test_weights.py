"""Checkpoints into fused places: layouts, dtypes, quantized files, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from model_folders import write_folder
from safetensors.torch import load_file, save_file

from minisgl.config import EngineConfig
from minisgl.errors import ModelLoadError
from minisgl.model_folder import resolve_model
from minisgl_worker import weights
from minisgl_worker.layers import WeightSource
from minisgl_worker.model_runner import ModelRunner
from minisgl_worker.weights import load_weights
from tests.worker.checkpoints import VOCAB_SIZE, make_admit, make_step, read_tokens, write_checkpoint

PROMPT = [4, 8, 15, 16, 23, 42]


def answer(folder: Path, **options: object) -> list[int]:
    """Greedy tokens after a prompt."""
    runner = make_runner(folder, **options)
    admit = make_admit(0, PROMPT, [0, 1, 2, 3, 4])
    results = [runner.execute(make_step(0, admits=(admit,), prefills=(0, 0, len(PROMPT), 1))).result()]
    results += [runner.execute(make_step(i, decode=[0], run_decode=True)).result() for i in range(1, 12)]
    return [token for result in results for token in read_tokens(result.tokens)]


def make_runner(folder: Path, **options: object) -> ModelRunner:
    torch.set_num_threads(1)
    values = {"device": "cpu", "dtype": "float32", "num_pages": 16, "page_size": 4, "max_running_req": 1, **options}
    return ModelRunner(EngineConfig.from_options(folder, values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", "LlamaForCausalLM", attention_bias=True)


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_index_gives_the_same_model_as_one_file(folder: Path) -> None:
    expected = answer(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    save_file({"stray": torch.zeros(2)}, folder / "stray.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert answer(folder) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_source_dtype_is_converted(folder: Path, dtype: torch.dtype) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.bfloat16).to(dtype)

    rewrite(folder, lambda tensors: tensors.update({k: v.to(torch.bfloat16).float() for k, v in tensors.items()}))
    expected = answer(folder)
    rewrite(folder, change)
    assert answer(folder) == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks 1 tensors: model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "1 tensors that the model has no place for: model.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"model.norm.weight has the shape \(5,\).*\(32,\)"),
        (lambda t: [t.pop(k) for k in list(t) if "layers" in k], "lacks 26 tensors"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(folder: Path, change, text: str) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelLoadError, match=text):
        answer(folder)


def test_head_in_the_file_of_a_tied_model_is_left_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tie_word_embeddings=True)
    expected = answer(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": torch.full_like(t["model.embed_tokens.weight"], 9.0)}))
    assert answer(folder) == expected


def test_dummy_weights_need_no_checkpoint_and_are_not_trivial(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first = answer(folder, use_dummy_weight=True)
    assert first == answer(folder, use_dummy_weight=True)
    assert len(set(first)) > 1


def test_small_buffers_give_the_same_model(folder: Path, monkeypatch) -> None:
    """Rows in many parts, a bias in parts, and rows larger than a buffer."""
    expected = answer(folder, dtype="float64")
    for size in (1, 100, 700):
        monkeypatch.setattr(weights, "BUFFER_BYTES", size)
        assert answer(folder, dtype="float64") == expected


def test_file_that_is_cut_off_while_it_is_read_is_named(folder: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    model = resolve_model(str(folder))
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 64)
    name, size = "model.embed_tokens.weight", VOCAB_SIZE * 32
    target = torch.zeros(VOCAB_SIZE, 32)
    sources = [WeightSource(name, torch.zeros(t.shape), t.shape) for name, t in model.tensors.items()]
    with pytest.raises(ModelLoadError, match=rf"{file} ended at byte \d+ while it was read"):
        load_weights(sources, model)
    load_weights([WeightSource(name, target, (VOCAB_SIZE, 32))], model)  # before the cut
    stored = np.fromfile(file, "<f4", size, offset=model.tensors[name].offset_bytes)
    assert torch.equal(target.flatten(), torch.from_numpy(stored))


def test_slices_of_ranks_are_read_from_rows_and_columns(folder: Path) -> None:
    model = resolve_model(str(folder))
    whole = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    name, shape = "model.layers.0.mlp.up_proj.weight", tuple(whole.shape)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rows, columns = torch.zeros(16, 32, dtype=dtype), torch.zeros(48, 8, dtype=dtype)
        sources = [
            WeightSource(name, rows, shape, 0, 32, 16),
            WeightSource(name, columns, shape, 1, 24, 8, offset=1.0),
            WeightSource(name, torch.zeros(0, 32), shape, 0, 48, 0),
        ]
        load_weights(sources, model)
        assert torch.equal(rows, whole[32:].to(dtype)) and torch.equal(columns, whole[:, 24:].to(dtype) + 1)


def test_rank_reads_the_bytes_of_its_slices_and_no_others(tmp_path: Path) -> None:
    """Counted by the system, for both kinds of slices of matrices as large as a model's."""
    config = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 1, "tie_word_embeddings": True}
    folder = write_checkpoint(tmp_path / "m", "LlamaForCausalLM", **config)
    model = resolve_model(str(folder))
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("up", "down")]
    whole = load_file(folder / "model.safetensors")
    for num_ranks in (1, 2):
        share, rank = 4096 // num_ranks, num_ranks - 1
        rows, columns = torch.zeros(share, 2048), torch.zeros(2048, share)
        sources = [
            WeightSource(names[0], rows, (4096, 2048), 0, rank * share, share),
            WeightSource(names[1], columns, (2048, 4096), 1, rank * share, share),
        ]
        before = count_bytes_read()
        load_weights(sources, model)
        num_bytes = 2 * rows.numel() * 4
        assert num_bytes <= count_bytes_read() - before < 1.01 * num_bytes
        assert torch.equal(rows, whole[names[0]][rank * share :])
        assert torch.equal(columns, whole[names[1]][:, rank * share :])


def count_bytes_read() -> int:
    """Bytes that this process has read so far, from files or their cache."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_beside_the_weights_is_a_few_buffers(tmp_path: Path, dtype: str) -> None:
    """Not a tensor, and not the file: two tensors of 168 MB, two threads with two buffers of 16 MiB each."""
    sizes = {"vocab_size": 40_960, "hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 512}
    folder = write_folder(tmp_path / "m", **sizes)
    cores = sorted(os.sched_getaffinity(0))[:2]
    script = str(Path(__file__).parents[2] / "benchmarks" / "bench_loading.py")
    done = subprocess.run(
        [sys.executable, script, str(folder), "--dtype", dtype, "--once"], capture_output=True, text=True, timeout=80,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bytes"] > 2 * 160e6 and 0 < report["seconds"] < 60
    assert report["bytes_beside_weights"] < 130 * 2**20


def test_report_says_seconds_per_gigabyte() -> None:
    assert weights.LoadReport(1_500_000_000, 3.0).describe() == "1.50 GB of weights in 3.0 s (2.00 s per GB)"
