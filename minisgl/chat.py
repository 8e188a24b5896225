"""A conversation in the terminal: /reset forgets it, /exit ends it, Ctrl-C stops an answer."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from prompt_toolkit import PromptSession
from rich.console import Console

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.llm import LLM


def run_chat(llm: LLM, params: SamplingParams) -> int:
    """Talk until /exit or the end of input; returns the exit code. Without a terminal, each line is a question."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if sys.stdin.isatty():
        console.print("/reset forgets the conversation, /exit ends it, Ctrl-C stops an answer", style="dim")
        session: PromptSession[str] = PromptSession()  # remembers lines, for the arrow keys
        converse(llm, params, _read_terminal(session), lambda text: console.print(text, end=""))
    else:
        converse(llm, params, sys.stdin, _write_plain)
    return 0


def converse(llm: LLM, params: SamplingParams, lines: Iterable[str], show: Callable[[str], object]) -> None:
    """Answer each line, with the conversation so far.

    Args:
        show: gets each piece of text to print.
    """
    messages: list[dict[str, Any]] = []
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            messages.clear()
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, params, messages, show)})
            except InvalidRequest as error:  # such as a conversation that became too long
                messages.pop()
                show(f"{error}\n")


def _answer(llm: LLM, params: SamplingParams, messages: list[dict[str, Any]], show: Callable[[str], object]) -> str:
    """Show the answer as it comes and return it; an interrupt ends it there."""
    parts: list[str] = []
    stream = llm.stream(llm.encode_chat(messages), params)
    try:
        for delta in stream:
            parts.append(delta["text"])
            show(delta["text"])
    except KeyboardInterrupt:
        stream.close()
    show("\n")
    return "".join(parts)


def _read_terminal(session: "PromptSession[str]") -> Iterable[str]:
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _write_plain(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
