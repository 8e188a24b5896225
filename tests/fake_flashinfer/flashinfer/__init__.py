"""Stands in for FlashInfer 0.6.8 where there is no GPU: the names and arguments that the worker uses, in plain torch.

As in the real one, a plan is written to the wrapper's workspace, and `run` takes the lengths from there: a plan for
other rows than those of the page lists is an error here, where the real kernels would compute something else.
"""

import torch
from torch import Tensor

PLANS: list[tuple[str, int]] = []  # (which planner, rows) of all plans so far


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, backend: str):
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert kv_layout == "NHD" and backend in ("fa2", "fa3")
        self._int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)

    def _write_plan(self, planner: str, indptr: Tensor, last_page_len: Tensor, page_size: int) -> None:
        PLANS.append((planner, len(last_page_len)))
        lengths = (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len
        assert lengths.dtype == torch.int32 and (lengths >= 1).all()
        head = torch.tensor([len(lengths), self._window_left], dtype=torch.int32)
        plan = torch.cat([head, lengths]).view(torch.uint8)
        self._pin_memory_int_workspace_buffer[: len(plan)] = plan
        self._int_workspace_buffer[: len(plan)] = self._pin_memory_int_workspace_buffer[: len(plan)]

    def _attend(self, q: Tensor, kv: tuple[Tensor, Tensor], starts: Tensor, lists: list[Tensor], out: Tensor) -> Tensor:
        """Every row's queries are its last tokens; each sees what comes before it, within the window."""
        planned = self._int_workspace_buffer[: len(self._int_workspace_buffer) // 4 * 4].view(torch.int32)
        indptr, indices, last_page_len = lists
        page_size, num_kv_heads, head_dim = kv[0].shape[1:]
        assert int(planned[1]) == self._window_left, "the plan is that of another window"
        assert int(planned[0]) == len(last_page_len) == len(starts) - 1 == len(indptr) - 1
        assert int(starts[-1]) == len(q)
        for row, (begin, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
            pages = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(pages) - 1) * page_size + int(last_page_len[row])
            assert length == int(planned[2 + row]), "the plan is of other lengths than the page lists"
            key, value = (store[pages].flatten(0, 1)[:length].double() for store in kv)
            grouped = q[begin:end].double().view(end - begin, num_kv_heads, -1, head_dim)
            logits = torch.einsum("qkgd,tkd->kgqt", grouped, key) * self._sm_scale
            distance = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)
            hidden = (distance < 0) | ((distance > self._window_left) if self._window_left >= 0 else False)
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            part = torch.einsum("kgqt,tkd->qkgd", weights, value).reshape(q[begin:end].shape)
            out[begin:end] = part.to(out.dtype)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto"):
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        window_left: int, q_data_type: torch.dtype, max_token_per_sequence: int,
    ) -> None:  # fmt: skip
        assert causal and num_qo_heads % num_kv_heads == 0
        assert max_token_per_sequence == int((qo_indptr[1:] - qo_indptr[:-1]).max())
        self._starts, self._lists = qo_indptr, [paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        self._sm_scale, self._window_left = sm_scale, window_left
        self._write_plan("prefill", paged_kv_indptr, paged_kv_last_page_len, page_size)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return self._attend(q, paged_kv_cache, self._starts, self._lists, out)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, use_cuda_graph: bool, use_tensor_cores: bool,
        paged_kv_indptr_buffer: Tensor, paged_kv_indices_buffer: Tensor, paged_kv_last_page_len_buffer: Tensor,
        backend: str = "auto",
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, backend)
        assert use_cuda_graph and use_tensor_cores
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self._buffers = [paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer]
        self.is_planned = False

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:  # fmt: skip
        for buffer, values in zip(self._buffers, (indptr, indices, last_page_len), strict=True):
            buffer[: len(values)] = values
        self._sm_scale, self._window_left, self.is_planned = sm_scale, window_left, True
        self._write_plan("decode", indptr, last_page_len, page_size)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return self._attend(q, paged_kv_cache, torch.arange(len(q) + 1), self._buffers, out)
