"""`LLM`: an engine as a Python object."""

import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from minisgl.batch_call import BatchCall, Progress
from minisgl.client import EngineClient
from minisgl.config import EngineConfig, engine_arguments
from minisgl.core import SamplingParams
from minisgl.detokenizer import TextDecoder
from minisgl.errors import InvalidRequest, ModelLoadError
from minisgl.model_folder import ModelFolder, resolve_model
from minisgl.request_builder import RequestBuilder, check_single, list_params, list_prompts
from minisgl.requirements import check_options
from minisgl.streams import AsyncTextStream, RequestStream, TextStream
from minisgl.supervisor import ChildProcess, PrivateFolder, spawn
from minisgl.tokenizer import Message, PromptEncoder, check_text, load_tokenizer

STOP_GRACE_S = 5.0
START_MARGIN_S = 5.0  # the engine has the same deadline and knows better who is late
StreamType = TypeVar("StreamType", bound=RequestStream)


class LLM:
    """Generates text with one model. Safe to call from several threads; not to be used in a forked child.

    Starts an engine in processes of its own, or attaches to a running one. Everything that it starts ends with `close`,
    with the object, or with this program, however that ends.

    Args:
        model_path: a folder, a `.gguf` file, `smollm2`, or a Hub id; with `engine=` it may be left out.
        dtype: a torch dtype or its name; "auto" is the checkpoint's own.
        engine: address of a running engine. It has its options already, so none can be given beside it.
        options: those of `EngineConfig`, see docs/config.md.

    Raises:
        TypeError: an unknown option, or an engine option beside `engine=`.
        ValueError: an option's value.
        ModelLoadError: the model; before any process starts.
        EngineStartError: a process did not become ready.
        EngineUnreachable, ProtocolMismatch: there is no engine at the address, or one of another version.
    """

    def __init__(
        self, model_path: str | Path | None = None, dtype: object = "auto", *, engine: str | None = None, **options: Any
    ):
        config = EngineConfig.from_options("unnamed" if model_path is None else model_path, {"dtype": dtype, **options})
        if engine is not None:
            beside = [*(["dtype"] if dtype != "auto" else []), *options]
            if beside:
                raise TypeError(
                    f"{', '.join(beside)} cannot be given beside engine=: the engine runs with its own options"
                )
        elif model_path is None:
            raise TypeError("LLM needs a model_path, or engine=ADDRESS of a running engine")
        self._streams: weakref.WeakValueDictionary[int, RequestStream] = weakref.WeakValueDictionary()
        if engine is not None:
            self._attach(engine, model_path)
        else:
            self._start(config)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, a fast tokenizer of transformers. Raises ModelLoadError where the model has none."""
        if self._encoder is None:
            raise ModelLoadError(f"{self._model_path} has no tokenizer")
        return self._encoder.tokenizer

    @property
    def decoder(self) -> TextDecoder:
        """What makes text and bytes of token ids. Raises ModelLoadError as `tokenizer`."""
        if self._decoder is None:
            raise ModelLoadError(f"{self._model_path} has no tokenizer")
        return self._decoder

    def generate(
        self,
        prompts: str | Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[dict[str, Any]]:
        """Complete prompts and wait for all of them.

        All prompts are checked before the first is sent. An interrupt or an error aborts what still runs; the engine
        goes on serving.

        Args:
            prompts: a str, a list of str, a list of token ids, or a list of such lists.
            sampling_params: one for all, or one for each prompt.
            use_tqdm: show a progress bar with tokens per second.

        Returns:
            One dict for each prompt, in their order: `text`, `token_ids` (without the end id), `finish_reason` ("stop",
            "length" or "abort"), `stop_reason` (the stop string or stop id, else None), `prompt_tokens`,
            `cached_tokens`, and `logprobs` when asked for. With n > 1, `outputs` holds such a dict for each sample and
            the outer one repeats the first.

        Raises:
            InvalidRequest: names the prompt's index, the value and the limit.
            Overloaded: other programs fill the engine's queue.
            EngineDead: the engine ended; so will every later call.
        """
        self._client.check_alive()
        listed = list_prompts(prompts)
        params = [self._builder.check_params(i, p) for i, p in enumerate(list_params(sampling_params, len(listed)))]
        call = BatchCall(self._client, self._builder, self._decoder, self._builder.pack_prompts(listed), params)
        with _progress(len(listed) if use_tqdm else 0) as report:
            return call.run(report)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer a conversation, or a list of them.

        Args:
            messages: dicts with `role` and `content`.
            template_options: variables for the model's chat template, such as enable_thinking.

        Returns:
            What `generate` returns for each: a dict for one conversation, a list for a list. Raises as `generate`.
        """
        self._client.check_alive()
        is_single = not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_single else messages
        encoder = self._get_encoder()
        results = self.generate(
            [encoder.encode_chat(conversation, template_options) for conversation in conversations],
            sampling_params,
            use_tqdm=use_tqdm,
        )
        return results[0] if is_single else results

    def stream(self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None) -> TextStream:
        """Complete one prompt piece by piece. The request is checked and sent by this call.

        Returns:
            An iterator of dicts `text`, `token_ids`, `finish_reason` (None until the last) and `index` (of the sample,
            with n > 1); see `RequestStream`. Leaving it early aborts the request. Its `request_id` is for `abort`.
        """
        prompt_ids, params = self._check_one(prompt, sampling_params)
        return self._remember(TextStream(self._client, self._builder, self._decoder, prompt_ids, params))

    def agenerate(self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None) -> AsyncTextStream:
        """As `stream`, for `async for`; called where an event loop runs."""
        prompt_ids, params = self._check_one(prompt, sampling_params)
        return self._remember(AsyncTextStream(self._client, self._builder, self._decoder, prompt_ids, params))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as `generate` makes them. Slow for long texts; any thread may call it."""
        encoder = self._get_encoder()
        for i, text in enumerate(texts):
            check_text(f"prompt {i}", text)
        return encoder.encode(texts)

    def encode_chat(self, messages: Sequence[Message], template_options: Mapping[str, Any] | None = None) -> list[int]:
        """The ids of a conversation, as `chat` makes them. Slow; any thread may call it."""
        return self._get_encoder().encode_chat(messages, template_options)

    def check_alive(self) -> None:
        """Raise EngineDead if the engine is gone."""
        self._client.check_alive()

    @property
    def model_path(self) -> Path:
        """The model's folder, or its .gguf file."""
        return self._model_path

    @property
    def context_tokens(self) -> int:
        """Prompt and output of one request together, at most."""
        return self._client.welcome.context_limit_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV memory holds, of all requests together."""
        return self._client.welcome.num_pages * self._client.welcome.page_size

    @property
    def window(self) -> int:
        """Samples that may be outstanding in the engine; more wait here."""
        return self._client.welcome.window

    def abort(self, request_id: int) -> None:
        """End a stream early: its last delta says "abort". Ids that are unknown or finished are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.abort()

    def stats(self) -> dict[str, int | float]:
        """The engine's counters: requests now, pages now, and sums since its start. Raises DeadlineExceeded."""
        stats = self._client.get_stats()
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "draining": stats.num_draining,
            "pages_free": stats.num_pages_free,
            "pages_cached": stats.num_pages_cached,
            "pages_used": stats.num_pages_used,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "prompt_tokens": stats.prompt_tokens,
            "output_tokens": stats.output_tokens,
            "preemptions": stats.num_preemptions,
            "steps": stats.num_steps,
            "tokens_per_s": stats.tokens_per_s,
        }

    def close(self) -> None:
        """End the connection, and the engine if it was started here; returns when its process is gone. Idempotent."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, config: EngineConfig) -> None:
        """Start an engine, and load the tokenizer while it starts."""
        model = resolve_model(config.model, need_weights=not config.use_dummy_weight)
        check_options(config, model.config)
        config = replace(config, model=str(model.path))  # so that a Hub id is looked up once
        folder = PrivateFolder()
        try:
            address = f"ipc://{folder.path}/engine.sock"
            child = spawn("minisgl.engine", [*engine_arguments(config), "--address", address])
        except BaseException:
            folder.remove()
            raise
        try:
            encoder = _load_encoder(model, model.config.vocab_size)
            child.wait_ready(config.start_timeout_s + START_MARGIN_S)
            client = EngineClient(address, child=child)
        except BaseException:
            child.stop(STOP_GRACE_S)
            folder.remove()
            raise
        self._use(client, (child, folder), model, encoder)

    def _attach(self, address: str, model_path: str | Path | None) -> None:
        client = EngineClient(address)
        try:
            vocab_size = client.welcome.vocab_size
            model = resolve_model(str(client.welcome.model if model_path is None else model_path), need_weights=False)
            if model.config.vocab_size != vocab_size:
                raise ModelLoadError(
                    f"{model.path} has a vocabulary of {model.config.vocab_size} ids, but the engine at {address} "
                    f"serves {client.welcome.model} with {vocab_size}"
                )
            encoder = _load_encoder(model, vocab_size)
        except BaseException:
            client.close()
            raise
        self._use(client, None, model, encoder)

    def _use(
        self,
        client: EngineClient,
        own: tuple[ChildProcess, PrivateFolder] | None,
        model: ModelFolder,
        encoder: PromptEncoder | None,
    ) -> None:
        self._client, self._encoder, self._model_path = client, encoder, model.path
        self._decoder = None if encoder is None else encoder.decoder
        end_ids = set(model.stop_ids)
        # The tokenizer of a GGUF file is made from the same metadata as the stop ids.
        if encoder is not None and encoder.end_id is not None and not model.is_gguf:
            end_ids.add(encoder.end_id)
        self._builder = RequestBuilder(client.welcome, end_ids, encoder)
        # Also runs at the interpreter's exit. It must not refer to self, or self would never be collected.
        self._finalizer = weakref.finalize(self, _shut_down, client, own, os.getpid())

    def _get_encoder(self) -> PromptEncoder:
        if self._encoder is None:
            raise InvalidRequest(f"{self._model_path} has no tokenizer; give token ids instead of text")
        return self._encoder

    def _check_one(self, prompt: object, sampling_params: SamplingParams | None) -> tuple[bytes, SamplingParams]:
        self._client.check_alive()
        check_single(prompt)
        params = self._builder.check_params(0, SamplingParams() if sampling_params is None else sampling_params)
        return self._builder.pack_prompts([prompt])[0], params

    def _remember(self, stream: StreamType) -> StreamType:
        self._streams[stream.request_id] = stream
        return stream


def _load_encoder(model: ModelFolder, vocab_size: int) -> PromptEncoder | None:
    tokenizer = load_tokenizer(model)
    return None if tokenizer is None else PromptEncoder(tokenizer, vocab_size)


def _shut_down(client: EngineClient, own: tuple[ChildProcess, PrivateFolder] | None, process_id: int) -> None:
    if os.getpid() != process_id:
        return  # a forked child: nothing of this is its own
    client.close()
    if own is not None:
        child, folder = own
        child.stop(STOP_GRACE_S)
        folder.remove()


@contextmanager
def _progress(num_prompts: int) -> Iterator[Progress]:
    """A progress bar over prompts that also shows tokens per second; silent for 0 prompts."""
    if not num_prompts:
        yield lambda num_finished, num_tokens: None
        return
    from tqdm.auto import tqdm  # deferred: only the bar needs it

    num_total = 0
    started = time.monotonic()
    with tqdm(total=num_prompts, unit="prompt", dynamic_ncols=True) as bar:

        def report(num_finished: int, num_tokens: int) -> None:
            nonlocal num_total
            num_total += num_tokens
            speed = num_total / max(time.monotonic() - started, 1e-9)
            bar.set_postfix_str(f"{speed:.0f} tok/s", refresh=False)
            bar.update(num_finished)

        yield report
