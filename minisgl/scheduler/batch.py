"""The rows of steps: who decodes, which chunks of prompts are computed, and what an issued step will bring."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from minisgl.scheduler.request import Request
from minisgl.scheduler.slot_table import SlotTable

_NO_SLOTS: NDArray[np.intp] = np.empty(0, np.intp)


class DecodeBatch:
    """The decode rows of consecutive steps with the same requests.

    Whatever depends on the requests alone is gathered once, and whatever grows by one in each step is kept as its value
    at the first of these steps: a steady step then needs only a handful of numpy calls.
    """

    def __init__(self, slots: NDArray[np.intp], table: SlotTable) -> None:
        self.slots = slots  # [num_rows]
        self.requests = table.requests[slots]  # [num_rows]: results are resolved through this, never by slot
        self.wire_slots = slots.astype(np.int32).tobytes()
        self.num_items = table.num_items[slots]  # [num_rows]
        self.has_logprobs = bool(self.num_items.any())
        stream_rows = table.is_streaming[slots].nonzero()[0]
        by_client = table.client_id[slots[stream_rows]].argsort(kind="stable")
        self.stream_rows = stream_rows[by_client]  # [num_streaming]
        stream_slots = slots[self.stream_rows]
        self.stream_client_ids = table.client_id[stream_slots]
        self.stream_request_ids = table.request_id[stream_slots]
        for shared in (self.stream_client_ids, self.stream_request_ids):
            shared.flags.writeable = False  # they go out with every step

        self._table = table
        self._num_steps = 0  # issued with this batch
        positions = table.num_issued[slots]
        self._phases = -positions % table.page_size  # [num_rows] the first step, modulo page_size, that begins a page
        self._locations = table.get_locations(slots, positions)  # [num_rows] of the first step
        self._final_steps = table.num_final[slots] - positions  # [num_rows] steps up to the last
        self._first_final_step = int(self._final_steps.min()) if len(slots) else 0

    def __len__(self) -> int:
        return len(self.slots)

    def row_of(self, request: Request) -> int | None:
        """The row of a request that holds a slot, if it is in the batch."""
        for row in (self.slots == request.slot).nonzero()[0].tolist():
            if self.requests[row] is request:
                return int(row)
        return None

    def find_rows_without_page(self) -> NDArray[np.intp]:
        """Rows whose next position begins a page."""
        rows: NDArray[np.intp] = (self._phases == self._num_steps % self._table.page_size).nonzero()[0]
        return rows

    def grant(self, rows: NDArray[np.intp], page_ids: NDArray[np.int32]) -> bytes:
        """Append a page to the page tables of rows without one. Returns the grants as they travel."""
        page_size = self._table.page_size
        slots = self.slots[rows]
        indices = self._table.num_issued[slots] // page_size
        self._table.page_table[slots, indices] = page_ids
        self._locations[rows] = page_ids * np.int64(page_size) - self._num_steps
        grants = np.empty((len(rows), 3), np.int32)
        grants[:, 0] = slots
        grants[:, 1] = indices
        grants[:, 2] = page_ids
        return grants.tobytes()

    def issue(self) -> NDArray[np.int64]:
        """Count one more step. Returns the KV locations that its rows write, [num_rows]."""
        locations = self._locations + self._num_steps
        self._num_steps += 1
        self._table.num_issued[self.slots] += 1
        return locations

    def find_final_rows(self) -> list[int]:
        """Rows of which the step issued last was the last one."""
        if self._num_steps != self._first_final_step:
            return []
        rows: list[int] = (self._final_steps == self._num_steps).nonzero()[0].tolist()
        return rows


class DecodeSet:
    """The requests that decode. Its changes are gathered until the next step is planned."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._slots = _NO_SLOTS
        self._joining: list[int] = []
        self._is_stale = False
        self.batch = DecodeBatch(_NO_SLOTS, table)  # of the next step, once refreshed

    def join(self, request: Request) -> None:
        """The last chunk is issued: the request decodes from the next step on."""
        assert request.slot is not None, f"{request} holds no slot"
        self._table.is_decoding[request.slot] = True
        self._joining.append(request.slot)
        self._is_stale = True

    def leave(self, request: Request) -> None:
        self._table.is_decoding[request.slot] = False
        self._is_stale = True

    def refresh(self) -> DecodeBatch:
        """Bring `batch` up to date, with a row for every decoding request."""
        if self._is_stale:
            slots = np.concatenate((self._slots, np.array(self._joining, np.intp)))
            self._slots = slots[self._table.is_decoding[slots]]
            self._joining = []
            self._is_stale = False
            self.batch = DecodeBatch(self._slots, self._table)
        return self.batch

    def hold(self, rows: NDArray[np.intp]) -> None:
        """Leave rows of `batch` out of the next step."""
        self.batch = DecodeBatch(np.delete(self._slots, rows), self._table)
        self._is_stale = True


@dataclass(slots=True)
class PrefillRow:
    """A chunk of a prompt in a step."""

    request: Request
    start: int
    num_tokens: int
    is_last: bool


class PrefillSet:
    """The running requests whose prompts are not issued up to the end, oldest first."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._requests: list[Request] = []

    def join(self, request: Request) -> None:
        self._requests.append(request)  # nobody newer can be there: a preempted request lets nobody pass

    def leave(self, request: Request) -> None:
        self._requests.remove(request)

    def plan(self, budget: int) -> list[PrefillRow]:
        """The next chunks, of `budget` tokens in all."""
        rows: list[PrefillRow] = []
        for request in self._requests:
            if not budget:
                break
            rows.append(self.plan_row(request, budget))
            budget -= rows[-1].num_tokens
        return rows

    def plan_row(self, request: Request, budget: int) -> PrefillRow:
        """The next chunk of one request, of at most `budget` tokens."""
        start = request.num_issued_tokens
        num_left = len(request.token_ids) - start
        return PrefillRow(request, start, min(num_left, budget), num_left <= budget)

    def issue(self, rows: list[PrefillRow]) -> None:
        """Count the tokens of chunks. Requests leave with their last one."""
        for row in rows:
            self._table.num_issued[row.request.slot] += row.num_tokens
            if row.is_last:
                self.leave(row.request)


@dataclass(slots=True)
class StepRecord:
    """What an issued step will bring: kept until its Result arrives. Sampling rows: decode rows, then last chunks."""

    step_id: int
    issued_at: float
    batch: DecodeBatch
    prefills: list[PrefillRow]
    last_chunks: list[Request]
    locations: NDArray[np.int64]  # [num_sampling_rows] KV location that the row writes (of a chunk: the last)
    final_rows: list[int]  # sampling rows that are the last of their request, by length
    has_large_prefill: bool
    dropped_rows: set[int] = field(default_factory=set)  # sampling rows whose request has ended before
    releases: list[Request] = field(default_factory=list)  # draining requests that no later step lists

    def request_of(self, row: int) -> Request:
        """The request of a sampling row."""
        num_decode = len(self.batch)
        request: Request = self.batch.requests[row] if row < num_decode else self.last_chunks[row - num_decode]
        return request

    def row_of(self, request: Request) -> int | None:
        """The sampling row of a request, if it has one."""
        for index, other in enumerate(self.last_chunks):
            if other is request:
                return len(self.batch) + index
        return self.batch.row_of(request)

    def count_tokens(self, request: Request) -> int:
        """KV positions that the step writes for a request; 0 if it does not list it."""
        for prefill in self.prefills:
            if prefill.request is request:
                return prefill.num_tokens
        return 0 if self.batch.row_of(request) is None else 1


def get_age(request: Request) -> int:
    """The place of an admitted request in the order of first admissions."""
    assert request.admission_order is not None, f"{request} was never admitted"
    return request.admission_order


def pack_prefills(rows: list[PrefillRow]) -> bytes:
    """[n, 4] i32: slot, first position, number of tokens, last chunk?"""
    if not rows:
        return b""
    return np.array([(row.request.slot, row.start, row.num_tokens, row.is_last) for row in rows], np.int32).tobytes()
