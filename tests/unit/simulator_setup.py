"""What a seed of the simulation draws: the engine's limits, the kinds of faults, and each request."""

import random
from dataclasses import dataclass, field

import numpy as np

from minisgl.protocol import Sampling
from minisgl.scheduler.request import Request
from minisgl.scheduler.scheduler import SchedulerConfig
from tests.unit.paged_worker import Answer, Model, make_reference

NUM_CLIENTS = 3
LONG_CONTEXT_TOKENS = 700  # of seeds with prompts large enough to keep the next step from running ahead


@dataclass(frozen=True, slots=True)
class Setup:
    """What one seed draws before the first event. Each kind of fault is absent from some seeds."""

    config: SchedulerConfig
    limit: int  # tokens of prompt and output, as the scheduler has to see it
    model: Model
    is_tight: bool  # many requests that outgrow the pool together
    is_long: bool
    longest_prompt: int
    num_requests: int
    share_rate: float  # of prompts that begin like others
    stop_rate: float  # of requests with stop ids
    arrival_rate: float
    abort_rate: float
    disconnect_rate: float
    issue_rate: float  # against completions
    is_eager: bool  # issues all that it may after every event
    first_id: int

    @classmethod
    def draw(cls, rng: random.Random) -> "Setup":
        is_tight = rng.random() < 0.45
        is_long = not is_tight and rng.random() < 0.12
        is_crowd = not is_long and rng.random() < 0.01
        page_size = rng.choice([1, 2, 4] if is_tight else [1, 2, 3, 4, 8, 16, 64, rng.randint(1, 64)])
        num_pages = rng.randint(6, 24) if is_tight else rng.randint(4, 40)
        if is_long:
            page_size, num_pages = rng.choice([16, 32]), rng.randint(24, 60)
        pool_tokens = num_pages * page_size
        context = rng.choice([pool_tokens, pool_tokens // 2 + 2, pool_tokens + 7])
        config = SchedulerConfig(
            num_pages=num_pages,
            page_size=page_size,
            max_running_req=rng.randint(2, 6) if is_tight else rng.randint(1, 6),
            max_extend_tokens=rng.choice([256, 300, 1024, 1024] if is_long else [1, 3, 5, 8, 16, 33, 4096]),
            context_limit_tokens=min(context, LONG_CONTEXT_TOKENS if is_long else 90),
            vocab_size=rng.choice([2, 3]),
            max_steps_in_flight=rng.randint(1, 4),
            cache_type="naive" if rng.random() < 0.15 else "radix",
            schedule_policy=rng.choice(["fcfs", "fcfs", "lof"]),
            max_queued_req=100 if is_crowd else rng.choice([3, 100, 100]),
        )
        limit = min(config.context_limit_tokens, pool_tokens)
        return cls(
            config=config,
            limit=limit,
            model=Model(config.vocab_size, rng.choice([0, 0, 25] if is_tight else [0, 40])),
            is_tight=is_tight,
            is_long=is_long,
            longest_prompt=max(2, rng.choice([limit // 2, min(limit // 2, 9)]) if is_tight else limit),
            num_requests=rng.randint(36, 48) if is_crowd else rng.randint(2, 5 if is_long else 11),
            share_rate=rng.choice([0.0, 0.5, 0.9]),
            stop_rate=rng.choice([0.0, 0.4, 1.0] if is_tight else [0.0, 0.4]),
            arrival_rate=rng.choice([0.1, 0.3, 0.6]),
            abort_rate=rng.choice([0.0, 0.04, 0.1] if is_tight else [0.0, 0.1, 0.3]),
            disconnect_rate=rng.choice([0.0, 0.0, 0.02]),
            issue_rate=rng.choice([0.4, 0.6, 0.8, 0.9]),
            is_eager=rng.random() < 0.3,
            first_id=rng.choice([0, 2**62]),
        )


@dataclass(slots=True, eq=False)
class Asked:
    """A request, what it must be answered, and how far it is."""

    number: int  # in the order of arrival
    request: Request
    prompt: list[int]
    room: int
    num_items: int  # log-probability items for each token
    reference: Answer
    is_refused: bool  # it could never run
    tokens: list[int] = field(default_factory=list)  # put out
    logprob_ids: list[int] = field(default_factory=list)
    logprob_values: list[float] = field(default_factory=list)
    is_live: bool = False  # accepted, and not ended
    has_failed: bool = False
    num_sampled: int = 0  # tokens of its answer in completed steps
    order: int | None = None  # of its first admission
    cached_tokens: int = 0  # at its first admission
    num_preemptions: int = 0
    num_overtaken: int = 0

    @property
    def seed(self) -> int:
        """By which the wire names it."""
        return self.request.seed

    @property
    def num_final(self) -> int:
        """KV positions after its last row by length."""
        return len(self.prompt) + self.room - 1

    @property
    def is_preempted(self) -> bool:
        """Whether it is on its way back into the queue, or there again."""
        return self.order is not None and (self.request.slot is None or self.request.is_preempted)

    def count_steps(self, num_tokens: int, config: SchedulerConfig) -> int:
        """Steps that it may take, with so many tokens of output, from an admission to its end or its preemption."""
        num_chunks = -(-(len(self.prompt) + num_tokens) // config.max_extend_tokens)
        return num_chunks + num_tokens + config.max_steps_in_flight + 2

    def __repr__(self) -> str:
        return f"request {self.number}"


def draw_request(rng: random.Random, setup: Setup, number: int, key: tuple[int, int], common: list[int]) -> Asked:
    """One request. Lengths near the edges of pages and chunks are as frequent as all others."""
    config, limit = setup.config, setup.limit
    page, chunk = config.page_size, config.max_extend_tokens
    edges = [1, page - 1, page, page + 1, 2 * page, 2 * page + 1, chunk, chunk + 1, 2 * chunk]
    length = rng.choice(edges) if rng.random() < 0.5 and not setup.is_long else rng.randint(1, setup.longest_prompt)
    length = max(1, min(length, setup.longest_prompt if rng.random() < 0.97 else limit))
    prompt = [rng.randrange(config.vocab_size) for _ in range(length)]
    if rng.random() < setup.share_rate:
        shared = length if rng.random() < 0.3 else rng.randint(0, length)
        prompt[:shared] = common[:shared]
    is_bad = rng.random() < 0.01
    if is_bad:
        prompt[rng.randrange(length) :] = rng.choice([[-1], [config.vocab_size]])
    most = rng.randint(1, limit) if setup.is_tight else rng.choice([1, 2, page, page + 1, rng.randint(1, 40)])
    num_stops = rng.choice([1, 1, 2]) if rng.random() < setup.stop_rate else 0
    stop_ids = (*rng.sample(range(config.vocab_size), num_stops), 7) if num_stops else ()
    min_tokens = rng.randint(0, 24) if setup.is_tight else rng.choice([0, 0, 1, 3, 8])  # tight: ends come late
    min_tokens = min_tokens if stop_ids else 0
    num_logprobs = rng.choice([None, None, None, 0, 2])
    num_items = 0 if num_logprobs is None else num_logprobs + 1
    packed = np.array(stop_ids, "<i4").tobytes()
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, min_tokens, packed, b"", b"", num_logprobs)
    seed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    request = Request(*key, np.array(prompt, np.int32), most, sampling, seed, rng.random() < 0.5)
    is_refused = is_bad or length >= limit
    room = min(most, limit - length)
    reference = Answer() if is_refused else make_reference(
        setup.model, prompt, room, stop_ids, min_tokens, num_items
    )  # fmt: skip
    return Asked(number, request, prompt, room, num_items, reference, is_refused)
