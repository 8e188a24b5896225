"""From a step's record and its Result to tokens, ends and outputs."""

import numpy as np
from numpy.typing import NDArray

from minisgl.core import FinishReason
from minisgl.protocol import FAILED_ROW_BIT, Result
from minisgl.scheduler.batch import StepRecord
from minisgl.scheduler.kv_memory import KVMemory
from minisgl.scheduler.outputs import OutputBuilder, join_outputs
from minisgl.scheduler.request import EMPTY_OUTPUTS, NO_TOKENS, NO_VALUES, LogprobItems, Request, StepOutputs

Tokens = NDArray[np.int32]  # [num_sampling_rows]
Ends = dict[int, FinishReason]  # by sampling row


class StopTable:
    """The union of the stop ids of all live requests: tests all tokens of a step at once. Hits are checked singly."""

    def __init__(self, vocab_size: int) -> None:
        self.is_stop = np.zeros(vocab_size, np.bool_)
        self._num_requests: dict[frozenset[int], int] = {}  # most requests have the same stop ids

    def add(self, stop_ids: frozenset[int]) -> None:
        self._num_requests[stop_ids] = self._num_requests.get(stop_ids, 0) + 1
        if self._num_requests[stop_ids] == 1:
            self._mark(stop_ids)

    def remove(self, stop_ids: frozenset[int]) -> None:
        self._num_requests[stop_ids] -= 1
        if not self._num_requests[stop_ids]:
            del self._num_requests[stop_ids]
            self._mark(stop_ids, False)
            for others in self._num_requests:
                if not others.isdisjoint(stop_ids):
                    self._mark(others)

    def _mark(self, stop_ids: frozenset[int], is_stop: bool = True) -> None:
        self.is_stop[[token for token in stop_ids if 0 <= token < len(self.is_stop)]] = is_stop


class StepResults:
    """Takes in the Results of steps."""

    def __init__(self, memory: KVMemory, vocab_size: int, num_slots: int) -> None:
        self.stops = StopTable(vocab_size)
        self._memory = memory
        self._ones = np.ones(num_slots, np.int32)
        self._zeros = np.zeros(num_slots, np.int32)
        self._no_reasons = np.zeros(num_slots, np.uint8)
        for shared in (self._ones, self._zeros, self._no_reasons):
            shared.flags.writeable = False

    def accept(self, record: StepRecord, result: Result) -> tuple[Tokens, Ends]:
        """Keep the new tokens, and find and mark who ends with them. Rows of requests that had ended are left out.

        Returns:
            The tokens of the sampling rows, and why the requests of some rows end.
        """
        ids: NDArray[np.uint32] = np.frombuffer(result.tokens, np.uint32)
        assert len(ids) == len(record.locations), (
            f"step {record.step_id} has {len(record.locations)} sampling rows, its result {len(ids)} tokens"
        )
        ends = dict.fromkeys(record.final_rows, FinishReason.LENGTH)
        try:
            is_hit = self.stops.is_stop.take(ids)
        except IndexError:  # a failure bit makes the id larger than any vocabulary: no test for it in a steady step
            failed_rows = (ids >= FAILED_ROW_BIT).nonzero()[0].tolist()
            ids = ids & np.uint32(FAILED_ROW_BIT - 1)
            assert int(ids.max()) < len(self.stops.is_stop), f"step {record.step_id} returned the token id {ids.max()}"
            is_hit = self.stops.is_stop.take(ids)
            ends |= dict.fromkeys(failed_rows, FinishReason.ERROR)
            for row in failed_rows:
                record.request_of(row).has_failed = True  # also where it has ended, and the token is dropped
        tokens = ids.view(np.int32)
        self._memory.store_tokens(record.locations, tokens)
        if np.count_nonzero(is_hit):
            for row in is_hit.nonzero()[0].tolist():
                if ends.get(row) is not FinishReason.ERROR and _is_stop(record.request_of(row), int(ids[row])):
                    ends[row] = FinishReason.STOP
        for row in record.dropped_rows:
            ends.pop(row, None)
        for row, reason in ends.items():
            request = record.request_of(row)
            token_ids = self._memory.known_tokens(request)
            request.final_ids = token_ids[:-1] if reason is FinishReason.ERROR else token_ids
        return tokens, ends

    def collect(self, record: StepRecord, result: Result, tokens: Tokens, ends: Ends) -> StepOutputs:
        """The outputs of a step whose tokens were accepted. Requests that end in it still hold their pages."""
        batch = record.batch
        num_decode = len(batch)
        single_rows = set(ends)
        single_rows.update(num_decode + i for i, request in enumerate(record.last_chunks) if request.stream)
        if batch.has_logprobs or result.logprob_ids:
            single_rows |= self._take_logprobs(record, result, ends)
        left_out = single_rows | record.dropped_rows
        rows, client_ids, request_ids = batch.stream_rows, batch.stream_client_ids, batch.stream_request_ids
        if left_out:
            is_kept = np.ones(len(tokens), np.bool_)
            is_kept[list(left_out)] = False
            kept = is_kept[rows]
            rows, client_ids, request_ids = rows[kept], client_ids[kept], request_ids[kept]
        steady = EMPTY_OUTPUTS
        if num := len(rows):
            steady = StepOutputs(
                client_ids, request_ids, self._ones[:num], self._no_reasons[:num], self._zeros[:num], tokens[rows],
                (), self._zeros[:num], NO_TOKENS, NO_VALUES,
            )  # fmt: skip
        if not single_rows:
            return steady
        builder = OutputBuilder()
        for row in sorted(single_rows - record.dropped_rows):
            self._add_single(builder, record, row, tokens, ends)
        return join_outputs(steady, builder.build())

    def _add_single(self, builder: OutputBuilder, record: StepRecord, row: int, tokens: Tokens, ends: Ends) -> None:
        request, reason = record.request_of(row), ends.get(row)
        is_failed = reason is FinishReason.ERROR
        error = f"step {record.step_id}: the model returned a logit that is not finite" if is_failed else None
        if request.stream:
            builder.add(request, NO_TOKENS if is_failed else tokens[row : row + 1], reason, error)
        elif reason is not None:
            builder.add(request, self._memory.output_tokens(request), reason, error)

    def _take_logprobs(self, record: StepRecord, result: Result, ends: Ends) -> set[int]:
        """Hand each request its items. Returns the rows that got some."""
        ids = np.frombuffer(result.logprob_ids, np.int32)
        values = np.frombuffer(result.logprob_values, np.float32)
        counts = [*record.batch.num_items.tolist(), *(request.num_items_per_token for request in record.last_chunks)]
        assert len(ids) == len(values) == sum(counts), (
            f"step {record.step_id} asked for {sum(counts)} log-probabilities, its result has {len(ids)}, {len(values)}"
        )
        rows = set()
        start = 0
        for row, count in enumerate(counts):
            if count and row not in record.dropped_rows and ends.get(row) is not FinishReason.ERROR:
                items = LogprobItems(ids[start : start + count].copy(), values[start : start + count].copy())
                record.request_of(row).logprobs.append(items)
                rows.add(row)
            start += count
        return rows


def _is_stop(request: Request, token: int) -> bool:
    """Whether an accepted token ends its request. The first min_tokens tokens do not: none of them is a stop id."""
    return token in request.stop_ids and request.num_output_tokens > request.sampling.min_tokens
