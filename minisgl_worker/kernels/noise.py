"""Counter-based Gumbel noise: a pure function of a request's seed, a position and a token id.

The same draw comes out alone, in any batch, on the CPU and on the GPU: integer arithmetic is exact everywhere, and the
two logarithms differ between devices by a few units in the last place. The mixing steps are Wellons' `lowbias32`.
"""

import numpy as np
import torch
from torch import Tensor

MAX_UNIFORM = 1.0 - 2.0**-24


def _signed(value: int) -> int:
    """The i32 with the bits of a u32: torch's integer arithmetic on i32 wraps as u32's does."""
    return value - (1 << 32) if value >= 1 << 31 else value


MIX_A = _signed(0x7FEB352D)
MIX_B = _signed(0x846CA68B)
POSITION_OFFSET = _signed(0x9E3779B9)
KEY_OFFSET = _signed(0x85EBCA6B)
TOKEN_STEP = _signed(0x9E3779B1)


def split_seeds(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """The low and high halves, [n] i32 each, of seeds [n] i64 that hold the bits of u64."""
    return _low_word(seeds), _low_word(seeds >> 32)


def row_keys(seeds_low: Tensor, seeds_high: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The two keys of each row.

    Args:
        seeds_low, seeds_high: [num_rows] i32, the bits of the halves of the seed.
        positions: [num_rows] i32 or i64, number of tokens before the one that is drawn.
    Returns:
        (k0, k1), [num_rows] i32 each, to be read as u32.
    """
    k0 = _mix(seeds_low ^ _mix(_low_word(positions) + POSITION_OFFSET))
    k1 = _mix(seeds_high ^ _mix(k0 + KEY_OFFSET))
    return k0, k1


def gumbel(k0: Tensor, k1: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise of token ids under row keys, fp32, of the broadcast shape.

    Args:
        k0, k1: i32 keys of `row_keys`, of a shape that broadcasts against token_ids.
        token_ids: i32.
    """
    x = token_ids * TOKEN_STEP + k0
    x ^= _shift_right(x, 16)
    x *= MIX_A
    x ^= _shift_right(x, 15)
    x ^= k1
    x *= MIX_B
    x ^= _shift_right(x, 16)
    return _gumbel_of_bits((x.to(torch.int64) & 0xFFFFFFFF).to(torch.float32))


class HostNoise:
    """`gumbel` for whole rows on the CPU. numpy has u32 arithmetic, and its buffers here serve row after row."""

    def __init__(self, num_tokens: int, first_token_id: int = 0):
        token_ids = np.arange(first_token_id, first_token_id + num_tokens, dtype=np.uint32)
        self._steps = token_ids * _unsigned(TOKEN_STEP)
        self._bits, self._shifted = np.empty_like(self._steps), np.empty_like(self._steps)
        self._noise = torch.empty(num_tokens, dtype=torch.float32)

    def draw(self, k0: int, k1: int) -> Tensor:
        """The noise of each token [num_tokens] fp32 under one row's keys; valid until the next call."""
        x, shifted = self._bits, self._shifted
        np.add(self._steps, _unsigned(k0), out=x)
        x ^= np.right_shift(x, 16, out=shifted)
        x *= _unsigned(MIX_A)
        x ^= np.right_shift(x, 15, out=shifted)
        x ^= _unsigned(k1)
        x *= _unsigned(MIX_B)
        x ^= np.right_shift(x, 16, out=shifted)
        np.copyto(self._noise.numpy(), x, casting="same_kind")
        return _gumbel_of_bits(self._noise)


def _gumbel_of_bits(bits: Tensor) -> Tensor:
    """Turns a hash's 32 bits, as fp32, in place into a uniform number (small ones keep their resolution) and noise."""
    bits.add_(0.5).mul_(2.0**-32).clamp_(max=MAX_UNIFORM)
    return bits.neg_().log1p_().neg_().log_().neg_()


def _unsigned(value: int) -> np.uint32:
    return np.uint32(value & 0xFFFFFFFF)


def _mix(x: Tensor) -> Tensor:
    x = x ^ _shift_right(x, 16)
    x *= MIX_A
    x ^= _shift_right(x, 15)
    x *= MIX_B
    x ^= _shift_right(x, 16)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift i32 as u32: torch's own shift repeats the sign bit."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _low_word(x: Tensor) -> Tensor:
    """The low 32 bits of integers, as i32, whatever the conversion of large values would do."""
    low = x.to(torch.int64) & 0xFFFFFFFF
    return (low - ((low >> 31) << 32)).to(torch.int32)
