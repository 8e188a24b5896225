"""Runs Steps: from wire messages to sampled tokens on one device."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.config import EngineConfig
from minisgl.model_folder import ModelFolder, resolve_model
from minisgl.protocol import Result, Step
from minisgl.sharding import divide_model
from minisgl_worker.attention import make_backend
from minisgl_worker.attention.base import AttentionSetup
from minisgl_worker.batch import SlotState
from minisgl_worker.cuda_graph import DecodeGraphs, choose_buckets
from minisgl_worker.kv_cache import KVCache
from minisgl_worker.layers import Place
from minisgl_worker.memory import agree_on_pages, fit_pages, measure_step_bytes
from minisgl_worker.models import MODELS
from minisgl_worker.models.decoder import CausalLM
from minisgl_worker.parallel import ParallelGroup, choose_device, share_vocabulary
from minisgl_worker.rotary import build_rotary_tables
from minisgl_worker.sampler import Logprobs, Sampler, extras_bytes
from minisgl_worker.weights import LoadReport, fill_dummy_weights, load_weights


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step that was launched. On a GPU its outcome may still be on the way to these host tensors."""

    step_id: int
    tokens: Tensor  # [num_sampling_rows] i32 host; the sign bit is the wire's FAILED_ROW_BIT
    logprob_ids: Tensor  # [num_items] i32 host
    logprob_values: Tensor  # [num_items] f32 host
    is_done: torch.cuda.Event | None

    def result(self) -> Result:
        """Waits for the outcome."""
        if self.is_done is not None:
            self.is_done.synchronize()
        ids, values = self.logprob_ids.numpy().tobytes(), self.logprob_values.numpy().tobytes()
        return Result(self.step_id, self.tokens.numpy().tobytes(), ids, values)


class ModelRunner:
    """One rank's model, KV pool and slots.

    Args:
        group: not joined so far; None for one rank.
        rendezvous: where the group's ranks meet, see `ParallelGroup.join`.

    Raises:
        ModelLoadError: the model cannot be loaded or shared among the ranks, or its KV pool has no room on the device.
        PeerLost: another rank ended meanwhile.
    """

    def __init__(self, config: EngineConfig, group: ParallelGroup | None = None, rendezvous: str = ""):
        started = time.monotonic()
        folder = resolve_model(config.model, need_weights=not config.use_dummy_weight)
        self.model_config = model = folder.config
        group = group or ParallelGroup()
        self.device = choose_device(config.device, group)
        self.dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
        self._where = f"{group.size} x {self.device.type}" if group.size > 1 else str(self.device)
        self.max_seq_len = min(config.max_seq_len or 2**31, model.max_position_embeddings)
        sizes = divide_model(model, group.size)
        setup = AttentionSetup(
            sizes.num_heads, sizes.num_kv_heads, model.head_dim, model.layer_windows, self.dtype, config.page_size,
            config.max_running_req, self.max_seq_len, self.device, model.query_pre_attn_scalar,
        )  # fmt: skip
        self._backend_name, self._backend = make_backend(config.attention_pair(), setup)
        tables = build_rotary_tables(model, self.max_seq_len, self.dtype, self.device)
        place = Place(group, self.dtype, self.device, config.moe_backend)
        self._model = MODELS[model.architecture](model, tables, self._backend, place)
        group.join(rendezvous, self.device)  # after what may be refused, before memory is measured
        with torch.inference_mode():
            self.load_report = _fill_weights(self._model, folder, config, show_progress=group.rank == 0)
            buckets = []
            if self.device.type == "cuda":
                buckets = choose_buckets(config.max_running_req, config.cuda_graph_bs, config.cuda_graph_max_bs)
            self.num_pages = config.num_pages or self._fit_pages(config, sizes.num_kv_heads, group, sum(buckets))
            self.kv = self._make_kv(self.num_pages, config.page_size, sizes.num_kv_heads)
            max_pages = -(-self.max_seq_len // config.page_size)
            self._slots = SlotState(config.max_running_req, max_pages, self.device)
            self._sampler = Sampler(self._slots, model.vocab_size, self.device, group)
            self._graphs = None
            if buckets:
                self._graphs = DecodeGraphs(
                    buckets, self._slots, self.kv, self._backend, self._model.forward, self._sampler.vocabulary.draw
                )
                self._graphs.capture()
        self._load_seconds = time.monotonic() - started

    @torch.inference_mode()
    def execute(self, step: Step) -> StepHandle:
        """Apply and launch one step; steps run in the order of these calls. Does not wait for the device."""
        self._slots.apply(step)
        for admit in step.admits:
            self._sampler.admit(admit.slot)
        grants = np.frombuffer(step.page_grants, "<i4").reshape(-1, 3)
        num_rows = len(self._slots.decode_slots) if step.run_decode else 0
        is_steady = num_rows > 0 and not step.admits and not step.prefills
        if self._graphs is not None and is_steady and max(num_rows, len(grants)) <= self._graphs.max_rows:
            return self._replay(step, grants)
        return self._run_eager(step, grants)

    def summary(self) -> str:
        """One line for the log."""
        tokens = self.num_pages * self.kv.page_size
        weights = "random weights" if self.load_report is None else self.load_report.describe()
        return (
            f"{self.model_config.architecture} in {str(self.dtype).removeprefix('torch.')} on {self._where}, "
            f"{self._backend_name} attention, KV pool of {tokens} tokens, {weights}, "
            f"ready after {self._load_seconds:.1f} s"
        )

    def _replay(self, step: Step, grants: NDArray[np.int32]) -> StepHandle:
        """A step of decode rows alone, as one graph replay."""
        assert self._graphs is not None
        slots = self._slots.decode_slots
        graph = self._graphs.run(grants)
        self._slots.seq_lens[slots] += 1
        out = graph.out[: len(slots)]
        logprobs = None
        if self._sampler.has_extras(slots):
            tokens, failed = graph.tokens[: len(slots)], out < 0
            logprobs = self._sampler.apply_extras(graph.logits, tokens, failed, slots, self._slots.seq_lens[slots])
            self._slots.last_token[graph.inputs.slots[: len(slots)].to(torch.int64)] = tokens
            out = _mark_failed(tokens, failed)
        return self._make_handle(step.step_id, out, logprobs)

    def _run_eager(self, step: Step, grants: NDArray[np.int32]) -> StepHandle:
        """Any step, as one packed forward pass."""
        batch = self._slots.build(step, self.kv)
        changed = [admit.slot for admit in step.admits] + grants[:, 0].tolist()
        handle = None
        if len(batch.tokens):
            self._backend.plan(batch.forward)
            logits = self._model.forward(batch.tokens, batch.forward)
            slots, positions = batch.sampling_slots, batch.sampling_positions
            draw = self._sampler.draw(logits, slots, positions)
            logprobs = None
            if self._sampler.has_extras(slots):
                logprobs = self._sampler.apply_extras(logits, draw.tokens, draw.failed, slots, positions)
            self._slots.store_tokens(slots, draw.tokens)
            handle = self._make_handle(step.step_id, _mark_failed(draw.tokens, draw.failed), logprobs)
        if self._graphs is not None:
            self._graphs.sync_slots(np.array(sorted(set(changed)), np.int64))
        return handle or self._make_handle(step.step_id, torch.zeros(0, dtype=torch.int32), None)

    def _make_handle(self, step_id: int, out: Tensor, logprobs: Logprobs | None) -> StepHandle:
        """Start the copies to the host."""
        ids, values = (out[:0], out[:0].float()) if logprobs is None else (logprobs.token_ids, logprobs.values)
        if self.device.type != "cuda":
            return StepHandle(step_id, out, ids, values, None)
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (out, ids, values)]
        for host, source in zip(hosts, (out, ids, values), strict=True):
            if len(host):
                host.copy_(source, non_blocking=True)
        is_done = torch.cuda.Event()
        is_done.record()
        return StepHandle(step_id, *hosts, is_done)

    def _make_kv(self, num_pages: int, page_size: int, num_kv_heads: int) -> KVCache:
        model = self.model_config
        return KVCache(model.num_layers, num_pages, page_size, num_kv_heads, model.head_dim, self.dtype, self.device)

    def _fit_pages(self, config: EngineConfig, num_kv_heads: int, group: ParallelGroup, num_graph_rows: int) -> int:
        """Pages for what memory is left beside the weights, the largest step and the graphs."""
        model = self.model_config
        page_bytes = KVCache.bytes_per_page(
            model.num_layers, config.page_size, num_kv_heads, model.head_dim, self.dtype
        )
        reserved_bytes = 0
        if self.device.type == "cuda":
            tiny = self._make_kv(1, config.page_size, num_kv_heads)
            reserved_bytes = measure_step_bytes(self._model.forward, self._backend, tiny, config, self.max_seq_len)
            num_columns, _ = share_vocabulary(model.vocab_size, group)
            reserved_bytes += num_graph_rows * num_columns * self.dtype.itemsize  # each graph keeps its logits
            reserved_bytes += extras_bytes(config.max_running_req, model.vocab_size)
        most = config.max_running_req * -(-self.max_seq_len // config.page_size)
        num_pages = fit_pages(page_bytes, reserved_bytes, most, config, self.device, group.size)
        return agree_on_pages(num_pages, group, self.device)


def _mark_failed(tokens: Tensor, failed: Tensor) -> Tensor:
    """[n] i32 with the sign bit set where a row failed."""
    return torch.where(failed, tokens - 2**31, tokens).to(torch.int32)


def _fill_weights(
    model: CausalLM, folder: ModelFolder, config: EngineConfig, *, show_progress: bool
) -> LoadReport | None:
    if config.use_dummy_weight:
        fill_dummy_weights(model.weights())
        return None
    return load_weights(model.weights(), folder, show_progress=show_progress)
