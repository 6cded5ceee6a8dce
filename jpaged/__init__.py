"""Serve language models from a paged KV cache with continuous batching, scheduled inside one compiled JAX step.

    from jpaged import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    llm.chat([{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(temperature=0, max_tokens=64))
"""

from jpaged.config import EngineConfig
from jpaged.engine import Engine, EngineStats
from jpaged.llm import LLM, StreamEvent
from jpaged.request import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams
from jpaged.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "LLM", "CompletionOutput", "Engine", "EngineConfig", "EngineStats", "FinishReason", "Logprob", "RequestOutput",
    "SamplingParams", "StreamEvent", "Tokenizer", "__version__",
]  # fmt: skip
