"""Tiny random checkpoints and hand-made Steps for tests of the worker."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from minisgl.protocol import Admit, Sampling, Step

VOCAB_SIZE = 96
TINY: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, b"", b"", b"", None)
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
}  # fmt: skip

# architecture -> (transformers' model_type, values beyond the common ones)
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {"sliding_window": None}),
    "Ministral3ForCausalLM": ("ministral3", {"rope_parameters": MINISTRAL3_ROPE}),
    "Qwen2ForCausalLM": (
        "qwen2",
        {"head_dim": 8},
    ),  # hidden_size / num_attention_heads, as the family has no key for it
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "Gemma3ForCausalLM": (
        "gemma3_text",
        {"num_hidden_layers": 4, "query_pre_attn_scalar": 11, "sliding_window": 12, "sliding_window_pattern": 3},
    ),
}


def write_checkpoint(folder: Path, architecture: str = "Qwen3ForCausalLM", **overrides: object) -> Path:
    """A random fp32 model by transformers, which is the judge of what it computes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = KINDS[architecture]
    config = AutoConfig.for_model(kind, **{**TINY, **values, **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_randomised(model, folder)
    return folder


def save_randomised(model: torch.nn.Module, folder: Path) -> None:
    """Save in the layout of published checkpoints, with norms and biases moved away from their trivial start."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def reference_logits(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers computes in `dtype`: [len(token_ids), vocab] fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
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


def write_multimodal(
    folder: Path, architecture: str, token_ids: list[int], *, old_names: bool, text: str
) -> tuple[Path, torch.Tensor]:
    """A random fp32 model of text and images; -> (folder, its logits after each of these tokens, [tokens, vocab]).

    Args:
        text: the architecture of its text part.
    """
    import transformers

    name = architecture.removesuffix("ForConditionalGeneration")
    kind, values = KINDS[text]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 28, "patch_size": 14, "head_dim": 16}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        text_config={**TINY, **values, "model_type": kind}, vision_config=vision, mm_tokens_per_image=4,
        tie_word_embeddings=False, image_token_index=VOCAB_SIZE - 1, spatial_merge_size=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval()
    save_randomised(model, folder)
    if not old_names:
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, folder / "model.safetensors")
    with torch.no_grad():
        return folder, model(torch.tensor([token_ids])).logits[0].float()
