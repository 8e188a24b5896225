"""The KV cache as the scheduler sees it: pages, prefix cache, prompts in progress, and the tokens by KV location."""

import numpy as np
from numpy.typing import NDArray

from minisgl.scheduler.page_pool import PagePool
from minisgl.scheduler.radix_cache import NaiveCache, PrefixCache, PrefixMatch, RadixCache
from minisgl.scheduler.request import NO_TOKENS, Request

CACHES: dict[str, type[RadixCache] | type[NaiveCache]] = {"radix": RadixCache, "naive": NaiveCache}


class KVMemory:
    """Pages of `page_size` tokens, and what is known about the tokens in them."""

    def __init__(self, num_pages: int, page_size: int, cache_type: str) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.cache: PrefixCache = CACHES[cache_type](self.pool, page_size)
        self._in_progress = PromptsInProgress(page_size)
        # By KV location, the token that the row which wrote it has sampled: the token of the *next* position (that one
        # need not have a page yet). Paged like the KV, it takes 4 bytes for each token of the pool, however long a
        # context is. Only the request that wrote a location reads it, and only while it holds the page.
        self._next_tokens = np.zeros((num_pages, page_size), np.int32)
        self._next_tokens_flat = self._next_tokens.reshape(-1)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` KV positions."""
        return -(-num_tokens // self.page_size)

    def match(self, request: Request) -> PrefixMatch:
        """The cached prefix of a waiting request. At least one token is left to compute, to sample from."""
        return self.cache.match_prefix(request.token_ids, self._max_match_pages(request))

    def num_pages_needed(self, request: Request, match: PrefixMatch) -> int:
        """Pages that its admission takes from those available: new ones, and matched ones that nobody holds so far."""
        num_held = int(np.count_nonzero(self.pool.reference_counts[match.page_ids]))
        return self.pages_for(len(request.token_ids)) - num_held

    def is_next_page_in_progress(self, request: Request, match: PrefixMatch) -> bool:
        """Whether a longer match is on its way: a prompt in progress has the first page that `match` lacks."""
        is_extensible = len(match.page_ids) < self._max_match_pages(request)
        return is_extensible and self._in_progress.has_next_page(request, match)

    def take_prompt(self, request: Request, match: PrefixMatch) -> NDArray[np.int32]:
        """The pages of all tokens of a request that is admitted: the matched ones, now shared, and new ones."""
        request.node = self.cache.acquire(match)
        num_matched = len(match.page_ids)
        self._in_progress.add(request, num_matched)
        return np.concatenate((match.page_ids, self.allocate(self.pages_for(len(request.token_ids)) - num_matched)))

    def allocate(self, num_pages: int) -> NDArray[np.int32]:
        """Take pages, evicting cached ones if need be. At most `pool.num_available` can be had."""
        if num_pages > self.pool.num_free:
            self.cache.evict(num_pages - self.pool.num_free)
        return self.pool.allocate(num_pages)

    def share_prompt(self, request: Request) -> None:
        """The last chunk is written: others may use the full pages from now on."""
        self._in_progress.discard(request)
        self.cache.insert_held(request.token_ids, request.page_ids)

    def release(self, request: Request, token_ids: NDArray[np.int32]) -> None:
        """Take back all pages of a request. Full pages of known tokens whose KV is written stay cached.

        Of a request that failed, none is added: what made its logits NaN may sit in its KV, and would make every later
        request with that prefix fail as well.
        """
        self._in_progress.discard(request)
        request.node = None
        num_tokens = request.num_written_tokens
        if request.has_failed:
            num_tokens = self.page_size * len(self.cache.match_prefix(token_ids, num_tokens // self.page_size).page_ids)
        self.cache.release(token_ids[:num_tokens], request.page_ids)

    def store_tokens(self, locations: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Note the tokens sampled by the rows that wrote these KV locations."""
        self._next_tokens_flat[locations] = tokens

    def known_tokens(self, request: Request) -> NDArray[np.int32]:
        """[num_accepted_tokens] i32: prompt and output so far."""
        if request.final_ids is not None:
            return request.final_ids
        base = request.token_ids
        num_new = request.num_accepted_tokens - len(base)
        if not num_new:
            return base
        start = len(base) - 1  # the row that wrote this position sampled the first new token
        first_page = start // self.page_size
        offset = start - first_page * self.page_size
        page_ids = request.page_ids[first_page : self.pages_for(start + num_new)]
        return np.concatenate((base, self._next_tokens[page_ids].reshape(-1)[offset : offset + num_new]))

    def output_tokens(self, request: Request) -> NDArray[np.int32]:
        """[num_output_tokens] i32."""
        return self.known_tokens(request)[len(request.prompt_ids) :]

    def count_owed_pages(self, draining: list[Request]) -> int:
        """Pages that become available once these requests, which hold slots, are released."""
        held = np.concatenate([NO_TOKENS, *(request.page_ids for request in draining)])
        counts = np.bincount(held, minlength=self.pool.num_pages)
        return int(np.count_nonzero((counts > 0) & (counts == self.pool.reference_counts)))

    def check_integrity(self, holders: list[Request]) -> int:
        """Compare the pool with the page tables of all requests that hold a slot, and with the prefix cache.

        Returns:
            The number of leaked pages.

        Raises:
            IntegrityError: a page has two owners, or a count is wrong.
        """
        held = np.concatenate([NO_TOKENS, *(request.page_ids for request in holders)])
        cached = np.concatenate([NO_TOKENS, *(node.page_ids for node in self.cache.iter_nodes())])
        return self.pool.count_leaked(held, cached)

    def _max_match_pages(self, request: Request) -> int:
        return (len(request.token_ids) - 1) // self.page_size


class PromptsInProgress:
    """Admitted prompts whose pages are not in the prefix cache yet, found by the first page that they compute."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._requests: dict[tuple[int, bytes], list[Request]] = {}  # by (id of the node above, tokens of the page)
        self._keys: dict[Request, tuple[int, bytes]] = {}

    def add(self, request: Request, num_matched_pages: int) -> None:
        """An admitted request computes the pages after its match, which ends at `request.node`."""
        start = num_matched_pages * self._page_size
        if start + self._page_size <= len(request.token_ids):
            key = id(request.node), request.token_ids[start : start + self._page_size].tobytes()
            self._keys[request] = key
            self._requests.setdefault(key, []).append(request)

    def discard(self, request: Request) -> None:
        """Its pages are in the cache, or on their way back."""
        key = self._keys.pop(request, None)
        if key is not None:
            self._requests[key].remove(request)
            if not self._requests[key]:
                del self._requests[key]

    def has_next_page(self, waiting: Request, match: PrefixMatch) -> bool:
        """Whether a prompt in progress holds the page after the match, and the same tokens before it.

        The match of such a prompt ended at a node on this one's path: it holds the node's pages, so they are still
        there, and a node that is split stays the one at which those pages end.
        """
        tokens = waiting.token_ids
        start = 0
        end = (len(match.page_ids) + 1) * self._page_size
        for node in match.nodes:
            start += len(node.page_ids) * self._page_size
            key = id(node), tokens[start : start + self._page_size].tobytes()
            for request in self._requests.get(key, ()):
                if np.array_equal(request.token_ids[start:end], tokens[start:end]):
                    return True
        return False
