"""Triton twins of `kernels.noise`, to be called from other kernels. Keys and token bits are u32."""

import triton
import triton.language as tl


@triton.jit
def mix32(x):
    """The 32-bit mixer of the row keys."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed, position):
    """The two keys of a row, u32, from its seed (the bits of a u64) and its position."""
    k0 = mix32(seed.to(tl.uint32) ^ mix32(position.to(tl.uint32) + 0x9E3779B9))
    k1 = mix32((seed >> 32).to(tl.uint32) ^ mix32(k0 + 0x85EBCA6B))
    return k0, k1


@triton.jit
def token_bits(k0, k1, token_ids):
    """32 random bits of each token id."""
    x = token_ids.to(tl.uint32) * 0x9E3779B1 + k0
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= (x >> 15) ^ k1
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(bits):
    """Gumbel noise, fp32, of random bits. Few bits set high make large noise, with the full resolution of fp32."""
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994039535522)
    # -log1p(-u): the series where 1 - u would lose the digits of u.
    series = 1.0 / 6 + uniform * (1.0 / 7 + uniform * (1.0 / 8))
    series = 1.0 + uniform * (0.5 + uniform * (1.0 / 3 + uniform * (0.25 + uniform * (0.2 + uniform * series))))
    exponential = tl.where(uniform < 0.0625, uniform * series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)
