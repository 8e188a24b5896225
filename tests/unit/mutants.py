"""Faults that the simulation must find: each replaces one fragment of the scheduler's source as it is imported.

    python -m tests.unit.mutants NAME 0:200        the simulation with one of them

The fragment must occur exactly once, so that a mutant that no longer fits the source is an error, not a silent pass.
No file is changed: a mutant lives in a process of its own, which it is installed in before the scheduler is imported.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault, and how many seeds may pass before it is found."""

    name: str
    module: str  # below minisgl.scheduler
    fragment: str
    replacement: str
    budget: int = 200


MUTANTS = (
    Mutant(
        "parent_ignored_in_a_prefix_key",
        "radix_cache",
        "            child = nodes[-1].children.get(data[start : start + self._page_bytes])\n",
        "            key = data[start : start + self._page_bytes]\n"
        "            child = nodes[-1].children.get(key) or next(\n"
        "                (n for n in self.iter_nodes() if n.tokens[: self._page_bytes] == key), None)\n",
    ),
    Mutant(
        "stale_key_kept_on_reuse",
        "radix_cache",
        "            del parent.children[node.tokens[: self._page_bytes]]\n",
        "",
    ),
    Mutant(
        "cached_length_plus_one",
        "scheduler",
        "        num_cached_tokens = len(match.page_ids) * self.config.page_size\n",
        "        num_cached_tokens = len(match.page_ids) * self.config.page_size + bool(len(match.page_ids))\n",
    ),
    Mutant("refcount_not_raised", "radix_cache", "        self._pool.acquire(match.page_ids)\n", ""),
    Mutant(
        "page_lost_on_preemption",
        "kv_memory",
        "self.cache.release(token_ids[:num_tokens], request.page_ids)",
        "self.cache.release(token_ids[:num_tokens], request.page_ids[: -1 if request.is_preempted else None])",
    ),
    Mutant(
        "free_before_in_flight_completes",
        "scheduler",
        "        for record in reversed(self._in_flight):\n            if record.count_tokens(request):\n",
        "        for record in reversed(self._in_flight):\n            if False:\n",
    ),
    Mutant(
        "two_terminals_on_abort",
        "scheduler",
        "        builder.add(request, output, FinishReason.ABORT)\n",
        "        builder.add(request, output, FinishReason.ABORT)\n"
        "        builder.add(request, NO_TOKENS, FinishReason.ABORT)\n",
    ),
    Mutant("fifo_broken", "policy", "    return arrival_order\n", "    return -arrival_order\n"),
    Mutant(
        "last_token_matched_too",
        "kv_memory",
        "        return (len(request.token_ids) - 1) // self.page_size\n",
        "        return len(request.token_ids) // self.page_size\n",
    ),
    Mutant(
        "unwritten_page_cached",
        "kv_memory",
        "num_tokens = request.num_written_tokens",
        "num_tokens = len(token_ids)",
    ),
    Mutant(
        "split_node_without_its_own_indices",
        "radix_cache",
        "upper = Node(parent, node.tokens[:num_bytes], node.page_ids[:num_pages].copy(), node.last_used)",
        "upper = Node(parent, node.tokens[:num_bytes], node.page_ids[-num_pages:].copy(), node.last_used)",
    ),
    Mutant(
        "slot_reused_while_in_flight",
        "scheduler",
        "        request.state = RequestState.DRAINING\n",
        "        request.state = RequestState.DRAINING\n        self._table.free_slots.append(request.slot)\n",
    ),
    Mutant(
        "surplus_token_delivered_after_the_end",
        "scheduler",
        "                    record.dropped_rows.add(row)\n",
        "                    pass\n",
    ),
    Mutant(
        "decode_set_not_sent_again",
        "scheduler",
        "decode_slots = None if batch is self._sent_batch else batch.wire_slots",
        "decode_slots = None if batch is self._sent_batch or len(batch) == 1 else batch.wire_slots",
    ),
    Mutant(
        "decode_set_not_refreshed",
        "batch",
        "        self._table.is_decoding[request.slot] = False\n        self._is_stale = True\n",
        "        self._table.is_decoding[request.slot] = False\n",
    ),
    Mutant(
        "page_grant_dropped",
        "batch",
        "        return grants.tobytes()\n",
        "        return grants[len(grants) > 1 :].tobytes()\n",
    ),
    Mutant(
        "logprob_columns_shifted",
        "step_results",
        "            start += count\n",
        "            start += count if row not in record.dropped_rows else 0\n",
    ),
    Mutant(
        "shared_below_a_page_of_another",
        "radix_cache",
        "        if partial is not None or not np.array_equal(held, page_ids[: len(held)]):\n",
        "        if partial is not None:\n",
        budget=1500,
    ),
    Mutant(
        "part_of_a_run_not_split_off",
        "radix_cache",
        "            return self._split(match.partial, match.num_partial_pages)\n",
        "            return match.partial\n",
    ),
    Mutant("oldest_preempted", "scheduler", "max(running, key=get_age)", "min(running, key=get_age)"),
    Mutant(
        "one_more_preempted_than_needed",
        "scheduler",
        "            if num_missing <= num_coming:\n",
        "            if num_missing < num_coming:\n",
    ),
    Mutant(
        "newest_granted_first",
        "scheduler",
        "self._table.admission_order[batch.slots[rows]].argsort()",
        "(-self._table.admission_order[batch.slots[rows]]).argsort()",
    ),
    Mutant(
        "preempted_request_loses_its_output",
        "scheduler",
        "        request.token_ids = token_ids\n",
        "",
    ),
    Mutant(
        "overtaking_without_bound",
        "admission",
        " or any(r.num_overtaken >= self._max_overtakes for r in skipped)",
        "",
        budget=1500,
    ),
    Mutant(
        "prompt_shared_before_it_is_written",
        "scheduler",
        "            for request in last_chunks:\n                self._decode_set.join(request)\n",
        "            for request in last_chunks:\n                self._decode_set.join(request)\n"
        "                self._memory.share_prompt(request)\n",
    ),
    Mutant(
        "prompt_in_progress_until_its_end",
        "kv_memory",
        "        self._in_progress.discard(request)\n        self.cache.insert_held",
        "        self.cache.insert_held",
        budget=1500,
    ),
    Mutant(
        "prompt_in_progress_for_ever",
        "kv_memory",
        "        self._in_progress.discard(request)\n        request.node = None\n",
        "        request.node = None\n",
    ),
    Mutant(
        "runs_ahead_of_a_large_prefill",
        "scheduler",
        "(1 if self._num_large_in_flight else self.config.max_steps_in_flight)",
        "self.config.max_steps_in_flight",
    ),
    Mutant(
        "token_of_a_failed_row_kept",
        "step_results",
        "token_ids[:-1] if reason is FinishReason.ERROR else token_ids",
        "token_ids",
    ),
    Mutant("pages_of_a_failed_request_cached", "kv_memory", "if request.has_failed:", "if False:"),
    Mutant(
        "pages_of_a_failed_surplus_row_cached",
        "step_results",
        "record.request_of(row).has_failed = True",
        "record.request_of(row).has_failed |= row not in record.dropped_rows",
    ),
    Mutant(
        "stop_ids_forgotten_with_another_request",
        "step_results",
        "                    self._mark(others)\n",
        "                    pass\n",
    ),
    Mutant(
        "min_tokens_ignored",
        "step_results",
        "token in request.stop_ids and request.num_output_tokens > request.sampling.min_tokens",
        "token in request.stop_ids",
    ),
)


class _MutatingFinder(importlib.abc.MetaPathFinder):
    """Loads one module of the scheduler with its fragment replaced."""

    def __init__(self, mutant: Mutant):
        self._mutant = mutant
        self._name = f"minisgl.scheduler.{mutant.module}"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # so that the search below finds the file
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.origin is not None
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_MutatingLoader(self._mutant, spec.origin)
        )


class _MutatingLoader(SourceFileLoader):
    def __init__(self, mutant: Mutant, path: str):
        super().__init__(f"minisgl.scheduler.{mutant.module}", path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        return compile(mutate(self._mutant, source), self.path, "exec")


def mutate(mutant: Mutant, source: str) -> str:
    """The source with the fault in it. Raises ValueError when the fragment is not there exactly once."""
    if source.count(mutant.fragment) != 1:
        raise ValueError(f"mutant {mutant.name}: its fragment occurs {source.count(mutant.fragment)} times")
    return source.replace(mutant.fragment, mutant.replacement)


def install(name: str) -> None:
    """From now on, importing the scheduler imports the mutant `name`. To be called before that import."""
    assert not any(module.startswith("minisgl.scheduler.") for module in sys.modules), "the scheduler is loaded already"
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    sys.meta_path.insert(0, _MutatingFinder(mutant))


def main() -> int:
    install(sys.argv[1])
    from tests.unit import simulator  # only now: it imports the scheduler

    sys.argv = ["simulator", "--seeds", sys.argv[2]]
    return simulator.main()


if __name__ == "__main__":
    sys.exit(main())
