"""The prefix cache: which token prefixes have their KV in which pages.

Pages are found by their tokens *and* all tokens before them: a run of pages is compared token by token (as bytes),
never by a hash alone. The tree has no locks of its own: whether a page may be evicted is a question of its reference
count in the `PagePool`. Two rules make this work:
    * whoever references a page of the tree references those before it too, so unreferenced pages are at the leaves;
    * all pages of a node have the same references: a match that ends inside a node splits it when it is acquired.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from minisgl.scheduler.page_pool import PagePool

_NO_PAGES: NDArray[np.int32] = np.empty(0, np.int32)
_TOKEN_BYTES = 4


class Node:
    """A run of pages below its parent. `tokens` and `page_ids` are the tree's own copies."""

    __slots__ = ("children", "in_heap", "last_used", "page_ids", "parent", "tokens")

    def __init__(self, parent: "Node | None", tokens: bytes, page_ids: NDArray[np.int32], last_used: int) -> None:
        self.parent = parent
        self.tokens = tokens  # the run's token ids as packed i32, len(page_ids) pages
        self.page_ids = page_ids  # [num_pages] i32
        self.children: dict[bytes, Node] = {}  # by the tokens of the child's first page
        self.last_used = last_used  # counted in releases; while unreferenced, a parent's is not below its child's
        self.in_heap = False


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Leading pages of a prompt that the cache has. Valid until the cache changes."""

    page_ids: NDArray[np.int32]  # [num_pages] i32
    nodes: tuple[Node, ...]  # the nodes matched whole, root first
    partial: Node | None = None  # the node in which the match ends, where it does not end at a node's end
    num_partial_pages: int = 0  # how many of its pages match


class PrefixCache(Protocol):
    """What the scheduler asks of a prefix cache."""

    num_changes: int  # grows whenever a later match may be longer or hold more referenced pages than an earlier one

    def match_prefix(self, token_ids: NDArray[np.int32], max_pages: int) -> PrefixMatch:
        """The longest cached prefix of `token_ids`, in whole pages and at most `max_pages`. Changes nothing."""

    def acquire(self, match: PrefixMatch) -> Node:
        """Reference the matched pages, which keeps them. Returns the node at which they end."""

    def insert_held(self, token_ids: NDArray[np.int32], page_ids: NDArray[np.int32]) -> None:
        """Take in the full pages of a request that goes on using them.

        Stops where the tree has the same tokens in another page: pages are never swapped under a live request, and a
        page below one that the request does not hold could outlive its parent.
        """

    def release(self, token_ids: NDArray[np.int32], page_ids: NDArray[np.int32]) -> None:
        """Drop a request's reference to all its pages, after taking in the full pages of `token_ids` that are new.

        Those of `token_ids` become the most recently used. Duplicates of pages that the tree already has, and pages
        beyond `token_ids`, become free.
        """

    def evict(self, num_pages: int) -> None:
        """Free `num_pages` unreferenced pages, the least recently used first, children before their parents."""

    def clear(self) -> None:
        """Forget all pages that no request holds."""

    def iter_nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""


class RadixCache:
    """Prefix cache as a radix tree with edges of whole pages."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.num_changes = 0
        self._pool = pool
        self._page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._root = Node(None, b"", _NO_PAGES, 0)
        self._clock = 0
        # Leaves by age, lazily: an entry may be younger by now, referenced, or no leaf any more, and is put right or
        # dropped only when it is popped. Every unreferenced leaf has an entry; no node has two.
        self._heap: list[tuple[int, int, Node]] = []
        self._num_pushes = 0  # breaks ties between ages, so that nodes are never compared

    def match_prefix(self, token_ids: NDArray[np.int32], max_pages: int) -> PrefixMatch:
        data = token_ids[: max_pages * self._page_size].tobytes()
        nodes, partial, num_partial_pages = self._walk(data)
        runs = [node.page_ids for node in nodes]
        if partial is not None:
            runs.append(partial.page_ids[:num_partial_pages])
        return PrefixMatch(np.concatenate(runs), tuple(nodes), partial, num_partial_pages)

    def acquire(self, match: PrefixMatch) -> Node:
        self.num_changes += 1
        self._pool.acquire(match.page_ids)
        if match.partial is not None:
            return self._split(match.partial, match.num_partial_pages)
        return match.nodes[-1]

    def insert_held(self, token_ids: NDArray[np.int32], page_ids: NDArray[np.int32]) -> None:
        num_pages = len(token_ids) // self._page_size
        data = token_ids[: num_pages * self._page_size].tobytes()
        nodes, partial, _ = self._walk(data)
        held = np.concatenate([node.page_ids for node in nodes])
        if partial is not None or not np.array_equal(held, page_ids[: len(held)]):
            return
        self._append(nodes[-1], data, page_ids[:num_pages], len(held))

    def release(self, token_ids: NDArray[np.int32], page_ids: NDArray[np.int32]) -> None:
        num_pages = len(token_ids) // self._page_size
        data = token_ids[: num_pages * self._page_size].tobytes()
        nodes, partial, num_partial_pages = self._walk(data)
        num_present = sum(len(node.page_ids) for node in nodes) + num_partial_pages
        if partial is not None:
            # Where the run goes on differently, its end parts from the rest; where it just ends, the node stays whole.
            nodes.append(self._split(partial, num_partial_pages) if num_present < num_pages else partial)
        self._clock += 1
        for node in nodes:
            node.last_used = self._clock
        last = self._append(nodes[-1], data, page_ids[:num_pages], num_present)
        self._pool.release(page_ids)
        self._offer(last)

    def evict(self, num_pages: int) -> None:
        while num_pages > 0:
            assert self._heap, f"{num_pages} more pages to evict, but no unreferenced leaf is left"
            age, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.children or self._pool.reference_counts[node.page_ids[0]]:
                continue  # offered again when it is released, or loses its last child
            if age != node.last_used:
                self._offer(node)
                continue
            num_kept = max(len(node.page_ids) - num_pages, 0)
            num_pages -= len(node.page_ids) - num_kept
            self._pool.drop_cached(node.page_ids[num_kept:])
            self._truncate(node, num_kept)

    def clear(self) -> None:
        self.evict(self._pool.num_cached)

    def iter_nodes(self) -> Iterator[Node]:
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def _walk(self, data: bytes) -> tuple[list[Node], Node | None, int]:
        """Follow packed tokens (whole pages) from the root.

        Returns:
            The nodes matched whole (root first), the node in which the match ends if it ends inside one, and the number
            of pages that match in that node.
        """
        nodes = [self._root]
        start = 0
        while start < len(data):
            child = nodes[-1].children.get(data[start : start + self._page_bytes])
            if child is None:
                break
            if not data.startswith(child.tokens, start):
                return nodes, child, self._count_equal_pages(child.tokens, data[start : start + len(child.tokens)])
            nodes.append(child)
            start += len(child.tokens)
        return nodes, None, 0

    def _count_equal_pages(self, run: bytes, data: bytes) -> int:
        """Leading pages in which two packed runs that differ agree."""
        size = min(len(run), len(data))
        is_different = np.frombuffer(run[:size], np.int32) != np.frombuffer(data[:size], np.int32)
        num_equal = int(is_different.argmax()) if is_different.any() else len(is_different)
        return num_equal // self._page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Part a node after `num_pages` pages. It keeps the rest; the new node above it, as old, is returned."""
        parent = node.parent
        assert parent is not None and 0 < num_pages < len(node.page_ids)
        num_bytes = num_pages * self._page_bytes
        upper = Node(parent, node.tokens[:num_bytes], node.page_ids[:num_pages].copy(), node.last_used)
        parent.children[upper.tokens[: self._page_bytes]] = upper
        node.parent, node.tokens, node.page_ids = upper, node.tokens[num_bytes:], node.page_ids[num_pages:].copy()
        upper.children[node.tokens[: self._page_bytes]] = node
        return upper

    def _append(self, parent: Node, data: bytes, page_ids: NDArray[np.int32], num_present: int) -> Node:
        """Hang the pages from `num_present` on, if any, below the node at which the present ones end."""
        if num_present == len(page_ids):
            return parent
        self.num_changes += 1
        self._pool.mark_cached(page_ids[num_present:])
        child = Node(parent, data[num_present * self._page_bytes :], page_ids[num_present:].copy(), self._clock)
        parent.children[child.tokens[: self._page_bytes]] = child
        return child

    def _offer(self, node: Node) -> None:
        """Enter a leaf into the order of eviction."""
        if not node.in_heap and not node.children and node is not self._root:
            node.in_heap = True
            self._num_pushes += 1
            heapq.heappush(self._heap, (node.last_used, self._num_pushes, node))

    def _truncate(self, node: Node, num_kept: int) -> None:
        parent = node.parent
        assert parent is not None
        if num_kept:
            node.page_ids = node.page_ids[:num_kept].copy()
            node.tokens = node.tokens[: num_kept * self._page_bytes]
            self._offer(node)
        else:
            del parent.children[node.tokens[: self._page_bytes]]
            self._offer(parent)


class NaiveCache:
    """No prefix reuse: every match is empty and pages are free as soon as they are released."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.num_changes = 0
        self._pool = pool
        self._root = Node(None, b"", _NO_PAGES, 0)

    def match_prefix(self, token_ids: NDArray[np.int32], max_pages: int) -> PrefixMatch:
        return PrefixMatch(_NO_PAGES, ())

    def acquire(self, match: PrefixMatch) -> Node:
        return self._root

    def insert_held(self, token_ids: NDArray[np.int32], page_ids: NDArray[np.int32]) -> None:
        pass

    def release(self, token_ids: NDArray[np.int32], page_ids: NDArray[np.int32]) -> None:
        self._pool.release(page_ids)

    def evict(self, num_pages: int) -> None:
        assert num_pages == 0, f"{num_pages} pages to evict from a cache that holds none"

    def clear(self) -> None:
        pass

    def iter_nodes(self) -> Iterator[Node]:
        return iter(())
