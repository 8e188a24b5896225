"""Triton kernels of `kernels.sampling`: candidates of each part of a row, then the best candidate of the row.

A part is scanned in tiles. Noise is costly, so a tile computes it only if one of its tokens could still beat the best
score so far: from -log1p(-u) >= u, a token wins only if its u is at most exp(logit / temperature - best). That test
needs one exponential per token instead of a division and two logarithms, and few tiles pass it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_worker.kernels.launch import use_pdl
from minisgl_worker.kernels.noise_triton import gumbel, row_keys, token_bits
from minisgl_worker.kernels.sampling import Draw

TILE = 512
MAX_PARTS = 256
TARGET_PROGRAMS = 2048
NUM_WARPS = 2


def sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_token_id: int,
    target_programs: int = TARGET_PROGRAMS,
) -> Draw:  # fmt: skip
    """See `kernels.sampling.sample`. `target_programs`: how many programs scan; with fewer, each can skip more."""
    num_rows, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, TILE)
    tiles_per_part = max(triton.cdiv(num_tiles, MAX_PARTS), triton.cdiv(num_tiles * num_rows, target_programs))
    num_parts = triton.cdiv(num_tiles, tiles_per_part)
    part_scores = logits.new_empty(num_rows, num_parts, dtype=torch.float32)
    part_tokens = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    part_failed = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    draw = Draw(
        tokens=logits.new_empty(num_rows, dtype=torch.int64),
        scores=logits.new_empty(num_rows, dtype=torch.float32),
        failed=logits.new_empty(num_rows, dtype=torch.bool),
    )
    pdl = use_pdl(logits)
    if num_rows:
        _scan_kernel[(num_rows, num_parts)](
            logits, temperature, seeds, positions, part_scores, part_tokens, part_failed,
            vocab, logits.stride(0), first_token_id, tiles_per_part, num_parts,
            TILE=TILE, PDL=pdl, num_warps=NUM_WARPS, launch_pdl=pdl,
        )  # fmt: skip
        _choose_kernel[(num_rows,)](
            part_scores, part_tokens, part_failed, draw.tokens, draw.scores, draw.failed, num_parts,
            BLOCK=MAX_PARTS, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return draw


@triton.jit(do_not_specialize=["first_token_id", "tiles_per_part", "num_parts"])
def _scan_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, part_scores_ptr, part_tokens_ptr, part_failed_ptr,
    vocab, row_stride, first_token_id, tiles_per_part, num_parts,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(temperature_ptr + row)
    k0, k1 = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    lanes = tl.arange(0, TILE)
    row_ptr = logits_ptr + row * row_stride
    is_greedy = temperature <= 0
    inverse_log2 = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
    best, best_column, failed = float("-inf"), 0, 0
    begin = part * tiles_per_part * TILE
    end = tl.minimum(begin + tiles_per_part * TILE, vocab)
    ahead = tl.load(row_ptr + begin + lanes, mask=begin + lanes < vocab, other=float("-inf"))
    for start in range(begin, end, TILE):
        columns = start + lanes
        logits = ahead.to(tl.float32)
        limit = tl.where(end > start + TILE, vocab, 0)
        ahead = tl.load(row_ptr + TILE + columns, mask=columns + TILE < limit, other=float("-inf"))
        if is_greedy:
            bits = columns.to(tl.uint32)
            cannot_win = logits <= best
        else:
            bits = token_bits(k0, k1, first_token_id + columns)
            # u, rounded down to 23 bits, plus 1. The slack covers the rounding of scores and of the bound itself.
            low = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
            slack = tl.abs(best) * 1e-6 + 0.01
            cannot_win = low > 1.0 + tl.exp2(logits * inverse_log2 + (slack - best * 1.4426950408889634))
        # NaN and +inf always come here.
        if tl.min(cannot_win.to(tl.int32), axis=0) == 0:
            scores = logits
            if not is_greedy:
                scores = tl.div_rn(logits, temperature) + gumbel(bits)
            failed |= tl.max((~(logits < float("inf"))).to(tl.int32), axis=0)
            tile_best = tl.max(scores, axis=0)
            if tile_best > best:
                best = tile_best
                best_column = tl.min(tl.where(scores == tile_best, columns, 0x7FFFFFFF), axis=0)
    slot = row * num_parts + part
    tl.store(part_scores_ptr + slot, best)
    tl.store(part_tokens_ptr + slot, first_token_id + best_column)
    tl.store(part_failed_ptr + slot, failed)


@triton.jit(do_not_specialize=["num_parts"])
def _choose_kernel(
    part_scores_ptr, part_tokens_ptr, part_failed_ptr, tokens_ptr, scores_ptr, failed_ptr, num_parts,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < num_parts
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scores = tl.load(part_scores_ptr + row * num_parts + lanes, mask=inside, other=float("-inf"))
    tokens = tl.load(part_tokens_ptr + row * num_parts + lanes, mask=inside, other=0x7FFFFFFF)
    failed = tl.load(part_failed_ptr + row * num_parts + lanes, mask=inside, other=0)
    score = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == score, tokens, 0x7FFFFFFF), axis=0)
    is_broken = tl.max(failed, axis=0) > 0
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(scores_ptr + row, tl.where(is_broken, float("nan"), score))
    tl.store(failed_ptr + row, is_broken | (score == float("-inf")))
