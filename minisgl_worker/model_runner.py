"""Runs Steps: from wire messages to sampled tokens on one device."""

import os
import time
from dataclasses import dataclass

import torch

from minisgl.config import EngineConfig
from minisgl.errors import ModelLoadError
from minisgl.model_folder import ModelConfig, ModelFolder, resolve_model
from minisgl.protocol import Result, Step
from minisgl_worker.attention import make_backend
from minisgl_worker.batch import SlotState
from minisgl_worker.kv_cache import KVCache
from minisgl_worker.layers import Place, share_kv_heads
from minisgl_worker.models import MODELS
from minisgl_worker.parallel import ParallelGroup
from minisgl_worker.rotary import build_rotary_table
from minisgl_worker.sampler import Sampled, Sampler
from minisgl_worker.weights import fill_dummy_weights, load_weights

CPU_POOL_SHARE = 0.25  # of free memory at most: the CPU's memory belongs to the user's other programs too


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step that was launched. On a GPU its tokens may not be there yet."""

    step_id: int
    sampled: Sampled

    def result(self) -> Result:
        """Waits for the step's tokens."""
        ids = [i.cpu().numpy().astype("<i4").tobytes() for i in self.sampled.logprob_ids]
        values = [v.cpu().numpy().astype("<f4").tobytes() for v in self.sampled.logprob_values]
        return Result(self.step_id, self.sampled.packed_tokens(), b"".join(ids), b"".join(values))


class ModelRunner:
    """One rank's model, KV pool and slots.

    Raises:
        ModelLoadError: the model cannot be loaded, or its KV pool has no room on the device.
    """

    def __init__(self, config: EngineConfig, rank: int = 0, rendezvous: str = ""):
        started = time.monotonic()
        folder = resolve_model(config.model, need_weights=not config.use_dummy_weight)
        self.model_config = folder.config
        self.device = choose_device(config.device, rank)
        self.dtype = getattr(torch, folder.config.dtype if config.dtype == "auto" else config.dtype)
        group = ParallelGroup.join(rank, config.tp_size, rendezvous, self.device)
        self.max_seq_len = min(config.max_seq_len or 2**31, folder.config.max_position_embeddings)
        self._backend_name, backend = make_backend(config, folder.config, self.device)
        table = build_rotary_table(folder.config, self.max_seq_len, self.dtype, self.device)
        place = Place(group, self.dtype, self.device)
        self.model = MODELS[folder.config.architecture](folder.config, table, backend, place)
        _fill_weights(self.model, folder, config)
        self.num_pages = config.num_pages or self._fit_pages(config, group)
        num_kv_heads, _ = share_kv_heads(folder.config.num_kv_heads, group)
        self.kv = KVCache(folder.config.num_layers, self.num_pages, config.page_size, num_kv_heads,
                          folder.config.head_dim, self.dtype, self.device)  # fmt: skip
        max_pages = -(-self.max_seq_len // config.page_size)
        self.slots = SlotState(config.max_running_req, max_pages, self.device)
        self.sampler = Sampler(self.slots, folder.config.vocab_size, self.device)
        self.load_seconds = time.monotonic() - started

    @torch.inference_mode()
    def execute(self, step: Step) -> StepHandle:
        """Apply and launch one step; steps run in the order of these calls."""
        self.slots.apply(step)
        for admit in step.admits:
            self.sampler.admit(admit.slot)
        batch = self.slots.build(step, self.kv)
        if not len(batch.tokens):
            empty = torch.zeros(0, dtype=torch.int64)
            return StepHandle(step.step_id, Sampled(empty, empty.bool(), [], []))
        logits = self.model.forward(batch.tokens, batch.forward)
        sampled = self.sampler.draw(logits, batch.sampling_slots, batch.sampling_positions)
        self.slots.last_token[torch.from_numpy(batch.sampling_slots).to(self.device)] = sampled.tokens
        return StepHandle(step.step_id, sampled)

    def summary(self) -> str:
        """One line for the log."""
        tokens = self.num_pages * self.kv.page_size
        return (
            f"{self.model_config.architecture} in {str(self.dtype).removeprefix('torch.')} on {self.device}, "
            f"{self._backend_name} attention, KV pool of {tokens} tokens, loaded in {self.load_seconds:.1f} s"
        )

    def _fit_pages(self, config: EngineConfig, group: ParallelGroup) -> int:
        """Pages that fit the memory left; on the CPU no more than all requests at full length could use.

        Memory of the CPU's pool is committed by the kernel as pages are first written, so a large pool costs nothing
        until it is needed.
        """
        num_kv_heads, _ = share_kv_heads(self.model_config.num_kv_heads, group)
        page_bytes = KVCache.bytes_per_page(
            self.model_config.num_layers, config.page_size, num_kv_heads, self.model_config.head_dim, self.dtype
        )
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            budget = int(free - (1 - config.memory_ratio) * total)
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            budget = int(free * CPU_POOL_SHARE * config.memory_ratio / group.size)
        most = config.max_running_req * -(-self.max_seq_len // config.page_size)
        pages = min(budget // page_bytes - 1, most)  # one more is the dummy page
        if pages < 1:
            raise ModelLoadError(
                f"no room for a KV pool: {budget} bytes are left of {free} free ones, a page of {config.page_size} "
                f"tokens takes {page_bytes}; raise memory_ratio, or use a smaller model or dtype"
            )
        return pages


def choose_device(name: str, rank: int) -> torch.device:
    """The device of a rank. Raises ModelLoadError where "cuda" is asked for and there is none for this rank."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank >= count:
        raise ModelLoadError(f"rank {rank} needs its own CUDA device, {count} are visible; use device=cpu or fewer ranks")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _fill_weights(model: object, folder: ModelFolder, config: EngineConfig) -> None:
    with torch.inference_mode():
        if config.use_dummy_weight:
            fill_dummy_weights(model.weights())
        else:
            load_weights(model.weights(), folder)
