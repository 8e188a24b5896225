"""Random requests with stated lengths, repeatable from their seed."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Workload:
    """Prompts of random ids, each with its own output length. Lengths are inclusive ranges, in tokens."""

    num_prompts: int
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    vocab_limit: int  # ids are below this
    temperature: float = 0.0
    seed: int = 0

    def draw_lengths(self) -> tuple[list[int], list[int]]:
        """Prompt and output lengths; the same for every repetition."""
        prompts, num_output_tokens = self.draw(0)
        return [len(prompt) for prompt in prompts], num_output_tokens

    def draw(self, repetition: int) -> tuple[list[list[int]], list[int]]:
        """Prompts and output lengths. Repetition 0 is the stated workload; others have its lengths and fresh ids."""
        random = Random(self.seed)
        prompts = [
            [random.randrange(self.vocab_limit) for _ in range(random.randint(*self.input_tokens))]
            for _ in range(self.num_prompts)
        ]
        num_output_tokens = [random.randint(*self.output_tokens) for _ in range(self.num_prompts)]
        if repetition:
            fresh = Random(f"{self.seed} {repetition}")
            prompts = [[fresh.randrange(self.vocab_limit) for _ in prompt] for prompt in prompts]
        return prompts, num_output_tokens


# The offline benchmark of Mini-SGLang and nano-vllm. Its ids are 0..10000, both ends included.
HEADLINE = Workload(256, (100, 1024), (100, 1024), vocab_limit=10_001, temperature=0.6)
# For a small model on a few CPU cores.
CPU = Workload(32, (32, 256), (32, 128), vocab_limit=49_000)
