"""Text in, text out: the door for notebooks. Names and fields follow vLLM."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from tqdm import TqdmWarning

from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.models.config import ModelConfig
from jpaged.models.llama import load_decoder
from jpaged.models.loading import load_checkpoint, resolve
from jpaged.replay import replay
from jpaged.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from jpaged.stats import EngineStats, TokenEvent
from jpaged.step import EngineState
from jpaged.tokenizer import IncrementalDetokenizer, Tokenizer
from jpaged.trace import Trace

with warnings.catch_warnings():  # a notebook without ipywidgets gets a plain bar
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class StreamEvent:
    """A piece of one prompt's continuation: what came since its last event."""

    index: int  # of the prompt in the call
    delta_text: str
    delta_token_ids: tuple[int, ...]
    finished: bool
    output: RequestOutput  # all of it so far


class LLM:
    """A language model with an engine around it.

        llm = LLM("smollm2-135m")
        llm.generate("The capital of France is", SamplingParams(temperature=0))

    Args:
        model: a directory (Hugging Face or one of ours), a `.gguf` file, a built-in name such as "smollm2-135m", or a
            Hugging Face hub id.
        config: sizes of the engine; single fields can be given as keywords instead, as in vLLM:
            `LLM(model, max_num_seqs=16, seed=1)`.
        tokenizer: a Tokenizer in place of the model's own.
        chat_template: a jinja2 chat template in place of the model's own.

    Raises:
        ValueError: for an unknown model, a checkpoint that is not whole, or sizes that do not fit.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        chat_template: str | None = None,
        **sizes: Any,
    ):
        config = replace(config or EngineConfig(), **sizes).for_platform(jax.default_backend())
        checkpoint = load_checkpoint(resolve(model))
        dtype = config.dtype
        decoder, params = load_decoder(checkpoint.config, checkpoint.parameters(dtype), jnp.dtype(dtype))
        self.model = str(model)
        self.tokenizer = tokenizer or Tokenizer.load(checkpoint.tokenizer_source, chat_template=chat_template)
        # As in vLLM, the tokenizer's end-of-sequence token counts beside those of the configuration.
        ends = dict.fromkeys((*checkpoint.config.eos_token_ids, *self.tokenizer.eos_token_ids))
        shapes = replace(checkpoint.config, eos_token_ids=tuple(ends))
        self._engine: Engine | None = Engine(decoder, params, shapes, config)
        self._ids = itertools.count()
        # Held for a burst, never between two pieces of a stream.
        self._lock = threading.Lock()
        # Of each request in the engine, where its events go and what turns them into text.
        self._routes: dict[str, tuple[deque[StreamEvent], _Continuation]] = {}
        self._abandoned: deque[str] = deque()

    # -- generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continues prompts, all in one batch.

        Args:
            prompts: a text, a list of token ids, or `{"prompt": ...}` / `{"prompt_token_ids": ...}`; one or a list of
                them. The last two may have a `"cache_salt"`: only prompts of the same salt share pages.
            sampling_params: one for all, or one for each prompt; None: `SamplingParams()`.
            use_tqdm: show a progress bar that counts prompts.
            priority: one for all, or one for each prompt; who has the smaller comes in first, and makes room last.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            ValueError: for a prompt or parameters that can never run, naming the prompt; nothing has run then.
        """
        return self._collect(self._requests(prompts, sampling_params, priority), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answers conversations with the model's chat template.

        Args:
            messages: a conversation, a list of `{"role": ..., "content": ...}`; or a list of conversations.
            sampling_params, use_tqdm, priority: as in `generate`.

        Raises:
            ValueError: also where the model has no template, or the template refuses the conversation.
        """
        return self._collect(self._chat_requests(messages, sampling_params, priority), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[StreamEvent]:
        """Like `generate`, but yields each piece of text as it comes. Stopping early aborts what is left."""
        return self._stream(self._requests(prompts, sampling_params, priority))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[StreamEvent]:
        """Like `chat`, but yields each piece of text as it comes. Stopping early aborts what is left."""
        return self._stream(self._chat_requests(messages, sampling_params, priority))

    # -- from prompts to requests

    def _requests(self, prompts: Any, sampling_params: Any, priority: Any) -> list[Request]:
        if _is_one_prompt(prompts):
            prompts = [prompts]
        texts, ids, salts = [], [], []
        for number, prompt in enumerate(prompts):
            text, tokens = self._tokenize(prompt, number)
            texts.append(text)
            ids.append(tokens)
            salts.append(prompt.get("cache_salt") if isinstance(prompt, Mapping) else None)
        return self._checked(texts, ids, salts, sampling_params, priority)

    def _chat_requests(self, messages: Any, sampling_params: Any, priority: Any) -> list[Request]:
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = [messages] if one else list(messages)
        texts, ids = [], []
        for number, conversation in enumerate(conversations):
            try:
                texts.append(self.tokenizer.render_chat(conversation))
                ids.append(self.tokenizer.apply_chat_template(conversation))
            except ValueError as error:
                raise ValueError(f"conversation {number}: {error}") from error
        return self._checked(texts, ids, [None] * len(ids), sampling_params, priority)

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
                return prompt, self.tokenizer.encode(prompt)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
        if isinstance(prompt, Sequence) or hasattr(prompt, "tolist"):
            values = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
            if all(isinstance(token, int) and not isinstance(token, bool) for token in values):
                return None, values
        raise ValueError(f"prompt {number} must be a text or a list of token ids, got {prompt!r:.80}")

    def _checked(self, texts: list, ids: list, salts: list, sampling_params: Any, priority: Any) -> list[Request]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(ids)
        else:
            params = list(sampling_params)
            if len(params) != len(ids):
                raise ValueError(f"{len(ids)} prompts need as many SamplingParams (or one for all), got {len(params)}")
        priorities = [priority] * len(ids) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(ids):
            raise ValueError(f"{len(ids)} prompts need as many priorities (or one for all), got {len(priorities)}")
        requests = []
        each = zip(texts, ids, salts, params, priorities, strict=True)
        for number, (text, tokens, salt, own, prior) in enumerate(each):
            if not isinstance(own, SamplingParams):
                raise ValueError(f"prompt {number}: sampling parameters must be SamplingParams, got {own!r:.80}")
            try:
                request = Request(str(next(self._ids)), tuple(tokens), own, text, salt, prior)
                self.engine.check(request)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
            requests.append(request)
        return requests

    # -- from events to outputs

    def _collect(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        tokens = 0
        with tqdm(total=len(requests), desc="Prompts", unit="prompt", disable=not use_tqdm, dynamic_ncols=True) as bar:
            start = time.perf_counter()
            for event in self._stream(requests):
                tokens += len(event.delta_token_ids)
                if event.finished:
                    outputs[event.index] = event.output
                    bar.update(1)
                    bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.1f} output tokens/s", refresh=False)
        return [outputs[number] for number in range(len(requests))]

    def _stream(self, requests: list[Request]) -> Iterator[StreamEvent]:
        """Runs `requests` to their ends. However it is left, none of them stays in the engine.

        Several may be open at once, in one thread or in many: the engine runs the requests of all of them together,
        and whichever is asked first for what has not come yet runs the next burst, for the others too.
        """
        arrived: deque[StreamEvent] = deque()
        open_ = {request.request_id for request in requests}
        try:
            with self._lock:
                for number, request in enumerate(requests):
                    self.engine.submit(request)
                    self._routes[request.request_id] = arrived, _Continuation(number, request, self.tokenizer)
            while open_:
                with self._lock:
                    if not arrived:
                        self._burst(open_)
                while arrived:
                    piece = arrived.popleft()
                    if piece.finished:
                        open_.remove(piece.output.request_id)
                    yield piece
        finally:
            # This may be the garbage collector's call, in the middle of a burst of the same thread.
            self._abandoned.extend(open_)
            if self._lock.acquire(blocking=False):
                try:
                    self._drop_abandoned()
                finally:
                    self._lock.release()

    def _burst(self, waiting: set[str]) -> None:
        """Runs a burst and gives what came out to those it belongs to. `waiting` are the caller's requests."""
        self._drop_abandoned()
        engine = self.engine
        if lost := waiting - self._routes.keys():
            raise RuntimeError(f"{len(lost)} requests were lost when another call failed or was interrupted")
        try:
            now_seen: dict[str, list[TokenEvent]] = {}
            for event in engine.burst():
                now_seen.setdefault(event.request_id, []).append(event)
            for name, events in now_seen.items():
                arrived, continuation = self._routes[name]
                piece = continuation.add(events)
                if piece.finished:
                    del self._routes[name]
                arrived.append(piece)
        except BaseException:
            self._routes.clear()
            engine.abort_all()
            raise

    def _drop_abandoned(self) -> None:
        """Gives up requests whose stream was left; under the lock."""
        names = []
        while self._abandoned:
            names.append(self._abandoned.popleft())
            self._routes.pop(names[-1], None)
        if names and self._engine is not None:
            self._engine.abort(names)

    # -- the engine

    @property
    def engine(self) -> Engine:
        """The engine. Raises RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError(f"this LLM ({self.model}) was closed; make a new one")
        return self._engine

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model_config

    @property
    def decoder(self) -> Any:
        return self.engine.decoder

    @property
    def params(self) -> Any:
        return self.engine.params

    def warmup(self) -> None:
        """Compiles every program now instead of when it is first needed."""
        self.engine.warmup()

    def stats(self) -> EngineStats:
        """Totals since the start, and how pages stand."""
        return self.engine.stats()

    @property
    def trace(self) -> Trace:
        """What the engine was told and what each step decided; it grows as the engine runs.

        Raises:
            ValueError: the engine keeps none.
        """
        if self.engine.trace is None:
            raise ValueError(f"the trace of {self.model} is off: make the LLM with trace=True")
        return self.engine.trace

    def replay(self, until: int | None = None) -> EngineState:
        """Does again, beside the engine, what it was told, up to and with step `until` (None: all), compares every step
        with the trace to the bit, and returns the state there; see `jpaged.replay`. It takes memory for another pool.

        Raises:
            ValueError: there is no trace, no such step in it, or other weights were taken before it.
            RuntimeError: a step did something else.
        """
        with self._lock:
            return replay(self.trace, self.decoder, self.params, until)

    def plot_pages(self, step: int | None = None) -> Figure:
        """The pool over time, and who owns each page after step `step` of the trace, those included who ended in it.
        None: the first step in which most pages were in use; without a trace, how things stand.

        Raises:
            ValueError: there is no such step, or no trace.
        """
        from jpaged.viz.engine import engine_pages

        with self._lock:
            return engine_pages(self.engine, step)

    def plot_timeline(self) -> Figure:
        """What each request did in each step of the trace: waited, computed its prompt, decoded, or had lost its slot.

        Raises:
            ValueError: there is no trace, or nothing in it.
        """
        from jpaged.viz.timeline import plot_timeline

        with self._lock:
            return plot_timeline(self.trace)

    def reset_prefix_cache(self) -> bool:
        """Makes all cached pages free. Returns False, and does nothing, while requests run."""
        with self._lock:
            self._drop_abandoned()
            return self.engine.reset_prefix_cache()

    def update_weights(self, model: str | Path) -> None:
        """Replaces the weights by those of another checkpoint of the same configuration. Nothing is compiled; what the
        old ones computed is never found again.

        Raises:
            RuntimeError: while requests have not ended.
            ValueError: for an unknown model, or one of another configuration.
        """
        checkpoint = load_checkpoint(resolve(model))
        dtype = self.config.dtype
        decoder, params = load_decoder(checkpoint.config, checkpoint.parameters(dtype), jnp.dtype(dtype))
        with self._lock:
            self._drop_abandoned()
            if decoder != self.decoder:
                raise ValueError(f"{model} has another configuration than {self.model}: {checkpoint.config}")
            self.engine.replace_params(params)

    def close(self) -> None:
        """Frees the device's memory at once. Twice is harmless; any other use afterwards is a RuntimeError."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._engine is None:
            return f"LLM({self.model!r}, closed)"
        config, model = self.config, self.model_config
        return (
            f"LLM({self.model!r}, {model.num_parameters / 1e6:.0f}M parameters, {config.dtype}, "
            f"{config.num_pages} pages of {config.page_size} tokens, {config.max_num_seqs} slots, "
            f"max_model_len={config.max_model_len})"
        )


class _Continuation:
    """One request's output as it grows."""

    def __init__(self, number: int, request: Request, tokenizer: Tokenizer):
        self.number = number
        self._request = request
        self._tokenizer = tokenizer
        self._text = IncrementalDetokenizer(tokenizer, request.prompt_token_ids)
        self._completion = CompletionOutput(0, "", [], 0.0, [])
        self._metrics = RequestMetrics(arrival_s=time.monotonic())
        self._cached_tokens = 0

    def add(self, events: list[TokenEvent]) -> StreamEvent:
        completion, delta, ids = self._completion, "", []
        for event in events:
            self._cached_tokens = event.num_cached_tokens
            completion.finish_reason, completion.stop_reason = event.finish_reason, event.stop_reason
            if event.token_id is None:
                continue
            if self._metrics.first_token_s is None:
                self._metrics.first_token_s = time.monotonic()
            ids.append(event.token_id)
            # The token that stopped it is one of token_ids, not of the text.
            if event.finish_reason != FinishReason.STOP:
                delta += self._text.push([event.token_id])
            decoded = self._tokenizer.decode([event.token_id], skip_special_tokens=False)
            completion.logprobs.append({event.token_id: Logprob(event.logprob, decoded)})
            completion.cumulative_logprob += event.logprob
        finished = completion.finish_reason is not None
        if finished:
            delta += self._text.finish()
            self._metrics.finished_s = time.monotonic()
        completion.text += delta
        completion.token_ids.extend(ids)
        output = RequestOutput(
            request_id=self._request.request_id,
            prompt=self._request.prompt,
            prompt_token_ids=list(self._request.prompt_token_ids),
            outputs=[completion],
            finished=finished,
            metrics=self._metrics,
            num_cached_tokens=self._cached_tokens,
        )
        return StreamEvent(self.number, delta, tuple(ids), finished, output)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    if hasattr(prompts, "ndim"):
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a text, a list of token ids, or a list of these; got {prompts!r:.80}")
    # A list of ids, also an empty one given alone as [[]] or among others, is a prompt; [] is no prompts.
    return len(prompts) > 0 and isinstance(prompts[0], int) and not isinstance(prompts[0], bool)
