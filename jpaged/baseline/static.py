"""Static batching, as it was done before continuous batching, with the same decoder, attention and sampler.

Requests are taken `batch_size` at a time, in the order they came. Each has a row with memory for `max_model_len`
tokens, reserved before it starts. Prompts are padded to the longest and computed together, `CHUNK` tokens of every row
at a time; then every row computes a token a step until the longest request of the batch has ended. Rows that are
padding, or have ended, are computed all the same: that is what static means.

The contiguous cache is a pool whose pages are whole rows, so the decoder and its attention are exactly the engine's.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.spec import ModelConfig
from jpaged.pool import Decoder, KVPool, StepBatch
from jpaged.record.stats import EngineStats, StepStats, TokenEvent
from jpaged.request import FinishReason, Request
from jpaged.runtime.prepare import check_request, fill_row
from jpaged.runtime.reading import FINISH_REASONS
from jpaged.step import Finish, Submission, stop
from jpaged.step.sampling.sample import sample

#: Prompt tokens of each row that one step computes.
CHUNK = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StaticState:
    """The running batch. [N] rows, [T] tokens a row."""

    pool: KVPool  # page 1 + r belongs to row r
    rows: Submission  # [N], the requests; `tokens` grow
    num_tokens: jax.Array  # [N] int32, tokens of prompt and output
    finish: jax.Array  # [N] int32, a Finish


def _batch(state: StaticState, first: jax.Array, count: int, logit: jax.Array) -> StepBatch:
    """`count` tokens of every row from position `first` `[N]` on; logits of the row's token number `logit` `[N]`."""
    rows, longest = state.rows.tokens.shape
    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), count)
    # A row that has ended computes its last place again and again.
    first = jnp.clip(first, 0, longest - count)
    position = first[row] + jnp.tile(jnp.arange(count, dtype=jnp.int32), rows)
    return StepBatch(
        token_ids=state.rows.tokens[row, position],
        positions=position,
        token_row=row,
        query_start=jnp.arange(rows + 1, dtype=jnp.int32) * count,
        kv_len=first + count,
        page_table=jnp.arange(1, rows + 1, dtype=jnp.int32)[:, None],
        logit_index=jnp.arange(rows, dtype=jnp.int32) * count + logit,
    )


def _advance(decoder: Decoder, params: Any, state: StaticState, batch: StepBatch, due: jax.Array):
    """Computes `batch` and gives the rows of `due` `[N] bool` a token. Returns the state and what came out."""
    logits, pool = decoder(params, state.pool, batch)
    rows, known = state.rows, state.num_tokens
    token, logprob, healthy = sample(logits, rows.sampling.where(due), known)
    sampled = due & healthy
    known = known + sampled.astype(jnp.int32)
    ended = stop.finish(rows.sampling, token, known, sampled, due & ~healthy)
    row = jnp.where(sampled, jnp.arange(known.shape[0]), known.shape[0])
    rows = replace(rows, tokens=rows.tokens.at[row, known - 1].set(token, mode="drop"))
    finish = jnp.where(ended != Finish.NOT, ended, state.finish)
    return StaticState(pool, rows, known, finish), (sampled, token, logprob, ended)


def prefill(decoder: Decoder, params: Any, state: StaticState, chunk: jax.Array):
    """Computes the prompt tokens number `chunk * CHUNK` and on of every row."""
    first = jnp.full_like(state.num_tokens, chunk * CHUNK)
    last = state.rows.num_prompt_tokens - 1 - first
    due = state.rows.valid & (last >= 0) & (last < CHUNK)
    batch = _batch(state, first, CHUNK, jnp.clip(last, 0, CHUNK - 1))
    return _advance(decoder, params, state, batch, due)


def decode(decoder: Decoder, params: Any, state: StaticState, step: jax.Array):
    """Computes one token of every row: the last one, or for a row that has ended one more place of its memory."""
    running = state.rows.valid & (state.finish == Finish.NOT)
    first = jnp.where(running, state.num_tokens - 1, jnp.max(state.rows.num_prompt_tokens) + step)
    return _advance(decoder, params, state, _batch(state, first, 1, jnp.zeros_like(first)), running)


class StaticEngine:
    """Static batching behind the interface of `Engine`, so that both can be measured alike.

    Args:
        decoder, params, model_config: as for `Engine`.
        batch_size: rows.
        max_model_len: tokens reserved for each row.
        dtype: of the cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Any,
        model_config: ModelConfig,
        *,
        batch_size: int,
        max_model_len: int,
        dtype: str = "float32",
        seed: int = 0,
    ):
        self.batch_size = batch_size
        #: tokens reserved for a row: a page is a row
        self.page_size = -(-max_model_len // CHUNK) * CHUNK
        self.model_config = model_config
        self.max_model_len = max_model_len
        self.compile_seconds = 0.0
        self.history: list[StepStats] = []
        self._decoder, self._params = decoder, params
        self._seeds = np.random.default_rng(seed)
        self._programs: dict[str, Any] = {}
        self._pool: KVPool | None = KVPool.zeros(
            layers=model_config.num_layers, num_pages=batch_size, kv_heads=model_config.num_kv_heads,
            page_size=self.page_size, head_dim=model_config.head_dim, dtype=jnp.dtype(dtype),
        )  # fmt: skip
        self._pending: deque[Request] = deque()
        self._state: StaticState | None = None
        self._running: dict[int, Request] = {}  # by row
        self._size = self._chunks = self._chunk = self._step = self._longest = 0
        self._useful = self._wasted = self._prompt_tokens = 0

    def check(self, request: Request) -> None:
        """Raises ValueError if `request` can never run here."""
        check_request(
            request, self.model_config, max_model_len=self.max_model_len, page_size=self.page_size,
            num_pages=self.batch_size,
        )  # fmt: skip
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise ValueError(f"the prompt leaves no room for a token within max_model_len {self.max_model_len}")

    def submit(self, request: Request) -> None:
        """Queues a request. Raises ValueError for one that can never run here."""
        self.check(request)
        self._pending.extend(request.continuations())

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self._running)

    @property
    def num_programs(self) -> int:
        return len(self._programs)

    def warmup(self) -> None:
        """Compiles the two programs."""
        rows = Submission.empty(self.batch_size, self.page_size)
        state = jax.eval_shape(self._start, self._pool, rows)
        for function in (prefill, decode):
            self._program(function, state)

    @staticmethod
    def _start(pool: KVPool, rows: Submission) -> StaticState:
        rows = jax.tree.map(jnp.asarray, rows)
        return StaticState(pool, rows, rows.num_prompt_tokens + 0, jnp.zeros_like(rows.num_prompt_tokens))

    def _program(self, function: Any, state: Any) -> Any:
        name = function.__name__
        if name not in self._programs:
            start = time.perf_counter()
            jitted = jax.jit(partial(function, self._decoder), donate_argnums=1)
            self._programs[name] = jitted.lower(self._params, state, jnp.int32(0)).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._programs[name]

    def program_text(self, budget: int) -> str:
        """The program whose steps compute `budget` tokens, as HLO text; it must be compiled already."""
        return self._programs["decode" if budget == self.batch_size else "prefill"].as_text()

    def burst_steps(self, budget: int) -> int:
        """Steps of a burst: always one."""
        return 1

    def _next_batch(self) -> None:
        rows = Submission.empty(self.batch_size, self.page_size)
        self._size = min(self.batch_size, len(self._pending))
        for place in range(self._size):
            request = self._pending.popleft()
            self._running[place] = request
            fill_row(
                rows, place, place, request, self.model_config, max_model_len=self.max_model_len,
                seed=int(self._seeds.integers(2**32)), namespace=0,
            )  # fmt: skip
        self._longest = int(rows.sampling.max_len[: self._size].max())
        self._prompt_tokens += int(rows.num_prompt_tokens.sum())
        self._chunks = -(-int(rows.num_prompt_tokens.max()) // CHUNK)
        self._chunk = self._step = 0
        pool, self._pool = self._pool, None  # it is in the state from now on
        assert pool is not None
        self._state = self._start(pool, rows)

    def burst(self) -> list[TokenEvent]:
        """One step of the batch: a chunk of all prompts, or a token of every row."""
        if not self.has_work:
            return []
        if self._state is None:
            self._next_batch()
        state = self._state
        assert state is not None
        prompts = self._chunk < self._chunks
        function, at, width = (prefill, self._chunk, CHUNK) if prompts else (decode, self._step, 1)
        self._state, out = self._program(function, state)(self._params, state, jnp.int32(at))
        useful = self._useful_tokens(at) if prompts else len(self._running)
        self._chunk, self._step = (self._chunk + 1, self._step) if prompts else (self._chunk, self._step + 1)
        events = self._read(*jax.device_get(out))
        self._note(useful, self.batch_size * width)
        if not self._running:
            self._pool, self._state = self._state.pool, None
        return events

    def reset_prefix_cache(self) -> bool:
        """Nothing is cached between batches."""
        return True

    def abort_all(self) -> None:
        """Gives everything up, waiting or running."""
        self._pending.clear()
        self._running.clear()
        if self._state is not None:
            self._pool, self._state = self._state.pool, None

    def _useful_tokens(self, chunk: int) -> int:
        lengths = [len(request.prompt_token_ids) for request in self._running.values()]
        return sum(int(np.clip(length - chunk * CHUNK, 0, CHUNK)) for length in lengths)

    def _read(self, sampled, token, logprob, ended) -> list[TokenEvent]:
        events = []
        for row in np.flatnonzero(sampled | (ended != Finish.NOT)):
            request, finish = self._running[int(row)], Finish(int(ended[row]))
            new = int(token[row]) if sampled[row] else None
            stop = new if finish == Finish.STOP and new in request.params.stop_token_ids else None
            reason: FinishReason | None = FINISH_REASONS.get(finish)
            events.append(TokenEvent(request.request_id, new, float(logprob[row]), reason, stop, index=request.index))
            if finish != Finish.NOT:
                del self._running[int(row)]
        return events

    def _note(self, useful: int, computed: int) -> None:
        self._useful += useful
        self._wasted += computed - useful
        assert self._state is not None
        # What an ended request left in its row is of no use to anyone any more.
        known = np.asarray(self._state.num_tokens)[list(self._running)]
        prompt_so_far = np.minimum(known, self._chunk * CHUNK) if self._step == 0 else known
        self.history.append(
            StepStats(
                step=len(self.history) + 1,
                running=len(self._running),
                waiting=len(self._pending),
                # The rows of the batch are reserved until its last request has ended.
                pages_in_use=self._size,
                tokens_in_pages=int(prompt_so_far.sum()),
                scheduled_tokens=useful,
                budget=computed,
                admitted=self._size if self._chunk == 1 and self._step == 0 else 0,
                preempted=0,
                longest_of_batch_tokens=self._size * self._longest,
            )
        )

    def stats(self) -> EngineStats:
        """Totals, in the terms of the continuous engine: a page is a row."""
        in_use = self._size if self._state is not None else 0
        return EngineStats(
            steps=len(self.history),
            useful_row_steps=self._useful,
            wasted_row_steps=self._wasted,
            preemptions=0,
            total_pages=self.batch_size,
            free_pages=self.batch_size - in_use,
            in_use_pages=in_use,
            running=len(self._running),
            waiting=len(self._pending),
            num_programs=self.num_programs,
            compile_seconds=self.compile_seconds,
            prefix_queries=self._prompt_tokens,
        )
