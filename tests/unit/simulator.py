"""A simulation of the scheduler in which one seed draws everything; what tests miss, it meets.

    python -m tests.unit.simulator --seed 17            replay one seed, verbosely
    python -m tests.unit.simulator --seeds 0:5000       run many; the last line is JSON with what occurred
    python -m tests.unit.run_mutant cached_length_plus_one 0:200

The worker (`paged_worker.py`) stores in each KV slot a hash of the history that it read *through the page table*, and
its tokens are hashes of all that it reads: another request's page, a stale one or one written too late changes them.
The reference computes the same tokens from the token list alone. Steps are executed when they complete, not when they
are issued, and events come in between. Phase one draws arrivals, aborts and disconnects; phase two only lets everything
end, within a bound. After every event all invariants are checked.

Exit codes: 0 all well, 1 an answer or an invariant is wrong, 2 no progress, 3 the scheduler raised something else.
"""

import argparse
import json
import random
import sys
import traceback
from collections import Counter
from dataclasses import dataclass

import numpy as np

from minisgl.core import FinishReason
from minisgl.errors import InvalidRequest, Overloaded
from minisgl.protocol import Sampling, Step, decode, encode
from minisgl.scheduler.request import Request, RequestState, StepOutputs
from minisgl.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.unit.paged_worker import PagedWorker, Wrong, reference_answer

KINDS = (
    "preemption",
    "eviction",
    "hit",
    "chunked_prefill",
    "abort_in_flight",
    "slot_turnover",
    "shared_pending_prefix",
)
NUM_CLIENTS = 3


class NoProgress(Exception):
    """Work is left and nothing happens, or not within the bound."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What one seed draws before the first event."""

    config: SchedulerConfig
    fail_one_in: int  # rows with a non-finite logit; 0 = none
    abort_rate: float
    disconnect_rate: float
    num_requests: int
    share_rate: float  # of prompts that begin like others
    is_tight: bool  # many requests that outgrow the pool together

    @classmethod
    def draw(cls, rng: random.Random) -> "Setup":
        is_tight = rng.random() < 0.45
        page_size = rng.choice([1, 2, 4]) if is_tight else rng.choice([1, 2, 3, 4, 8, 16, 64])
        num_pages = rng.randint(6, 24) if is_tight else rng.randint(4, 40)
        pool_tokens = num_pages * page_size
        config = SchedulerConfig(
            num_pages=num_pages,
            page_size=page_size,
            max_running_req=rng.randint(2, 6) if is_tight else rng.randint(1, 6),
            max_extend_tokens=rng.choice([1, 3, 5, 8, 16, 33, 4096]),
            context_limit_tokens=min(rng.choice([pool_tokens, pool_tokens // 2 + 2]), 90),
            vocab_size=rng.choice([2, 3]),
            max_steps_in_flight=rng.randint(1, 4),
            cache_type="naive" if rng.random() < 0.15 else "radix",
            schedule_policy=rng.choice(["fcfs", "fcfs", "lof"]),
            max_queued_req=rng.choice([3, 100, 100]),
        )
        calm = is_tight or rng.random() < 0.3
        return cls(
            config=config,
            fail_one_in=0 if calm else rng.choice([0, 40]),
            abort_rate=rng.choice([0.0, 0.04]) if calm else rng.choice([0.0, 0.1, 0.3]),
            disconnect_rate=0.0 if calm else rng.choice([0.0, 0.02]),
            num_requests=rng.randint(2, 14),
            share_rate=rng.choice([0.0, 0.5, 0.9]),
            is_tight=is_tight,
        )


@dataclass(slots=True)
class Asked:
    """A request that the scheduler accepted, and what it has answered so far."""

    request: Request
    prompt: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    num_items: int  # log-probability items for each token
    tokens: list[int]
    num_overtaken: int = 0


class Simulation:
    """One seed, from its setup to the end of every request."""

    def __init__(self, seed: int, log: list[str] | None = None):
        self.rng = random.Random(seed)
        self.setup = Setup.draw(self.rng)
        self.config = self.setup.config
        self.scheduler = Scheduler(self.config)
        self.worker = PagedWorker(self.config, self.setup.fail_one_in)
        self.log = log if log is not None else []
        self.live: dict[tuple[int, int], Asked] = {}
        self.all: list[Asked] = []
        self.in_flight: list[tuple[Step, dict[int, Request]]] = []  # with the request of each slot at issue
        self.seen: Counter[str] = Counter()
        self.num_steps = 0
        self.last_slots: dict[int, Request] = {}
        limit = self.config.context_limit_tokens
        self.common = [self.rng.randrange(self.config.vocab_size) for _ in range(limit)]

    # ------------------------------------------------------------------------------------------------------ events

    def run(self) -> Counter[str]:
        """Both phases. Returns what occurred."""
        left = self.setup.num_requests
        while left:
            roll = self.rng.random()
            if roll < 0.3:
                for _ in range(min(left, self.rng.choice([1, 1, 2, 4]))):
                    self.arrive()
                    left -= 1
            elif roll < 0.3 + self.setup.abort_rate:
                self.abort()
            elif roll < 0.3 + self.setup.abort_rate + self.setup.disconnect_rate:
                self.disconnect()
            elif roll < 0.72:
                self.issue()
            else:
                self.finish_one()
            self.check_invariants()
        while self.scheduler.has_work:
            was_issued = self.issue() if self.rng.random() < 0.6 or not self.in_flight else False
            if not was_issued and not self.in_flight:
                raise NoProgress(f"{len(self.live)} requests are live, nothing is in flight, and no step is issued")
            if self.rng.random() < 0.05 * bool(self.setup.abort_rate):
                self.abort()
            if self.rng.random() < 0.6:
                self.finish_one()
            self.check_invariants()
            if self.num_steps > 5000:
                raise NoProgress("5000 steps were not enough")
        self.check_end()
        return self.seen

    def arrive(self) -> None:
        rng, config = self.rng, self.config
        page, chunk, limit = config.page_size, config.max_extend_tokens, config.context_limit_tokens
        longest = max(2, limit // 2 if self.setup.is_tight else limit)
        edges = [1, page - 1, page, page + 1, 2 * page, 2 * page + 1, chunk, chunk + 1, 2 * chunk]
        length = max(
            1, min(rng.choice([*edges, *[rng.randint(1, longest)] * 9]), longest if rng.random() < 0.97 else limit)
        )
        prompt = [rng.randrange(config.vocab_size) for _ in range(length)]
        if rng.random() < self.setup.share_rate:
            shared = length if rng.random() < 0.3 else rng.randint(0, length)
            prompt[:shared] = self.common[:shared]
        max_tokens = (
            rng.randint(1, limit) if self.setup.is_tight else rng.choice([1, 2, page, page + 1, rng.randint(1, 40)])
        )
        stop_ids = () if self.setup.is_tight or rng.random() < 0.6 else (rng.randrange(config.vocab_size),)
        num_logprobs = rng.choice([None, None, None, 0, 2])
        packed = np.array(stop_ids, "<i4").tobytes()
        sampling = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, packed, b"", b"", num_logprobs)
        key = (rng.randrange(NUM_CLIENTS), len(self.all) + 1)
        request = Request(*key, np.array(prompt, np.int32), max_tokens, sampling, key[1], rng.random() < 0.5)
        asked = Asked(request, prompt, max_tokens, stop_ids, 0 if num_logprobs is None else num_logprobs + 1, [])
        self.note(f"arrive {key} prompt={prompt} max_tokens={max_tokens} stop={stop_ids}")
        try:
            self.scheduler.add_request(request)
        except InvalidRequest:
            expect(length >= limit, f"{length} tokens were refused, the limit is {limit}")
            return
        except Overloaded:
            self.seen["overloaded"] += 1
            return
        expect(length < limit, f"{length} tokens were accepted, the limit is {limit}")
        self.live[key] = asked
        self.all.append(asked)

    def abort(self) -> None:
        if not self.live:
            return
        key = self.rng.choice(list(self.live))
        request = self.live[key].request
        if request.num_issued_tokens > request.num_written_tokens:
            self.seen["abort_in_flight"] += 1
        self.note(f"abort {key}")
        self.deliver(self.scheduler.abort_request(*key))
        expect(key not in self.live, f"{key} was aborted without a terminal output")
        expect(len(self.scheduler.abort_request(*key)) == 0, f"{key} ended twice")

    def disconnect(self) -> None:
        client = self.rng.randrange(NUM_CLIENTS)
        self.note(f"disconnect {client}")
        self.scheduler.abort_client(client)
        for key in [key for key in self.live if key[0] == client]:
            del self.live[key]

    def issue(self) -> bool:
        scheduler = self.scheduler
        before = {r.slot: r for r in scheduler.live_requests() if r.state is RequestState.RUNNING and is_decoding(r)}
        phases = {slot: r.num_issued_tokens % self.config.page_size for slot, r in before.items()}
        waiting = [r for r in scheduler.live_requests() if r.slot is None and r.admission_order is None]
        evictable = scheduler._memory.pool.is_cached.copy()
        preempted_before = scheduler.stats().num_preemptions
        oldest = min((r.admission_order for r in before.values()), default=None)
        step = scheduler.schedule(float(self.num_steps))
        if step is None:
            return False
        step = decode(encode(step))
        assert isinstance(step, Step)
        expect(step.step_id == self.num_steps, f"step {step.step_id} was issued, expected {self.num_steps}")
        self.num_steps += 1
        slots = {r.slot: r for r in scheduler.live_requests() if r.slot is not None}
        self.in_flight.append((step, slots))
        expect(len(self.in_flight) <= self.config.max_steps_in_flight, "too many steps in flight")
        self.note(f"issue {step.step_id} admits={[a.slot for a in step.admits]} decode={step.run_decode}")
        self.check_fairness(step, before, phases, waiting, slots)
        if scheduler.stats().num_preemptions > preempted_before:
            self.seen["preemption"] += 1
            is_victim = [r for r in before.values() if r.is_preempted or r.slot is None]
            expect(all(r.admission_order != oldest for r in is_victim) or len(before) == 1, "the oldest was preempted")
        self.seen["eviction"] += bool((evictable & ~scheduler._memory.pool.is_cached).any())
        prefills = np.frombuffer(step.prefills, "<i4").reshape(-1, 4)
        self.seen["chunked_prefill"] += bool((prefills[:, 3] == 0).any())
        self.seen["slot_turnover"] += any(
            a.slot in self.last_slots and self.last_slots[a.slot] is not slots.get(a.slot) for a in step.admits
        )
        self.last_slots = slots
        return True

    def finish_one(self) -> None:
        if not self.in_flight:
            return
        step, slots = self.in_flight.pop(0)
        holders = [r for r in self.scheduler.live_requests() if r.slot is not None]
        result = self.worker.execute(step, slots, holders)
        self.note(f"complete {step.step_id} tokens={np.frombuffer(result.tokens, '<u4').tolist()}")
        self.deliver(self.scheduler.complete(decode(encode(result))))
        if step.step_id % 8 == 0:
            self.check_cached_pages()

    # ------------------------------------------------------------------------------------------------------ checks

    def deliver(self, outputs: StepOutputs) -> None:
        """Take in outputs; at a request's end, compare its tokens with the reference."""
        expect(len(outputs.tokens) == outputs.num_tokens.sum(), "columns of tokens do not fit")
        expect(
            len(outputs.logprob_ids) == len(outputs.logprob_values) == outputs.num_logprobs.sum(), "logprobs do not fit"
        )
        start = item = num_errors = 0
        for i in range(len(outputs)):
            key = (int(outputs.client_ids[i]), int(outputs.request_ids[i]))
            expect(key in self.live, f"output for {key}, which has ended or never was")
            asked, count = self.live[key], int(outputs.num_tokens[i])
            tokens = outputs.tokens[start : start + count].tolist()
            items = int(outputs.num_logprobs[i])
            expect(items == count * asked.num_items, f"{key} got {items} log-probability items for {count} tokens")
            chosen = outputs.logprob_ids[item : item + items][:: asked.num_items or 1].tolist()
            expect(not asked.num_items or chosen == tokens, f"{key} got another request's log-probabilities")
            start, item = start + count, item + items
            reason = int(outputs.finish_reasons[i])
            expect(reason != 0 or (asked.request.stream and count == 1), f"{key} got {count} tokens in passing")
            asked.tokens += tokens
            num_errors += reason == FinishReason.ERROR
            if reason:
                del self.live[key]
                self.check_answer(key, asked, FinishReason(reason), int(outputs.cached_tokens[i]))
        expect(num_errors == len(outputs.errors), "errors do not fit")

    def check_answer(self, key: tuple[int, int], asked: Asked, reason: FinishReason, cached_tokens: int) -> None:
        room = min(asked.max_tokens, self.config.context_limit_tokens - len(asked.prompt))
        tokens, why = reference_answer(
            asked.prompt, room, asked.stop_ids, self.config.vocab_size, self.setup.fail_one_in
        )
        if reason is FinishReason.ABORT:
            expect(
                asked.tokens == tokens[: len(asked.tokens)], f"{key}: {asked.tokens}, expected the begin of {tokens}"
            )
        else:
            expect((asked.tokens, reason) == (tokens, why), f"{key}: {asked.tokens} {reason}, expected {tokens} {why}")
        expect(0 <= cached_tokens < len(asked.prompt), f"{key}: {cached_tokens} cached tokens of {len(asked.prompt)}")
        expect(cached_tokens % self.config.page_size == 0, f"{key}: {cached_tokens} cached tokens are not whole pages")
        expect(self.config.cache_type == "radix" or not cached_tokens, f"{key}: a hit without a cache")
        self.seen["hit"] += cached_tokens > 0

    def check_fairness(self, step: Step, before: dict[int, Request], phases: dict[int, int], waiting: list[Request],
                       slots: dict[int, Request]) -> None:  # fmt: skip
        """Each decoding request has a row unless it lacks a page; overtaking is bounded; budgets hold."""
        record = self.scheduler._in_flight[-1]
        rows = set(record.batch.slots.tolist()) if step.run_decode else set()
        for slot, request in before.items():
            is_excused = phases[slot] == 0 or request.state is not RequestState.RUNNING or request.slot is None
            expect(slot in rows or is_excused, f"{request} has no row though it needs no page")
        admitted = [slots[a.slot] for a in step.admits]
        for request in admitted:
            if request.num_preemptions or self.config.schedule_policy != "fcfs":
                continue
            for other in waiting:
                if other.slot is None and other.admission_order is None and other.request_id < request.request_id:
                    asked = self.live.get(other.key)
                    if asked is not None:
                        asked.num_overtaken += 1
                        expect(asked.num_overtaken <= self.config.max_running_req, f"{other} is overtaken for ever")
                        self.seen["overtaken"] += 1
        prefills = np.frombuffer(step.prefills, "<i4").reshape(-1, 4)
        expect(int(prefills[:, 2].sum()) <= self.config.max_extend_tokens, "the budget of prompt tokens is exceeded")
        memory = self.scheduler._memory
        for other in waiting:
            if other.slot is None and other.state is RequestState.WAITING:
                self.seen["shared_pending_prefix"] += memory.is_next_page_in_progress(other, memory.match(other))
                break

    def check_invariants(self) -> None:
        """The books of pages and slots, and the counters of each request. Freed pages are poisoned here."""
        scheduler, config = self.scheduler, self.config
        num_leaked = scheduler.check_integrity()
        expect(num_leaked == 0, f"{num_leaked} pages leaked")
        stats = scheduler.stats()
        total = stats.num_pages_free + stats.num_pages_cached + stats.num_pages_used
        expect(total == config.num_pages, f"{total} pages are accounted for, the pool has {config.num_pages}")
        expect(stats.num_running + stats.num_draining <= config.max_running_req, "more requests than slots")
        ended = stats.num_finished + stats.num_aborted + stats.num_failed
        expect(stats.num_accepted == ended + len(self.live), "a request is lost, or counted twice")
        slots = []
        for request in scheduler.live_requests():
            if request.slot is None:
                continue
            slots.append(request.slot)
            pages = request.page_ids.tolist()
            expect(len(set(pages)) == len(pages), f"{request} holds a page twice")
            capacity = len(pages) * config.page_size
            expect(request.num_written_tokens <= request.num_issued_tokens <= capacity, f"{request}: counters")
        expect(len(set(slots)) == len(slots), "a slot has two holders")
        counts = scheduler._memory.pool.reference_counts
        for node in scheduler._memory.cache.iter_nodes():
            above = node.parent.page_ids if node.parent is not None else node.page_ids[:0]
            is_held = len(above) == 0 or counts[above[-1]] >= counts[node.page_ids[0]]
            expect(is_held, f"cached page {node.page_ids[0]} is held by more requests than the page before it")
        self.worker.poison(set(scheduler._memory.pool.free_ids.tolist()))

    def check_cached_pages(self) -> None:
        """Every page in the prefix cache is written, with the tokens under which it can be found."""
        ends: dict[int, int] = {}  # by the id of a node: the history at its end
        for node in self.scheduler._memory.cache.iter_nodes():
            start = ends.get(id(node.parent), 0)
            tokens = np.frombuffer(node.tokens, "<i4").tolist()
            ends[id(node)] = self.worker.check_pages(node.page_ids.tolist(), tokens, start)

    def check_end(self) -> None:
        """All is given back, and it took no more steps than it may."""
        expect(not self.live, f"{list(self.live)} never ended")
        self.check_cached_pages()
        stats = self.scheduler.stats()
        expect(
            stats.num_pages_used == stats.num_running == stats.num_draining == stats.num_waiting == 0, f"left: {stats}"
        )
        for asked in self.all:
            order = asked.request.admission_order
            expect(order is None or asked.request.num_preemptions <= order, f"{asked.request} is preempted too often")
        bound = sum(
            (
                -(-(len(a.prompt) + len(a.tokens)) // self.config.max_extend_tokens)
                + len(a.tokens)
                + self.config.max_steps_in_flight
                + 2
            )
            * (1 + a.request.num_preemptions)
            for a in self.all
        )
        if not self.setup.disconnect_rate and self.num_steps > bound:
            raise NoProgress(f"{self.num_steps} steps, at most {bound} are needed")

    def note(self, event: str) -> None:
        self.log.append(event)


def is_decoding(request: Request) -> bool:
    """Whether its prompt is issued to the end."""
    return request.num_issued_tokens >= len(request.token_ids)


def expect(condition: bool, text: str) -> None:
    if not condition:
        raise Wrong(text)


def run_seed(seed: int, *, verbose: bool = False) -> tuple[int, Counter[str]]:
    """(exit code, what occurred); a failure prints the seed and the command that replays it."""
    simulation = Simulation(seed)
    try:
        return 0, simulation.run()
    except Exception as error:
        code = 2 if isinstance(error, NoProgress) else 1 if isinstance(error, (Wrong, AssertionError)) else 3
        kind = {1: "wrong", 2: "no progress", 3: "crash"}[code]
        print(f"seed {seed}: {kind}: {type(error).__name__}: {error}\n    python -m tests.unit.simulator --seed {seed}")
        if verbose:
            print(simulation.setup, *simulation.log, sep="\n")
            traceback.print_exc()
        return code, simulation.seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", metavar="FIRST:END", default="0:1000")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        code, seen = run_seed(arguments.seed, verbose=True)
        print(json.dumps(seen))
        return code
    first, end = map(int, arguments.seeds.split(":"))
    occurred: Counter[str] = Counter()
    for seed in range(first, end):
        code, seen = run_seed(seed)
        if code:
            return code
        occurred.update(kind for kind, count in seen.items() if count)
    print(json.dumps({"num_seeds": end - first, "seeds_with": occurred}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
