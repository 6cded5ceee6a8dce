"""What a caller asks for and what comes back. Names and fields follow vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from jpaged.checks import checked


class FinishReason(StrEnum):
    """Why a continuation ended."""

    STOP = "stop"  # an end-of-sequence or stop token was generated
    LENGTH = "length"  # max_tokens or max_model_len was reached
    ABORT = "abort"  # the caller gave it up
    ERROR = "error"  # its logits were not finite


#: the most stop ids one request can carry; a static shape of the compiled step
MAX_STOP_TOKENS = 16


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Args:
        n: continuations of the prompt, which is computed once for all of them.
        temperature: 0 is greedy: the largest logit, the lowest id on a tie.
        top_k: keep the `top_k` largest logits (the lowest ids on a tie); 0 and -1 keep all.
        top_p: keep the smallest set of tokens whose probability reaches `top_p`; in (0, 1].
        min_p: drop tokens less probable than `min_p` times the most probable one; in [0, 1].
        seed: makes sampling reproducible, whatever else runs at the time; None: the engine draws one. Continuation i
            has the seed `seed + i`.
        max_tokens: the most tokens to generate; None: as many as max_model_len leaves.
        min_tokens: no end-of-sequence or stop token is sampled before this many were generated.
        stop_token_ids: end after generating one of these; it is part of `token_ids`, not of `text`.
        ignore_eos: generate through the model's own end-of-sequence tokens.
        logprobs: 0: outputs have the log-probability of each generated token; None: only their sum. Those of other
            tokens are not offered.

    Raises:
        ValueError: naming the field, the value given, and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        stops = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(stops, (str, bytes)) or not hasattr(stops, "__iter__"):
            raise ValueError(f"stop_token_ids must be token ids, at least 0; got {stops!r:.80}")
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        _set(self, "n", int, lambda v: v >= 1, "at least 1")
        _set(self, "temperature", float, lambda v: math.isfinite(v) and v >= 0, "finite, at least 0")
        _set(self, "top_k", int, lambda v: -1 <= v < 2**31, "-1 or 0 (all tokens) or a positive count")
        _set(self, "top_p", float, lambda v: 0 < v <= 1, "in (0, 1]")
        _set(self, "min_p", float, lambda v: 0 <= v <= 1, "in [0, 1]")
        _set(self, "min_tokens", int, lambda v: 0 <= v < 2**31, "at least 0")
        if self.max_tokens is not None:
            _set(self, "max_tokens", int, lambda v: v >= 1, "at least 1, or None")
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _set(self, "seed", int, lambda v: 0 <= v < 2**32, "in [0, 2**32), or None")
        if self.logprobs is not None:
            words = "0 (those of the generated tokens) or None; the most probable others are not offered"
            _set(self, "logprobs", int, lambda v: v == 0, words)
        words = "token ids, at least 0"
        stops = [checked("stop_token_ids", one, int, lambda v: 0 <= v < 2**31, words) for one in self.stop_token_ids]
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")


def _set(own: Any, name: str, kind: type, allowed: Callable[[Any], bool], words: str) -> None:
    """Makes a field of a frozen dataclass the Python number that it stands for; see `jpaged.checks`."""
    object.__setattr__(own, name, checked(name, getattr(own, name), kind, allowed, words))


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search for the most probable continuations of a prompt; see `jpaged.runtime.beam_search`.

    Args:
        beam_width: continuations that go on at a time, and that come out.
        max_tokens: the most tokens to generate.
        length_penalty: a score is the log-probability over the number of generated tokens to this power: 0 favours the
            probable, and the short; the larger it is, the longer ones.
        stop_token_ids: end after one of these, beside the model's own end-of-sequence tokens.
        ignore_eos: generate through the model's own end-of-sequence tokens.

    Raises:
        ValueError: naming the field, the value given, and what is allowed.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        _set(self, "beam_width", int, lambda v: v >= 1, "at least 1")
        _set(self, "length_penalty", float, math.isfinite, "finite")
        own = self.sampling_params()
        object.__setattr__(self, "max_tokens", own.max_tokens)
        object.__setattr__(self, "stop_token_ids", own.stop_token_ids)

    def sampling_params(self) -> SamplingParams:
        """What the engine needs to know of each beam."""
        return SamplingParams(
            n=self.beam_width, temperature=0, max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A checked prompt on its way to the engine. `prompt_token_ids` is never empty. Only requests of the same
    `cache_salt` share pages. `index` is that of one of its continuations. With `candidates`, nothing is sampled: so
    many are offered for each token, and `Engine.advance` says which it is."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    index: int = 0
    candidates: int = 0

    def continuations(self) -> list[Request]:
        """Its `params.n` continuations, each with a seed of its own if there is a seed."""
        seed = self.params.seed
        if self.params.n == 1:
            return [self]
        return [
            replace(self, index=i, params=replace(self.params, n=1, seed=None if seed is None else (seed + i) % 2**32))
            for i in range(self.params.n)
        ]

    def __post_init__(self):
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise ValueError(f"cache_salt must be a text that is not empty, or None; got {self.cache_salt!r:.80}")
        _set(self, "priority", int, lambda v: -(2**31) <= v < 2**31, "an integer of 32 bits")


@dataclass(frozen=True)
class Logprob:
    """The log-probability the model gave a token, before temperature and truncation. `decoded_token` is what the token
    adds to the text, special tokens included; of a character that several tokens make up, all is with the last."""

    logprob: float
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One continuation. `logprobs[i]` maps `token_ids[i]` to its `Logprob`, as in vLLM, where `SamplingParams.logprobs`
    asks for them, else it is None; `cumulative_logprob` is the sum over the chosen tokens."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class BeamSearchSequence:
    """What a beam search found. `tokens` are the prompt's and those generated, as in vLLM; `logprobs` are of the
    generated ones, `cum_logprob` is their sum, and `score` what sequences are compared by."""

    tokens: list[int]
    text: str
    logprobs: list[float]
    cum_logprob: float
    score: float
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass
class BeamSearchOutput:
    """A prompt and the best sequences that begin with it, the best first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]


@dataclass
class RequestMetrics:
    """When things happened, in seconds of one monotonic clock. `compile_s` are seconds within these times in which the
    engine compiled programs: where it is not 0, the latencies are not those of a warm engine; see `LLM.warmup`."""

    arrival_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    compile_s: float = 0.0


@dataclass
class RequestOutput:
    """A prompt and its continuations, in the order of `index`. `num_cached_tokens` of the prompt were not computed,
    because they had been before."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0

    def __repr__(self) -> str:
        first = self.outputs[0] if self.outputs else None
        text = "" if first is None else first.text if len(first.text) <= 60 else first.text[:57] + "..."
        reason = None if first is None or first.finish_reason is None else str(first.finish_reason)
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt_tokens={len(self.prompt_token_ids)}, "
            f"output_tokens={sum(len(o.token_ids) for o in self.outputs)}, finish_reason={reason!r}, "
            f"text={text!r})"
        )
