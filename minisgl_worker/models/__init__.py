"""The model families, by the architecture name in config.json."""

from minisgl_worker.models.llama import LlamaForCausalLM
from minisgl_worker.models.qwen3 import Qwen3ForCausalLM

MODELS = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
