"""A call of many prompts feeds the engine within its window."""

import queue
import threading
from types import SimpleNamespace

import pytest
from tokenizers_made_here import make_byte_tokenizer

from minisgl.batch_call import BatchCall
from minisgl.core import FinishReason, SamplingParams
from minisgl.detokenizer import TextDecoder
from minisgl.mailbox import Output
from minisgl.protocol import Welcome
from minisgl.request_builder import RequestBuilder

WINDOW = 10


class FakeClient:
    """Answers one sample at a time, on a thread of its own, and counts what is outstanding."""

    def __init__(self):
        self.welcome = SimpleNamespace(window=WINDOW)
        self.most_outstanding = self._num_outstanding = self._next_id = 0
        self._sent = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._answer, daemon=True).start()

    def make_request_ids(self, num_samples):
        self._next_id += num_samples
        return self._next_id - num_samples

    def submit(self, requests, mailbox):
        for request in requests:
            for i in range(len(request.seeds) // 8):
                with self._lock:
                    self._num_outstanding += 1
                    self.most_outstanding = max(self.most_outstanding, self._num_outstanding)
                self._sent.put((request.request_id + i, mailbox))

    def abort(self, request_ids, *, discard=False):
        raise AssertionError("nothing is to be aborted")

    def close(self):
        self._sent.put(None)

    def _answer(self):
        while (sent := self._sent.get()) is not None:
            request_id, mailbox = sent
            with self._lock:
                self._num_outstanding -= 1
            mailbox.put([Output(request_id, [97 + request_id % 26], FinishReason.LENGTH)])


@pytest.mark.parametrize("num_samples", [1, 3])
def test_run_keeps_within_the_window_and_the_order(num_samples):
    client = FakeClient()
    builder = RequestBuilder(Welcome(1, "m", 320, 512, 16, 4, WINDOW, 0), (), None)
    prompts = [builder.pack_ids(i, [1]) for i in range(500)]
    params = [SamplingParams(n=num_samples)] * len(prompts)
    reported = []
    call = BatchCall(client, builder, TextDecoder(make_byte_tokenizer()), prompts, params)
    results = call.run(lambda num_prompts, num_tokens: reported.append((num_prompts, num_tokens)))
    client.close()
    assert [r["token_ids"] for r in results] == [[97 + i * num_samples % 26] for i in range(500)]
    assert 1 < client.most_outstanding < WINDOW + num_samples
    assert [sum(column) for column in zip(*reported, strict=True)] == [500, 500 * num_samples]
