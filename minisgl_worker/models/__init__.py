"""What builds a model of each family; the rest of what is known about it is its row in `minisgl.families`."""

from collections.abc import Mapping
from types import MappingProxyType

from minisgl_worker.models.decoder import Build
from minisgl_worker.models.gemma3 import build_gemma3
from minisgl_worker.models.llama import build_llama
from minisgl_worker.models.ministral3 import build_ministral3
from minisgl_worker.models.mistral import build_mistral
from minisgl_worker.models.qwen2 import build_qwen2
from minisgl_worker.models.qwen3 import build_qwen3
from minisgl_worker.models.qwen3_moe import build_qwen3_moe

MODELS: Mapping[str, Build] = MappingProxyType(
    {
        "LlamaForCausalLM": build_llama,
        "MistralForCausalLM": build_mistral,
        "Ministral3ForCausalLM": build_ministral3,
        "Qwen2ForCausalLM": build_qwen2,
        "Qwen3ForCausalLM": build_qwen3,
        "Qwen3MoeForCausalLM": build_qwen3_moe,
        "Gemma3ForCausalLM": build_gemma3,
    }
)
