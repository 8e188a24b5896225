"""The MLP of a sparse layer: a router, and experts of which each token uses a few."""

from collections.abc import Iterator

import torch
from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl.requirements import TRITON
from minisgl.sharding import divide_model
from minisgl_worker.kernels.dispatch import TRITON_DTYPES
from minisgl_worker.kernels.moe import compute_experts, route, router_logits
from minisgl_worker.layers import Place, WeightSource


class SparseMLP:
    """Each rank holds a share of every expert's columns; the router is whole on every rank.

    Attributes:
        gate: [num_experts, hidden_size]; gate_up [num_experts, 2 * share, hidden_size]; down [num_experts, hidden_size,
            share]. All of the model's dtype, on the rank's device.
    """

    def __init__(self, config: ModelConfig, place: Place):
        moe = config.moe
        assert moe is not None, "the config of a sparse layer has no experts"
        self._moe, self._group, self._activation = moe, place.group, config.hidden_act
        self._share = divide_model(config, place.group.size).expert_size
        self.gate = place.empty(moe.num_experts, config.hidden_size)
        self.gate_up = place.empty(moe.num_experts, 2 * self._share, config.hidden_size)
        self.down = place.empty(moe.num_experts, config.hidden_size, self._share)
        is_triton = choose_moe_backend(place) == "triton"
        self._counts = torch.zeros(moe.num_experts, dtype=torch.int32, device=place.device) if is_triton else None

    def __call__(self, x: Tensor) -> Tensor:
        """x and result [num_tokens, hidden_size] of the model's dtype."""
        num_chosen, normalise = self._moe.num_experts_per_token, self._moe.norm_topk_prob
        if self._counts is not None:
            from minisgl_worker.kernels import moe_triton  # Triton is absent where there is no GPU

            logits = router_logits(x, self.gate)
            return self._group.sum(
                moe_triton.sparse_mlp(
                    x, logits, self.gate_up, self.down, num_chosen, normalise, self._activation, self._counts
                )
            )
        values, ids = route(x, self.gate, num_chosen, normalise)
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


def choose_moe_backend(place: Place) -> str:
    """The backend that `place` asks for; "auto" is triton where it can serve.

    Raises:
        ModelLoadError: it cannot serve the device or dtype.
    """
    can_serve = place.device.type == "cuda" and place.dtype in TRITON_DTYPES
    name = place.moe_backend
    if name == "auto":
        return "triton" if can_serve else "torch"
    if name == "triton":
        dtype = str(place.dtype).removeprefix("torch.")
        TRITON.check("moe_backend", name, device=place.device.type, dtype=dtype)
    return name
