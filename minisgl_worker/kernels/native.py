"""The CPU kernels of `native.cpp`: compiled for this machine at first use, and called on torch's tensors.

They are optional. Without a C++ compiler, or with MINISGL_NATIVE=0, `kernels_for` has nothing to offer and plain torch
serves, with the same results but for rounding, at about a third of the speed. The library lies in the user's cache,
named after the source, the compiler and the processor, and takes some two seconds to build, once.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-w")
COMPILE_LIMIT_S = 120
# Rows up to which the weight's bytes decide, and not the products: beyond, oneDNN's blocked kernels win (measured).
MAX_ROWS, MAX_TILE_ROWS = 8, 64
VECTOR = 16  # values; sizes must be multiples of it

logger = logging.getLogger(__name__)
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "norm": [_POINTER] * 5 + [_LONG] * 2 + [_FLOAT, _INT],
    "silu_mul": [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "rope_append": [_POINTER] * 3 + [_FLOAT] + [_POINTER] * 6 + [_LONG] * 4 + [_INT],
    "attend": [_POINTER] * 7 + [_LONG] * 6 + [_FLOAT, _LONG, _INT],
}


class NativeKernels:
    """The kernels of one dtype, bf16 or fp32. Tensors are contiguous, on the CPU, and of that dtype unless stated."""

    def __init__(self, library: ctypes.CDLL, suffix: str):
        self._norm, self._silu_mul, self._rope_append, self._attend = (
            _declare(library, f"{name}_{suffix}", arguments) for name, arguments in _SIGNATURES.items()
        )
        self._linear = None
        if suffix == "bf16":
            self._linear = _declare(library, "linear_bf16", [_POINTER] * 4 + [_LONG] * 3 + [_INT])
            self._max_rows = MAX_TILE_ROWS if library.has_tiles() else MAX_ROWS

    def serves_linear(self, x: Tensor) -> bool:
        """Whether `linear` takes x [num_tokens, in_size], CPU, and is faster than torch at it."""
        return self._linear is not None and 0 < x.shape[0] <= self._max_rows and x.shape[1] % (2 * VECTOR) == 0

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `kernels.linear.linear`."""
        out = x.new_empty(x.shape[0], weight.shape[0])
        bias_pointer = 0 if bias is None else bias.data_ptr()
        self._linear(
            x.data_ptr(), weight.data_ptr(), bias_pointer, out.data_ptr(), x.shape[0], *weight.shape, _num_threads()
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `kernels.norm.rms_norm`."""
        out = torch.empty_like(x)
        size = weight.shape[0]
        self._norm(x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), x.numel() // size, size, eps, _num_threads())
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `kernels.norm.add_rms_norm`."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        pointers = (tensor.data_ptr() for tensor in (x, residual, weight, total, out))
        size = weight.shape[0]
        self._norm(*pointers, x.numel() // size, size, eps, _num_threads())
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `kernels.activation.silu_mul`."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, _num_threads())
        return out

    def qk_norm_rope_append(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_locations: Tensor,
    ) -> Tensor:
        """See `kernels.rope_append.qk_norm_rope_append`."""
        num_kv_heads, head_dim = k_cache.shape[2:]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        query = qkv.new_empty(qkv.shape[0], num_heads, head_dim)
        norms = (0 if weight is None else weight.data_ptr() for weight in (q_weight, k_weight))
        tensors = (cos_sin, positions, k_cache, v_cache, kv_locations, query)
        self._rope_append(
            qkv.data_ptr(), *norms, eps, *(tensor.data_ptr() for tensor in tensors),
            qkv.shape[0], num_heads, num_kv_heads, head_dim, _num_threads(),
        )  # fmt: skip
        return query

    def attend_decode(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        slots: Tensor | None,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """One query per row over the pages of its table row.

        Args:
            query: [num_rows, num_heads, head_dim].
            k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim].
            page_table: [num_table_rows, max_pages] i32; seq_lens [num_table_rows] i32, the current token included.
            slots: [num_rows] i32, the table row of each row; None = its own number.
            window: a row sees its last `window` tokens; None = all.
        Returns:
            [num_rows, num_heads, head_dim]. Memory past a row's length is not read.
        """
        num_rows, num_heads, head_dim = query.shape
        page_size, num_kv_heads = k_cache.shape[1:3]
        out = torch.empty_like(query)
        tensors = (query, k_cache, v_cache, page_table, seq_lens)
        self._attend(
            *(tensor.data_ptr() for tensor in tensors), 0 if slots is None else slots.data_ptr(), out.data_ptr(),
            num_rows, page_table.shape[1], page_size, num_heads, num_kv_heads, head_dim, scale, window or 0,
            _num_threads(),
        )  # fmt: skip
        return out


def kernels_for(x: Tensor) -> NativeKernels | None:
    """The native kernels that serve `x`, a CPU tensor whose last dimension is a multiple of 16; None = plain torch."""
    if x.device.type != "cpu" or x.shape[-1] % VECTOR or not x.is_contiguous():
        return None
    return _load_kernels().get(x.dtype)


@functools.cache
def _load_kernels() -> dict[torch.dtype, NativeKernels]:
    if os.environ.get("MINISGL_NATIVE") == "0":
        return {}
    try:
        library = ctypes.CDLL(str(build()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("CPU kernels were not compiled, decoding is about three times slower: %s", error)
        return {}
    return {torch.bfloat16: NativeKernels(library, "bf16"), torch.float32: NativeKernels(library, "f32")}


def build() -> Path:
    """The compiled library, from the cache if it is there.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, it fails, or the cache cannot be written, or others
            can write it.
        RuntimeError: this user has no home folder.
    """
    names = (os.environ.get("CXX"), "g++", "c++")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C++ compiler (g++) is installed")
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_LIMIT_S, check=True).stdout
    named = [SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _describe_processor()]
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (stated if stated.is_absolute() else Path.home() / ".cache") / "minisgl"  # as its specification has it
    library = folder / f"native-{hashlib.sha256(b'|'.join(named)).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:  # what lies there will be run
        raise OSError(f"{folder} can be written by others")
    if not library.exists():
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            command = [compiler, *FLAGS, *_machine_flags(), "-o", temporary, str(SOURCE)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
            if run.returncode:
                raise OSError(f"{compiler} failed: {run.stderr.strip()[-500:]}")
            os.replace(temporary, library)  # whole or not at all: other workers may build it at this moment
        finally:
            Path(temporary).unlink(missing_ok=True)
    return library


def _machine_flags() -> list[str]:
    """Compile for this very processor, with its widest vectors."""
    if platform.machine() in ("x86_64", "AMD64"):
        return ["-march=native", "-mprefer-vector-width=512"]
    return ["-mcpu=native"]


def _describe_processor() -> bytes:
    """What `_machine_flags` depends on: a home folder may be shared by machines."""
    features = ""
    if (info := Path("/proc/cpuinfo")).exists():
        features = next((line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {features}".encode()


def _declare(library: ctypes.CDLL, name: str, arguments: list[type]) -> Callable[..., None]:
    """The function of that name, whose calls show in torch's profiles as `native::NAME`, without the dtype."""
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, None
    label = f"native::{name.rpartition('_')[0]}"

    def call(*values: object) -> None:
        if not torch.autograd._profiler_enabled():  # 40 ns; a record that nobody takes costs some 10 us
            function(*values)
            return
        with torch.profiler.record_function(label):
            function(*values)

    return call


def _num_threads() -> int:
    return torch.get_num_threads()
