"""Which part of a model a rank has, what is refused, and how ranks settle on one number of pages."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.errors import ModelLoadError, PeerLost
from minisgl_worker.memory import agree_on_pages
from minisgl_worker.model_runner import ModelRunner
from minisgl_worker.parallel import ParallelGroup, share_vocabulary, sum_in_rank_order
from tests.worker.checkpoints import write_checkpoint
from tests.worker.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [1, 16, 97, 151_936])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_vocabulary_parts_are_equal_and_cover_it(vocab_size: int, num_ranks: int) -> None:
    parts = [share_vocabulary(vocab_size, ParallelGroup(rank, num_ranks)) for rank in range(num_ranks)]
    rows = parts[0][0]
    assert parts == [(rows, rank * rows) for rank in range(num_ranks)]
    assert vocab_size <= num_ranks * rows < vocab_size + 16 * num_ranks
    assert num_ranks == 1 or rows % 16 == 0


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "words"),
    [
        ({"num_attention_heads": 4}, 3, "4 attention heads do not divide over tp_size 3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36}, 2, "3 KV heads do not divide over"),
        ({"intermediate_size": 50}, 4, r"50 MLP columns \(intermediate_size\) do not divide over tp_size 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_anything_is_exchanged(
    tmp_path: Path, overrides: dict[str, int], num_ranks: int, words: str
) -> None:
    config = EngineConfig.from_options(write_checkpoint(tmp_path, **overrides), {"device": "cpu", "num_pages": 8})
    group = ParallelGroup(0, num_ranks)  # has nobody to meet: joining would fail
    with pytest.raises(ModelLoadError, match=words):
        ModelRunner(replace(config, tp_size=num_ranks), group)
    assert group.num_collectives == 0


def test_sum_is_in_rank_order_and_rounded_once() -> None:
    parts = torch.tensor([[2.0**30], [1.0], [-(2.0**30)], [1.0]])
    assert sum_in_rank_order(parts).item() == 1.0  # fp32 loses the first 1 and keeps the last
    assert sum_in_rank_order(parts.double()).item() == 2.0
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert sum_in_rank_order(parts).item() == 258.0 and sum_in_rank_order(parts).dtype == torch.bfloat16


def test_smallest_pool_counts_and_an_uneven_one_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def agree(pages: list[int]) -> list[int]:
        return run_ranks(3, lambda group: agree_on_pages(pages[group.rank], group, CPU))

    with caplog.at_level(logging.WARNING):
        assert agree([100, 95, 99]) == [95] * 3
        assert not caplog.records
        assert agree([100, 70, 99]) == [70] * 3
    (record,) = caplog.records
    assert "rank 1 has room for 70 KV pages, rank 0 for 100" in record.getMessage()


def test_exchange_that_breaks_off_is_the_loss_of_a_peer() -> None:
    class Broken:
        def gather(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("connection closed by peer")

        def sum(self, x: torch.Tensor) -> torch.Tensor:
            return self.gather(x)

    group = ParallelGroup(0, 2, Broken())
    for operation in (group.sum, group.gather, group.gather_columns):
        with pytest.raises(PeerLost, match="closed by peer"):
            operation(torch.zeros(2, 2))
    assert group.num_collectives == 3


@pytest.mark.parametrize("use_dummy_weight", [False, True])
def test_shares_of_all_ranks_together_are_the_model(tmp_path: Path, use_dummy_weight: bool) -> None:
    """Each rank holds its slices and no more; together they are the whole, whatever the weights come from."""
    folder = write_checkpoint(tmp_path, "LlamaForCausalLM", num_key_value_heads=4)
    config = EngineConfig.from_options(
        folder, {"device": "cpu", "num_pages": 8, "max_seq_len": 32, "use_dummy_weight": use_dummy_weight}
    )

    def read(group: ParallelGroup) -> list[tuple[object, ...]]:
        model = ModelRunner(replace(config, tp_size=group.size), group)._model
        return [(s.name, s.dim, s.target.clone()) for s in model.weights()]

    (whole,) = run_ranks(1, read)
    for num_ranks in (2, 4):
        parts = run_ranks(num_ranks, read)
        for (name, _, expected), *shares in zip(whole, *parts, strict=True):
            values = [value for _, _, value in shares]
            if values[0].shape == expected.shape:
                assert name.endswith("norm.weight") and all(torch.equal(value, expected) for value in values)
            else:
                assert torch.equal(torch.cat(values, shares[0][1]), expected)
                assert sum(value.numel() for value in values) == expected.numel()
