"""A model's logits along given tokens, through the runner's own steps, whatever it would have drawn itself."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl_worker.model_runner import ModelRunner
from tests.worker.checkpoints import make_admit, make_step


class ForcedLogits:
    """Keeps the logits of every row that a runner samples, in eager steps and in replays."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self._rows: list[Tensor] = []  # [num_sampling_rows, vocab] of each step
        self.num_replays = 0
        draw = runner._sampler.draw

        def keep_draw(logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> object:
            self._rows.append(logits.float())
            return draw(logits, slots, positions)

        runner._sampler.draw = keep_draw
        if runner._graphs is None:
            return
        run = runner._graphs.run

        def keep_run(page_grants: NDArray[np.int32]) -> object:
            graph = run(page_grants)
            self._rows.append(graph.logits[: len(runner._slots.decode_slots)].float())
            self.num_replays += 1
            return graph

        runner._graphs.run = keep_run

    def run(self, prompts: list[list[int]], answers: list[list[int]], chunk: int) -> Tensor:
        """Prompts are computed in chunks, one after the other, then all answers together, a token of each per step.

        Args:
            answers: of equal length.
        Returns:
            [num_requests, answer length, vocab] f32 cpu: the logits that each answer token would be drawn from.
        """
        runner, rows = self._runner, self._rows
        page_size, step_id, pages = runner.kv.page_size, 0, 0
        first = []
        for slot, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            count = -(-(len(prompt) + len(answer)) // page_size)
            admits = (make_admit(slot, prompt, list(range(pages, pages + count))),)
            pages += count
            for start in range(0, len(prompt), chunk):
                length = min(chunk, len(prompt) - start)
                prefill = (slot, start, length, int(start + length == len(prompt)))
                runner.execute(make_step(step_id, admits=admits, prefills=prefill))
                admits, step_id = (), step_id + 1
            first.append(rows[-1][0])
        rows.clear()
        slots = list(range(len(prompts)))
        for i in range(len(answers[0]) - 1):
            tokens = torch.tensor([answer[i] for answer in answers], device=runner.device)
            with torch.inference_mode():
                runner._slots.last_token[: len(slots)] = tokens
            runner.execute(make_step(step_id, decode=slots if i == 0 else None, run_decode=True))
            step_id += 1
        logits = torch.stack([torch.stack(first), *rows], dim=1).cpu()
        rows.clear()
        return logits
