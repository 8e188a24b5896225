"""A simulation of the scheduler in which one seed draws everything; what tests miss, it meets.

    python -m tests.unit.simulator --seed 17            replay one seed, with its events
    python -m tests.unit.simulator --seeds 0:5000       run many; the last line is JSON with what occurred

The worker (`paged_worker.py`) stores in each KV slot a hash of the history that it read *through the page table*, and
its tokens are hashes of all that it reads: another request's page, a stale one or one written too late changes them.
The reference computes the same tokens from the token list alone. Steps are executed when they complete, not when they
are issued, and events come in between. Phase one draws arrivals, aborts and disconnects; phase two only lets everything
end, within a bound. Issued steps are followed (`simulator_ledger.py`), and after every event all invariants are checked
against them (`simulator_checks.py`).

Exit codes: 0 all well, 1 an answer or an invariant is wrong, 2 no progress, 3 the scheduler raised something else.
"""

import argparse
import json
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from zlib import crc32

import numpy as np

from minisgl.core import FinishReason
from minisgl.errors import InvalidRequest, Overloaded
from minisgl.protocol import Step, decode, encode
from minisgl.scheduler.request import RequestState, StepOutputs
from minisgl.scheduler.scheduler import Scheduler
from tests.unit.paged_worker import PagedWorker, Wrong
from tests.unit.simulator_checks import Auditor, Before
from tests.unit.simulator_ledger import Holding, Issued, Ledger, expect
from tests.unit.simulator_outputs import split_entries, update_digest
from tests.unit.simulator_setup import NUM_CLIENTS, Asked, Setup, draw_request


class NoProgress(Exception):
    """Work is left and nothing happens, or not within the bound."""


class Simulation:
    """One seed, from its setup to the end of every request."""

    def __init__(self, seed: int, log: list[str] | None = None):
        self.rng = random.Random(seed)
        self.setup = Setup.draw(self.rng)
        self.config = self.setup.config
        self.scheduler = Scheduler(self.config)
        self.worker = PagedWorker(self.setup.model, self.config.num_pages, self.config.page_size)
        self.ledger = Ledger(self.setup)
        self.auditor = Auditor(self.setup, self.scheduler, self.worker, self.ledger)
        self.log = log  # what happened, in words; None: not kept
        self.digest = 0  # of all steps, results and outputs
        self.live: dict[tuple[int, int], Asked] = {}
        self.accepted: list[Asked] = []
        self.by_seed: dict[int, Asked] = {}
        self.ended_keys: list[tuple[int, int]] = []
        self.in_flight: list[Issued] = []
        self.seen: Counter[str] = Counter()
        self.reasons: Counter[FinishReason] = Counter()
        self.num_steps = self.num_events = self.num_arrived = self.num_admitted = 0
        self.has_changed = False  # since the last check
        self.last_slots: set[int] = set()  # held when the step before was issued
        self.common = [self.rng.randrange(self.config.vocab_size) for _ in range(self.setup.limit)]

    def run(self) -> Counter[str]:
        """Both phases. Returns what occurred."""
        setup, rng = self.setup, self.rng
        left, more = setup.num_requests, rng.randint(0, 30)  # events after the last arrival
        while left or more:
            roll = rng.random()
            more -= not left
            if left and roll < setup.arrival_rate:
                for _ in range(min(left, rng.choice([1, 1, 2, 4]))):
                    self.arrive()
                    left -= 1
            elif (roll := rng.random()) < setup.abort_rate:
                self.abort()
            elif roll < setup.abort_rate + setup.disconnect_rate:
                self.disconnect()
            elif rng.random() < setup.issue_rate:
                self.issue()
            else:
                self.finish_one()
            self.check()
            while setup.is_eager and self.issue():
                self.check()
        self.let_end()
        self.check_end()
        return self.seen

    def let_end(self) -> None:
        """Without faults, all that is left ends, within a bound on steps."""
        setup = self.setup
        bound = self.num_steps + sum(
            a.count_steps(a.room, self.config) * (1 + (self.num_admitted + i if a.order is None else a.order))
            for i, a in enumerate(self.live.values())
        )
        while self.scheduler.has_work:
            if not self.in_flight or self.rng.random() < setup.issue_rate:
                self.issue()
            if self.rng.random() < 0.6:
                self.finish_one()
            self.check()
            if self.num_steps > bound:
                raise NoProgress(f"{self.num_steps} steps, at most {bound} are needed")

    def arrive(self) -> None:
        self.has_changed = True
        number = self.num_arrived
        self.num_arrived += 1
        free_keys = [key for key in self.ended_keys[-3:] if key not in self.live]
        is_reused = bool(free_keys) and self.rng.random() < 0.3
        key = free_keys[-1] if is_reused else (self.rng.randrange(NUM_CLIENTS), self.setup.first_id + number)
        asked = draw_request(self.rng, self.setup, number, key, self.common)
        self.note("arrive", key, asked, asked.prompt, "room", asked.room, "stop", asked.request.stop_ids)
        is_full = sum(other.order is None for other in self.live.values()) >= self.config.max_queued_req
        try:
            self.scheduler.add_request(asked.request)
        except InvalidRequest as error:
            limit = self.setup.limit if len(asked.prompt) >= self.setup.limit else self.config.vocab_size
            expect(asked.is_refused and f"limit {limit - 1}" in str(error), asked, "was refused:", error)
            self.seen["refused"] += 1
            return
        except Overloaded as error:
            expect(is_full and f"limit {self.config.max_queued_req}" in str(error), asked, "was refused:", error)
            self.seen["overloaded"] += 1
            return
        expect(not asked.is_refused and not is_full, asked, "was accepted")
        expect(asked.request.max_tokens == asked.room, asked, "may have", asked.request.max_tokens, "tokens")
        self.seen["reused_id"] += is_reused
        asked.is_live = True
        self.live[key] = asked
        self.accepted.append(asked)
        self.by_seed[asked.seed] = asked

    def abort(self) -> None:
        expect(len(self.scheduler.abort_request(NUM_CLIENTS, 1)) == 0, "an unknown id was aborted")
        if not self.live:
            return
        self.has_changed = True
        key = self.rng.choice(list(self.live))
        asked = self.live[key]
        self.seen["abort_in_flight"] += any(
            asked is h.asked for i in self.in_flight for h in [*i.decoding, *i.prefills]
        )
        self.seen["abort_while_preempted"] += asked.order is not None and (
            asked.request.slot is None or asked.request.is_preempted
        )
        self.note("abort", asked)
        outputs = self.scheduler.abort_request(*key)
        expect(len(outputs) == 1 and int(outputs.finish_reasons[0]) == FinishReason.ABORT, asked, "has no terminal")
        self.deliver(outputs)
        expect(len(self.scheduler.abort_request(*key)) == 0, asked, "ended twice")

    def disconnect(self) -> None:
        self.has_changed = True
        client = self.rng.randrange(NUM_CLIENTS)
        self.note("disconnect", client)
        self.scheduler.abort_client(client)
        for key in [key for key in self.live if key[0] == client]:
            self.seen["disconnect"] += 1
            self.reasons[FinishReason.ABORT] += 1
            self.end(key)

    def issue(self) -> bool:
        """One call of `schedule`. Returns whether it gave a step."""
        depth = self.auditor.get_depth(self.in_flight)
        if len(self.in_flight) >= depth:
            self.seen["large_prefill"] += depth < self.config.max_steps_in_flight
            expect(self.scheduler.schedule(0.0) is None, "a step beyond", depth, "in flight")
            return False
        self.has_changed = True
        live = list(self.live.values())
        before = self.auditor.look_before(live)
        was_cached = self.auditor.pool.is_cached.tolist()
        step = self.scheduler.schedule(float(self.num_events))
        self.seen["eviction"] += any(
            was and not now for was, now in zip(was_cached, self.auditor.pool.is_cached.tolist(), strict=True)
        )
        issued = None if step is None else self.follow(step)
        self.check_decisions(before, issued, live)
        if issued is None and not self.in_flight and live:
            raise NoProgress(f"{len(live)} requests are live, nothing is in flight, and no step is issued")
        return issued is not None

    def follow(self, step: Step) -> Issued:
        """Take a new step as the worker will see it."""
        frame = encode(step)
        self.digest = crc32(frame, self.digest)
        expect(step.step_id == self.num_steps, "step", step.step_id, "expected", self.num_steps)
        if step.admits or step.step_id % 8 == 0:  # the codec has tests of its own, and takes its time
            expect(decode(frame) == step, "step", step.step_id, "is another one behind the wire")
        taken = {admit.slot for admit in step.admits}
        holders = {r.slot: r for r in self.scheduler.live_requests() if r.slot is not None and r.slot not in taken}
        self.ledger.take_back(holders, self.oldest_in_flight)
        cached = self.auditor.check_cached_pages() if step.admits else {}
        issued = self.ledger.apply(step, self.by_seed, cached)
        self.num_steps += 1
        self.worker.poison(issued.fresh_pages)
        self.auditor.clear_taint(issued.fresh_pages)
        self.in_flight.append(issued)
        self.seen["slot_turnover"] += any(h.slot in self.last_slots for h in issued.admitted)
        self.last_slots = set(self.ledger.holdings)
        self.seen["chunked_prefill"] += issued.has_chunk
        self.note(issued)
        return issued

    def check_decisions(self, before: Before, issued: Issued | None, live: list[Asked]) -> None:
        victims = self.auditor.check_decode(before, issued)
        for victim in victims:
            self.seen["preemption"] += 1
            victim.asked.num_preemptions += 1
            self.note("preempted", victim.asked)
        self.seen["held_row"] += any(
            h in before.needers and h.is_running and h.num_issued == len(h.pages) * self.config.page_size
            for h in before.running
        )
        if issued is not None and issued.admitted:
            self.seen["overtaken"] += self.auditor.check_admission(before, issued, live)
            for holding in issued.admitted:
                if holding.asked.order is None:
                    holding.asked.order = self.num_admitted
                    holding.asked.cached_tokens = holding.num_cached
                    self.num_admitted += 1
                    self.seen["hit"] += holding.num_cached > 0
        is_due = self.num_steps % 2 == 0 and any(asked.order is None for asked in live)
        if is_due and len(self.ledger.holdings) < self.config.max_running_req:
            cached = self.auditor.check_cached_pages()
            self.seen["shared_pending_prefix"] += self.auditor.check_head(before, victims, issued, live, cached)

    def finish_one(self) -> None:
        """The oldest step in flight is executed, and completes."""
        if not self.in_flight:
            return
        self.has_changed = True
        issued = self.in_flight.pop(0)
        writable = self.auditor.find_writable_pages()
        result, rows, draws = self.worker.execute(issued.step, writable)
        expect(rows == [h.slot for h in issued.sampling], "sampling rows", rows, "of step", issued.step.step_id)
        ends = self.count_samples(issued.sampling, draws)
        self.note("complete", issued.step.step_id, np.frombuffer(result.tokens, "<u4").tolist())
        self.deliver(self.scheduler.complete(result))
        for asked in ends:
            expect(not asked.is_live, asked, "goes on after its end")
        for holding in issued.sampling:
            asked = holding.asked
            holding.is_shared |= holding.is_running
            expect(not asked.is_live or not asked.request.stream or len(asked.tokens) == asked.num_sampled,
                   asked, "streams and was not given its token")  # fmt: skip

    def count_samples(self, sampling: list[Holding], draws: list[int]) -> list[Asked]:
        """Count new tokens. Returns the requests that must end with them."""
        ends = []
        for holding, draw in zip(sampling, draws, strict=True):
            asked = holding.asked
            if self.setup.model.has_failed(draw):
                self.auditor.taint(holding)
            if not asked.is_live:
                self.seen["surplus_row"] += 1
                continue
            if self.setup.model.has_failed(draw):
                self.seen["failed_row"] += 1
                ends.append(asked)
                continue
            asked.num_sampled += 1
            if asked.num_sampled == len(asked.reference.tokens) and asked.reference.reason is not FinishReason.ERROR:
                ends.append(asked)
        self.seen["end_while_preempted"] += any(asked.request.is_preempted for asked in ends)
        return ends

    def deliver(self, outputs: StepOutputs) -> None:
        """Take in outputs; at a request's end, compare its answer with the reference."""
        if not len(outputs):
            return
        self.digest = update_digest(self.digest, outputs)
        for entry in split_entries(outputs):
            expect(entry.key in self.live, "output for", entry.key, "which has ended or never was")
            asked, count, num_items = self.live[entry.key], len(entry.tokens), len(entry.logprob_ids)
            expect(num_items == count * asked.num_items, asked, "has", num_items, "items for", count, "tokens")
            asked.tokens += entry.tokens
            asked.logprob_ids += entry.logprob_ids
            asked.logprob_values += entry.logprob_values
            if entry.reason is not None:
                self.check_answer(asked, entry.reason, entry.cached_tokens)
                self.end(entry.key)
            else:
                expect(asked.request.stream and count == 1, asked, "has", count, "tokens in passing")
                expect(entry.cached_tokens == 0, asked, "has cached tokens before its end")

    def check_answer(self, asked: Asked, reason: FinishReason, cached_tokens: int) -> None:
        reference, count = asked.reference, asked.num_sampled
        self.note("ends", asked, reason.name, asked.tokens)
        self.reasons[reason] += 1
        self.seen["stop"] += reason is FinishReason.STOP
        if reason is not FinishReason.ABORT:
            expect(reason is reference.reason, asked, "ends by", reason.name, "expected", reference.reason.name)
            expect(count == len(reference.tokens), asked, "ends with", count, "tokens, expected", reference.tokens)
        expect(
            asked.tokens == reference.tokens[:count], asked, "has", asked.tokens, "expected", reference.tokens[:count]
        )
        num_items = count * asked.num_items
        expect(asked.logprob_ids == reference.logprob_ids[:num_items], asked, "has wrong ids of log-probabilities")
        expect(asked.logprob_values == reference.logprob_values[:num_items], asked, "has wrong log-probabilities")
        expect(cached_tokens == asked.cached_tokens, asked, cached_tokens, "cached tokens, not", asked.cached_tokens)

    def end(self, key: tuple[int, int]) -> None:
        self.live[key].is_live = False
        del self.live[key]
        self.ended_keys.append(key)

    @property
    def oldest_in_flight(self) -> int:
        return self.in_flight[0].step.step_id if self.in_flight else self.num_steps

    def check(self) -> None:
        """All invariants; the slower ones not after every event."""
        if not self.has_changed:
            return
        self.has_changed = False
        self.num_events += 1
        live = list(self.live.values())
        self.auditor.check_books(live, self.oldest_in_flight)
        if self.num_events % 8 == 0:
            self.check_counters()
        if self.num_events % 32 == 0:
            self.auditor.check_cached_pages()

    def check_counters(self) -> None:
        self.auditor.check_counters(self.oldest_in_flight)
        self.auditor.check_stats(len(self.live), self.accepted, self.reasons, self.num_steps)

    def check_end(self) -> None:
        """All is given back, and it took no more steps than it may."""
        expect(not self.live, self.live, "never ended")
        self.check_counters()
        self.auditor.check_cached_pages()
        self.auditor.check_quiet()
        for asked in self.accepted:
            expect(asked.num_preemptions <= (asked.order or 0), asked, "is preempted", asked.num_preemptions, "times")
            expect(asked.request.num_preemptions == asked.num_preemptions, asked, "miscounts its preemptions")
            expect(asked.request.state is RequestState.FINISHED, asked, "is left", asked.request.state)
        bound = sum(a.count_steps(a.num_sampled, self.config) * (1 + a.num_preemptions) for a in self.accepted)
        if self.num_steps > bound:
            raise NoProgress(f"{self.num_steps} steps, at most {bound} are needed")

    def note(self, *words: object) -> None:
        if self.log is not None:
            self.log.append(" ".join(map(str, words)))


def run_seed(
    seed: int, *, verbose: bool = False, make: Callable[..., Simulation] = Simulation
) -> tuple[int, Simulation]:
    """(exit code, what was simulated); a failure prints the seed and the command that replays it."""
    simulation = make(seed, [] if verbose else None)
    try:
        simulation.run()
        code = 0
    except Exception as error:
        code = 2 if isinstance(error, NoProgress) else 1 if isinstance(error, (Wrong, AssertionError)) else 3
        kind = {1: "wrong", 2: "no progress", 3: "crash"}[code]
        print(f"seed {seed}: {kind}: {type(error).__name__}: {error}\n    python -m tests.unit.simulator --seed {seed}")
        if verbose:
            traceback.print_exc(file=sys.stdout)
    if simulation.log is not None:
        print(simulation.setup, *simulation.log, sep="\n")
    return code, simulation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", metavar="FIRST:END", default="0:1000")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        code, simulation = run_seed(arguments.seed, verbose=True)
        print(json.dumps(simulation.seen))
        return code
    first, end = map(int, arguments.seeds.split(":"))
    occurred: Counter[str] = Counter()
    digest = 0
    for seed in range(first, end):
        code, simulation = run_seed(seed)
        if code:
            return code
        occurred.update(kind for kind, count in simulation.seen.items() if count)
        digest = crc32(simulation.digest.to_bytes(4, "little"), digest)
    print(json.dumps({"num_seeds": end - first, "digest": digest, "seeds_with": occurred}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
