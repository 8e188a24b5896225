"""The MLP of a sparse layer: a router, and experts of which each token uses a few."""

from collections.abc import Iterator

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.kernels.moe import compute_experts, route
from minisgl_worker.layers import Place, WeightSource


class SparseMLP:
    """Each rank holds a share of every expert's columns; the router is whole on every rank."""

    def __init__(self, config: ModelConfig, place: Place):
        moe = config.moe
        assert moe is not None, "the config of a sparse layer has no experts"
        self._moe, self._group, self._activation = moe, place.group, config.hidden_act
        self._share = place.group.share(moe.intermediate_size, "expert columns (moe_intermediate_size)")
        self.gate = place.empty(moe.num_experts, config.hidden_size)
        self.gate_up = place.empty(moe.num_experts, 2 * self._share, config.hidden_size)
        self.down = place.empty(moe.num_experts, config.hidden_size, self._share)

    def __call__(self, x: Tensor) -> Tensor:
        """x and result [num_tokens, hidden_size]."""
        values, ids = route(x, self.gate, self._moe.num_experts_per_token, self._moe.norm_topk_prob)
        return self._group.sum(compute_experts(x, self.gate_up, self.down, values, ids, self._activation))

    def weights(self, name: str) -> Iterator[WeightSource]:
        hidden, size, share = self.gate.shape[1], self._moe.intermediate_size, self._share
        first = self._group.rank * share
        yield WeightSource(f"{name}.gate.weight", self.gate, (self._moe.num_experts, hidden))
        for i in range(self._moe.num_experts):
            part = f"{name}.experts.{i}"
            halves = (self.gate_up[i, :share], self.gate_up[i, share:])
            for projection, target in zip(("gate_proj", "up_proj"), halves, strict=True):
                yield WeightSource(f"{part}.{projection}.weight", target, (size, hidden), 0, first, share)
            yield WeightSource(f"{part}.down_proj.weight", self.down[i], (hidden, size), 1, first, share)
