"""The order in which waiting requests are admitted."""

import numpy as np
import pytest
from scheduler_scenario import SAMPLING

from minisgl.scheduler.policy import AGING_TOKENS, POLICIES, WaitingQueue
from minisgl.scheduler.request import Request


def make_request(request_id: int, max_tokens: int = 10, admission_order: int | None = None) -> Request:
    request = Request(0, request_id, np.array([1, 2], np.int32), max_tokens, SAMPLING, 0, False)
    request.admission_order = admission_order
    return request


def make_queue(policy: str, *max_tokens: int) -> WaitingQueue:
    queue = WaitingQueue(POLICIES[policy])
    for i, number in enumerate(max_tokens):
        queue.push(make_request(i, number), 0)
    return queue


def get_order(queue: WaitingQueue) -> list[int]:
    return [request.request_id for request in queue]


def test_push_with_fcfs_keeps_the_order_of_arrival():
    assert get_order(make_queue("fcfs", 3, 9, 1, 9)) == [0, 1, 2, 3]


def test_push_with_lof_puts_long_outputs_first_and_ties_by_arrival():
    assert get_order(make_queue("lof", 3, 9, 1, 9)) == [1, 3, 0, 2]


@pytest.mark.parametrize("num_admitted, order", [(0, [1, 0]), (3, [1, 0]), (4, [0, 1]), (9, [0, 1])])
def test_push_with_lof_lets_those_that_wait_age(num_admitted, order):
    queue = make_queue("lof", 10)
    queue.push(make_request(1, 10 + 4 * AGING_TOKENS), num_admitted)
    assert get_order(queue) == order


def test_lof_request_of_one_token_does_not_starve():
    queue = make_queue("lof", 1)
    for num_admitted in range(200):
        queue.push(make_request(1 + num_admitted, 1000), num_admitted)
        first = next(iter(queue))
        queue.remove(first)
        if first.request_id == 0:
            break
    assert num_admitted <= 999 // AGING_TOKENS + 1


def test_push_preempted_goes_before_all_others_by_first_admission():
    queue = make_queue("fcfs", 5, 5)
    for request_id, admission_order in ((8, 4), (9, 2)):
        queue.push_preempted(make_request(request_id, admission_order=admission_order))
    assert get_order(queue) == [9, 8, 0, 1]
    assert queue.first_preempted.request_id == 9
    assert (queue.num_waiting, queue.num_preempted) == (2, 2)


def test_remove_takes_out_exactly_that_request():
    queue = make_queue("lof", 5, 5, 7, 1)
    preempted, other = make_request(9, admission_order=3), make_request(8, admission_order=1)
    queue.push_preempted(preempted)
    queue.push_preempted(other)
    for request in [request for request in queue if request.request_id in (1, 3)]:
        queue.remove(request)
    queue.remove(preempted)
    assert get_order(queue) == [8, 2, 0]
    queue.remove(other)
    assert queue.first_preempted is None


def test_iter_new_allows_removal_and_leaves_out_preempted_ones():
    queue = make_queue("fcfs", 5, 5, 5, 5)
    queue.push_preempted(make_request(9, admission_order=0))
    seen = []
    for request in queue.iter_new(3):
        queue.remove(request)
        seen.append(request.request_id)
    assert seen == [0, 1, 2] and get_order(queue) == [9, 3]
