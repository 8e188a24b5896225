"""Writes data/smollm2_greedy.json: SmolLM2's greedy answers in fp32 on a CPU, and by how much each token won.

python tests/gpu/make_smollm2_expectation.py
"""

import json
from pathlib import Path

import torch

from minisgl.config import EngineConfig
from minisgl.model_folder import resolve_model
from minisgl.tokenizer import PromptEncoder, load_tokenizer
from minisgl_worker.model_runner import ModelRunner
from tests.worker.checkpoints import make_admit, make_step

FILE = Path(__file__).with_name("data") / "smollm2_greedy.json"
NUM_TOKENS = 64
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "To sort a list of numbers, first",
    "Water boils at 100 degrees. Ice melts at",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that energy",
    "Dear Sir or Madam, I am writing to you in order to",
    "In 1969, the first people landed on the Moon. The mission was called Apollo 11 and it carried three astronauts. "
    "One of them, Michael Collins, stayed in orbit while the other two",
]


def main() -> None:
    torch.set_num_threads(1)
    folder = resolve_model("smollm2")
    prompts = PromptEncoder(load_tokenizer(folder), folder.config.vocab_size).encode(TEXTS)
    config = EngineConfig.from_options("smollm2", {"device": "cpu", "dtype": "float32", "num_pages": 128})
    runner = ModelRunner(config)
    kept: list[torch.Tensor] = []
    draw = runner._sampler.draw

    def keep(logits, slots, positions):
        kept.append(logits.clone())
        return draw(logits, slots, positions)

    runner._sampler.draw = keep
    pages = 16  # each
    admits = [make_admit(i, prompt, list(range(i * pages, (i + 1) * pages))) for i, prompt in enumerate(prompts)]
    prefills = [value for i, prompt in enumerate(prompts) for value in (i, 0, len(prompt), 1)]
    runner.execute(make_step(0, admits=tuple(admits), prefills=tuple(prefills)))
    for i in range(1, NUM_TOKENS):
        runner.execute(make_step(i, decode=list(range(len(prompts))), run_decode=True))
    top = torch.stack(kept, dim=1).topk(2)  # [num_prompts, NUM_TOKENS, 2]
    rows = [
        {"prompt": prompt, "tokens": ids[:, 0].tolist(), "margins": [round(m, 3) for m in (v[:, 0] - v[:, 1]).tolist()]}
        for prompt, ids, v in zip(prompts, top.indices, top.values, strict=True)
    ]
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
