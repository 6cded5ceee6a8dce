"""Options of an LLM: the fields of EngineConfig, and what vLLM calls them.

A name of vLLM is the same here, has another name here, or stands for something that this engine always or never does.
In the last case the one value that changes nothing is taken, and any other is refused with what to do.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from jpaged.checks import number
from jpaged.config import EngineConfig

_FIELDS = {field.name: field for field in fields(EngineConfig)}

#: vLLM's name: the name here, and what makes the value here of the value there
RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "block_size": ("page_size", lambda value: value),
    "num_gpu_blocks_override": ("num_pages", lambda value: value),
    "kv_cache_memory_bytes": ("pool_bytes", lambda value: value),
    "swap_space": ("swap_space_bytes", lambda gib: round(number(gib) * 2**30)),
}

#: vLLM's name: values that change nothing here, and what to do instead of giving another one
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((1,), "an LLM runs on one device"),
    "pipeline_parallel_size": ((1,), "an LLM runs on one device"),
    "data_parallel_size": ((1,), "make an LLM in each process"),
    "enforce_eager": ((False,), "the step is always compiled; give token_budgets to compile fewer sizes of it"),
    "trust_remote_code": ((False,), "code that comes with a checkpoint is never run; convert it to a known family"),
    "quantization": ((None,), "a .gguf file says itself how it is quantised; weights are served in dtype"),
    "disable_log_stats": ((True,), "nothing is logged; llm.stats() has the numbers"),
    "enable_chunked_prefill": ((True, None), "long prompts are always computed in pieces; see max_num_batched_tokens"),
    "skip_tokenizer_init": ((False,), "give prompts as token ids where no text is wanted"),
    "tokenizer_mode": (("auto",), "there is one kind: tokenizer.json or a GGUF vocabulary"),
    "load_format": (("auto",), "the format is seen from the files"),
    "revision": ((None,), "download that revision and give its directory as the model"),
    "cpu_offload_gb": ((0,), "weights are on the device; give a model that fits"),
    "enable_lora": ((False,), "adapters are not supported: merge them into the weights"),
    "speculative_config": ((None,), "speculative decoding is not supported"),
    "scheduling_policy": (("priority",), "give admission= and victim=, policies of jpaged.policy"),
}


def engine_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of EngineConfig from keywords of an LLM, by their names here or in vLLM.

    Raises:
        TypeError: an unknown name; the message has the nearest one.
        ValueError: a value that this engine cannot follow, or two names of one field.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        field = name
        if name in FIXED:
            allowed, words = FIXED[name]
            if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
                shown = " or ".join(map(repr, allowed))
                raise ValueError(f"{name} can only be {shown} here, got {value!r:.80}: {words}")
            continue
        if name in RENAMED:
            field, convert = RENAMED[name]
            if name == "swap_space" and options.get("preemption", "recompute") == "recompute":
                if value == 0:
                    continue
                raise ValueError(f"swap_space={value!r:.80} (GiB) needs preemption='swap' or preemption='auto' here")
            try:
                value = convert(value)
            except TypeError:
                raise ValueError(f"{name} must be a number, got {value!r:.80}") from None
        elif name not in _FIELDS:
            known = [*_FIELDS, *RENAMED, *FIXED, "config", "tokenizer", "chat_template"]
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else "; help(LLM) lists them"
            raise TypeError(f"LLM has no option {name!r}{hint}")
        if field in found:
            raise ValueError(f"{name} and {field} are the same option: give one of them")
        found[field] = value
    return found


def with_engine_options(init: Callable[..., Any]) -> Callable[..., Any]:
    """Shows the fields of EngineConfig in the signature of a function that takes them as `**options`, for help and
    completion. What the function does is the same."""
    signature = inspect.signature(init)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for name, field in _FIELDS.items()
    ]
    init.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return init
