"""The paged store of keys and values."""

import torch
from torch import Tensor


class KVCache:
    """K and V of every layer, in pages of `page_size` tokens.

    One dummy page follows the pages that the scheduler hands out: padding rows write there. Memory is not cleared (on
    the CPU the kernel commits it only when it is written): a reader must never let an unwritten value reach a result.

    Attributes:
        k, v: one tensor per layer, [num_pages + 1, page_size, num_kv_heads, head_dim] of the model's dtype.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (num_pages + 1, page_size, num_kv_heads, head_dim)
        self.num_pages, self.page_size = num_pages, page_size
        self.dummy_page = num_pages
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k, v) of one layer, [num_pages + 1, page_size, num_kv_heads, head_dim]."""
        return self.k[index], self.v[index]

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
