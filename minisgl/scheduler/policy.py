"""Who is admitted next: the queue of waiting requests and the orders in which it can be kept."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from minisgl.scheduler.request import Request

# Longest output first: to have waited through one admission outweighs this many output tokens. A request is thus passed
# only by those that arrive before another (n / 16) are admitted, n being the tokens that they ask for beyond its own.
AGING_TOKENS = 16

# A policy maps (request, arrival order, requests admitted before it arrived) to a rank. The lowest rank goes first and
# ties go to the earlier arrival. The rank does not change while the request waits.
Policy = Callable[[Request, int, int], int]


def first_come_first_served(request: Request, arrival_order: int, num_admitted: int) -> int:
    """Rank by arrival."""
    return arrival_order


def longest_output_first(request: Request, arrival_order: int, num_admitted: int) -> int:
    """Rank by max_tokens, the longest first, so that no long request is left to run alone at the end.

    All that wait age alike, so the age need be counted only once: who arrives later starts that much further behind.
    """
    return num_admitted * AGING_TOKENS - request.max_tokens


POLICIES: dict[str, Policy] = {"fcfs": first_come_first_served, "lof": longest_output_first}


class WaitingQueue:
    """Requests not admitted so far, in the order of a policy, and preempted ones, which go before all of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._num_arrived = 0
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # sorted; the keys are distinct
        self._preempted: list[tuple[int, Request]] = []  # sorted by first admission
        self.num_returning = 0  # preempted, but still draining

    @property
    def num_waiting(self) -> int:
        """Requests never admitted so far."""
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """Preempted requests that wait."""
        return len(self._preempted)

    @property
    def first_preempted(self) -> Request | None:
        """Of the preempted requests that wait, the one first admitted."""
        return self._preempted[0][1] if self._preempted else None

    def push(self, request: Request, num_admitted: int) -> None:
        """Enter a new request, given the number of requests admitted so far."""
        rank = self._policy(request, self._num_arrived, num_admitted)
        request.queue_key = (rank, self._num_arrived)
        self._num_arrived += 1
        insort(self._waiting, (request.queue_key, request))

    def push_preempted(self, request: Request) -> None:
        """Enter a request that was admitted before."""
        assert request.admission_order is not None, f"{request} was never admitted"
        insort(self._preempted, (request.admission_order, request))

    def remove(self, request: Request) -> None:
        """Take out a request that is admitted or has ended."""
        if request.admission_order is None:
            del self._waiting[bisect_left(self._waiting, (request.queue_key,))]
        else:
            del self._preempted[bisect_left(self._preempted, (request.admission_order,))]

    def iter_new(self, limit: int) -> Iterator[Request]:
        """The first `limit` requests never admitted so far. They may be removed while iterating."""
        return (request for _, request in self._waiting[:limit])

    def __iter__(self) -> Iterator[Request]:
        """All requests that wait, in order."""
        yield from (request for _, request in self._preempted)
        yield from (request for _, request in self._waiting)
