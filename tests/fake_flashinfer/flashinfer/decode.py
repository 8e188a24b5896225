"""The planner for graphs: it writes the plan alone, and leaves the page lists to its caller."""

import torch
from torch import Tensor

from flashinfer import BatchDecodeWithPagedKVCacheWrapper


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *, window_left: int,
    q_data_type: torch.dtype, kv_data_type: torch.dtype, sm_scale: float,
) -> None:  # fmt: skip
    assert wrapper.is_planned, "its first plan has to be the full one"
    wrapper._sm_scale, wrapper._window_left = sm_scale, window_left
    wrapper._write_plan("fast", indptr, last_page_len, page_size)
