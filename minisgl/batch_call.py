"""One call of `LLM.generate`: many prompts, fed within the engine's window, answered in their order."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.client import EngineClient
from minisgl.completion import Completion, Delta, complete
from minisgl.core import SamplingParams
from minisgl.detokenizer import TextDecoder
from minisgl.errors import Overloaded
from minisgl.mailbox import Output, ThreadMailbox
from minisgl.protocol import NewRequest
from minisgl.request_builder import RequestBuilder

SUBMIT_BATCH = 64  # prompts handed over at once: the engine's first steps are full, and do not wait for the last prompt

# Called with the number of prompts and of tokens that were finished since the last call.
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _Sample:
    """A sample that is on its way."""

    prompt_index: int
    index: int  # among the prompt's samples
    num_prompt_tokens: int
    completion: Completion | None  # None: it has one output, at its end
    is_aborted: bool = False
    whole: Delta = field(default_factory=Delta)  # what the deltas so far add up to


class BatchCall:
    """Runs once. Holds no more than the window's worth of requests at a time, beside the packed prompts and results.

    Args:
        prompts: packed ids, one for each prompt.
        params: one for each prompt.
    """

    def __init__(
        self,
        client: EngineClient,
        builder: RequestBuilder,
        decoder: TextDecoder | None,
        prompts: Sequence[bytes],
        params: Sequence[SamplingParams],
    ):
        self._client, self._builder, self._decoder = client, builder, decoder
        self._prompts, self._params = prompts, params
        self._mailbox = ThreadMailbox()
        self._samples: dict[int, _Sample] = {}  # by request id
        self._results: list[list[dict[str, Any]]] = [[{}] * p.n for p in params]
        self._num_left = [p.n for p in params]
        self._unsent = deque(range(len(prompts)))
        self._is_overloaded = False  # then one of ours must end before another is sent

    def run(self, report: Progress) -> list[dict[str, Any]]:
        """The results in the prompts' order.

        Raises:
            MinisglError: the first error of a prompt, or what ended the connection; the other prompts are aborted.
        """
        try:
            while self._unsent or self._samples:
                self._fill_window()
                for output in self._mailbox.take():
                    self._handle(output, report)
        except BaseException:  # KeyboardInterrupt too: the engine must not go on with what nobody wants
            self._client.abort(self._samples, discard=True)
            raise
        return [make_result(samples) for samples in self._results]

    def _fill_window(self) -> None:
        if self._is_overloaded and not self._samples:
            raise Overloaded(
                f"the engine's queue is full, {len(self._unsent)} of {len(self._prompts)} prompts not sent"
            )
        batch: list[NewRequest] = []
        while self._unsent and not self._is_overloaded and len(self._samples) < self._client.welcome.window:
            batch.append(self._prepare(self._unsent.popleft()))
            if len(batch) == SUBMIT_BATCH:
                self._client.submit(batch, self._mailbox)
                batch = []
        if batch:
            self._client.submit(batch, self._mailbox)

    def _prepare(self, prompt_index: int) -> NewRequest:
        params, prompt_ids = self._params[prompt_index], self._prompts[prompt_index]
        first_id = self._client.make_request_ids(params.n)
        request = self._builder.build(first_id, prompt_ids, params, stream=False)
        for i in range(params.n):
            completion = Completion(params, self._decoder) if request.stream else None
            self._samples[first_id + i] = _Sample(prompt_index, i, len(prompt_ids) // 4, completion)
        return request

    def _handle(self, output: Output, report: Progress) -> None:
        sample = self._samples[output.request_id]
        params = self._params[sample.prompt_index]
        if isinstance(output.error, Overloaded):
            self._take_back(output.request_id, sample)
            return
        if output.error is not None:
            raise type(output.error)(f"prompt {sample.prompt_index}: {output.error}")
        if sample.completion is None:
            sample.whole = complete(output, params, self._decoder)
        else:
            sample.whole.extend(sample.completion.add(output))
            if sample.completion.must_abort and not sample.is_aborted:
                sample.is_aborted = True
                self._client.abort([output.request_id])
        if output.finish_reason is not None:
            self._finish(output.request_id, sample, report)

    def _take_back(self, request_id: int, sample: _Sample) -> None:
        """Send a prompt again later: others, perhaps of other programs, hold the engine's queue now."""
        del self._samples[request_id]
        self._is_overloaded = True
        if sample.index == 0:
            self._unsent.appendleft(sample.prompt_index)

    def _finish(self, request_id: int, sample: _Sample, report: Progress) -> None:
        del self._samples[request_id]
        self._is_overloaded = False
        params = self._params[sample.prompt_index]
        described = describe_sample(sample.whole, params, sample.num_prompt_tokens)
        self._results[sample.prompt_index][sample.index] = described
        self._num_left[sample.prompt_index] -= 1
        report(int(self._num_left[sample.prompt_index] == 0), len(sample.whole.token_ids))


def describe_sample(delta: Delta, params: SamplingParams, num_prompt_tokens: int) -> dict[str, Any]:
    """A finished sample as `generate` returns it."""
    described: dict[str, Any] = {
        "text": delta.text,
        "token_ids": delta.token_ids,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": delta.cached_tokens,
    }
    if params.logprobs is not None:
        described["logprobs"] = delta.logprobs
    return described


def make_result(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A prompt's result: its one sample, or its first with all of them as `outputs`."""
    return samples[0] if len(samples) == 1 else {**samples[0], "outputs": samples}
