"""One question to the small model: `make demo`, or `python examples/quickstart.py [MODEL]`."""

import sys

from minisgl.core import SamplingParams
from minisgl.llm import LLM

QUESTION = "What is the capital of France?"


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
        answer = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=64))
    print(f"Q: {QUESTION}\nA: {answer['text']}")


if __name__ == "__main__":
    main()
