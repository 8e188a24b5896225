"""The engine's options: one frozen `EngineConfig`, built from Python keywords, flags, or the wire, and checked once."""

import argparse
import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

ALIASES = {
    "tensor_parallel_size": "tp_size",
    "max_num_seqs": "max_running_req",
    "max_num_batched_tokens": "max_extend_tokens",
    "num_page_override": "num_pages",
    "gpu_memory_utilization": "memory_ratio",
    "max_seq_len_override": "max_seq_len",
    "max_model_len": "max_seq_len",
}
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DTYPE_SYNONYMS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
DEVICES = ("auto", "cpu", "cuda")
CACHE_TYPES = ("radix", "naive")
SCHEDULE_POLICIES = ("fcfs", "lof")
MOE_BACKENDS = ("auto", "torch", "triton")
MIN_CONTEXT_TOKENS = 2
ATTENTION_BACKENDS = ("torch", "fi", "triton", "fa", "trtllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every option of an engine. One row each in `docs/config.md`.

    Built by `EngineConfig.from_options`, which resolves aliases. A bad value raises `ValueError` naming both.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    tp_size: int = 1
    max_running_req: int = 256
    max_extend_tokens: int = 8192
    page_size: int = 16
    num_pages: int | None = None
    memory_ratio: float = 0.9
    max_seq_len: int | None = None
    cache_type: str = "radix"
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    cuda_graph_bs: tuple[int, ...] | None = None
    cuda_graph_max_bs: int | None = None
    use_dummy_weight: bool = False
    seed: int = 0
    start_timeout_s: float = 600.0
    step_timeout_s: float = 300.0
    schedule_policy: str = "fcfs"
    # Not options of `LLM`, but of the engine as a program:
    max_steps_in_flight: int = 2  # D: steps issued and not completed; 2 hides the host behind the device
    max_queued_req: int = 4096  # waiting requests of all clients, then Overloaded
    record_steps: str | None = None  # file that receives rank 0's step channel, to be replayed on a worker alone

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model or "\0" in self.model:
            raise ValueError(f"model must be a folder, a file or a name, got {self.model!r}")
        for name, low, high in (
            ("tp_size", 1, 1024), ("max_running_req", 1, 65_535), ("max_extend_tokens", 1, 2**20),
            ("page_size", 1, 1024), ("max_steps_in_flight", 1, 8), ("max_queued_req", 1, 2**20),
            ("seed", -(2**63), 2**63 - 1),
        ):  # fmt: skip
            _check_int(name, getattr(self, name), low, high)
        for name, low, high in (("num_pages", 1, 2**30), ("max_seq_len", MIN_CONTEXT_TOKENS, 2**24)):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, high)
        if self.num_pages is not None and self.num_pages * self.page_size < MIN_CONTEXT_TOKENS:
            raise ValueError(
                f"num_pages {self.num_pages} with page_size {self.page_size} holds {self.num_pages * self.page_size} "
                f"token, the least that a request needs is {MIN_CONTEXT_TOKENS} (one of its prompt, one to generate); "
                f"raise num_pages to at least {-(-MIN_CONTEXT_TOKENS // self.page_size)}"
            )
        if self.cuda_graph_max_bs is not None:
            _check_int("cuda_graph_max_bs", self.cuda_graph_max_bs, 0, 65_535)
        for size in self.cuda_graph_bs or ():
            _check_int("cuda_graph_bs", size, 1, 65_535)
        for name, top in (("memory_ratio", 1.0), ("start_timeout_s", 1e6), ("step_timeout_s", 1e6)):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not math.isfinite(value)
                or not 0 < value <= top
            ):
                raise ValueError(f"{name} must be above 0 and at most {top:g}, got {value!r}")
        for name, allowed in (
            ("dtype", DTYPES), ("device", DEVICES), ("cache_type", CACHE_TYPES), ("schedule_policy", SCHEDULE_POLICIES),
            ("moe_backend", MOE_BACKENDS),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        if not isinstance(self.use_dummy_weight, bool):
            raise ValueError(f"use_dummy_weight must be True or False, got {self.use_dummy_weight!r}")
        self.attention_pair()

    def attention_pair(self) -> tuple[str, str]:
        """The (prefill, decode) attention backends; "auto" where the worker chooses."""
        parts = self.attention_backend.split(",")
        if len(parts) == 1:
            parts = parts * 2
        if len(parts) != 2 or any(p not in (*ATTENTION_BACKENDS, "auto") for p in parts):
            raise ValueError(
                f"attention_backend must be auto, {', '.join(ATTENTION_BACKENDS)} or a 'prefill,decode' pair of them; "
                f"got {self.attention_backend!r}"
            )
        return parts[0], parts[1]

    @classmethod
    def from_options(cls, model: object, options: Mapping[str, Any]) -> "EngineConfig":
        """Build from user keywords. Aliases are resolved, dtypes may be torch dtypes.

        Raises:
            TypeError: an unknown option (with the nearest known name), or one given twice under two names.
            ValueError: a value out of range.
        """
        known = {f.name for f in fields(cls)} - {"model"}
        values: dict[str, Any] = {}
        for name, value in options.items():
            target = ALIASES.get(name, name)
            if target not in known:
                near = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise TypeError(f"unknown option {name!r}{hint}")
            if target in values:
                raise TypeError(f"option {target!r} is given twice (as {name!r} too)")
            values[target] = value
        if "dtype" in values:
            values["dtype"] = dtype_name(values["dtype"])
        if values.get("cuda_graph_bs") is not None:
            values["cuda_graph_bs"] = tuple(values["cuda_graph_bs"])
        if isinstance(model, os.PathLike):
            model = str(model)
        return cls(model=model, **values)  # type: ignore[arg-type]  # what is no str is refused there

    def to_wire(self) -> dict[str, Any]:
        """As a map of plain values, the inverse of `from_wire`."""
        return asdict(self)

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> "EngineConfig":
        """Raises `TypeError` or `ValueError` for anything that `to_wire` would not have written."""
        return cls.from_options(values["model"], {k: v for k, v in values.items() if k != "model"})


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one flag for each option of `EngineConfig` but the model, with its aliases."""
    for option in fields(EngineConfig):
        if option.name == "model":
            continue
        names = [option.name, *(alias for alias, target in ALIASES.items() if target == option.name)]
        flags = ["--" + name.replace("_", "-") for name in names]
        if option.name == "use_dummy_weight":
            parser.add_argument(*flags, "--dummy-weight", dest=option.name, action="store_true", default=None)
        else:
            parser.add_argument(*flags, dest=option.name, default=None, type=_FLAG_TYPES.get(option.name, int))


def read_engine_flags(model: str, arguments: argparse.Namespace) -> EngineConfig:
    """The config that flags of `add_engine_flags` state. Raises ValueError naming option and value."""
    names = [option.name for option in fields(EngineConfig) if option.name != "model"]
    return EngineConfig.from_options(
        model, {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    )


def engine_arguments(config: EngineConfig) -> list[str]:
    """The command line of `python -m minisgl.engine` for a config: the inverse of `read_engine_flags`."""
    arguments = ["--model", config.model]
    for option in fields(config):
        value = getattr(config, option.name)
        if option.name == "model" or value == option.default:
            continue
        flag = "--" + option.name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            arguments.append(f"{flag}={text}")
    return arguments


def _read_sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


_FLAG_TYPES: Mapping[str, Callable[[str], object]] = {
    "dtype": str,
    "device": str,
    "cache_type": str,
    "attention_backend": str,
    "moe_backend": str,
    "schedule_policy": str,
    "record_steps": str,
    "memory_ratio": float,
    "start_timeout_s": float,
    "step_timeout_s": float,
    "cuda_graph_bs": _read_sizes,
}


def dtype_name(dtype: object) -> str:
    """Name of a dtype given as a name or as a torch dtype (read from its text, so that torch need not be imported)."""
    name = str(dtype).removeprefix("torch.")
    return DTYPE_SYNONYMS.get(name, name)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer between {low} and {high}, got {value!r}")
