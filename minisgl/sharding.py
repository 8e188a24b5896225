"""How a model's heads and columns are divided among tensor-parallel ranks, and which numbers of ranks can do it.

The frontend, the engine and the workers all ask here, so what is refused before a process starts is what a worker
would refuse.
"""

from dataclasses import dataclass

from minisgl.errors import ModelLoadError
from minisgl.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class RankSizes:
    """One rank's part of a model, the same on every rank. The vocabulary is not here: its parts are padded."""

    num_heads: int
    num_kv_heads: int  # 1 where the ranks outnumber them: neighbours then hold the same head
    intermediate_size: int  # of the MLP of dense layers; 0 if the model has none
    expert_size: int  # of one expert; 0 if the model has none


def divide_model(config: ModelConfig, tp_size: int) -> RankSizes:
    """The part of each of `tp_size` ranks.

    Raises:
        ModelLoadError: something does not divide; the text has the numbers, and the tp_sizes that would do.
    """
    misfit = _find_misfit(config, tp_size)
    if misfit is not None:
        fitting = [str(n) for n in range(1, config.num_heads + 1) if _find_misfit(config, n) is None]
        raise ModelLoadError(f"{misfit} do not divide over tp_size {tp_size}; use tp_size {' or '.join(fitting)}")
    num_heads, mlp, experts = (count // tp_size for count, _ in _list_divided(config))
    return RankSizes(num_heads, max(1, config.num_kv_heads // tp_size), mlp, experts)


def _find_misfit(config: ModelConfig, tp_size: int) -> str | None:
    """What `tp_size` ranks cannot have equal parts of, with its number; None when they can of all."""
    for count, what in _list_divided(config):
        if count % tp_size:
            return f"{count} {what}"
    if config.num_kv_heads % tp_size and tp_size % config.num_kv_heads:
        return f"{config.num_kv_heads} KV heads"
    return None


def _list_divided(config: ModelConfig) -> tuple[tuple[int, str], ...]:
    """What every rank has an equal part of."""
    moe = config.moe
    has_mlp = moe is None or len(moe.sparse_layers) < config.num_layers
    return (
        (config.num_heads, "attention heads"),
        (config.intermediate_size if has_mlp else 0, "MLP columns (intermediate_size)"),
        (moe.intermediate_size if moe else 0, "expert columns (moe_intermediate_size)"),
    )
