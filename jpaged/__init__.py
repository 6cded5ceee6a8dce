"""Serve language models from a paged KV cache, scheduled inside one compiled JAX step.

    from jpaged import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    llm.chat([{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(max_tokens=64))

A name is imported when it is first used: `jpaged --help` does not wait for JAX, and the command line can
choose a platform before JAX starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.config import EngineConfig
    from jpaged.llm import LLM
    from jpaged.record.stats import EngineStats
    from jpaged.record.trace import Trace
    from jpaged.request import (
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        FinishReason,
        Logprob,
        RequestOutput,
        SamplingParams,
    )
    from jpaged.runtime.engine import Engine
    from jpaged.runtime.outputs import StreamEvent
    from jpaged.text.tokenizer import Tokenizer

__version__ = "0.1.0"

_HOME = {
    "EngineConfig": "config",
    "Engine": "runtime.engine",
    "EngineStats": "record.stats",
    "LLM": "llm",
    "StreamEvent": "runtime.outputs",
    "BeamSearchOutput": "request",
    "BeamSearchParams": "request",
    "BeamSearchSequence": "request",
    "CompletionOutput": "request",
    "FinishReason": "request",
    "Logprob": "request",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "Tokenizer": "text.tokenizer",
    "Trace": "record.trace",
}

__all__ = [
    "LLM", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "CompletionOutput", "Engine", "EngineConfig",
    "EngineStats", "FinishReason", "Logprob", "RequestOutput", "SamplingParams", "StreamEvent", "Tokenizer", "Trace",
    "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
