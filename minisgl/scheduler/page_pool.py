"""Who holds each KV page: the free list, the reference counts and the marks of the prefix cache."""

import numpy as np
from numpy.typing import NDArray


class IntegrityError(AssertionError):
    """A page is owned twice, freed twice, or counted below zero: the KV cache can no longer be trusted."""


class PagePool:
    """Hands out page ids 0..num_pages-1 and knows when one is free again.

    A page is exactly one of
        free         in the free list
        cached       in the prefix cache, in no request's page table: can be evicted
        referenced   in `reference_counts[page]` page tables, whether the prefix cache has it too or not
    so num_free + num_cached + num_used == num_pages after every call.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_cached = 0  # in the prefix cache and in no page table
        self.reference_counts: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        self.is_cached: NDArray[np.bool_] = np.zeros(num_pages, np.bool_)
        # A stack: the ids at [0, num_free) are free. Low ids on top, so that a fresh pool hands out 0, 1, 2, ...
        self._free_ids: NDArray[np.int32] = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    @property
    def num_used(self) -> int:
        """Pages in at least one page table, those of draining requests included."""
        return self.num_pages - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Pages that an allocation can have, some of them after an eviction."""
        return self.num_free + self.num_cached

    @property
    def free_ids(self) -> NDArray[np.int32]:
        """A copy of the free list, in no particular order."""
        return self._free_ids[: self.num_free].copy()

    def allocate(self, num_pages: int) -> NDArray[np.int32]:
        """Take `num_pages` free pages, each referenced once. The array is the caller's own.

        Raises:
            IntegrityError: fewer are free; the caller has to evict first.
        """
        rest = self.num_free - num_pages
        if rest < 0:
            raise IntegrityError(f"{num_pages} pages asked for, {self.num_free} free")
        page_ids = self._free_ids[rest : self.num_free][::-1].copy()
        self.num_free = rest
        self.reference_counts[page_ids] = 1
        return page_ids

    def acquire(self, page_ids: NDArray[np.int32]) -> None:
        """Reference cached pages (distinct ids) once more."""
        counts = self.reference_counts[page_ids]
        if not self.is_cached[page_ids].all():
            raise IntegrityError(f"pages {page_ids[~self.is_cached[page_ids]]} are shared but not in the prefix cache")
        self.num_cached -= int(np.count_nonzero(counts == 0))
        self.reference_counts[page_ids] = counts + 1

    def release(self, page_ids: NDArray[np.int32]) -> None:
        """Drop one reference of each page (distinct ids). Unreferenced pages stay cached or become free."""
        counts = self.reference_counts[page_ids] - 1
        if len(page_ids) and int(counts.min()) < 0:
            raise IntegrityError(f"pages {page_ids[counts < 0]} are released but in no page table")
        self.reference_counts[page_ids] = counts
        unreferenced = page_ids[counts == 0]
        cached = self.is_cached[unreferenced]
        self.num_cached += int(np.count_nonzero(cached))
        self._push_free(unreferenced[~cached])

    def mark_cached(self, page_ids: NDArray[np.int32]) -> None:
        """The prefix cache takes in pages that a request holds and that it does not have yet."""
        if self.is_cached[page_ids].any() or (self.reference_counts[page_ids] == 0).any():
            raise IntegrityError(f"pages {page_ids} enter the prefix cache while cached or in no page table")
        self.is_cached[page_ids] = True

    def drop_cached(self, page_ids: NDArray[np.int32]) -> None:
        """The prefix cache gives up unreferenced pages: they become free."""
        if not self.is_cached[page_ids].all() or self.reference_counts[page_ids].any():
            raise IntegrityError(f"pages {page_ids} leave the prefix cache while not cached or in a page table")
        self.is_cached[page_ids] = False
        self.num_cached -= len(page_ids)
        self._push_free(page_ids)

    def count_leaked(self, held_ids: NDArray[np.int32], cached_ids: NDArray[np.int32]) -> int:
        """Compare the books with the truth.

        Args:
            held_ids: every entry of every page table, repeated as often as it occurs.
            cached_ids: every page in the prefix cache.

        Returns:
            Pages that nobody owns and nobody will give back. They cost memory, but no result.

        Raises:
            IntegrityError: a page is owned twice, or a count is too low: somebody's KV can be overwritten.
        """
        free = self._count(self.free_ids, "the free list")
        cached = self._count(cached_ids, "the prefix cache")
        held = self._count(held_ids, "a page table")
        for name, is_wrong in (
            ("free twice", free > 1),
            ("cached twice", cached > 1),
            ("free and cached", (free > 0) & (cached > 0)),
            ("free and in a page table", (free > 0) & (held > 0)),
            ("in two page tables but not cached", (held > 1) & (cached == 0)),
            ("in more page tables than counted", held > self.reference_counts),
            ("counted below zero", self.reference_counts < 0),
            ("cached and not marked so", (cached > 0) & ~self.is_cached),
        ):
            if is_wrong.any():
                raise IntegrityError(f"pages {np.flatnonzero(is_wrong)[:16].tolist()} are {name}")
        if min(self.num_free, self.num_cached, self.num_used) < 0:
            raise IntegrityError(f"{self.num_free} free, {self.num_cached} cached, {self.num_used} used pages")
        nobody = (free == 0) & (cached == 0) & (held == 0)
        overcounted = self.reference_counts > held
        unmarked = self.is_cached & (cached == 0)
        return int(np.count_nonzero(nobody | overcounted | unmarked))

    def _count(self, page_ids: NDArray[np.int32], place: str) -> NDArray[np.intp]:
        if len(page_ids) and not 0 <= int(page_ids.min()) <= int(page_ids.max()) < self.num_pages:
            raise IntegrityError(f"{place} has pages outside of 0..{self.num_pages - 1}")
        return np.bincount(page_ids, minlength=self.num_pages)

    def _push_free(self, page_ids: NDArray[np.int32]) -> None:
        top = self.num_free + len(page_ids)
        if top > self.num_pages:
            raise IntegrityError(f"{top} pages free, the pool has {self.num_pages}")
        self._free_ids[self.num_free : top] = page_ids
        self.num_free = top
