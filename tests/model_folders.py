"""Model folders without torch: config.json, a tokenizer, and weights of zeros."""

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers_made_here import BOS, EOS, FastTokenizer

from minisgl.checkpoint import expected_tensors, gguf_name
from minisgl.errors import ModelLoadError
from minisgl.json_file import JsonFile
from minisgl.model_config import read_config

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


def write_safetensors(path: Path, tensors: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """F32 tensors of zeros with these shapes. The zeros are a hole in the file: large ones cost nothing."""
    header, end = {}, 0
    for name, shape in (tensors or {"w": (4,)}).items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(path, 8 + len(encoded) + end)


def write_folder(folder: Path, tokenizer: FastTokenizer | None = None, **changes: Any) -> Path:
    """A folder that `resolve_model` accepts; `changes` are to config.json, and None removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    write_json(folder / "config.json", values)
    write_safetensors(folder / "model.safetensors", list_tensors(folder))
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


def list_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """What the folder's config.json asks for; nothing when it is not sound."""
    try:
        return expected_tensors(read_config(JsonFile(folder / "config.json")))
    except ModelLoadError:
        return {}


# GGUF: kinds of values, and a small model's metadata
UINT32, FLOAT32, STRING, ARRAY, INT32 = 4, 6, 8, 9, 5
GGUF_METADATA = {
    "general.architecture": (STRING, "llama"),
    "general.file_type": (UINT32, 1),
    "llama.block_count": (UINT32, 2),
    "llama.context_length": (UINT32, 512),
    "llama.embedding_length": (UINT32, 64),
    "llama.feed_forward_length": (UINT32, 128),
    "llama.attention.head_count": (UINT32, 4),
    "llama.attention.head_count_kv": (UINT32, 2),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 2.0**-17),
    "llama.rope.freq_base": (FLOAT32, 5e5),
    "tokenizer.ggml.tokens": (ARRAY, ["a", "日本", ""]),
    "tokenizer.ggml.token_type": (ARRAY, [1, 3, 1]),
    "tokenizer.ggml.eos_token_id": (UINT32, 2),
    "tokenizer.ggml.eot_token_id": (UINT32, 5),
}
# Innermost dimension first, as the file has it.
GGUF_TENSORS = {
    gguf_name(name): shape[::-1]
    for name, shape in expected_tensors(read_config(JsonFile(Path("GGUF_METADATA"), CONFIG))).items()
}
F32 = 0


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write_gguf(
    path: Path,
    *,
    tensors: Mapping[str, tuple[int, ...]] = GGUF_TENSORS,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    **changes: Any,
) -> Path:
    """A GGUF file with float32 tensors of zeros; `changes` are to GGUF_METADATA with dots as double underscores."""
    metadata = {**GGUF_METADATA, **{key.replace("__", "."): value for key, value in changes.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    header = struct.pack("<4sI", b"GGUF", version) + struct.pack("<QQ", *(counts or (len(tensors), len(metadata))))
    for key, (kind, value) in metadata.items():
        header += _text(key) + struct.pack("<I", kind)
        if kind == STRING:
            header += _text(value)
        elif kind == ARRAY:
            is_text = isinstance(value[0], str)
            header += struct.pack("<IQ", STRING if is_text else INT32, len(value))
            header += b"".join(_text(v) if is_text else struct.pack("<i", v) for v in value)
        else:
            header += struct.pack({UINT32: "<I", FLOAT32: "<f"}[kind], value)
    offset = 0
    for name, shape in tensors.items():
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, F32, offset)
        offset += 4 * math.prod(shape)
    path.write_bytes(header + bytes(-len(header) % 32))
    os.truncate(path, path.stat().st_size + offset)
    return path
