"""A conversation in the terminal, streamed: `python examples/chat.py [MODEL]`. An empty line ends it."""

import sys

from minisgl.core import SamplingParams
from minisgl.llm import LLM

PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256)


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
        messages: list[dict[str, str]] = []
        while text := read_line():
            messages.append({"role": "user", "content": text})
            # The template writes BOS where the model wants one; a prompt that begins with it gets no second one.
            prompt = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            answer = ""
            for delta in llm.stream(prompt, PARAMS):
                print(delta["text"], end="", flush=True)
                answer += delta["text"]
            print()
            # What was said so far is a prefix of the next prompt: the engine has it in its cache.
            messages.append({"role": "assistant", "content": answer})


def read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
