"""The command line. Nothing heavy is imported before a command runs."""

import argparse
import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from minisgl import __version__
from minisgl.config import add_engine_flags, read_engine_flags
from minisgl.core import SamplingParams
from minisgl.errors import EXIT_START, EXIT_USAGE, MinisglError

DEFAULT_PORT = 1919
SMALL_MODEL = "smollm2"
# Mini-SGLang's names of options, beside those of `EngineConfig` and its aliases.
MINI_SGLANG_FLAGS: Mapping[str, tuple[str, type]] = {
    "--tp": ("tp_size", int),
    "--max-running-requests": ("max_running_req", int),
    "--graph": ("cuda_graph_max_bs", int),
    "--max-prefill-length": ("max_extend_tokens", int),
    "--max-extend-length": ("max_extend_tokens", int),
    "--attn": ("attention_backend", str),
    "--cache": ("cache_type", str),
}
SHOWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
SHELL_FLAGS = ("--shell", "--shell-mode")


def main(arguments: Sequence[str] | None = None) -> int:
    """`minisgl COMMAND`; flags alone serve. Returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _make_parser()
    if given and given[0].startswith("-") and given[0] not in ("-h", "--help", "--version"):
        given = ["serve", *given]
    if given[:1] == ["serve"] and set(SHELL_FLAGS) & set(given):
        given = ["chat", *(flag for flag in given[1:] if flag not in SHELL_FLAGS)]
    parsed = parser.parse_args(given)
    try:
        code: int = parsed.run(parsed)
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        print(f"minisgl: {error}; install the extras: pip install 'minisgl[serve,chat]'", file=sys.stderr)
        return EXIT_USAGE
    except (TypeError, ValueError, MinisglError) as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, (TypeError, ValueError)) else EXIT_START
    return code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minisgl", description="A compact LLM inference engine.", epilog="Flags without a command serve."
    )
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="an OpenAI-compatible HTTP server", allow_abbrev=False)
    _add_model_flags(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    serve.add_argument("--port", type=_read_port, metavar="PORT", default=DEFAULT_PORT)
    serve.add_argument("--served-model-name", metavar="NAME", help="the model's name for clients")
    serve.add_argument("--api-key", metavar="KEY", help="asked of clients; default: $MINISGL_API_KEY, else none")
    serve.add_argument(*SHELL_FLAGS, action="store_true", help="chat in this terminal instead of serving")
    serve.set_defaults(run=_serve)
    chat = commands.add_parser("chat", help="talk to a model in the terminal", allow_abbrev=False)
    _add_model_flags(chat)
    _add_sampling_flags(chat, max_tokens=1024)
    chat.set_defaults(run=_chat)
    generate = commands.add_parser("generate", help="complete one prompt and print the text", allow_abbrev=False)
    generate.add_argument("prompt", help="text; - reads it from standard input")
    _add_model_flags(generate, positional=False)
    _add_sampling_flags(generate, max_tokens=128)
    generate.set_defaults(run=_generate)
    bench = commands.add_parser("bench", help="measure this machine", allow_abbrev=False)
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    offline = kinds.add_parser("offline", help="throughput of one batch of random prompts", allow_abbrev=False)
    _add_model_flags(offline)
    offline.add_argument("--num-prompts", type=int, default=16)
    offline.add_argument("--input-tokens", type=int, default=64)
    offline.add_argument("--output-tokens", type=int, default=64)
    offline.set_defaults(run=_bench_offline)
    commands.add_parser("env", help="versions that matter to a bug report", allow_abbrev=False).set_defaults(run=_env)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    if positional:
        parser.add_argument("model_name", nargs="?", metavar="MODEL", help="folder, .gguf file, smollm2, or Hub id")
    parser.add_argument("--model", "--model-path", dest="model", metavar="MODEL", help="the same as a flag")
    parser.add_argument("--engine", metavar="ADDRESS", help="attach to a running engine instead of starting one")
    add_engine_flags(parser)
    for flag, (name, kind) in MINI_SGLANG_FLAGS.items():
        parser.add_argument(flag, dest=name, type=kind, default=None, help=argparse.SUPPRESS)
    # Encoding has threads of its own here, so the number of tokenizer processes is taken and not used.
    parser.add_argument("--num-tokenizer", type=int, default=0, help=argparse.SUPPRESS)
    parser.set_defaults(model_name=None)


def _add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--sampling-seed", type=int, default=None)


def _get_model(parsed: argparse.Namespace) -> str | None:
    if parsed.model is not None and parsed.model_name is not None:
        raise ValueError("the model is given twice, as MODEL and with --model")
    model: str | None = parsed.model if parsed.model is not None else parsed.model_name
    return model


def _serve(parsed: argparse.Namespace) -> int:
    from minisgl.server.run import serve  # deferred: imports the web framework

    model = _get_model(parsed)
    if model is None and parsed.engine is None:
        raise ValueError("serve needs a MODEL, or --engine ADDRESS")
    options = _get_options(parsed, model)
    return serve(
        model,
        options,
        engine=parsed.engine,
        host=parsed.host,
        port=parsed.port,
        served_model_name=parsed.served_model_name,
        api_key=_read_api_key(parsed),
    )


def _chat(parsed: argparse.Namespace) -> int:
    from minisgl.chat import run_chat  # deferred: imports the terminal libraries
    from minisgl.llm import LLM

    params = _read_sampling(parsed)
    with LLM(*_choose_model(parsed), engine=parsed.engine, **_get_options(parsed, None)) as llm:
        return run_chat(llm, params)


def _generate(parsed: argparse.Namespace) -> int:
    from minisgl.llm import LLM  # deferred: help answers at once

    params = _read_sampling(parsed)
    prompt = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    with LLM(*_choose_model(parsed), engine=parsed.engine, **_get_options(parsed, None)) as llm:
        for delta in llm.stream(prompt, params):
            sys.stdout.write(delta["text"])
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _bench_offline(parsed: argparse.Namespace) -> int:
    from minisgl.llm import LLM  # deferred: help answers at once

    params = SamplingParams(max_tokens=parsed.output_tokens, ignore_eos=True)
    with LLM(*_choose_model(parsed), engine=parsed.engine, **_get_options(parsed, None)) as llm:
        chance = random.Random(0)
        ids = range(min(100, len(llm.tokenizer)))
        prompts = [chance.choices(ids, k=parsed.input_tokens) for _ in range(parsed.num_prompts)]
        llm.generate(prompts[:1], params)  # warm up
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
    num_tokens = sum(len(output["token_ids"]) for output in outputs)
    result = {"output_tokens": num_tokens, "seconds": seconds, "output_tokens_per_s": num_tokens / seconds}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _env(parsed: argparse.Namespace) -> int:
    lines = [f"minisgl {__version__}", f"python {platform.python_version()}", platform.platform()]
    for name in ("torch", "transformers", "triton", "flashinfer-python", "pyzmq", "fastapi", "uvicorn"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} not installed")
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name in SHOWN_VARIABLES]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _read_port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, got {text!r:.60}")
    return int(text)


def _read_api_key(parsed: argparse.Namespace) -> str | None:
    """None where no key is asked for. An empty one is a variable that was not set, not a wish for an open server."""
    key: str | None = os.environ.get("MINISGL_API_KEY") if parsed.api_key is None else parsed.api_key
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise ValueError(
            "the API key must be visible ASCII and not empty; leave --api-key and MINISGL_API_KEY out for none"
        )
    return key


def _choose_model(parsed: argparse.Namespace) -> tuple[str | None]:
    model = _get_model(parsed)
    return (model if model is not None or parsed.engine is not None else SMALL_MODEL,)


def _read_sampling(parsed: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=parsed.max_tokens, temperature=parsed.temperature, top_p=parsed.top_p, seed=parsed.sampling_seed
    )


def _get_options(parsed: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """The engine's options that were given as flags. Raises ValueError naming option and value."""
    values = read_engine_flags(model or "unnamed", parsed).to_wire()
    return {name: value for name, value in values.items() if name != "model" and getattr(parsed, name) is not None}
