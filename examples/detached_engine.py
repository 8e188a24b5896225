"""One engine, several programs: start `python -m minisgl.engine`, attach two frontends to it, and end it.

The engine here is a child only to make the example whole; it can as well be started by hand or by a service manager.
"""

import subprocess
import sys
import tempfile
import time

from minisgl.core import SamplingParams
from minisgl.errors import EngineUnreachable
from minisgl.llm import LLM

START_LIMIT_S = 120


def attach(address: str, engine: subprocess.Popen[bytes]) -> LLM:
    """A frontend of the engine at `address`, which may still be starting."""
    end = time.monotonic() + START_LIMIT_S
    while True:
        try:
            return LLM(engine=address)
        except EngineUnreachable:
            if engine.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.2)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with tempfile.TemporaryDirectory() as folder:  # mode 0700: nobody else can reach the socket
        address = f"ipc://{folder}/engine.sock"
        engine = subprocess.Popen([sys.executable, "-m", "minisgl.engine", "--model", model, "--address", address])
        try:
            with attach(address, engine) as one, attach(address, engine) as two:
                params = SamplingParams(max_tokens=16)
                for name, llm in (("one", one), ("two", two)):
                    print(f"{name}: {llm.generate('The sea is', params)[0]['text']!r}")
                print(f"cached by the first, used by the second: {two.stats()}")
        finally:
            engine.terminate()  # it finishes what runs, then exits 0
            print(f"engine ended with {engine.wait(30)}")


if __name__ == "__main__":
    main()
