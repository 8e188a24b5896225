"""One request of the scheduler, and the columns in which outputs leave."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from minisgl.protocol import Sampling
from minisgl.scheduler.radix_cache import Node
from minisgl.scheduler.slot_table import SlotTable


class RequestState(StrEnum):
    """Where a request is in its life: waiting -> running -> draining -> finished, or back to waiting when preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"  # no further row is issued; holds its slot and pages until its last issued step completes
    FINISHED = "finished"


class Request:
    """One sample: what was asked for, and what the scheduler knows about it.

    The scheduler owns the object from `add_request` on: read it freely, but leave changes to the scheduler.

    Args:
        client_id, request_id: name the request; unique among the live ones.
        prompt_ids: [num_prompt_tokens] i32, not empty.
        max_tokens: output tokens, at least 1. `add_request` cuts it to the room that the context leaves.
        sampling: passed on to the worker; of it the scheduler reads stop_ids, min_tokens and num_logprobs.
        seed: 64 bits.
        stream: whether each token is put out as it comes, or all of them at the end.
    """

    __slots__ = (
        "admission_order", "cached_tokens", "client_id", "final_ids", "has_failed", "is_preempted", "logprobs",
        "max_tokens", "node", "num_changes_seen", "num_items_per_token", "num_older", "num_overtaken",
        "num_pages_short", "num_preemptions", "prompt_ids", "queue_key", "request_id", "sampling", "seed", "slot",
        "state", "stop_ids", "stream", "table", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        client_id: int,
        request_id: int,
        prompt_ids: NDArray[np.int32],
        max_tokens: int,
        sampling: Sampling,
        seed: int,
        stream: bool,
    ) -> None:
        assert prompt_ids.dtype == np.int32, f"prompt_ids are {prompt_ids.dtype}, not int32"
        self.client_id, self.request_id = client_id, request_id
        self.prompt_ids, self.max_tokens = prompt_ids, max_tokens
        self.sampling, self.seed, self.stream = sampling, seed, stream
        self.stop_ids = frozenset(np.frombuffer(sampling.stop_ids, np.int32).tolist())
        # Log-probability items that the Result holds for each of its tokens: the chosen one and the k best.
        self.num_items_per_token = 0 if sampling.num_logprobs is None else sampling.num_logprobs + 1

        self.state = RequestState.WAITING
        self.token_ids = prompt_ids  # known at the (next) admission: the prompt, and what was generated before
        self.logprobs: list[LogprobItems] = []  # not put out so far
        self.cached_tokens = 0  # prompt tokens found in the prefix cache at the first admission
        self.final_ids: NDArray[np.int32] | None = None  # prompt and output, from its terminal output on
        self.has_failed = False  # a row of it had a logit that is not finite: its KV may be no better
        self.num_preemptions = 0

        # Of use to the queue and to admission:
        self.queue_key = (0, 0)  # its place among the requests never admitted so far
        self.admission_order: int | None = None  # of the first admission
        self.num_overtaken = 0  # requests behind it in the queue that were admitted before it
        self.is_preempted = False  # until it waits again
        self.num_older = 0  # when it was preempted, holders of slots that were admitted before it
        self.num_pages_short = 0  # pages that it needed when it was last looked at, and
        self.num_changes_seen: int | None = None  # the state of the prefix cache at that time

        # While it holds a slot (running or draining):
        self.slot: int | None = None
        self.table: SlotTable | None = None
        self.node: Node | None = None  # where its prefix match ended

    @property
    def key(self) -> tuple[int, int]:
        """(client_id, request_id)."""
        return self.client_id, self.request_id

    @property
    def has_ended(self) -> bool:
        """Whether its terminal output is made."""
        return self.final_ids is not None

    @property
    def page_ids(self) -> NDArray[np.int32]:
        """[num_pages] i32, a copy: the pages of KV positions 0, page_size, ... Empty without a slot."""
        return NO_TOKENS if self.table is None else self.table.get_page_ids(self)

    @property
    def num_issued_tokens(self) -> int:
        """KV positions promised by issued steps, or found in the prefix cache."""
        return 0 if self.table is None else int(self.table.num_issued[self.slot])

    @property
    def num_written_tokens(self) -> int:
        """KV positions written by completed steps, or found in the prefix cache."""
        return 0 if self.table is None else self.num_issued_tokens - self.table.count_in_flight_tokens(self)

    @property
    def num_accepted_tokens(self) -> int:
        """Token ids known: the prompt and the output so far."""
        if self.final_ids is not None:
            return len(self.final_ids)
        num_written = self.num_written_tokens
        # Each row from the last chunk on has written the position before the token that it sampled.
        return num_written + 1 if num_written >= len(self.token_ids) else len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_accepted_tokens - len(self.prompt_ids)

    @property
    def num_final_tokens(self) -> int:
        """num_issued_tokens after its last row by length: the KV of the last token is never needed."""
        return len(self.prompt_ids) + self.max_tokens - 1

    def __repr__(self) -> str:
        return f"Request({self.client_id}, {self.request_id}, {self.state})"


@dataclass(frozen=True, slots=True)
class LogprobItems:
    """Log-probabilities of consecutive tokens: for each, the chosen token and then the k best."""

    token_ids: NDArray[np.int32]  # [num_items]
    values: NDArray[np.float32]  # [num_items]


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """New tokens and ends of requests, columnar: entry i owns the next num_tokens[i] of `tokens`. Read-only.

    A streaming request has one entry for each step that gave it a token; any other has one entry, at its end, with all
    its tokens. An entry with STOP carries the stop id as its last token. Streamed entries come grouped by client.
    """

    client_ids: NDArray[np.int64]  # [n]
    request_ids: NDArray[np.uint64]  # [n]
    num_tokens: NDArray[np.int32]  # [n]
    finish_reasons: NDArray[np.uint8]  # [n] FinishReason, 0 = goes on
    cached_tokens: NDArray[np.int32]  # [n] prompt tokens from the prefix cache; set when finished
    tokens: NDArray[np.int32]  # [sum(num_tokens)]
    errors: tuple[str, ...]  # one for each entry with FinishReason.ERROR
    num_logprobs: NDArray[np.int32]  # [n] items owned in the two arrays below
    logprob_ids: NDArray[np.int32]  # [sum(num_logprobs)]
    logprob_values: NDArray[np.float32]  # [sum(num_logprobs)]

    def __len__(self) -> int:
        return len(self.request_ids)


NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
NO_VALUES: NDArray[np.float32] = np.empty(0, np.float32)
EMPTY_OUTPUTS = StepOutputs(
    client_ids=np.empty(0, np.int64),
    request_ids=np.empty(0, np.uint64),
    num_tokens=NO_TOKENS,
    finish_reasons=np.empty(0, np.uint8),
    cached_tokens=NO_TOKENS,
    tokens=NO_TOKENS,
    errors=(),
    num_logprobs=NO_TOKENS,
    logprob_ids=NO_TOKENS,
    logprob_values=NO_VALUES,
)
