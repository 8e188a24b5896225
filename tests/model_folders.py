"""Model folders without torch: config.json, a tokenizer, and weights of zeros."""

import json
from pathlib import Path
from typing import Any

from tokenizers_made_here import BOS, EOS, FastTokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
    "eos_token_id": 257,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<{% endif %}"
)


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values))


def write_safetensors(path: Path, tensors: dict[str, int] | None = None) -> None:
    """One-dimensional F32 tensors of so many zeros each."""
    header, end = {}, 0
    for name, size in (tensors or {"w": 4}).items():
        header[name] = {"dtype": "F32", "shape": [size], "data_offsets": [end, end + 4 * size]}
        end += 4 * size
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(end))


def write_folder(folder: Path, tokenizer: FastTokenizer | None = None, **changes: Any) -> Path:
    """A folder that `resolve_model` accepts; `changes` are to config.json, and None removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    write_json(folder / "config.json", values)
    write_safetensors(folder / "model.safetensors")
    if tokenizer is not None:
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        write_json(
            folder / "tokenizer_config.json",
            {
                "bos_token": BOS,
                "eos_token": EOS,
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": CHAT_TEMPLATE,
            },
        )
    return folder
