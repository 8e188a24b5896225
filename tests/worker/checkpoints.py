"""Tiny random checkpoints and hand-made Steps for tests of the worker."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from minisgl.protocol import Admit, Sampling, Step

VOCAB_SIZE = 96
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, b"", b"", b"", None)


def write_checkpoint(folder: Path, architecture: str = "Qwen3ForCausalLM", **overrides: object) -> Path:
    """A random fp32 model by transformers, which is the judge of what it computes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        **overrides,
    }
    kind = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if values.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture], "dtype": "float32"}))
    return folder


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """What transformers computes: [len(token_ids), vocab] fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def pack(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def make_admit(slot: int, token_ids: list[int], pages: list[int], *, sampling: Sampling = GREEDY, seed: int = 0,
               num_cached: int = 0, num_prompt: int | None = None) -> Admit:  # fmt: skip
    num_prompt = len(token_ids) if num_prompt is None else num_prompt
    return Admit(slot, pack(*token_ids), num_prompt, num_cached, pack(*pages), seed, sampling)


def make_step(
    step_id: int,
    *,
    admits: tuple[Admit, ...] = (),
    grants: tuple[int, ...] = (),
    decode: list[int] | None = None,
    run_decode: bool = False,
    prefills: tuple[int, ...] = (),
) -> Step:
    decode_slots = None if decode is None else pack(*decode)
    return Step(step_id, admits, pack(*grants), decode_slots, run_decode, pack(*prefills))


def read_tokens(result_tokens: bytes) -> list[int]:
    return np.frombuffer(result_tokens, "<u4").tolist()
