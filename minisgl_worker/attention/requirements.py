"""What a backend needs from package, device and model, and the error that names what is missing."""

from dataclasses import dataclass

import torch

from minisgl.errors import ModelLoadError
from minisgl_worker.attention.base import AttentionSetup


@dataclass(frozen=True, slots=True)
class Requirements:
    """Limits of a backend's kernels. None = no limit."""

    needs_gpu: bool = False
    package: str | None = None  # by its name in the package index
    capability: int | None = None  # major compute capability of the GPU, exactly
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    has_windows: bool = True

    def check(self, name: str, setup: AttentionSetup) -> None:
        """Raises ModelLoadError naming the first thing that `setup` or its device lacks; packages are left out."""
        self.check_model(name, setup)
        if self.needs_gpu and setup.device.type != "cuda":
            raise ModelLoadError(f"attention backend {name} needs an NVIDIA GPU, the device is {setup.device}")
        if self.capability is not None:
            self.check_capability(name, torch.cuda.get_device_capability(setup.device))

    def check_model(self, name: str, setup: AttentionSetup) -> None:
        """The part that depends on the model and the options alone."""
        dtype = str(setup.dtype).removeprefix("torch.")
        dtypes = None if self.dtypes is None else tuple(str(d).removeprefix("torch.") for d in self.dtypes)
        for what, value, allowed in (
            ("dtype", dtype, dtypes),
            ("a head size of", setup.head_dim, self.head_dims),
            ("page_size", setup.page_size, self.page_sizes),
        ):
            if allowed is not None and value not in allowed:
                raise ModelLoadError(
                    f"attention backend {name} needs {what} {' or '.join(map(str, allowed))}, got {value}; "
                    "use attention_backend=auto"
                )
        windows = [window for window in setup.windows if window is not None]
        if windows and not self.has_windows:
            raise ModelLoadError(
                f"attention backend {name} has no sliding windows, the model has one of {windows[0]} tokens; "
                "use attention_backend=auto"
            )

    def explain_missing(self, name: str, error: ImportError) -> ModelLoadError:
        """The error for a package that cannot be imported."""
        return ModelLoadError(
            f"attention backend {name} needs the package {self.package}, which cannot be imported ({error}); "
            "install it, or use attention_backend=auto"
        )

    def check_capability(self, name: str, capability: tuple[int, int]) -> None:
        """The part that depends on the GPU alone."""
        if capability[0] != self.capability:
            raise ModelLoadError(
                f"attention backend {name} needs a GPU of compute capability {self.capability}.x, "
                f"this one has {capability[0]}.{capability[1]}; use attention_backend=auto"
            )
