"""Logits through the paged path against transformers, and their independence of how the work is cut."""

import random
from pathlib import Path

import pytest
import torch

from minisgl.checkpoint import expected_tensors
from minisgl.config import EngineConfig
from minisgl_worker.model_runner import ModelRunner
from tests.worker.checkpoints import (
    VOCAB_SIZE,
    make_admit,
    make_step,
    read_tokens,
    reference_logits,
    write_checkpoint,
    write_multimodal,
)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
VARIANTS = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("LlamaForCausalLM", {"num_key_value_heads": 1, "head_dim": 8}),
    ("LlamaForCausalLM", {"num_key_value_heads": 4, "rope_parameters": LLAMA3}),
    ("LlamaForCausalLM", {"rope_parameters": LINEAR}),
    ("LlamaForCausalLM", {"rope_parameters": YARN}),
    ("LlamaForCausalLM", {"rope_parameters": DYNAMIC, "tie_word_embeddings": True}),
    ("MistralForCausalLM", {"rope_parameters": YARN}),
    ("MistralForCausalLM", {"sliding_window": 12}),
    ("MistralForCausalLM", {"sliding_window": 1, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("MistralForCausalLM", {"sliding_window": 40, "rope_parameters": LINEAR}),
    ("Ministral3ForCausalLM", {}),
    ("Ministral3ForCausalLM", {"sliding_window": 9, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("Ministral3ForCausalLM", {"rope_parameters": {**YARN, "rope_type": "default", "llama_4_scaling_beta": 1.0}}),
    ("Qwen2ForCausalLM", {}),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("Qwen2ForCausalLM", {"rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    ("Qwen3ForCausalLM", {}),
    ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ("Qwen3ForCausalLM", {"rope_parameters": YARN, "num_key_value_heads": 1}),
    ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True}),
    ("Qwen3MoeForCausalLM", {}),
    ("Qwen3MoeForCausalLM", {"norm_topk_prob": False, "tie_word_embeddings": True, "attention_bias": True}),
    ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2, "num_hidden_layers": 3, "num_experts_per_tok": 1}),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 10}),
    ("Qwen3MoeForCausalLM", {"rope_parameters": YARN, "num_experts_per_tok": 8}),
    ("Gemma3ForCausalLM", {}),
    ("Gemma3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
    ("Gemma3ForCausalLM", {"rope_parameters": GEMMA_ROPES, "num_key_value_heads": 1}),
    ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2, "head_dim": 24}),
]
PROMPT = [random.Random(3).randrange(VOCAB_SIZE) for _ in range(37)]


TOKENS = [*PROMPT, 5, 17, 3, 80, 41]


class Recorder:
    """A runner whose sampling rows' logits are kept."""

    def __init__(self, folder: Path, **options: object):
        torch.set_num_threads(1)
        values = {"device": "cpu", "num_pages": 64, "page_size": 4, "max_running_req": 4, "max_seq_len": 128, **options}
        self.runner = ModelRunner(EngineConfig.from_options(folder, values))
        self.logits: list[torch.Tensor] = []
        draw = self.runner._sampler.draw

        def keep(logits, slots, positions):
            self.logits.append(logits.clone())
            return draw(logits, slots, positions)

        self.runner._sampler.draw = keep

    def force(self, tokens: list[int], chunk: int, num_cached: int = 0) -> torch.Tensor:
        """Logits after tokens[:chunk...], computed as a prompt cut into chunks and then one token at a time."""
        page_size = self.runner.kv.page_size
        pages = list(range(5, 5 + -(-len(tokens) // page_size)))
        step_id = 0
        for start in range(num_cached, len(PROMPT), chunk):
            admits = (make_admit(1, PROMPT, pages, num_cached=num_cached),) if start == num_cached else ()
            length = min(chunk, len(PROMPT) - start)
            prefill = (1, start, length, int(start + length == len(PROMPT)))
            self.runner.execute(make_step(step_id, admits=admits, prefills=prefill))
            step_id += 1
        for token in tokens[len(PROMPT) :]:
            with torch.inference_mode():
                self.runner._slots.last_token[1] = token
            self.runner.execute(make_step(step_id, decode=[1], run_decode=True))
            step_id += 1
        return torch.cat(self.logits)


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path: Path, architecture: str, overrides: dict[str, object]) -> None:
    folder = write_checkpoint(tmp_path / "m", architecture, **overrides)
    tokens = TOKENS
    expected = reference_logits(folder, tokens)[len(PROMPT) - 1 :]
    for chunk in (len(PROMPT), 8, 1):
        logits = Recorder(folder, dtype="float32").force(tokens, chunk)
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "architecture", ["Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM"]
)
def test_bfloat16_logits_are_as_close_as_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    """The fast kernels of a CPU serve these sizes; norms with fp32 weights are not among them."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "initializer_range": 0.15}
    folder = write_checkpoint(tmp_path / "m", architecture, **sizes)
    exact = reference_logits(folder, TOKENS)[len(PROMPT) - 1 :]
    theirs = reference_logits(folder, TOKENS, torch.bfloat16)[len(PROMPT) - 1 :]
    ours = Recorder(folder, dtype="bfloat16").force(TOKENS, 8).float()
    assert (ours - exact).square().mean() < 2 * (theirs - exact).square().mean()


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        ("Mistral3ForConditionalGeneration", "MistralForCausalLM"),
        ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"),
        ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    ],
)
def test_logits_of_a_text_part_equal_those_of_transformers(
    tmp_path: Path, architecture: str, text: str, old_names: bool
) -> None:
    """The folder holds a vision tower as well; names as published, or as transformers 5 has them in memory."""
    folder, expected = write_multimodal(tmp_path / "m", architecture, TOKENS, old_names=old_names, text=text)
    logits = Recorder(folder, dtype="float32").force(TOKENS, 8)
    assert (logits - expected[len(PROMPT) - 1 :]).abs().max() < 1e-4


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS)
def test_checked_tensors_are_those_that_the_model_wants(
    tmp_path: Path, architecture: str, overrides: dict[str, object]
) -> None:
    """What is checked from headers before the worker starts is what the worker will ask for."""
    runner = Recorder(write_checkpoint(tmp_path / "m", architecture, **overrides)).runner
    wanted = {source.name: source.full_shape for source in runner._model.weights()}
    assert wanted == expected_tensors(runner.model_config)


def test_float64_logits_do_not_depend_on_how_the_work_is_cut(tmp_path: Path) -> None:
    """Chunk and page sizes, and a prefix from the cache, change nothing but the last bits."""
    folder = write_checkpoint(tmp_path / "m")
    tokens = [*PROMPT, 5, 17, 3, 80, 41]
    base = Recorder(folder, dtype="float64").force(tokens, len(PROMPT))
    for page_size, chunk in ((1, 5), (4, 8), (16, 1), (16, 30)):
        logits = Recorder(folder, dtype="float64", page_size=page_size).force(tokens, chunk)
        assert (logits - base).abs().max() < 1e-9
    recorder = Recorder(folder, dtype="float64")
    recorder.force(tokens, 9)
    recorder.logits.clear()
    assert (recorder.force(tokens, 50, num_cached=32) - base).abs().max() < 1e-9


def test_batch_mates_do_not_change_a_request_in_float64(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "LlamaForCausalLM")
    prompts = [[random.Random(i).randrange(VOCAB_SIZE) for _ in range(3 + 9 * i)] for i in range(4)]

    def run(chosen: list[int]) -> dict[int, list[int]]:
        recorder = Recorder(folder, dtype="float64")
        admits = tuple(make_admit(i, prompts[i], list(range(i * 16, i * 16 + 16))) for i in chosen)
        prefills = tuple(value for i in chosen for value in (i, 0, len(prompts[i]), 1))
        results = [recorder.runner.execute(make_step(0, admits=admits, prefills=prefills)).result()]
        for step_id in range(1, 12):
            decode = chosen if step_id == 1 else None
            results.append(recorder.runner.execute(make_step(step_id, decode=decode, run_decode=True)).result())
        return dict(zip(chosen, zip(*(read_tokens(r.tokens) for r in results), strict=True), strict=True))

    together = run([0, 1, 2, 3])
    assert all(run([i])[i] == together[i] for i in range(4))
    assert run([3, 1])[1] == together[1]
    assert len(set(together.values())) == 4
