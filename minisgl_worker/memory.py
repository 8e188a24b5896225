"""How large the KV pool can be: what the device has left beside the weights and the largest step."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from minisgl.config import EngineConfig
from minisgl.errors import ModelLoadError
from minisgl_worker.attention.base import AttentionBackend, ForwardBatch, PrefillRow
from minisgl_worker.kv_cache import KVCache
from minisgl_worker.parallel import ParallelGroup

MEMINFO = Path("/proc/meminfo")
CPU_POOL_SHARE = 0.25  # of the memory that is available
CUDA_SLACK_BYTES = 512 * 2**20  # libraries' workspaces, the graphs' own memory, fragments
IMBALANCE = 0.1  # share of the largest pool that the smallest may lack before somebody should look at the devices

logger = logging.getLogger(__name__)


def measure_step_bytes(
    forward: Callable[[Tensor, ForwardBatch], Tensor],
    backend: AttentionBackend,
    kv: KVCache,
    config: EngineConfig,
    max_seq_len: int,
) -> int:
    """Device memory that the largest step takes beside weights and KV, measured by running one.

    Args:
        kv: a pool of one page, which all its tokens share: values do not matter here.
    """
    device = kv.k[0].device
    num_tokens = config.max_extend_tokens + config.max_running_req
    rows, first = [], 0
    while first < num_tokens:
        length = min(num_tokens - first, max_seq_len)
        rows.append(PrefillRow(first, length, 0, torch.zeros(-(-length // kv.page_size), dtype=torch.int32)))
        first += length
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    no_rows = torch.zeros(0, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        kv, zeros, zeros, 0, no_rows.view(0, 1), no_rows, None, tuple(rows), zeros[: config.max_running_req]
    )
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    backend.plan(batch)
    forward(zeros, batch)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def fit_pages(
    page_bytes: int, reserved_bytes: int, most: int, config: EngineConfig, device: torch.device, num_ranks: int
) -> int:
    """Pages of the KV pool: what fits the memory that is left, but no more than `most`, which all requests could use.

    On a GPU `memory_ratio` of the whole memory may be used, weights and all. On a CPU the memory belongs to other
    programs too: `memory_ratio` of a quarter of what is available at most, shared by the ranks; the operating system
    commits it only as pages are first written.

    Args:
        reserved_bytes: kept free for the largest step and the graphs.

    Raises:
        ModelLoadError: there is no room for a single page; the text has the bytes.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - config.memory_ratio) * total) - int(reserved_bytes * 1.1) - CUDA_SLACK_BYTES
    else:
        free = available_memory_bytes()
        budget = int(free * CPU_POOL_SHARE * config.memory_ratio / num_ranks)
    num_pages = min(budget // page_bytes - 1, most)  # one more is the dummy page
    if num_pages < 1:
        raise ModelLoadError(
            f"no room for a KV pool: {free} bytes are free, {reserved_bytes} are kept for the largest step and "
            f"{budget} are left, but a page of {config.page_size} tokens takes {page_bytes}; raise memory_ratio, or "
            "lower max_extend_tokens or max_running_req"
        )
    return num_pages


def agree_on_pages(num_pages: int, group: ParallelGroup, device: torch.device) -> int:
    """The smallest of the ranks' pools, which all of them use; rank 0 reports one that is much smaller than others."""
    if group.size == 1:
        return num_pages
    pages = group.gather(torch.tensor(num_pages, device=device)).tolist()
    least, most = min(pages), max(pages)
    if group.rank == 0 and least < (1 - IMBALANCE) * most:
        logger.warning(
            "memory is uneven: rank %d has room for %d KV pages, rank %d for %d; every rank uses %d",
            pages.index(least), least, pages.index(most), most, least,
        )  # fmt: skip
    return least


def available_memory_bytes() -> int:
    """Memory of this machine that programs can still get, file caches included: they are dropped when it is needed.

    After a model was read, most memory that can be had is such a cache, which the number of free pages leaves out.
    """
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
