"""Rollouts for reinforcement learning: several samples per prompt with their log-probabilities, scored in groups.

A seed fixes the noise of every draw, whatever else is in the batch, so that a rollout can be repeated alone. The logits
themselves differ by rounding between batches; float32 makes it rare that this decides a token.
"""

import statistics
import sys

from minisgl.core import SamplingParams
from minisgl.llm import LLM

PROMPTS = ["The best thing about rain is", "Two plus three equals", "A short name for a cat is"]
NUM_SAMPLES = 4
NUM_TOKENS = 24


def score(text: str) -> float:
    """A stand-in for a reward model: the share of words that are new."""
    words = text.lower().split()
    return len(set(words)) / max(1, len(words))


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", dtype="float32") as llm:
        params = [
            SamplingParams(
                temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=NUM_SAMPLES, seed=seed, logprobs=0
            )
            for seed in range(len(PROMPTS))
        ]
        groups = llm.generate(PROMPTS, params)
        again = llm.generate(PROMPTS[-1], params[-1])
    for prompt, group in zip(PROMPTS, groups, strict=True):
        rewards = [score(sample["text"]) for sample in group["outputs"]]
        baseline = statistics.mean(rewards)
        print(f"\n{prompt!r}: mean reward {baseline:.2f}")
        for sample, reward in zip(group["outputs"], rewards, strict=True):
            logprob = sum(entry["logprob"] for entry in sample["logprobs"])
            print(f"  advantage {reward - baseline:+.2f}, log-probability {logprob:7.1f}: {sample['text']!r}")
    same = [s["token_ids"] for s in again[0]["outputs"]] == [s["token_ids"] for s in groups[-1]["outputs"]]
    print(f"\nthe last prompt alone gives the same samples: {same}")


if __name__ == "__main__":
    main()
