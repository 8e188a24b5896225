#!/usr/bin/env python3
"""The least time that a workload can take on a device, from two rates: bytes read and matrix flops per second.

Serial kernels: each matrix takes the longer of reading it and multiplying by it, attention takes reading K and V, and
logits are written once and read once. Of experts, those count that somebody chooses when
all are chosen alike. Prompts come first, then all requests decode together until each has its tokens.

    python benchmarks/roofline.py FOLDER --bandwidth 4300 --matmul 790      headline workload on FOLDER's config.json
    python benchmarks/roofline.py --measure cpu                             the two rates of this machine, as JSON
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.model_folder import ModelConfig, resolve_model
from workload import HEADLINE

PREFILL_ATTENTION_SHARE = 0.7  # of the matrix rate, which attention kernels reach on long prompts
PREFILL_CHUNK_TOKENS = 16_384


@dataclass(frozen=True)
class Rates:
    """What a device does per second."""

    bytes_per_s: float
    flops: float


@dataclass(frozen=True)
class Limit:
    """The least seconds for a workload."""

    prefill_s: float
    decode_s: float
    output_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / (self.prefill_s + self.decode_s)


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model's matrices, and bytes of its KV."""

    attention: tuple[int, ...]  # of one layer, one entry per matrix
    mlp: tuple[int, ...]  # of one dense layer
    router: int  # of one sparse layer
    expert: tuple[int, ...]
    num_experts: int
    num_chosen: int  # experts per token
    head: int
    num_layers: int
    num_sparse: int  # layers with experts in place of the MLP
    value_bytes: int
    kv_bytes: int  # K and V of one token in one layer

    @classmethod
    def of(cls, config: ModelConfig, value_bytes: int) -> "Sizes":
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        moe = config.moe
        width = moe.intermediate_size if moe else 0
        return cls(
            attention=(hidden * (query + 2 * key), query * hidden),
            mlp=(2 * hidden * inner, inner * hidden),
            router=hidden * moe.num_experts if moe else 0,
            expert=(2 * hidden * width, width * hidden),
            num_experts=moe.num_experts if moe else 0,
            num_chosen=moe.num_experts_per_token if moe else 0,
            num_sparse=len(moe.sparse_layers) if moe else 0,
            head=config.vocab_size * hidden,
            num_layers=config.num_layers,
            value_bytes=value_bytes,
            kv_bytes=2 * key * value_bytes,
        )

    def experts_chosen(self, num_tokens: int) -> float:
        """How many of a layer's experts somebody chooses, on average, when tokens choose evenly and independently."""
        return self.num_experts * (1 - (1 - self.num_chosen / max(1, self.num_experts)) ** num_tokens)


def compute_limit(
    config: ModelConfig, prompt_tokens: Sequence[int], output_tokens: Sequence[int], rates: Rates, value_bytes: int = 2
) -> Limit:
    """The limit for requests of the given lengths, all of them in memory at once.

    Args:
        value_bytes: of one weight, activation or KV value (2 for bf16).
    """
    sizes = Sizes.of(config, value_bytes)

    def matrices(num_tokens: int, num_logit_rows: int) -> float:
        def matrix(num_parameters: int, rows: float) -> float:
            return max(value_bytes * num_parameters / rates.bytes_per_s, 2 * num_parameters * rows / rates.flops)

        dense = sizes.num_layers * sum(matrix(n, num_tokens) for n in sizes.attention)
        dense += (sizes.num_layers - sizes.num_sparse) * sum(matrix(n, num_tokens) for n in sizes.mlp)
        chosen = sizes.experts_chosen(num_tokens)
        rows_each = num_tokens * sizes.num_chosen / chosen if chosen else 0.0
        experts = chosen * sum(matrix(n, rows_each) for n in sizes.expert) + matrix(sizes.router, num_tokens)
        return dense + sizes.num_sparse * experts + matrix(sizes.head, num_logit_rows)

    prompts, outputs = np.array(prompt_tokens, np.float64), np.array(output_tokens)
    prefill_s, left = 0.0, int(prompts.sum())
    while left > 0:
        chunk = min(left, PREFILL_CHUNK_TOKENS)
        prefill_s += matrices(chunk, max(1, len(prompts) * chunk // int(prompts.sum())))
        left -= chunk
    attention_flops = 4 * config.num_heads * config.head_dim * _attended(config, prompts, is_prompt=True)
    prefill_s += attention_flops / (PREFILL_ATTENTION_SHARE * rates.flops)
    decode_s = 0.0
    for step in range(1, int(outputs.max())):
        context = prompts[outputs > step] + step
        num_rows = len(context)
        decode_s += matrices(num_rows, num_rows)
        kv_bytes = (_attended(config, context) + num_rows * config.num_layers) * sizes.kv_bytes
        logit_bytes = 2 * num_rows * config.vocab_size * value_bytes
        decode_s += (kv_bytes + logit_bytes) / rates.bytes_per_s
    return Limit(prefill_s, decode_s, int(outputs.sum()))


def _attended(config: ModelConfig, lengths: np.ndarray, is_prompt: bool = False) -> float:
    """Tokens attended to, over all layers: by the last token of each row, or by every token of each prompt."""
    total = 0.0
    for window in config.layer_windows:
        seen = lengths if window is None else np.minimum(lengths, window)
        total += float((seen * (seen + 1) / 2 + (lengths - seen) * seen).sum() if is_prompt else seen.sum())
    return total


def measure_rates(device: str, dtype_name: str) -> Rates:
    """The rates of this machine with all its threads: reading 1 GiB, and a square matrix product."""
    import torch

    dtype = getattr(torch, dtype_name)
    side = 8192 if device == "cuda" else 2048
    buffer = torch.ones(2**28, dtype=torch.float32, device=device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def best_seconds(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return Rates(2**30 / best_seconds(buffer.sum), 2 * side**3 / best_seconds(lambda: left @ right))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder with config.json")
    parser.add_argument("--bandwidth", type=float, default=4300, help="GB/s (default: one H200)")
    parser.add_argument("--matmul", type=float, default=790, help="TFLOP/s (default: one H200, bf16)")
    parser.add_argument("--measure", choices=("cpu", "cuda"), help="print the rates of this machine instead")
    parser.add_argument("--dtype", default="bfloat16", help="of the measured matrix product")
    args = parser.parse_args()
    if args.measure:
        rates = measure_rates(args.measure, args.dtype)
        print(json.dumps({"bytes_per_s": rates.bytes_per_s, "flops": rates.flops}))
        return
    if args.model is None:
        parser.error("name a model folder, or --measure")
    config = resolve_model(args.model, need_weights=False).config
    limit = compute_limit(config, *HEADLINE.draw_lengths(), Rates(args.bandwidth * 1e9, args.matmul * 1e12))
    print(f"prefill {limit.prefill_s:.3f} s, decode {limit.decode_s:.3f} s, {limit.tokens_per_s:,.0f} output tok/s")


if __name__ == "__main__":
    main()
