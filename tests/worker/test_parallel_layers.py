"""Every layer that ranks share, with 2, 3 and 4 ranks, against the same layer whole."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.config import EngineConfig
from minisgl.model_config import MoeConfig
from minisgl.model_folder import ModelConfig, read_folder
from minisgl_worker.attention.base import ForwardBatch
from minisgl_worker.batch import SlotState
from minisgl_worker.kernels.sampling import sample
from minisgl_worker.kv_cache import KVCache
from minisgl_worker.layers import Attention, ColumnLinear, GatedMLP, RowLinear, Vocabulary
from minisgl_worker.model_runner import ModelRunner
from minisgl_worker.moe import SparseMLP
from minisgl_worker.parallel import ParallelGroup
from minisgl_worker.sampler import Sampler
from minisgl_worker.vocabulary import SharedVocabulary
from tests.worker.checkpoints import GREEDY, make_admit, make_step, read_tokens, write_checkpoint
from tests.worker.ranks import fill_share, fill_whole, place_of, run_ranks, whole_place

CPU = torch.device("cpu")
RANKS = pytest.mark.parametrize("num_ranks", [2, 3, 4])
BATCH = pytest.mark.parametrize("num_rows", [1, 2, 7])
HIDDEN, HEAD_DIM = 24, 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Sizes that 2, 3 and 4 divide, with a bias wherever there can be one."""
    folder = write_checkpoint(
        tmp_path_factory.mktemp("config"), "LlamaForCausalLM", hidden_size=HIDDEN, intermediate_size=36,
        head_dim=HEAD_DIM, num_attention_heads=12, num_key_value_heads=12, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    return read_folder(folder, need_weights=False).config


def assert_on_every_rank(outcomes: list[Tensor], expected: Tensor) -> None:
    """Close to the whole layer's, and the same bits on all ranks."""
    assert (outcomes[0] - expected).abs().max() < 1e-5
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes[1:])


@RANKS
@BATCH
def test_column_linear_parts_side_by_side_equal_the_whole(num_ranks: int, num_rows: int) -> None:
    x = torch.randn(num_rows, HIDDEN)
    sizes = {"a": 24, "b": 12}

    def make(group: ParallelGroup) -> ColumnLinear:
        parts = {name: (size, group.rank * size // group.size, size // group.size) for name, size in sizes.items()}
        return ColumnLinear(HIDDEN, parts, True, place_of(group))

    whole = make(ParallelGroup())
    values = fill_whole(list(whole.weights("m")))

    def run(group: ParallelGroup) -> list[Tensor]:
        layer = make(group)
        fill_share(list(layer.weights("m")), values)
        return list(layer(x).split([size // num_ranks for size in sizes.values()], dim=1))

    parts = run_ranks(num_ranks, run)
    together = torch.cat([torch.cat(columns, 1) for columns in zip(*parts, strict=True)], 1)
    assert (together - whole(x)).abs().max() < 1e-5


@RANKS
@BATCH
@pytest.mark.parametrize("bias", [False, True])
def test_row_linear_adds_its_bias_once(num_ranks: int, num_rows: int, bias: bool) -> None:
    x = torch.randn(num_rows, 36)
    whole = RowLinear(36, 0, 36, HIDDEN, bias, whole_place())
    values = fill_whole(list(whole.weights("m")))

    def run(group: ParallelGroup) -> Tensor:
        length = 36 // group.size
        layer = RowLinear(36, group.rank * length, length, HIDDEN, bias, place_of(group))
        fill_share(list(layer.weights("m")), values)
        return layer(x[:, group.rank * length : (group.rank + 1) * length])

    assert_on_every_rank(run_ranks(num_ranks, run), whole(x))


@RANKS
@BATCH
def test_gated_mlp_equals_the_whole(config: ModelConfig, num_ranks: int, num_rows: int) -> None:
    x = torch.randn(num_rows, HIDDEN)
    whole = GatedMLP(config, whole_place())
    values = fill_whole(list(whole.weights("m")))

    def run(group: ParallelGroup) -> Tensor:
        layer = GatedMLP(config, place_of(group))
        fill_share(list(layer.weights("m")), values)
        return layer(x)

    assert_on_every_rank(run_ranks(num_ranks, run), whole(x))


@RANKS
@BATCH
@pytest.mark.parametrize("vocab_size", [96, 97, 40, 5])
def test_vocabulary_embeds_and_scores_as_the_whole(num_ranks: int, num_rows: int, vocab_size: int) -> None:
    """97 does not divide; of 40 and 5, some ranks of several have nothing but padding."""
    tokens = torch.randint(vocab_size, (num_rows,))
    tokens[-1] = vocab_size - 1
    hidden = torch.randn(num_rows, HIDDEN)
    whole = Vocabulary(vocab_size, HIDDEN, whole_place())
    values = fill_whole(list(whole.weights("m")))

    def run(group: ParallelGroup) -> tuple[Tensor, Tensor, Tensor]:
        layer = Vocabulary(vocab_size, HIDDEN, place_of(group))
        fill_share(list(layer.weights("m")), values)
        logits = layer.logits(hidden)
        return layer.embed(tokens), SharedVocabulary(vocab_size, group).gather_logits(logits), logits

    embedded, gathered, own = zip(*run_ranks(num_ranks, run), strict=True)
    assert_on_every_rank(list(embedded), whole.embed(tokens))
    assert_on_every_rank(list(gathered), whole.logits(hidden))
    assert len({part.shape for part in own}) == 1
    assert torch.cat(own, 1)[:, vocab_size:].eq(-torch.inf).all()


@RANKS
@BATCH
def test_experts_columns_are_shared_and_summed_once(config: ModelConfig, num_ranks: int, num_rows: int) -> None:
    x = torch.randn(num_rows, HIDDEN)
    model = replace(config, moe=MoeConfig(5, 2, 36, True, frozenset({0})))
    whole = SparseMLP(model, whole_place())
    values = fill_whole(list(whole.weights("m")))

    def run(group: ParallelGroup) -> Tensor:
        layer = SparseMLP(model, place_of(group))
        fill_share(list(layer.weights("m")), values)
        return layer(x)

    assert_on_every_rank(run_ranks(num_ranks, run), whole(x))


class EchoAttention:
    """Stands for attention: each query head's result is a function of itself and of the K and V of its KV head."""

    def plan(self, batch: ForwardBatch) -> None:
        pass

    def attend(self, query: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        k, v = (cache.flatten(0, 1)[batch.kv_locations] for cache in batch.kv.layer(layer))
        repeats = query.shape[1] // k.shape[1]
        return (query * k.repeat_interleave(repeats, 1)).tanh() + v.repeat_interleave(repeats, 1)


@pytest.mark.parametrize(
    ("num_ranks", "num_kv_heads"), [(n, k) for n in (2, 3, 4) for k in (1, 2, 3, 4, 12) if n % k == 0 or k % n == 0]
)
@BATCH
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_equals_the_whole(
    config: ModelConfig, num_ranks: int, num_rows: int, num_kv_heads: int, qk_norm: bool
) -> None:
    """With fewer KV heads than ranks, neighbours hold the same one."""
    x = torch.randn(num_rows, HIDDEN)
    model = replace(config, num_kv_heads=num_kv_heads)
    table = torch.randn(64, HEAD_DIM)

    def make(group: ParallelGroup) -> tuple[Attention, ForwardBatch]:
        rows = torch.arange(num_rows)
        kv = KVCache(1, 2, 8, max(1, num_kv_heads // group.size), HEAD_DIM, torch.float32, CPU)
        none = torch.zeros(0, 1, dtype=torch.int32)
        batch = ForwardBatch(kv, rows + 3, rows + 2, 0, none, none[:, 0], None, (), None)
        return Attention(model, 0, table, EchoAttention(), place_of(group), qk_norm=qk_norm), batch

    whole, batch = make(ParallelGroup())
    values = fill_whole(list(whole.weights("m")))
    expected = whole(x, batch)

    def run(group: ParallelGroup) -> Tensor:
        layer, batch = make(group)
        fill_share(list(layer.weights("m")), values)
        return layer(x, batch)

    assert_on_every_rank(run_ranks(num_ranks, run), expected)


@RANKS
@BATCH
@pytest.mark.parametrize("vocab_size", [50, 96])
def test_draw_of_a_shared_vocabulary_is_that_of_the_whole(num_ranks: int, num_rows: int, vocab_size: int) -> None:
    logits = torch.randn(num_rows, vocab_size)
    logits[0, [7, 40]] = 9.0  # a tie between ranks: the lowest id wins
    logits[num_rows // 2, : vocab_size // 2] = -torch.inf
    rows = torch.arange(num_rows)
    temperature = (rows % 3).float() * 0.7
    expected = sample(logits, temperature, rows + 3, rows)

    def run(group: ParallelGroup) -> tuple[Tensor, Tensor]:
        draw = SharedVocabulary(vocab_size, group).draw(shard(logits, group), temperature, rows + 3, rows)
        return draw.tokens, draw.failed

    for tokens, failed in run_ranks(num_ranks, run):
        assert torch.equal(tokens, expected.tokens) and not failed.any()


@RANKS
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 49])
def test_row_that_is_broken_on_one_rank_fails_on_all(num_ranks: int, broken: float, where: int) -> None:
    logits = torch.randn(3, 50)
    logits[1, where], logits[2] = broken, -torch.inf
    rows = torch.arange(3)

    def run(group: ParallelGroup) -> tuple[list[bool], list[int]]:
        draw = SharedVocabulary(50, group).draw(shard(logits, group), torch.tensor([0.0, 0.0, 1.0]), rows, rows)
        return draw.failed.tolist(), draw.tokens.tolist()

    outcomes = run_ranks(num_ranks, run)
    assert all(failed == [False, True, True] and max(tokens) < 50 for failed, tokens in outcomes)
    assert all(outcome == outcomes[0] for outcome in outcomes)


SAMPLINGS = [
    GREEDY,
    replace(GREEDY, temperature=0.8),
    replace(GREEDY, temperature=0.9, top_k=5),
    replace(GREEDY, temperature=1.1, top_p=0.7, num_logprobs=3),
    replace(GREEDY, repetition_penalty=1.7, num_logprobs=0),
    replace(GREEDY, bias_ids=np.array([49], "<i4").tobytes(), bias_values=np.array([9.0], "<f4").tobytes()),
    replace(GREEDY, min_tokens=9, stop_ids=np.array([3, 40], "<i4").tobytes()),
]


@RANKS
def test_extras_and_logprobs_are_those_of_the_whole(num_ranks: int) -> None:
    logits = torch.randn(len(SAMPLINGS), 50)
    logits[-1, 40] = 9.0
    rows, positions = np.arange(len(SAMPLINGS)), np.full(len(SAMPLINGS), 3)

    def run(group: ParallelGroup) -> list[list[float]]:
        slots = SlotState(len(SAMPLINGS), 8, CPU)
        admits = tuple(make_admit(i, [1, 2, 49], [0], sampling=s, seed=i) for i, s in enumerate(SAMPLINGS))
        slots.apply(make_step(0, admits=admits))
        sampler = Sampler(slots, 50, CPU, group)
        for row in rows.tolist():
            sampler.admit(row)
        own = shard(logits, group)
        draw = sampler.draw(own, rows, positions)
        logprobs = sampler.apply_extras(own, draw.tokens, draw.failed, rows, positions)
        return [t.tolist() for t in (draw.tokens, draw.failed, logprobs.token_ids, logprobs.values)]

    (expected,) = run_ranks(1, run)
    assert expected[0][5:] == [49, expected[0][6]] and expected[0][6] != 40
    assert all(outcome == expected for outcome in run_ranks(num_ranks, run))


def shard(logits: Tensor, group: ParallelGroup) -> Tensor:
    """This rank's part of logits [n, vocab], with noise where the padding is: what a head computes there."""
    shared = SharedVocabulary(logits.shape[1], group)
    own = torch.full((len(logits), shared.num_rows), 99.0)
    first = shared.first_token_id
    own[:, : shared.num_tokens] = logits[:, first : first + shared.num_tokens]
    return shared.mask_padding(own)


MODELS = [
    ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "vocab_size": 97}),
    ("LlamaForCausalLM", {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}),
    ("Qwen2ForCausalLM", {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 36}),
    ("Qwen3MoeForCausalLM", {"num_attention_heads": 12, "num_key_value_heads": 4}),
    ("Gemma3ForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ("Qwen3ForCausalLM", {"num_attention_heads": 12, "num_key_value_heads": 1}),
    ("Qwen3ForCausalLM", {"num_attention_heads": 12, "num_key_value_heads": 2}),
    ("Qwen3ForCausalLM", {"num_attention_heads": 12, "num_key_value_heads": 12, "attention_bias": True}),
]


@pytest.mark.parametrize(("architecture", "overrides"), MODELS)
def test_logits_of_a_shared_model_are_those_of_one_rank(
    tmp_path: Path, architecture: str, overrides: dict[str, object]
) -> None:
    """Prompts and decode rows; 1e-4 in fp32, and the ranks' tokens are the same."""
    folder = write_checkpoint(tmp_path, architecture, **overrides)
    options = {"device": "cpu", "num_pages": 32, "page_size": 4, "max_running_req": 8, "max_seq_len": 64}
    config = EngineConfig.from_options(folder, options)
    prompts = [list(range(3 + i, 5 + 2 * i)) for i in range(1, 8)]

    def run(group: ParallelGroup) -> tuple[list[Tensor], list[list[int]]]:
        runner = ModelRunner(replace(config, tp_size=group.size), group)
        logits, draw = [], runner._sampler.draw

        def keep(own: Tensor, *rest: object) -> object:
            logits.append(runner._sampler.vocabulary.gather_logits(own))
            return draw(own, *rest)

        runner._sampler.draw = keep
        admits = tuple(make_admit(i, prompt, list(range(4 * i, 4 * i + 4))) for i, prompt in enumerate(prompts))
        prefills = tuple(value for i, prompt in enumerate(prompts) for value in (i, 0, len(prompt), 1))
        results = [runner.execute(make_step(0, admits=admits, prefills=prefills)).result()]
        for step_id, decode in enumerate(([0], [3, 5], list(range(7))), 1):
            results.append(runner.execute(make_step(step_id, decode=decode, run_decode=True)).result())
        return logits, [read_tokens(result.tokens) for result in results]

    ((expected, tokens),) = run_ranks(1, run)
    heads = int(overrides.get("num_attention_heads", 4))
    kv_heads = int(overrides.get("num_key_value_heads", 2))
    sizes = [n for n in (2, 3, 4) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    assert sizes
    for size in sizes:
        for logits, drawn in run_ranks(size, run):
            assert drawn == tokens
            assert all((a - b).abs().max() < 1e-4 for a, b in zip(logits, expected, strict=True))
