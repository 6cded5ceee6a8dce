"""The sampling options of requests as arrays: each option is declared here, once.

A field of `Sampling` says which dtype an option has, what stands in rows without a request, and how its value follows
from what the caller asked for. Submissions, the rows of the engine, the sampler and static batching carry the whole
pytree and never name an option that they do not use, so a new one needs a field here and the stage that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.request import MAX_STOP_TOKENS, SamplingParams

#: Fills unused places of `stop_ids`: no token has this id.
NO_TOKEN = -1


@dataclass(frozen=True)
class Asked:
    """What the caller asked for, with what it depends on beside the `SamplingParams`."""

    params: SamplingParams
    num_prompt_tokens: int
    max_model_len: int
    stop_ids: Sequence[int]  # of the model and of the caller, at most MAX_STOP_TOKENS
    seed: int

    def num_tokens(self, generated: int | None) -> int:
        """Tokens of prompt and output after `generated` ones, at most max_model_len; None: that many."""
        longest = self.max_model_len
        return longest if generated is None else min(longest, self.num_prompt_tokens + generated)


def _option(dtype: Any, default: Any, value: Callable[[Asked], Any], *, width: int | None = None) -> dict[str, Any]:
    """Of a field `[N]` or `[N, width]`: a row is `default` until `value` of a request fills it, from the left."""
    return {"dtype": np.dtype(dtype), "default": default, "value": value, "width": width}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How the requests of N rows are continued; numpy arrays while the host fills them in."""

    #: `[N]` float32, 0: greedy
    temperature: Any = field(metadata=_option(np.float32, 0, lambda asked: asked.params.temperature))
    #: `[N]` int32, 0: all
    top_k: Any = field(metadata=_option(np.int32, 0, lambda asked: max(asked.params.top_k, 0)))
    #: `[N]` float32
    top_p: Any = field(metadata=_option(np.float32, 1, lambda asked: asked.params.top_p))
    #: `[N]` float32
    min_p: Any = field(metadata=_option(np.float32, 0, lambda asked: asked.params.min_p))
    #: `[N]` uint32, makes the random numbers, with the position of the token
    seed: Any = field(metadata=_option(np.uint32, 0, lambda asked: asked.seed))
    #: `[N, MAX_STOP_TOKENS]` int32, tokens that end the request; NO_TOKEN where unused
    stop_ids: Any = field(metadata=_option(np.int32, NO_TOKEN, lambda asked: asked.stop_ids, width=MAX_STOP_TOKENS))
    #: `[N]` int32, the request ends when it has that many tokens
    max_len: Any = field(metadata=_option(np.int32, 0, lambda asked: asked.num_tokens(asked.params.max_tokens)))
    #: `[N]` int32, no stop token is sampled while it has fewer tokens
    min_len: Any = field(metadata=_option(np.int32, 0, lambda asked: asked.num_tokens(asked.params.min_tokens)))

    @classmethod
    def empty(cls, rows: int, *, numpy: Any = np) -> Sampling:
        """Rows without requests, as arrays of `numpy`: that of the host, or `jax.numpy`."""
        options = {f.name: f.metadata for f in fields(cls)}
        shapes = {name: (rows,) if o["width"] is None else (rows, o["width"]) for name, o in options.items()}
        return cls(**{name: numpy.full(shapes[name], o["default"], o["dtype"]) for name, o in options.items()})

    def fill(self, row: int, asked: Asked) -> None:
        """Writes what was asked for into row `row`, which is empty. For numpy arrays."""
        for option in fields(self):
            array, value = getattr(self, option.name), option.metadata["value"](asked)
            if option.metadata["width"] is None:
                array[row] = value
            else:
                array[row, : len(value)] = value

    def of(self, row: jax.Array) -> Sampling:
        """Those of the rows `row` `[K]`."""
        return jax.tree.map(lambda array: array[row], self)

    def where(self, which: jax.Array) -> Sampling:
        """Greedy but for the rows `which` `[N]` bool: one that needs no token asks for no random numbers."""
        return replace(self, temperature=jnp.where(which, self.temperature, 0))
