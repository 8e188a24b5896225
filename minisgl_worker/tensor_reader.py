"""Reads rows of stored tensors from safetensors and GGUF files, a bounded number of bytes at a time.

Files are read, not mapped: one that is cut off meanwhile is an error with a name, not the end of the process.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from minisgl.errors import ModelLoadError
from minisgl.gguf_header import GgufTensor
from minisgl.safetensors_files import StoredTensor
from minisgl_worker.dequantize import dequantize

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


MIN_PIECE_BYTES = 4096  # of a row's columns: reading less than the system's own page, apart, saves nothing


def read_exactly(file: int, target: memoryview, offset: int, path: Path) -> None:
    """Fill `target` from byte `offset` of an open file. Raises ModelLoadError when the file ends before."""
    position = 0
    while position < len(target):
        try:
            count = os.preadv(file, [target[position:]], offset + position)
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
        if count == 0:
            raise ModelLoadError(f"{path} ended at byte {offset + position} while it was read; it was cut off")
        position += count


class SafetensorsReader:
    """One tensor of a safetensors file."""

    def __init__(self, tensor: StoredTensor, file: int):
        self._tensor, self._file = tensor, file
        self.dtype = DTYPES[tensor.dtype]
        self.shape = tensor.shape
        self.row_bytes = self.dtype.itemsize * math.prod(tensor.shape[1:])
        self.row_unit = 1  # rows that cannot be read apart
        self.peak_row_bytes = self.row_bytes  # what reading a row takes

    def read(self, start: int, stop: int, buffer: Tensor) -> Tensor:
        """Rows start to stop in the stored dtype, in the memory of `buffer`, [at least their bytes] u8 cpu."""
        used = buffer[: (stop - start) * self.row_bytes]
        self.read_into(start, used)
        return used.view(self.dtype).view(stop - start, *self.shape[1:])

    def read_columns(self, rows: range, columns: range, buffer: Tensor) -> Tensor:
        """Some columns of a matrix's rows, otherwise as `read`; where pieces are large, no other bytes are read."""
        piece_bytes = len(columns) * self.dtype.itemsize
        if not MIN_PIECE_BYTES <= piece_bytes < self.row_bytes:
            return self.read(rows.start, rows.stop, buffer)[:, columns.start : columns.stop]
        used = buffer[: len(rows) * piece_bytes]
        pieces, first = memoryview(used.numpy()), self._tensor.offset_bytes + columns.start * self.dtype.itemsize
        for i, row in enumerate(rows):
            piece = pieces[i * piece_bytes : (i + 1) * piece_bytes]
            read_exactly(self._file, piece, first + row * self.row_bytes, self._tensor.file)
        return used.view(self.dtype).view(len(rows), len(columns))

    def read_into(self, start: int, target: Tensor) -> None:
        """The bytes from row `start` on, as many as `target` holds, [num_bytes] u8 cpu."""
        offset = self._tensor.offset_bytes + start * self.row_bytes
        read_exactly(self._file, memoryview(target.numpy()), offset, self._tensor.file)


class GgufReader:
    """One tensor of a GGUF file; its rows are dequantized to fp32."""

    def __init__(self, tensor: GgufTensor, file: int, path: Path, rotary_head_dim: int | None):
        """
        Args:
            rotary_head_dim: the size of a head whose rows the file has in the order of neighbours that rotate together
                (the rows are returned in the order in which value i rotates with value i + half); None = as they are.
        """
        self._tensor, self._file, self._path = tensor, file, path
        self.dtype = torch.float32
        self.shape = tensor.shape
        self.row_bytes = tensor.num_bytes // max(1, tensor.shape[0])
        self.row_unit = rotary_head_dim or 1
        self.peak_row_bytes = max(self.row_bytes, self.dtype.itemsize * math.prod(tensor.shape[1:]))
        self._rotary_head_dim = rotary_head_dim

    def read(self, start: int, stop: int, buffer: Tensor) -> Tensor:
        """Rows start to stop in fp32; `buffer`, [at least their stored bytes] u8 cpu, is scratch memory."""
        raw = buffer[: (stop - start) * self.row_bytes]
        offset = self._tensor.offset_bytes + start * self.row_bytes
        read_exactly(self._file, memoryview(raw.numpy()), offset, self._path)
        values = dequantize(raw, self._tensor.ggml_type).reshape(stop - start, *self.shape[1:])
        if self._rotary_head_dim is not None:
            pairs = values.reshape(-1, self._rotary_head_dim // 2, 2, *self.shape[1:])
            values = pairs.transpose(1, 2).reshape(values.shape)
        return values

    def read_columns(self, rows: range, columns: range, buffer: Tensor) -> Tensor:
        """Some columns of a matrix's rows, otherwise as `read`. Whole rows are read: they are made of blocks."""
        return self.read(rows.start, rows.stop, buffer)[:, columns.start : columns.stop]
