"""Values of GGUF's quantized types. The plain ones are unpacked here, three times as fast as by the `gguf` package."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor


def dequantize(raw: Tensor, ggml_type: int) -> Tensor:
    """All values of `raw`, [num_bytes] u8 cpu in whole blocks -> [num_values] fp32 cpu, bit by bit those of `gguf`.

    Args:
        ggml_type: the number of gguf's GGMLQuantizationType.
    """
    if ggml_type in UNPACKERS:
        return UNPACKERS[ggml_type](raw).flatten()
    # Deferred: only GGUF files need it.
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(raw.numpy().reshape(1, -1), GGMLQuantizationType(ggml_type))).flatten()


def _unpack_q4_0(raw: Tensor) -> Tensor:
    """Blocks of a scale and 32 values of 0 to 15, of which 8 is zero."""
    blocks = raw.view(-1, 18)
    return _unpack_nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _unpack_q4_1(raw: Tensor) -> Tensor:
    """Blocks of a scale, the least value, and 32 values of 0 to 15."""
    blocks = raw.view(-1, 20)
    return _unpack_nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _unpack_q8_0(raw: Tensor) -> Tensor:
    """Blocks of a scale and 32 signed bytes."""
    blocks = raw.view(-1, 34)
    return blocks[:, 2:].view(torch.int8) * _half(blocks, 0)


def _unpack_nibbles(packed: Tensor) -> Tensor:
    """[n, 16] u8 -> [n, 32] fp32: the lower halves of all bytes, then the upper ones."""
    out = torch.empty(len(packed), 32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 value at byte `start` of each block, [n, 1] fp32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


# By the number of gguf's GGMLQuantizationType.
UNPACKERS: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType(
    {2: _unpack_q4_0, 3: _unpack_q4_1, 8: _unpack_q8_0}
)
