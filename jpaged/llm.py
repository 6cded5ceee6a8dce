"""Text in, text out: the door for notebooks. Names and fields follow vLLM."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from tqdm import TqdmWarning

from jpaged.config import EngineConfig
from jpaged.inputs import Inputs, Prompt, tokenizer_for
from jpaged.models.decoder import load_decoder, replace_weights
from jpaged.models.load import load_checkpoint, resolve
from jpaged.models.spec import ModelConfig
from jpaged.options import engine_fields, with_engine_options
from jpaged.record.replay import replay
from jpaged.record.saving import Saved
from jpaged.record.stats import EngineStats, History
from jpaged.record.trace import Trace
from jpaged.request import (
    BeamSearchOutput,
    BeamSearchParams,
    Request,
    RequestOutput,
    SamplingParams,
)
from jpaged.runtime.beam_search import BeamRoom, BeamSearch
from jpaged.runtime.engine import Engine
from jpaged.runtime.outputs import StreamEvent
from jpaged.runtime.prepare import stop_ids
from jpaged.runtime.streams import Call, Streams
from jpaged.saved_llm import SavedLLM
from jpaged.step import EngineState
from jpaged.text.tokenizer import Tokenizer

with warnings.catch_warnings():  # a notebook without ipywidgets gets a plain bar
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LLM:
    """A language model with an engine around it.

        llm = LLM("smollm2-135m")
        llm.generate("The capital of France is", SamplingParams(temperature=0))

    Args:
        model: a directory (Hugging Face or one of ours), a `.gguf` file, a built-in name such as "smollm2-135m", or a
            Hugging Face hub id.
        config: sizes of the engine.
        tokenizer: a Tokenizer, or the directory or `.gguf` file of one, in place of the model's own.
        chat_template: a jinja2 chat template, or the path of one, in place of the tokenizer's own.
        options: single fields of `EngineConfig`, which explains them: `LLM(model, max_num_seqs=16, seed=1)`. Names of
            vLLM are understood, see `jpaged.options`.

    Raises:
        TypeError: for an unknown option; the message has the nearest name.
        ValueError: for an unknown model, a checkpoint that is not whole, an option that this engine cannot follow, or
            sizes that do not fit.
    """

    @with_engine_options
    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
        chat_template: str | Path | None = None,
        **options: Any,
    ):
        config = replace(config or EngineConfig(), **engine_fields(options)).for_platform(jax.default_backend())
        checkpoint = load_checkpoint(resolve(model))
        self.model = str(model)
        self.tokenizer = tokenizer_for(checkpoint, tokenizer, chat_template)  # before any weight is read
        dtype = config.dtype
        decoder, params = load_decoder(checkpoint.config, checkpoint.parameters(dtype), jnp.dtype(dtype))
        # As in vLLM, the tokenizer's end-of-sequence token counts beside those of the configuration.
        ends = dict.fromkeys((*checkpoint.config.eos_token_ids, *self.tokenizer.eos_token_ids))
        shapes = replace(checkpoint.config, eos_token_ids=tuple(ends))
        self._engine: Engine | None = Engine(decoder, params, shapes, config)
        self._inputs = Inputs(self.tokenizer)
        self._streams = Streams(self._engine, self.tokenizer)
        self._left: Call | None = None  # what `resume` finishes

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
            priority: one for all, or one for each prompt; the smaller is admitted first, and preempted last.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            ValueError: for a prompt or parameters that can never run, naming the prompt; nothing has run then.
        """
        requests = self._inputs.of_prompts(self.engine, prompts, sampling_params, priority)
        return self._collect(self._stream(requests), len(requests), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        allow_special_tokens: bool = False,
    ) -> list[RequestOutput]:
        """Answers conversations with the model's chat template.

        Args:
            messages: a conversation, a list of `{"role": ..., "content": ...}`; or a list of conversations.
            sampling_params, use_tqdm, priority: as in `generate`.
            allow_special_tokens: special tokens that a message spells, such as `<|im_end|>`, are special tokens, as in
                transformers; else they are text, so that no message can end its turn or forge another one.

        Raises:
            ValueError: also where the model has no template, or the template refuses the conversation.
        """
        requests = self._inputs.of_conversations(self.engine, messages, sampling_params, priority, allow_special_tokens)
        return self._collect(self._stream(requests), len(requests), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[StreamEvent]:
        """Like `generate`, but yields each piece of text as it comes. Stopping early aborts what is left."""
        return self._stream(self._inputs.of_prompts(self.engine, prompts, sampling_params, priority))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        allow_special_tokens: bool = False,
    ) -> Iterator[StreamEvent]:
        """Like `chat`, but yields each piece of text as it comes. Stopping early aborts what is left."""
        requests = self._inputs.of_conversations(self.engine, messages, sampling_params, priority, allow_special_tokens)
        return self._stream(requests)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """The most probable continuations of prompts, by beam search; see `jpaged.runtime.beam_search`. A prompt is
        computed once, and beams share pages as far as they are the same.

        Args:
            prompts, use_tqdm: as in `generate`.
            params: for all prompts.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            ValueError: also for more beams than `max_num_seqs`, or than the pool has pages for.
        """
        engine, own = self.engine, params.sampling_params()
        candidates = BeamSearch.num_candidates(
            params.beam_width, stop_ids(own, engine.model_config), engine.model_config.vocab_size
        )
        requests = self._inputs.of_prompts(engine, prompts, own, 0, candidates)
        room = BeamRoom(
            slots=engine.config.max_num_seqs, pages=engine.num_pages, page_size=engine.config.page_size,
            max_model_len=engine.max_model_len,
        )  # fmt: skip
        outputs: dict[str, BeamSearchOutput] = {}
        with tqdm(total=len(requests), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
            for output in self._streams.beam_search(requests, params, room):
                outputs[output.request_id] = output
                bar.update(1)
        return [outputs[request.request_id] for request in requests]

    # -- from events to outputs

    def _collect(self, events: Iterator[StreamEvent], total: int, use_tqdm: bool) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        tokens = 0
        with tqdm(total=total, desc="Prompts", unit="prompt", disable=not use_tqdm, dynamic_ncols=True) as bar:
            start = time.perf_counter()
            for event in events:
                tokens += len(event.delta_token_ids)
                if event.all_finished:
                    outputs[event.index] = event.output
                    bar.update(1)
                    bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.1f} output tokens/s", refresh=False)
        return [outputs[number] for number in range(total)]

    def _stream(self, requests: list[Request]) -> Iterator[StreamEvent]:
        # Submitted when the first piece is asked for.
        yield from self._streams.events(self._streams.open(requests))

    def abort(self, request_ids: str | Sequence[str], *, index: int | None = None) -> None:
        """Gives requests up, in any thread, beside a call that waits for them: that call gets what there is of their
        outputs, with the finish reason "abort". Unknown ids are ignored: a request may have ended a moment ago.

        Args:
            request_ids: `RequestOutput.request_id` of one or of several.
            index: of the one continuation to give up; None: all.
        """
        self.engine.abort(request_ids, index=index)

    # -- saved and restored

    def save_state(self, directory: str | Path) -> Path:
        """Saves the running engine: what runs and waits, what came out of it, and what is cached; with Orbax, and of
        the pool only the pages that hold something. Nothing changes here, and all that is open goes on. `restore` goes
        on with it too, in another process.

            for event in llm.stream(prompts):              # left open, or between two of its pieces
                llm.save_state("saved")

        Args:
            directory: a new one; it appears complete or not at all. Weights are not saved.

        Returns:
            The directory, absolute.

        Raises:
            RuntimeError: after `close`.
            ValueError: something is already there, or a beam search is under way.
        """
        with self.engine.paused():
            own = SavedLLM.of(self.model, self.tokenizer, self._inputs.new_id(), self._streams.outputs())
            return self.engine.save_state(directory, own.files())

    @classmethod
    def restore(
        cls,
        directory: str | Path,
        *,
        model: str | Path | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
        chat_template: str | Path | None = None,
        **changes: Any,
    ) -> LLM:
        """An LLM that goes on where `save_state` was called: `resume` finishes what had not ended, and every token is
        the one that it would have been.

            llm = LLM.restore("saved", num_pages=1000)
            outputs = llm.resume()

        `stats` counts on; the history of steps and the times of outputs begin anew.

        Args:
            directory: of `save_state`.
            model: where the model is now, if it is not where it was. Its weights must be the same.
            tokenizer, chat_template: as for `LLM`; give those that were given to the LLM that was saved.
            changes: fields of EngineConfig that may be others now: `num_pages` or `pool_bytes`, `admission`, `victim`,
                `max_num_batched_tokens`, `token_budgets`, `steps_per_burst`, `gpu_memory_utilization`, `preemption` and
                what belongs to it. A policy that is not one of `jpaged.policy` must be given.

        Raises:
            ValueError: the directory is not whole or of another version, the model, its weights or the tokenizer are
                others, a field is changed that may not be, or the pages in use do not fit.
        """
        saved = Saved(directory)
        own = SavedLLM.read(saved)
        config = saved.config(**changes)
        llm = cls(model or own.model, config=config, tokenizer=tokenizer, chat_template=chat_template)
        try:
            if llm.tokenizer.fingerprint() != own.tokenizer:
                raise ValueError(f"{directory} was saved with another tokenizer: give it, as tokenizer=")
            llm.engine.load_state(saved)
            llm._inputs = Inputs(llm.tokenizer, own.next_id)
            llm._left = llm._streams.left(own.outputs(llm.engine.unfinished(), llm.tokenizer))
        except BaseException:
            llm.close()
            raise
        return llm

    def resume(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Finishes the requests that `restore` found, as `generate` does its own.

        Returns:
            The outputs of all that had not ended, or whose output had not been taken, in the order of submission; each
            with all its text and log-probabilities, also what it had before. A second time there are none.
        """
        left, self._left = self._left, None
        if left is None:
            return []
        return self._collect(self._streams.events(left), len(left.outputs), use_tqdm)

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

    def warmup(self, *, use_tqdm: bool = True) -> None:
        """Compiles every program now instead of when it is first needed.

        Args:
            use_tqdm: show a progress bar that counts programs.
        """
        self.engine.warmup(use_tqdm=use_tqdm)

    def stats(self) -> EngineStats:
        """Totals since the start, and how pages stand. A notebook shows them as a table."""
        return self.engine.stats()

    @property
    def history(self) -> History:
        """What each step did: `history.to_arrays()`, `history.to_dataframe()`, `history[-1]`."""
        return History(self.engine.history)

    @property
    def trace(self) -> Trace:
        """All inputs of the engine and what each step decided; it grows as the engine runs.

        Raises:
            ValueError: the engine keeps none.
        """
        trace = self.engine.trace
        if trace is None:
            raise ValueError(f"the trace of {self.model} is off: make the LLM with trace=True")
        return trace

    def replay(self, until: int | None = None) -> EngineState:
        """Runs the inputs of the engine again, beside it, up to and with step `until` (None: all), compares every step
        with the trace to the bit, and returns the state there; see `jpaged.record.replay`. It takes
        memory for another pool.

        Raises:
            ValueError: there is no trace, no such step in it, or other weights were taken before it.
            RuntimeError: a step did something else.
        """
        with self.engine.paused():
            return replay(self.trace, self.decoder, self.params, until)

    def plot_pages(self, step: int | None = None) -> Figure:
        """The pool over time, and the owner of each page after step `step` of the trace, requests that ended in it
        included.
        None: the first step in which most pages were in use; without a trace, how things stand.

        Raises:
            ValueError: there is no such step, or no trace.
        """
        from jpaged.viz.engine import engine_pages

        with self.engine.paused():
            return engine_pages(self.engine, step)

    def plot_timeline(self) -> Figure:
        """What each request did in each step of the trace: waited, computed its prompt, decoded, or had lost its slot.

        Raises:
            ValueError: there is no trace, or nothing in it.
        """
        from jpaged.viz.timeline import plot_timeline

        with self.engine.paused():
            return plot_timeline(self.trace)

    def reset_prefix_cache(self) -> bool:
        """Makes all cached pages free. Returns False, and does nothing, while requests run."""
        return self.engine.reset_prefix_cache()

    def update_weights(self, model: str | Path) -> None:
        """Replaces the weights by those of another checkpoint of the same configuration. Nothing is compiled; what the
        old ones computed is never found again.

        Names, shapes and configuration are checked before anything changes. Then each weight is read, the old one is
        deleted, and the new one takes its place: two models are never in memory. An array of `params` that was kept is
        of no use afterwards.

        Raises:
            RuntimeError: while requests have not ended.
            ValueError: for an unknown model, or one of another configuration. Nothing has changed then. Also for
                weights that cannot be read: then this LLM has no usable weights, and refuses requests with a
                RuntimeError until this method has been called with a checkpoint that is whole.
        """
        checkpoint = load_checkpoint(resolve(model))
        with self.engine.paused():
            new, running = asdict(checkpoint.config), self.decoder.config
            if other := [f"{k} {new.get(k)!r} (here {v!r})" for k, v in asdict(running).items() if new.get(k) != v]:
                raise ValueError(f"{model} has another configuration than {self.model}: {', '.join(other)}")
            named = checkpoint.parameters(self.config.dtype)
            self.engine.update_params(lambda params: replace_weights(params, running, named))
            self.model = str(model)

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
