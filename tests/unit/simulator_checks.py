"""What must hold of the scheduler after every event, and of what it decides at each call of `schedule`."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from minisgl.core import FinishReason
from minisgl.scheduler.request import RequestState
from minisgl.scheduler.scheduler import LARGE_PREFILL_TOKENS, Scheduler
from tests.unit.paged_worker import PagedWorker, Wrong
from tests.unit.simulator_ledger import Holding, Issued, Ledger, expect
from tests.unit.simulator_setup import Asked, Setup


@dataclass(frozen=True, slots=True)
class Before:
    """The state before a call of `schedule`."""

    running: list[Holding]
    draining: list[Holding]
    needers: set[Holding]  # running ones whose next row needs a page
    num_available: int
    counts: list[int]  # references of each page
    waiting: list[Asked]  # never admitted, in the order of arrival


class Auditor:
    """Compares the scheduler with the ledger of what it has sent, and with the requests as they were asked."""

    def __init__(self, setup: Setup, scheduler: Scheduler, worker: PagedWorker, ledger: Ledger):
        self.config = setup.config
        self.scheduler, self.worker, self.ledger = scheduler, worker, ledger
        self.pool, self.cache = scheduler._memory.pool, scheduler._memory.cache
        self._free: set[int] = set(range(self.config.num_pages))
        self._tainted: set[int] = set()  # pages whose KV a failed row has read, until they are given out anew

    def taint(self, holding: Holding) -> None:
        """A row of this one has failed: what is not shared so far must never be."""
        self._tainted.update(page for page in holding.pages if not self.pool.is_cached[page])

    def clear_taint(self, fresh_pages: list[int]) -> None:
        self._tainted.difference_update(fresh_pages)

    # ----------------------------------------------------------------------------------------------- after an event

    def check_books(self, live: list[Asked], oldest_in_flight: int) -> None:
        """Every page and slot has its place, and every request too. Freed pages are poisoned here."""
        in_slots = {}
        queued = []
        for request in self.scheduler.live_requests():
            if request.slot is None:
                queued.append(request)
            else:
                expect(request.slot not in in_slots, "slot", request.slot, "has two holders")
                in_slots[request.slot] = request
        ledger = self.ledger
        ledger.take_back(in_slots, oldest_in_flight)
        expect(len(in_slots) == len(ledger.holdings), "slots", sorted(in_slots), "are held, the steps told of",
               sorted(ledger.holdings))  # fmt: skip
        expect(len(in_slots) <= self.config.max_running_req, "more requests than slots")
        for holding in ledger.holdings.values():
            is_running = holding.is_running
            state = RequestState.RUNNING if is_running else RequestState.DRAINING
            expect(holding.asked.request.state is state, holding.asked, "is", holding.asked.request.state)
            expect(is_running or holding.last_step >= oldest_in_flight, holding.asked, "is kept for no step")
        is_placed = [request for request in queued if request.state is RequestState.WAITING]
        held = [holding.asked.request for holding in ledger.holdings.values() if holding.asked.is_live]
        expect(len(is_placed) == len(queued), "a request that has ended is in the queue")
        expect({*is_placed, *held} == {asked.request for asked in live}, "a request is lost, or kept after its end")
        expect(len(is_placed) + len(held) == len(live), "a request is in two places")
        self._check_pages()

    def _check_pages(self) -> None:
        pool, num_pages = self.pool, self.config.num_pages
        held = [0] * num_pages
        for holding in self.ledger.holdings.values():
            expect(len(set(holding.pages)) == len(holding.pages), holding.asked, "holds a page twice")
            for page in holding.pages:
                held[page] += 1
        counts = pool.reference_counts.tolist()
        expect(held == counts, "pages are in", held, "page tables and counted", counts)
        in_tree = [False] * num_pages
        last_held = {id(None): num_pages}
        for node in self.cache.iter_nodes():
            pages = node.page_ids.tolist()
            above, count = last_held.get(id(node.parent), num_pages), held[pages[0]]
            for page in pages:
                if in_tree[page] or held[page] != count:
                    raise Wrong(f"page {page} of {pages} is cached twice, or not held like the others of its node")
                in_tree[page] = True
            expect(count <= above, "cached page", pages[0], "is held by more requests than the page before it")
            last_held[id(node)] = count
        expect(in_tree == pool.is_cached.tolist(), "cached are", in_tree)
        free = pool.free_ids.tolist()
        is_free = set(free)
        expect(len(free) == len(is_free) == pool.num_free, "free twice:", free)
        num_cached = 0
        for page, (count, is_cached) in enumerate(zip(held, in_tree, strict=True)):
            if (page in is_free) == (count > 0 or is_cached):
                raise Wrong(f"page {page} is lost, or free and in use")
            if count > 1 and not is_cached:
                raise Wrong(f"page {page} has {count} holders and is not cached")
            num_cached += is_cached and not count
        expect(num_cached == pool.num_cached, pool.num_cached, "cached pages are counted, and there are", num_cached)
        tainted = [page for page in self._tainted if in_tree[page]]
        expect(not tainted, "pages", tainted, "of a request that failed are cached")
        self.worker.poison(is_free - self._free)
        self._free = is_free

    def check_counters(self, oldest_in_flight: int) -> None:
        """What each request says of itself, and the scheduler's own check of its books."""
        for holding in self.ledger.holdings.values():
            request = holding.asked.request
            is_begun = holding.first_step < oldest_in_flight
            written = self.worker.slots[holding.slot].length if is_begun else holding.num_cached
            expect(
                request.num_issued_tokens == holding.num_issued, holding.asked, "promised", request.num_issued_tokens
            )
            expect(request.num_written_tokens == written, holding.asked, "has written", request.num_written_tokens)
            expect(request.page_ids.tolist() == holding.pages, holding.asked, "has pages", request.page_ids)
            if holding.asked.is_live:
                known = len(holding.asked.prompt) + holding.asked.num_sampled
                expect(request.num_accepted_tokens == known, holding.asked, "knows", request.num_accepted_tokens)
        expect(self.scheduler.check_integrity() == 0, "pages leaked")

    def check_stats(self, num_live: int, accepted: list[Asked], reasons: Counter[FinishReason], num_steps: int) -> None:
        """The scheduler's counts, all of them computed anew."""
        stats, held = self.scheduler.stats(), list(self.ledger.holdings.values())
        admitted = [asked for asked in accepted if asked.order is not None]
        num_held = sum(holding.asked.is_live for holding in held)
        pages = stats.num_pages_free + stats.num_pages_cached + stats.num_pages_used
        expected = {
            "num_waiting": num_live - num_held,
            "num_running": sum(holding.is_running for holding in held),
            "num_draining": sum(not holding.is_running for holding in held),
            "prefix_hit_tokens": sum(asked.cached_tokens for asked in admitted),
            "prompt_tokens": sum(len(asked.prompt) for asked in admitted),
            "output_tokens": sum(asked.num_sampled for asked in accepted),
            "num_preemptions": sum(asked.num_preemptions for asked in accepted),
            "num_steps": num_steps,
            "num_accepted": len(accepted),
            "num_finished": reasons[FinishReason.STOP] + reasons[FinishReason.LENGTH],
            "num_aborted": reasons[FinishReason.ABORT],
            "num_failed": reasons[FinishReason.ERROR],
        }
        expect(pages == self.config.num_pages, pages, "pages are accounted for")
        for name, value in expected.items():
            expect(getattr(stats, name) == value, name, "is", getattr(stats, name), "expected", value)

    def check_cached_pages(self) -> dict[tuple[int, ...], int]:
        """Every cached page is written, with the tokens under which it is found. Returns the pages by those tokens."""
        found: dict[tuple[int, ...], int] = {}
        ends: dict[int, tuple[int, list[int]]] = {}  # by the id of a node: the history at its end, and all tokens
        size = self.config.page_size
        for node in self.cache.iter_nodes():
            history, before = ends.get(id(node.parent), (0, []))
            tokens, pages = np.frombuffer(node.tokens, "<i4").tolist(), node.page_ids.tolist()
            every = before + tokens
            ends[id(node)] = self.worker.check_pages(pages, tokens, history), every
            for index, page in enumerate(pages):
                prefix = tuple(every[: len(before) + (index + 1) * size])
                expect(prefix not in found, "pages", page, found.get(prefix), "are cached under the same tokens")
                found[prefix] = page
        return found

    def find_writable_pages(self) -> dict[int, int]:
        """The pages that a step may write, each with the one slot whose request holds it."""
        slots: dict[int, int] = {}
        shared = set()
        for holding in self.ledger.holdings.values():
            for page in holding.pages:
                if page in slots:
                    shared.add(page)
                slots[page] = holding.slot
        is_cached = self.pool.is_cached.tolist()
        return {page: slot for page, slot in slots.items() if page not in shared and not is_cached[page]}

    def check_quiet(self) -> None:
        """Nothing is kept of requests that have ended, and the prefix cache gives all its pages back."""
        scheduler, pool = self.scheduler, self.pool
        expect(pool.num_used == 0 and not self.ledger.holdings, pool.num_used, "pages are in use by nobody")
        memory, stops = scheduler._memory, scheduler._results.stops
        left = [memory._in_progress._requests, memory._in_progress._keys, stops._num_requests, scheduler._requests]
        expect(not any(left) and not stops.is_stop.any(), "something is kept of requests that have ended:", left)
        self.cache.clear()
        expect(pool.num_free == pool.num_pages and not list(self.cache.iter_nodes()), "pages stay after a flush")

    # -------------------------------------------------------------------------------------------- a call of schedule

    def get_depth(self, in_flight: list[Issued]) -> int:
        """How many steps may be in flight."""
        large = max(LARGE_PREFILL_TOKENS, self.config.max_extend_tokens * 0.25)
        return 1 if any(i.num_prefill_tokens >= large for i in in_flight) else self.config.max_steps_in_flight

    def look_before(self, live: list[Asked]) -> Before:
        holdings = list(self.ledger.holdings.values())
        running = [holding for holding in holdings if holding.is_running]
        draining = [holding for holding in holdings if not holding.is_running]
        size = self.config.page_size
        needers = {h for h in running if h.is_decoding and h.num_issued == len(h.pages) * size}
        waiting = [asked for asked in live if asked.order is None]
        return Before(running, draining, needers, self.pool.num_available, self.pool.reference_counts.tolist(), waiting)

    def check_decode(self, before: Before, issued: Issued | None) -> list[Holding]:
        """Each running request has a row unless it lacks a page or a budget. Returns those that were preempted."""
        victims = [
            h for h in before.running if self.ledger.holdings.get(h.slot) is not h or h.asked.request.is_preempted
        ]
        decoding = set(issued.decoding) if issued else set()
        prefills = set(issued.prefills) if issued else set()
        is_spent = issued is not None and issued.num_prefill_tokens == self.config.max_extend_tokens
        granted, held = [], []
        for holding in before.running:
            if holding in victims:
                continue
            if holding in before.needers:
                (granted if holding in decoding else held).append(holding)
            elif holding in prefills:
                expect(holding not in decoding, holding.asked, "has a chunk and a decode row in one step")
            else:
                expect(holding in decoding or (not holding.is_decoding and is_spent), holding.asked, "has no row")
        if held:
            expect(self.pool.num_available == 0, held[0].asked, "is held, and pages are there")
            expect(issued is None or not issued.admitted, "requests are admitted while", held[0].asked, "lacks a page")
            newest = max((holding.asked.order or 0 for holding in granted), default=-1)
            expect(newest < min(h.asked.order or 0 for h in held), "a newer request was given a page first")
        is_short = len(before.needers) > before.num_available
        expect(is_short or not (victims or held), "rows are held or preempted though pages are there")
        if is_short:
            self._check_victims(before, victims)
        return victims

    def _check_victims(self, before: Before, victims: list[Holding]) -> None:
        """Those preempted are the newest, never the oldest, and no more than the missing pages need."""
        survivors = [holding for holding in before.running if holding not in victims]
        expect(bool(survivors), "the oldest request was preempted")
        victims = sorted(victims, key=lambda holding: -(holding.asked.order or 0))
        if victims:
            newest = max(holding.asked.order or 0 for holding in survivors)
            expect(newest < (victims[-1].asked.order or 0), victims[-1].asked, "was preempted before a newer request")
        for num_victims in (len(victims) - 1, len(victims)):
            chosen = victims[: max(num_victims, 0)]
            num_missing = len(before.needers - set(chosen))
            num_coming = before.num_available + self._count_owed(before, before.draining + chosen)
            is_enough = num_missing <= num_coming
            if num_victims == len(victims):
                expect(is_enough, num_missing, "pages are missing,", num_coming, "are on their way")
            elif victims:
                expect(not is_enough, victims[-1].asked, "was preempted though enough pages were on their way")

    def _count_owed(self, before: Before, draining: list[Holding]) -> int:
        """Pages that nobody but these holds."""
        held = [page for holding in draining for page in holding.pages]
        return sum(held.count(page) == before.counts[page] for page in set(held))

    def check_admission(self, before: Before, issued: Issued, live: list[Asked]) -> int:
        """Preempted requests go first, in the order of age; others overtake each other a bounded number of times.

        Returns how often a request was overtaken.
        """
        preempted = [asked for asked in live if asked.is_preempted]
        returning = [h.asked.order for h in issued.admitted if h.asked.order is not None]
        fresh = [h.asked for h in issued.admitted if h.asked.order is None]
        left = [asked.order for asked in preempted if asked.order is not None]
        expect(returning == sorted(returning), "preempted requests return in the order", returning)
        expect(not (left and returning) or max(returning) < min(left), "an older preempted request is left behind")
        expect(not (left and fresh), "a new request is admitted while preempted ones wait")
        is_draining = any(holding.asked.request.is_preempted for holding in self.ledger.holdings.values())
        expect(not is_draining, "requests are admitted while a preempted one still drains")
        num_overtakes = 0
        behind = [asked for asked in before.waiting if asked.request.slot is None and asked not in fresh]
        for asked in fresh:
            for other in behind:
                if self._goes_before(other, asked):
                    num_overtakes += 1
                    other.num_overtaken += 1
                    expect(other.num_overtaken <= self.config.max_running_req, other, "is overtaken for ever")
        return num_overtakes

    def _goes_before(self, one: Asked, other: Asked) -> bool:
        """In the queue: by arrival, or as the policy has it."""
        if self.config.schedule_policy == "fcfs":
            return one.number < other.number
        return one.request.queue_key < other.request.queue_key

    def check_head(self, before: Before, victims: list[Holding], issued: Issued | None, live: list[Asked],
                   cached: dict[tuple[int, ...], int]) -> bool:  # fmt: skip
        """The first of the queue is admitted if it fits. Returns whether it waits for a page that another computes."""
        waiting = [asked for asked in live if asked.order is None]
        is_barred = any(asked.is_preempted for asked in live)
        is_spent = issued is not None and issued.num_prefill_tokens == self.config.max_extend_tokens
        holdings = list(self.ledger.holdings.values())
        if not waiting or is_barred or is_spent or len(holdings) == self.config.max_running_req:
            return False
        head = waiting[0]
        for asked in waiting[1:]:
            head = asked if self._goes_before(asked, head) else head
        prompt, size = head.prompt, self.config.page_size
        num_pages = -(-len(prompt) // size)
        num_held = end = 0
        while end + size < len(prompt) and (page := cached.get(tuple(prompt[: end + size]))) is not None:
            end += size
            num_held += int(self.pool.reference_counts[page]) > 0
        end += size
        if end < len(prompt) and self.config.cache_type == "radix":
            for holding in holdings:
                if holding.is_shared:
                    continue
                known = (holding.asked.prompt + holding.asked.reference.tokens)[: holding.num_known]
                if len(known) >= end and known[:end] == prompt[:end]:
                    return True
        num_running = len(before.running) - len(victims) + len(issued.admitted if issued else ())
        fits = num_pages - num_held + num_running <= self.pool.num_available
        expect(not fits, head, "waits though it fits")
        return False
