"""What attention and MoE backends need from machine, model and options, and the errors that name what is missing.

The frontend and the engine ask before a process starts, the workers when they build the backend on its device.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from minisgl.config import EngineConfig
from minisgl.errors import ModelLoadError
from minisgl.model_config import ModelConfig
from minisgl.sharding import divide_model

PACKAGES = MappingProxyType({"triton": "triton", "flashinfer": "flashinfer-python"})  # module -> its package


@dataclass(frozen=True, slots=True)
class Requirements:
    """Limits of a backend's kernels. None = no limit."""

    gpu_module: str | None = None  # a module with kernels for NVIDIA GPUs; None = runs on every device
    capability: int | None = None  # major compute capability of the GPU, exactly
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    has_windows: bool = True

    def check(
        self, option: str, name: str, *, device: str, dtype: str,
        head_dim: int = 0, page_size: int = 0, windows: Sequence[int | None] = (),
    ) -> None:  # fmt: skip
        """Raises ModelLoadError naming the first thing that is missing or that the kernels do not serve.

        Args:
            option, name: as in attention_backend=fi.
            device: "cpu", "cuda", or "auto" if it is not known yet.
            head_dim, page_size, windows: of an attention backend.
        """
        backend, way_out = f"{option} {name}", f"use {option}=auto"
        if self.gpu_module is not None and device == "cpu":
            raise ModelLoadError(f"{backend} needs an NVIDIA GPU, the device is cpu; {way_out}")
        for what, value, allowed in (
            ("dtype", dtype, self.dtypes),
            ("a head size of", head_dim, self.head_dims),
            ("page_size", page_size, self.page_sizes),
        ):
            if allowed is not None and value not in allowed:
                raise ModelLoadError(f"{backend} needs {what} {' or '.join(map(str, allowed))}, got {value}; {way_out}")
        stated = [window for window in windows if window is not None]
        if stated and not self.has_windows:
            raise ModelLoadError(
                f"{backend} has no sliding windows, the model has one of {stated[0]} tokens; {way_out}"
            )
        if self.gpu_module is not None and importlib.util.find_spec(self.gpu_module) is None:
            raise ModelLoadError(
                f"{backend} needs an NVIDIA GPU and the package {PACKAGES[self.gpu_module]}, which is not installed; "
                f"install it, or {way_out}"
            )

    def check_capability(self, name: str, capability: tuple[int, int]) -> None:
        """Raises ModelLoadError for a GPU of another generation than attention `name` is for."""
        if capability[0] != self.capability:
            raise ModelLoadError(
                f"attention_backend {name} needs a GPU of compute capability {self.capability}.x, "
                f"this one has {capability[0]}.{capability[1]}; use attention_backend=auto"
            )


_HALF, _HEADS = ("bfloat16", "float16"), (64, 128, 256)
TRITON = Requirements("triton", dtypes=("bfloat16", "float16", "float32"))
ATTENTION: Mapping[str, Requirements] = MappingProxyType(
    {
        "torch": Requirements(),
        "triton": TRITON,
        "fi": Requirements("flashinfer", dtypes=_HALF, head_dims=_HEADS),
        "fa": Requirements("flashinfer", capability=9, dtypes=_HALF, head_dims=_HEADS, has_windows=False),
        "trtllm": Requirements(
            "flashinfer", capability=9, dtypes=_HALF, head_dims=_HEADS, page_sizes=(16, 32, 64, 128), has_windows=False
        ),
    }
)


def check_options(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse what is wrong for this model or machine and shows without a device.

    Raises:
        ModelLoadError: names the option, its value and the way out.
    """
    divide_model(model, config.tp_size)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if model.moe is not None and config.moe_backend == "triton":
        TRITON.check("moe_backend", "triton", device=config.device, dtype=dtype)
    for name in dict.fromkeys(config.attention_pair()):
        if name != "auto":
            ATTENTION[name].check(
                "attention_backend", name, device=config.device, dtype=dtype,
                head_dim=model.head_dim, page_size=config.page_size, windows=model.layer_windows,
            )  # fmt: skip
