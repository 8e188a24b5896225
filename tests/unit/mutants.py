"""Faults that the simulation must find: each replaces one fragment of the scheduler's source as it is imported.

The fragment must occur exactly once, so that a mutant that no longer fits the source is an error, not a silent pass.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType


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
        "self.cache.release(token_ids[: request.num_written_tokens], request.page_ids)",
        "pages = request.page_ids[: -1 if request.is_preempted else None]\n"
        "        self.cache.release(token_ids[: request.num_written_tokens], pages)",
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
        "token_ids[: request.num_written_tokens]",
        "token_ids",
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
        "shared_below_a_page_of_another",
        "radix_cache",
        "        if partial is not None or not np.array_equal(held, page_ids[: len(held)]):\n",
        "        if partial is not None:\n",
        budget=1500,
    ),
    Mutant("oldest_preempted", "scheduler", "max(running, key=get_age)", "min(running, key=get_age)"),
    Mutant(
        "prompt_shared_before_it_is_written",
        "scheduler",
        "            for request in last_chunks:\n                self._decode_set.join(request)\n",
        "            for request in last_chunks:\n                self._decode_set.join(request)\n"
        "                self._memory.share_prompt(request)\n",
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

    def get_code(self, fullname: str):
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
