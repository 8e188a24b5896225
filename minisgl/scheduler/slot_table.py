"""What the worker's slots hold, as numpy columns by slot, and the steps in flight that use them.

A decode step touches hundreds of requests, so what changes in every step is in columns, not in `Request` objects.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from minisgl.scheduler.batch import StepRecord
    from minisgl.scheduler.request import Request

_NEVER = np.iinfo(np.int64).max


class SlotTable:
    """One row for each slot. A request holds its slot from admission to release, that is, while it runs and drains."""

    def __init__(self, num_slots: int, page_size: int, max_pages: int) -> None:
        self.page_size = page_size
        self.in_flight: deque[StepRecord] = deque()  # issued and not completed, oldest first
        self.num_running = 0  # the other holders of slots are draining
        self.free_slots = list(range(num_slots - 1, -1, -1))  # a stack, low slots on top

        self.requests: NDArray[np.object_] = np.empty(num_slots, np.object_)
        self.num_issued = np.zeros(num_slots, np.int64)  # KV positions promised by issued steps
        # Pages of positions 0, page_size, ...; the memory of rows and columns never used is never touched.
        self.page_table = np.zeros((num_slots, max_pages), np.int32)
        self.is_decoding = np.zeros(num_slots, np.bool_)
        # Unchanged while the slot is held:
        self.num_final = np.zeros(num_slots, np.int64)  # num_issued after the last row
        self.admission_order = np.full(num_slots, _NEVER)  # _NEVER: the slot is free
        self.client_id = np.zeros(num_slots, np.int64)
        self.request_id = np.zeros(num_slots, np.uint64)
        self.is_streaming = np.zeros(num_slots, np.bool_)
        self.num_items = np.zeros(num_slots, np.int64)  # log-probability items for each token

    def take(self, request: Request, num_cached_tokens: int, page_ids: NDArray[np.int32]) -> int:
        """Give an admitted request a free slot, with the pages of its prompt."""
        slot = self.free_slots.pop()
        self.requests[slot] = request
        self.num_issued[slot] = num_cached_tokens
        self.page_table[slot, : len(page_ids)] = page_ids
        self.num_final[slot] = request.num_final_tokens
        self.admission_order[slot] = request.admission_order or 0
        self.client_id[slot] = request.client_id
        self.request_id[slot] = request.request_id
        self.is_streaming[slot] = request.stream
        self.num_items[slot] = request.num_items_per_token
        self.num_running += 1
        request.slot, request.table = slot, self
        return slot

    def give_back(self, request: Request) -> None:
        slot = request.slot
        assert slot is not None and self.requests[slot] is request, f"{request} does not hold slot {slot}"
        self.requests[slot] = None
        self.admission_order[slot] = _NEVER
        self.free_slots.append(slot)
        request.slot, request.table = None, None

    def get_page_ids(self, request: Request) -> NDArray[np.int32]:
        """[num_pages] i32, a copy: the page table of a request that holds a slot."""
        num_tokens = max(request.num_issued_tokens, len(request.token_ids))
        return self.page_table[request.slot, : -(-num_tokens // self.page_size)].copy()

    def get_locations(self, slots: NDArray[np.intp], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """KV locations of one position in each slot: page id * page_size + offset."""
        page_ids = self.page_table[slots, positions // self.page_size]
        return page_ids * np.int64(self.page_size) + positions % self.page_size

    def count_in_flight_tokens(self, request: Request) -> int:
        """KV positions of a request that steps in flight are to write."""
        return sum(record.count_tokens(request) for record in self.in_flight)

    def count_older(self, admission_order: int) -> int:
        """Requests that hold a slot and were first admitted before this one."""
        return int(np.count_nonzero(self.admission_order < admission_order))

    def holders(self) -> list[Request]:
        """The requests that hold a slot."""
        return [request for request in self.requests if request is not None]
