"""Loads a model's tokenizer, and encodes prompts and conversations with it. No code from the model folder is run."""

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl.detokenizer import TextDecoder
from minisgl.errors import InvalidRequest, ModelLoadError
from minisgl.gguf_tokenizer import load_gguf_tokenizer
from minisgl.json_file import JsonFile
from minisgl.model_folder import ModelFolder

TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
Message = Mapping[str, Any]
# Parameters of `apply_chat_template` that are not variables of the template. A template above all: it is a program, and
# comes from the model's folder alone.
RESERVED_OPTIONS = frozenset({
    "conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip

# transformers imports its parts when they are asked for, and two threads that ask first at once may find them missing.
_LOADING = threading.Lock()

logger = logging.getLogger(__name__)


class PromptEncoder:
    """A tokenizer of transformers, as the frontend uses it. Thread-safe.

    Raises:
        ModelLoadError: the tokenizer knows an id that the model has no embedding for.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self.tokenizer = tokenizer
        self.decoder = TextDecoder(tokenizer)
        self._bos = tokenizer.bos_token
        largest = max(tokenizer.get_vocab().values(), default=-1)
        if largest >= vocab_size:
            raise ModelLoadError(
                f"the tokenizer does not fit the model: its largest token id is {largest}, the model's vocabulary has "
                f"{vocab_size} ids; tokenizer: {tokenizer.name_or_path or 'unnamed'}"
            )

    @property
    def end_id(self) -> int | None:
        """The end-of-sequence id that the tokenizer itself names."""
        end_id: int | None = self.tokenizer.eos_token_id
        return end_id

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with the special tokens that the tokenizer adds, unless the text begins with BOS itself."""
        marked = [text.startswith(self._bos) if self._bos else False for text in texts]
        encoded: list[list[int]] = [[] for _ in texts]
        for has_bos in (False, True):
            places = [i for i, is_marked in enumerate(marked) if is_marked == has_bos]
            if places:
                ids = self._encode([texts[i] for i in places], add_special_tokens=not has_bos)
                for i, found in zip(places, ids, strict=True):
                    encoded[i] = found
        return encoded

    def encode_chat(self, messages: Sequence[Message], template_options: Mapping[str, Any] | None = None) -> list[int]:
        """Ids of a conversation, as the folder's template writes it, up to where the assistant speaks.

        Raises:
            InvalidRequest: there is no template, it refuses these messages, or an option is not a variable for it.
        """
        messages = check_messages(messages)
        if reserved := RESERVED_OPTIONS.intersection(template_options or ()):
            raise InvalidRequest(f"{sorted(reserved)[0]} is no variable of a chat template")
        if not self.tokenizer.chat_template:
            raise InvalidRequest("the model's tokenizer has no chat template; use generate with a text of your own")
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **(template_options or {})
            )
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise InvalidRequest(f"the chat template refuses the messages: {type(error).__name__}: {error}") from None
        check_text("the conversation", text)
        return self._encode([text], add_special_tokens=False)[0]

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(
            texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )["input_ids"]
        return ids


def check_text(name: str, text: str) -> None:
    """Raises InvalidRequest for half of a surrogate pair, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not valid text: {error}") from None


def check_messages(messages: object) -> list[Message]:
    """The messages, each content as one text. Raises InvalidRequest unless they have a role."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequest(f"messages must be a non-empty list of messages, got {messages!r:.100}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"message {i} must be a dict with a role and a content, got {message!r:.100}")
    return [
        {**message, "content": join_parts(f"message {i}", message["content"])} if "content" in message else message
        for i, message in enumerate(messages)
    ]


def join_parts(place: str, content: object) -> object:
    """Content as one text where it is a list of text parts, as it is otherwise. Raises InvalidRequest."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{place} may hold only parts {{type: text, text}}, got {part!r:.60}")
    return "".join(part["text"] for part in content)


def load_tokenizer(model: ModelFolder) -> Any | None:
    """The tokenizer of a model folder or GGUF file; None when the folder has no tokenizer files.

    Warns when neither it nor the model names an end id: answers would then run to their length.

    A `tokenizer.json` is used as it is, with no class of its own: that is exact, runs nothing from the folder, and
    spares the import of torch.

    Raises:
        ModelLoadError: a tokenizer file is broken; names the file.
    """
    with _LOADING:
        tokenizer = load_gguf_tokenizer(model.path) if model.is_gguf else _load_from_folder(model.path)
    if tokenizer is not None and tokenizer.eos_token_id is None and not model.stop_ids:
        logger.warning("%s: neither the model nor its tokenizer names an end-of-sequence id", model.path)
    return tokenizer


def _load_from_folder(folder: Path) -> Any | None:
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast  # deferred: takes a second

        return _add_template(_prepare(_load(PreTrainedTokenizerFast, folder)), folder)
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        from transformers import AutoTokenizer  # deferred: imports torch

        return _add_template(_prepare(_load(AutoTokenizer, folder)), folder)
    return None


def _load(loader: Any, folder: Path) -> Any:
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a broken file
        raise ModelLoadError(f"cannot load the tokenizer of {folder}: {type(error).__name__}: {error}") from None


def _add_template(tokenizer: Any, folder: Path) -> Any:
    """Add the template of chat_template.json, where models of text and images have theirs, if there is no other."""
    file = folder / "chat_template.json"
    if not tokenizer.chat_template and file.is_file():
        values = JsonFile(file)
        template = values.values.get("chat_template")
        if not isinstance(template, str):
            raise values.fail("chat_template", template, "a template")
        tokenizer.chat_template = template
    return tokenizer


def _prepare(tokenizer: Any) -> Any:
    """Make `decode` exact and `encode` stateless: no removal of blanks, no truncation or padding from the file."""
    tokenizer.clean_up_tokenization_spaces = False
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelLoadError(f"{type(tokenizer).__name__} is not a fast tokenizer; add a tokenizer.json")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
