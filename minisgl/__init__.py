"""minisgl: a compact LLM inference engine. The public API is `minisgl.llm.LLM` and `minisgl.core.SamplingParams`."""

__version__ = "0.1.0"
