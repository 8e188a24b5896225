"""The scheduler: which tokens are computed next, for whom, and in which pages. A plain object without any I/O."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from minisgl.core import FinishReason
from minisgl.errors import Overloaded
from minisgl.protocol import Admit, Result, Step
from minisgl.scheduler.admission import Admission, check_prompt
from minisgl.scheduler.batch import DecodeBatch, DecodeSet, PrefillRow, PrefillSet, StepRecord, get_age, pack_prefills
from minisgl.scheduler.kv_memory import KVMemory
from minisgl.scheduler.outputs import OutputBuilder
from minisgl.scheduler.page_pool import IntegrityError
from minisgl.scheduler.policy import POLICIES, WaitingQueue
from minisgl.scheduler.radix_cache import PrefixMatch
from minisgl.scheduler.request import EMPTY_OUTPUTS, NO_TOKENS, Request, RequestState, StepOutputs
from minisgl.scheduler.slot_table import SlotTable
from minisgl.scheduler.step_results import StepResults

# A step with this many prompt tokens takes so much longer than a decode step that running ahead of it would hide
# nothing, while a prompt that arrives meanwhile would have to wait for two such steps.
LARGE_PREFILL_TOKENS = 257
LARGE_PREFILL_SHARE = 0.25  # of max_extend_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know of the engine."""

    num_pages: int
    page_size: int  # tokens
    max_running_req: int  # slots of the worker
    max_extend_tokens: int  # prompt tokens in one step, beside the decode rows
    context_limit_tokens: int  # prompt and output of one request; cut to what the pool holds
    vocab_size: int
    max_steps_in_flight: int = 2
    cache_type: str = "radix"
    schedule_policy: str = "fcfs"
    max_queued_req: int = 4096


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts now and since the start. num_accepted = num_finished + num_aborted + num_failed + those without an end."""

    num_waiting: int  # preempted ones included
    num_running: int
    num_draining: int
    num_pages_free: int
    num_pages_cached: int
    num_pages_used: int
    prefix_hit_tokens: int
    prompt_tokens: int  # of admitted requests, cached ones included
    output_tokens: int
    num_preemptions: int
    num_steps: int  # issued
    num_accepted: int
    num_finished: int
    num_aborted: int
    num_failed: int


class Scheduler:
    """Four verbs: `add_request`, `abort_request`, `schedule`, `complete`.

    At most `max_steps_in_flight` steps are issued and not completed. A request holds a slot and pages from admission
    until the last step that lists it has completed; only then does `_release` take them back. Who owns which positions
    of a request that holds a slot:

        [0, cached)                       pages found in the prefix cache, shared, never written
        [cached, num_written)             its own pages; from the last chunk on, full pages of the prompt are shared
        [num_written, num_issued)         its own pages, being written by steps in flight
        [num_issued, end of last page)    its own, free for its next rows
        token ids are known up to num_accepted: the whole prompt, and then num_written + 1
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.context_limit_tokens = min(config.context_limit_tokens, config.num_pages * config.page_size)
        self._large_prefill_tokens = max(LARGE_PREFILL_TOKENS, config.max_extend_tokens * LARGE_PREFILL_SHARE)
        self._memory = KVMemory(config.num_pages, config.page_size, config.cache_type)
        max_pages = self._memory.pages_for(self.context_limit_tokens)
        self._table = SlotTable(config.max_running_req, config.page_size, max_pages)
        self._in_flight = self._table.in_flight
        self._queue = WaitingQueue(POLICIES[config.schedule_policy])
        self._admission = Admission(self._memory, self._table, self._queue, config.max_running_req)
        self._results = StepResults(self._memory, config.vocab_size, config.max_running_req)
        self._requests: dict[tuple[int, int], Request] = {}  # without a terminal output so far
        self._prefill_set = PrefillSet(self._table)
        self._decode_set = DecodeSet(self._table)
        self._sent_batch: DecodeBatch = self._decode_set.batch  # whose slots the worker has
        self._num_large_in_flight = 0
        self._num_ended = dict.fromkeys(FinishReason, 0)
        self._num_steps = self._num_accepted = self._num_admitted = self._num_preemptions = 0
        self._prompt_tokens = self._prefix_hit_tokens = self._output_tokens = 0

    # ------------------------------------------------------------------------------------------------ the four verbs

    def add_request(self, request: Request) -> None:
        """Queue a request; its max_tokens is cut to the room in the context.

        Raises:
            InvalidRequest: no room for one output token, or a token id outside of the vocabulary.
            Overloaded: the queue is full.
        """
        assert request.key not in self._requests, f"request {request.key} is live already"
        check_prompt(request.prompt_ids, self.config.vocab_size, self.context_limit_tokens)
        if self._queue.num_waiting >= self.config.max_queued_req:
            raise Overloaded(f"{self._queue.num_waiting} requests are waiting, limit {self.config.max_queued_req}")
        request.max_tokens = min(request.max_tokens, self.context_limit_tokens - len(request.prompt_ids))
        self._requests[request.key] = request
        self._num_accepted += 1
        self._results.stops.add(request.stop_ids)
        self._queue.push(request, self._num_admitted)

    def abort_request(self, client_id: int, request_id: int) -> StepOutputs:
        """End a request now. Returns its terminal output, or nothing if the id is unknown or has ended."""
        request = self._requests.get((client_id, request_id))
        if request is None:
            return EMPTY_OUTPUTS
        request.final_ids = self._memory.known_tokens(request)
        builder = OutputBuilder()
        output = NO_TOKENS if request.stream else self._memory.output_tokens(request)
        builder.add(request, output, FinishReason.ABORT)
        self._end(request, FinishReason.ABORT)
        return builder.build()

    def abort_client(self, client_id: int) -> None:
        """End all requests of a client, without outputs."""
        for request in [request for request in self._requests.values() if request.client_id == client_id]:
            request.final_ids = self._memory.known_tokens(request)
            self._end(request, FinishReason.ABORT)

    def schedule(self, now: float) -> Step | None:
        """Decide the next step and record it as issued; None if there is nothing to issue now.

        Every decoding request gets a row, and a page if its last one is full. Where pages run out, the oldest requests
        get them, the others sit the step out, and the newest are preempted until the pages on their way back suffice.
        Then up to max_extend_tokens prompt tokens are given out: first to prompts that were begun before, the oldest
        first, then to waiting requests in the order of the queue, as far as slots and pages last. Nothing here depends
        on token values, so a step can be decided while the one before it runs.

        Args:
            now: monotonic seconds; kept for `oldest_issued_at`.
        """
        if len(self._in_flight) >= (1 if self._num_large_in_flight else self.config.max_steps_in_flight):
            return None
        grants = self._plan_decode()
        admits: list[Admit] = []
        prefills = self._plan_prefills(admits)
        if not prefills and not len(self._decode_set.batch):
            return None
        return self._issue(now, grants, prefills, admits)

    def complete(self, result: Result) -> StepOutputs:
        """Take in the result of the oldest step in flight. Returns its new tokens, and the ends that they bring."""
        record = self._in_flight.popleft()
        assert result.step_id == record.step_id, f"result of step {result.step_id}, expected {record.step_id}"
        self._num_large_in_flight -= record.has_large_prefill
        tokens, ends = self._results.accept(record, result)
        outputs = self._results.collect(record, result, tokens, ends)
        self._output_tokens += len(tokens) - len(record.dropped_rows)
        for row, reason in ends.items():
            self._output_tokens -= reason is FinishReason.ERROR
            self._end(record.request_of(row), reason)
        for request in record.last_chunks:
            if request.state is RequestState.RUNNING:
                self._memory.share_prompt(request)
        for request in record.releases:
            self._release(request)
        return outputs

    # ------------------------------------------------------------------------------------------------ looking in

    @property
    def has_work(self) -> bool:
        """Whether a request is live or a step in flight."""
        return bool(self._requests or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps issued and not completed."""
        return len(self._in_flight)

    @property
    def oldest_issued_at(self) -> float | None:
        """The `now` at which the oldest step in flight was issued."""
        return self._in_flight[0].issued_at if self._in_flight else None

    def live_requests(self) -> Iterator[Request]:
        """Requests that hold a slot and pages (running or draining), then those that wait."""
        yield from self._table.holders()
        yield from self._queue

    def stats(self) -> SchedulerStats:
        pool, ended = self._memory.pool, self._num_ended
        return SchedulerStats(
            num_waiting=self._queue.num_waiting + self._queue.num_preempted,
            num_running=self._table.num_running,
            num_draining=self.config.max_running_req - len(self._table.free_slots) - self._table.num_running,
            num_pages_free=pool.num_free,
            num_pages_cached=pool.num_cached,
            num_pages_used=pool.num_used,
            prefix_hit_tokens=self._prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            num_accepted=self._num_accepted,
            num_finished=ended[FinishReason.STOP] + ended[FinishReason.LENGTH],
            num_aborted=ended[FinishReason.ABORT],
            num_failed=ended[FinishReason.ERROR],
        )

    def check_integrity(self) -> int:
        """Check the books of slots and pages.

        Returns:
            The number of leaked pages.

        Raises:
            IntegrityError: a slot or page has two owners, or a count is wrong.
        """
        holders, free = self._table.holders(), self._table.free_slots
        if len(set(free)) != len(free) or len(free) + len(holders) != self.config.max_running_req:
            raise IntegrityError(f"{len(holders)} requests hold slots, and {sorted(free)} are free")
        num_running = sum(request.state is RequestState.RUNNING for request in holders)
        if num_running != self._table.num_running:
            raise IntegrityError(f"{num_running} requests are running, {self._table.num_running} were counted")
        return self._memory.check_integrity(holders)

    # ------------------------------------------------------------------------------------------------ planning

    def _plan_decode(self) -> bytes:
        """Settle which rows decode in the next step. Returns the page grants that they need."""
        batch = self._decode_set.refresh()
        rows = batch.find_rows_without_page()
        if not len(rows):
            return b""
        if len(rows) <= self._memory.pool.num_available:
            return batch.grant(rows, self._memory.allocate(len(rows)))
        self._make_room()
        batch = self._decode_set.batch
        rows = batch.find_rows_without_page()
        by_age = rows[self._table.admission_order[batch.slots[rows]].argsort()]
        num_granted = min(len(by_age), self._memory.pool.num_available)
        grants = batch.grant(by_age[:num_granted], self._memory.allocate(num_granted))
        if num_granted < len(by_age):
            self._decode_set.hold(by_age[num_granted:])
        return grants

    def _make_room(self) -> None:
        """Preempt, newest first, until the pages available or on their way back suffice for all decode rows."""
        while True:
            num_missing = len(self._decode_set.refresh().find_rows_without_page())
            holders = self._table.holders()
            draining = [request for request in holders if request.state is RequestState.DRAINING]
            running = [request for request in holders if request.state is RequestState.RUNNING]
            num_coming = self._memory.pool.num_available + self._memory.count_owed_pages(draining)
            if num_missing <= num_coming:
                return
            assert len(running) > 1, f"{running} does not fit into the pool alone"
            self._preempt(max(running, key=get_age))

    def _plan_prefills(self, admits: list[Admit]) -> list[PrefillRow]:
        """Chunks of prompts for the next step. Requests that are admitted for them are added to `admits`."""
        rows = self._prefill_set.plan(self.config.max_extend_tokens)
        budget = self.config.max_extend_tokens - sum(row.num_tokens for row in rows)
        if budget and self._table.free_slots:
            for request, match in self._admission.iter_admissible():
                admits.append(self._admit(request, match))
                rows.append(self._prefill_set.plan_row(request, budget))
                budget -= rows[-1].num_tokens
                if not budget or not self._table.free_slots:
                    break
        return rows

    def _admit(self, request: Request, match: PrefixMatch) -> Admit:
        """Give a waiting request a slot and the pages of its prompt."""
        self._queue.remove(request)
        num_cached_tokens = len(match.page_ids) * self.config.page_size
        if request.admission_order is None:
            request.admission_order = self._num_admitted
            request.cached_tokens = num_cached_tokens
            self._num_admitted += 1
            self._prompt_tokens += len(request.prompt_ids)
            self._prefix_hit_tokens += num_cached_tokens
        page_ids = self._memory.take_prompt(request, match)
        slot = self._table.take(request, num_cached_tokens, page_ids)
        request.state = RequestState.RUNNING
        self._prefill_set.join(request)
        return Admit(
            slot=slot,
            token_ids=request.token_ids.tobytes(),
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=num_cached_tokens,
            page_ids=page_ids.tobytes(),
            seed=request.seed,
            sampling=request.sampling,
        )

    # ------------------------------------------------------------------------------------------------ issue

    def _issue(self, now: float, grants: bytes, prefills: list[PrefillRow], admits: list[Admit]) -> Step:
        """Advance the counters of a planned step, record it, and drain the requests of which it holds the last row."""
        batch = self._decode_set.batch
        locations = batch.issue()
        final_rows = batch.find_final_rows()
        last_chunks = [row.request for row in prefills if row.is_last]
        if prefills:
            self._prefill_set.issue(prefills)
            last_slots = np.array([request.slot for request in last_chunks], np.intp)
            for request in last_chunks:
                self._decode_set.join(request)
            num_issued = self._table.num_issued[last_slots]
            locations = np.concatenate((locations, self._table.get_locations(last_slots, num_issued - 1)))
            is_final = num_issued == self._table.num_final[last_slots]
            final_rows += (len(batch) + is_final.nonzero()[0]).tolist()
        is_large = bool(prefills) and sum(row.num_tokens for row in prefills) >= self._large_prefill_tokens
        step_id = self._num_steps
        record = StepRecord(step_id, now, batch, prefills, last_chunks, locations, final_rows, is_large)
        self._num_steps += 1
        self._num_large_in_flight += is_large
        self._in_flight.append(record)
        for row in final_rows:
            request = record.request_of(row)
            self._stop_issuing(request)
            record.releases.append(request)
        decode_slots = None if batch is self._sent_batch else batch.wire_slots
        self._sent_batch = batch
        return Step(step_id, tuple(admits), grants, decode_slots, len(batch) > 0, pack_prefills(prefills))

    # ------------------------------------------------------------------------------------------------ ends

    def _end(self, request: Request, reason: FinishReason) -> None:
        """The terminal output is made: no row of the request counts any more."""
        assert request.final_ids is not None, f"{request} ends without its tokens"
        del self._requests[request.key]
        self._num_ended[reason] += 1
        self._results.stops.remove(request.stop_ids)
        if request.slot is None:
            self._queue.remove(request)
            request.state = RequestState.FINISHED
            return
        if reason is not FinishReason.LENGTH:  # a length is known at issue: no row comes after it
            for record in self._in_flight:
                row = record.row_of(request)
                if row is not None:
                    record.dropped_rows.add(row)
        if request.state is RequestState.RUNNING:
            self._drain(request)
        elif request.is_preempted:  # it does not return, so it need not bar the way while it drains
            request.is_preempted = False
            self._queue.num_returning -= 1

    def _preempt(self, request: Request) -> None:
        """Let a running request drain and then wait again, to be computed anew from the tokens it has by then."""
        assert request.admission_order is not None, f"{request} was never admitted"
        self._num_preemptions += 1
        request.num_preemptions += 1
        request.num_older = self._table.count_older(request.admission_order)
        request.is_preempted = True
        self._queue.num_returning += 1
        self._drain(request)

    def _drain(self, request: Request) -> None:
        """Issue no further row, and release the request once the last step that lists it has completed."""
        self._stop_issuing(request)
        for record in reversed(self._in_flight):
            if record.count_tokens(request):
                record.releases.append(request)
                return
        self._release(request)

    def _stop_issuing(self, request: Request) -> None:
        assert request.state is RequestState.RUNNING and request.slot is not None, f"{request} cannot drain"
        request.state = RequestState.DRAINING
        self._table.num_running -= 1
        if self._table.is_decoding[request.slot]:
            self._decode_set.leave(request)
        else:
            self._prefill_set.leave(request)

    def _release(self, request: Request) -> None:
        """Take back slot and pages. A preempted request that has not ended waits again, with all tokens it has."""
        assert request.state is RequestState.DRAINING, f"{request} cannot be released"
        token_ids = self._memory.known_tokens(request)
        self._memory.release(request, token_ids)
        self._table.give_back(request)
        request.token_ids = token_ids
        self._queue.num_returning -= request.is_preempted
        request.is_preempted = False
        if request.has_ended:
            request.state = RequestState.FINISHED
        else:
            request.state = RequestState.WAITING
            self._queue.push_preempted(request)
