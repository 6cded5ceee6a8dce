"""What Python costs: `python -m jpaged.bench.host` prints tables of one run, in which the device is a stand-in.

The stand-in keeps a queue and slots in numpy and gives every running request a token a step, so that all of the time
that is not its own is the host's: submission, the queue, books, reading records, detokenising, events and outputs.
Times are processor seconds of this process, and of a table the ratios are worth more than the seconds.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jpaged.config import EngineConfig
from jpaged.models.nothing import NoModel
from jpaged.models.spec import ModelConfig
from jpaged.request import Request, SamplingParams
from jpaged.runtime.device import DeviceSide, Flight
from jpaged.runtime.engine import Engine
from jpaged.runtime.programs import Figures
from jpaged.runtime.streams import Streams
from jpaged.step import NO_REQUEST, Finish, StepRecord, Submission
from jpaged.text.tokenizer import Tokenizer

VOCAB = 512
_MODEL = ModelConfig(
    family="nothing", vocab_size=VOCAB, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=2, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip


class StandIn:
    """In place of `DeviceSide`: each request that has a slot gets a token in each step. `seconds` are its own."""

    trace = None

    def __init__(self, device: DeviceSide, slots: int, steps: int):
        self._device, self._steps = device, steps
        self._waiting: deque[tuple[int, int]] = deque()  # uid, tokens to come
        self._uid, self._left = np.full(slots, NO_REQUEST, np.int32), np.zeros(slots, np.int32)
        self.bursts: dict[tuple[int, int], Any] = {}
        self.compile_seconds, self.num_programs, self.seconds = 0.0, 0, 0.0
        empty = StepRecord.zeros(slots)
        self._empty = {
            name: np.broadcast_to(np.asarray(value), (steps, *value.shape))
            for name, value in vars(empty).items()
            if value is not None
        }
        self.figures = self.nothing()

    def nothing(self) -> Figures:
        return self._device.nothing()

    def put(self, batch: Submission) -> None:
        start = time.process_time()
        for uid, prompt, most in zip(
            batch.uid[batch.valid].tolist(), batch.num_prompt_tokens[batch.valid].tolist(),
            batch.sampling.max_len[batch.valid].tolist(), strict=True,
        ):  # fmt: skip
            self._waiting.append((uid, most - prompt))
        self.figures = replace(self.figures, demand=np.int32(1))
        self.seconds += time.process_time() - start

    def tell(self, told: Any) -> None:
        pass

    def exchange(self) -> None:
        pass

    def launch(self, budget: int, candidates: int) -> Flight:
        start = time.process_time()
        shape = self._steps, len(self._uid)
        uid, finish = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for step in range(self._steps):
            for slot in np.flatnonzero(self._uid == NO_REQUEST).tolist():
                if not self._waiting:
                    break
                self._uid[slot], self._left[slot] = self._waiting.popleft()
            uid[step] = self._uid
            self._left -= self._uid != NO_REQUEST
            ends = (self._uid != NO_REQUEST) & (self._left == 0)
            finish[step] = np.where(ends, Finish.LENGTH, Finish.NOT)
            self._uid[ends] = NO_REQUEST
        sampled = uid != NO_REQUEST
        columns = self._empty | {
            "uid": uid, "finish": finish, "sampled": sampled, "scheduled": sampled.astype(np.int32),
            "token": uid % VOCAB, "logprob": np.full(shape, -1.0, np.float32),
        }  # fmt: skip
        busy = np.int32(bool(self._waiting) or (self._uid != NO_REQUEST).any())
        self.figures = replace(self.figures, demand=busy)
        self.seconds += time.process_time() - start
        return Flight(budget, self._steps, StepRecord(**columns), busy, None)  # type: ignore[arg-type]

    def close(self) -> None:
        self._device.close()


def stand_in_engine(*, slots: int, queue: int = 1024, steps: int = 1) -> Engine:
    """An engine whose device is a stand-in."""
    config = EngineConfig(
        page_size=16, num_pages=64, max_num_seqs=slots, max_num_batched_tokens=slots, max_queue=queue,
        max_model_len=1024, dtype="float32", steps_per_burst=steps, async_scheduling=False,
    )  # fmt: skip
    engine = Engine(NoModel(vocab=VOCAB), {"nothing": jnp.zeros(1)}, _MODEL, config)
    engine.device = StandIn(engine.device, slots, steps)  # type: ignore[assignment]
    return engine


def words_tokenizer() -> Tokenizer:
    """A vocabulary of VOCAB words."""
    backend = Backend(models.WordLevel({f"Ġw{number}": number for number in range(VOCAB)}, unk_token="Ġw0"))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def run(engine: Engine, requests: list[Request], *, keep: list[Any] | None = None) -> int:
    """Runs requests as `LLM.generate` does; returns how many events there were."""
    streams = Streams(engine, words_tokenizer())
    events = 0
    for event in streams.events(streams.open(requests)):
        events += 1
        if event.all_finished and keep is not None:
            keep.append(event.output)
    return events


def requests_of(count: int, *, tokens: int, prompt: int = 8) -> list[Request]:
    """Requests for `tokens` tokens after prompts of `prompt` tokens."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [Request(str(number), (number % VOCAB,) * prompt, params) for number in range(count)]


def _host_seconds(engine: Engine, requests: list[Request]) -> float:
    before, start = engine.device.seconds, time.process_time()  # type: ignore[attr-defined]
    run(engine, requests, keep=[])
    return time.process_time() - start - (engine.device.seconds - before)  # type: ignore[attr-defined]


def main() -> None:
    """Prints the tables."""
    print("A call with many short requests (8 tokens in, 4 out, 64 slots), microseconds of the host a request:")
    print("| requests | us a request | to the first |\n|---|---|---|")
    first = None
    for count in (1_000, 10_000, 100_000):
        engine = stand_in_engine(slots=64)
        _host_seconds(engine, requests_of(200, tokens=4))
        each = _host_seconds(engine, requests_of(count, tokens=4)) / count
        first = first or each
        print(f"| {count:,} | {1e6 * each:.1f} | {each / first:.2f} |")
    print("\nA long prompt, 64 requests of 64 tokens each, microseconds of the host a token:")
    print("| prompt | us a token | to the first |\n|---|---|---|")
    first = None
    for prompt in (8, 900):
        engine = stand_in_engine(slots=64)
        _host_seconds(engine, requests_of(64, tokens=4))
        each = _host_seconds(engine, requests_of(64, tokens=64, prompt=prompt)) / 64 / 64
        first = first or each
        print(f"| {prompt} | {1e6 * each:.2f} | {each / first:.2f} |")
    print("\n256 rows decoding in bursts of 8 steps, milliseconds of the host a burst:")
    engine = stand_in_engine(slots=256, steps=8)
    _host_seconds(engine, requests_of(256, tokens=16))
    seconds = _host_seconds(engine, requests_of(256, tokens=800))
    print(f"{1e3 * seconds / 100:.2f} ms for 2,048 tokens, {1e6 * seconds / 100 / 2048:.2f} us a token")


if __name__ == "__main__":
    main()
