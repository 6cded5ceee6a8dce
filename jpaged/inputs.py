"""What callers of an LLM give, checked and made into requests: prompts, conversations, parameters, priorities."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from jpaged.checks import integer
from jpaged.models.load import Checkpoint
from jpaged.request import Request, SamplingParams
from jpaged.runtime.engine import Engine
from jpaged.text.tokenizer import Tokenizer

Prompt = str | Iterable[int] | Mapping[str, Any]


def tokenizer_for(checkpoint: Checkpoint, given: Any, chat_template: str | Path | None) -> Tokenizer:
    """The tokenizer of an LLM; nothing of the weights is read.

    Args:
        checkpoint: of the model.
        given: a Tokenizer, or the directory or `.gguf` file that holds one; None: the checkpoint's own.
        chat_template: a jinja2 template or the path of one, for whichever tokenizer it is; None: its own.

    Raises:
        ValueError: `given` is none of these, or cannot be read.
    """
    if given is None:
        return Tokenizer.load(checkpoint.tokenizer_source, chat_template=chat_template)
    if isinstance(given, (str, Path)):
        return Tokenizer.load(given, chat_template=chat_template)
    if not isinstance(given, Tokenizer):
        raise ValueError(f"tokenizer must be a jpaged.Tokenizer, a directory or a .gguf file; got {given!r:.80}")
    return given if chat_template is None else given.with_chat_template(chat_template)


class Inputs:
    """Makes requests of what callers give, and gives each an id.

    Args:
        tokenizer: of the model.
        next_id: the id of the next request.
    """

    def __init__(self, tokenizer: Tokenizer, next_id: int = 0):
        self._tokenizer = tokenizer
        self._ids = itertools.count(next_id)

    def of_prompts(
        self, engine: Engine, prompts: Any, sampling_params: Any, priority: Any, candidates: int = 0
    ) -> list[Request]:
        """One request a prompt, in their order; arguments as of `LLM.generate`.

        Args:
            engine: that is to run them.
            candidates: how many tokens are offered for each that is generated; 0: tokens are sampled.

        Raises:
            ValueError: naming the prompt that cannot run, or the parameters.
        """
        prompts = _list_of_prompts(prompts)
        texts, ids, salts = [], [], []
        for number, prompt in enumerate(prompts):
            text, tokens = self._tokenize(prompt, number)
            texts.append(text)
            ids.append(tokens)
            salts.append(prompt.get("cache_salt") if isinstance(prompt, Mapping) else None)
        return self._checked(engine, texts, ids, salts, sampling_params, priority, candidates)

    def of_conversations(
        self,
        engine: Engine,
        messages: Any,
        sampling_params: Any,
        priority: Any,
        allow_special_tokens: bool = False,
    ) -> list[Request]:
        """One request a conversation, in their order; arguments as of `LLM.chat`.

        Raises:
            ValueError: naming the conversation that cannot run, or the parameters.
        """
        texts, ids = [], []
        for number, conversation in enumerate(_list_of_conversations(messages)):
            try:
                text, tokens = self._tokenizer.chat(conversation, allow_special_tokens=allow_special_tokens)
                texts.append(text)
                ids.append(tokens)
            except ValueError as error:
                raise ValueError(f"conversation {number}: {error}") from error
        return self._checked(engine, texts, ids, [None] * len(ids), sampling_params, priority)

    def _tokenize(self, prompt: Any, number: int) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
            if len(known) != 1 or not prompt.keys() <= {known[0], "cache_salt"}:
                raise ValueError(
                    f"prompt {number} must have either 'prompt' or 'prompt_token_ids', and nothing else but a "
                    f"'cache_salt'; it has {sorted(prompt)}"
                )
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            try:
                return prompt, self._tokenizer.encode(prompt)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
        tokens = _token_ids(prompt)
        if tokens is None:
            raise ValueError(f"prompt {number} must be a text or a list of token ids, got {prompt!r:.80}")
        return None, tokens

    def _checked(
        self,
        engine: Engine,
        texts: Sequence[str | None],
        ids: Sequence[Sequence[int]],
        salts: Sequence[Any],
        sampling_params: Any,
        priority: Any,
        candidates: int = 0,
    ) -> list[Request]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(ids)
        else:
            params = list(sampling_params)
            if len(params) != len(ids):
                raise ValueError(f"{len(ids)} prompts need as many SamplingParams (or one for all), got {len(params)}")
        one = not isinstance(priority, Iterable) or getattr(priority, "ndim", None) == 0
        priorities = [priority] * len(ids) if one else list(priority)
        if len(priorities) != len(ids):
            raise ValueError(f"{len(ids)} prompts need as many priorities (or one for all), got {len(priorities)}")
        requests = []
        each = zip(texts, ids, salts, params, priorities, strict=True)
        for number, (text, tokens, salt, own, prior) in enumerate(each):
            if not isinstance(own, SamplingParams):
                raise ValueError(f"prompt {number}: sampling parameters must be SamplingParams, got {own!r:.80}")
            try:
                request = Request(str(self.new_id()), tuple(tokens), own, text, salt, prior, candidates=candidates)
                engine.check(request)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
            requests.append(request)
        return requests

    def new_id(self) -> int:
        """An id that no request has had; safe in many threads."""
        return next(self._ids)


def _list_of_prompts(prompts: Any) -> list[Any]:
    """The prompts of a call. A list of ids is one prompt, also an empty one given as [[]]; [] is no prompts."""
    if isinstance(prompts, (bytes, bytearray, memoryview)):
        raise ValueError(f"prompts are texts or token ids, not bytes: decode them first; got {bytes(prompts)!r:.60}")
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or getattr(prompts, "ndim", None) == 0:
        raise ValueError(f"prompts must be a text, a list of token ids, or a list of these; got {prompts!r:.80}")
    if hasattr(prompts, "ndim"):  # an array of ids, or of as many rows as prompts
        return [prompts] if prompts.ndim == 1 else list(prompts)
    listed = list(prompts)
    return [listed] if listed and _is_token(listed[0]) else listed


def _token_ids(prompt: Any) -> list[int] | None:
    """A prompt's ids as Python integers; None: it is no list of integers."""
    if isinstance(prompt, (bytes, bytearray, memoryview, Set, Mapping)) or not isinstance(prompt, Iterable):
        return None
    # One call moves an array to the host; its items are Python numbers then.
    values = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    try:
        return [integer(token) for token in values]
    except TypeError:
        return None


def _is_token(value: Any) -> bool:
    try:
        integer(value)
    except TypeError:
        return False
    return True


def _list_of_conversations(messages: Any) -> list[list[Any]]:
    """The conversations of a call. A message alone, or a list of messages, is one conversation."""
    example = 'a list like [{"role": "user", "content": "Hello"}], or a list of these'
    if isinstance(messages, Mapping):
        return [[messages]]
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Iterable):
        raise ValueError(f"messages must be {example}; got {messages!r:.80}")
    listed = list(messages)
    if listed and isinstance(listed[0], Mapping):
        return [listed]
    if any(isinstance(one, (str, bytes, Mapping)) or not isinstance(one, Iterable) for one in listed):
        raise ValueError(f"messages must be {example}; got {messages!r:.80}")
    return [list(one) for one in listed]
