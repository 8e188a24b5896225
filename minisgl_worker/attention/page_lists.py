"""Pages of several rows laid end to end, the form in which planners on the host take a batch. Plain numpy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minisgl_worker.attention.base import AttentionSetup, HostRows, PrefillRow


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages of row i are indices[indptr[i] : indptr[i + 1]], in the order of their positions."""

    indptr: NDArray[np.int32]  # [num_rows + 1]
    indices: NDArray[np.int32]  # [indptr[-1]]
    last_page_len: NDArray[np.int32]  # [num_rows] tokens in a row's last page, 1..page_size

    @staticmethod
    def last_page_len_at(max_rows: int) -> int:
        """Where `last_page_len` begins in a packed array; a multiple of 4 values."""
        return -(-(max_rows + 1) // 4) * 4

    @staticmethod
    def header_size(max_rows: int) -> int:
        """Where `indices` begin in a packed array; `indptr` comes first."""
        return 2 * PageLists.last_page_len_at(max_rows)


def list_decode_pages(rows: HostRows, page_size: int) -> PageLists:
    """The pages that hold the first seq_len tokens of each row; every row has at least one token."""
    num_pages = -(-rows.seq_lens // page_size)
    indptr = np.zeros(len(num_pages) + 1, np.int64)
    np.cumsum(num_pages, out=indptr[1:])
    # A row's first entry in the flat table, less its first place in the result: one gather then serves all rows.
    shifts = rows.slots * np.int64(rows.page_table.shape[1]) - indptr[:-1]
    places = np.repeat(shifts, num_pages) + np.arange(indptr[-1])
    indices = rows.page_table.reshape(-1).take(places)
    return PageLists(indptr.astype(np.int32), indices, _last_page_len(rows.seq_lens, num_pages, page_size))


def list_prefill_pages(rows: Sequence[PrefillRow], page_size: int) -> PageLists:
    """The pages of each prompt up to the last token of its row."""
    lengths = np.array([row.first_position + row.num_tokens for row in rows], np.int64)
    num_pages = np.array([len(row.page_ids) for row in rows], np.int64)
    assert (num_pages == -(-lengths // page_size)).all(), "a row's pages end elsewhere than its tokens"
    indices = [np.asarray(row.page_ids, np.int32) for row in rows]
    indptr = np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32)
    joined = np.concatenate(indices) if indices else np.zeros(0, np.int32)
    return PageLists(indptr, joined, _last_page_len(lengths, num_pages, page_size))


def join(first: PageLists, second: PageLists) -> PageLists:
    """The rows of both, in this order."""
    indptr = np.concatenate([first.indptr, first.indptr[-1] + second.indptr[1:]])
    last_page_len = np.concatenate([first.last_page_len, second.last_page_len])
    return PageLists(indptr, np.concatenate([first.indices, second.indices]), last_page_len)


def pack_lists(lists: PageLists, max_rows: int) -> NDArray[np.int32]:
    """The three lists in one array, each where `PageLists` says it begins, up to the last index."""
    num_rows, header = len(lists.last_page_len), PageLists.header_size(max_rows)
    middle = PageLists.last_page_len_at(max_rows)
    assert num_rows <= max_rows, f"room for {max_rows} rows, batch has {num_rows}"
    packed = np.zeros(header + len(lists.indices), np.int32)
    packed[: num_rows + 1] = lists.indptr
    packed[middle : middle + num_rows] = lists.last_page_len
    packed[header:] = lists.indices
    return packed


def query_indptr(num_decode: int, prefills: Sequence[PrefillRow]) -> NDArray[np.int32]:
    """Where each row's tokens begin in a packed batch, and the end: [num_decode + len(prefills) + 1]."""
    counts = np.concatenate([np.ones(num_decode, np.int32), np.array([row.num_tokens for row in prefills], np.int32)])
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    starts = indptr[num_decode:-1].tolist()
    assert starts == [row.first_row for row in prefills], "the prefill rows' tokens do not follow each other"
    return indptr


def split_workspace_bytes(setup: AttentionSetup, num_multiprocessors: int) -> int:
    """Bytes of partial results, for FlashInfer's fa2 kernels, of any batch that `setup` allows.

    Where a row's KV is split, each part of a tile of query rows has an fp32 result and a sum per head. In a graph rows
    always count as split, and the number of tiles is the most that a batch of its size can have. Outside a graph a
    split makes two tiles per multiprocessor at most.
    """
    group = setup.num_heads // setup.num_kv_heads
    tile = next(size for size in (16, 64, 128) if group <= size or size == 128)
    most_split = 2 * num_multiprocessors // setup.num_kv_heads
    in_graph = max(most_split, -(-setup.max_rows * group // tile) + setup.max_rows - 1) * tile
    rows = max(in_graph, most_split * 128)
    return rows * setup.num_heads * (setup.head_dim + 1) * 4 + 2**20


def _last_page_len(lengths: NDArray[np.int64], num_pages: NDArray[np.int64], page_size: int) -> NDArray[np.int32]:
    return (lengths - (num_pages - 1) * page_size).astype(np.int32)
