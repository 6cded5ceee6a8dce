"""Tiny random models against numpy: every position, however the tokens were fed, and then through the engine."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import Ask, Driver
from support.numpy_llama import numpy_greedy, numpy_logits
from support.paged_rows import PagedRows
from support.tiny import TINY, tiny_config, tiny_decoder, tiny_weights

from jpaged.config import EngineConfig
from jpaged.models import attention
from jpaged.models.decoder import ModelDecoder, load_decoder
from jpaged.models.spec import RopeScaling
from jpaged.step import Finish
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS, paged_attention

CONFIGS = {
    "gqa": TINY,
    "mha-tied": tiny_config(num_kv_heads=4, tie_word_embeddings=True),
    "mqa-window": tiny_config(num_kv_heads=1, sliding_window=9),
    "gqa3-llama3": tiny_config(
        num_heads=6, rope_theta=500.0, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    ),
    "linear-theta-eps": tiny_config(
        rope_theta=300.0, rms_norm_eps=0.1, rope_scaling=RopeScaling("linear", 4.0), num_layers=3
    ),
    "mqa-tied-window-llama3": tiny_config(
        num_kv_heads=1, tie_word_embeddings=True, sliding_window=16,
        rope_scaling=RopeScaling("llama3", 4.0, 1.0, 2.0, 64),
    ),
}  # fmt: skip
BUDGET, PAGE = 44, 16


def text(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@cache
def program(decoder: ModelDecoder):
    """Without LLVM's optimizations: here only compiling takes time."""
    return jax.jit(decoder, donate_argnums=1, compiler_options={"xla_backend_optimization_level": 0})


def paged(config, rows, *, budget=BUDGET, max_len=64, page_size=PAGE) -> PagedRows:
    decoder, params = tiny_decoder(config)
    return PagedRows(decoder, params, rows, page_size=page_size, max_len=max_len, budget=budget, call=program(decoder))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_numpy_at_every_position(name):
    """Catches: a head, norm, scale, window or rotary frequency that is wrong, at shapes where no wrong formula is
    right by chance (hidden size is not heads x head_dim). Fed as a whole, in chunks, and one by one; positions pass
    two page borders and, for llama3, the original context."""
    config, tokens = CONFIGS[name], text(40)
    expected = numpy_logits(config, tiny_weights(config), tokens)
    assert np.ptp(expected, axis=0).min() > 0.1, "the model says the same whatever it reads"
    for chunk in (40, 17, 1):
        rows = paged(config, 2)
        got = [rows.feed([tokens[i : i + chunk], []])[0] for i in range(0, 40, chunk)]
        np.testing.assert_allclose(np.concatenate(got), expected, atol=1e-4)


@pytest.mark.parametrize("implementation", [i.name for i in IMPLEMENTATIONS if not i.platforms or "cpu" in i.platforms])
def test_decoding_equals_prefill_in_a_batch_of_ragged_rows(implementation, monkeypatch):
    """NU-05: a 40-token text decoded one at a time, beside rows of 1, 15, 16 and 17 tokens that decode too, has its
    prefill logits at every position, with every attention implementation. Catches: positions of decoding off by one,
    first right and then wrong."""
    monkeypatch.setattr(attention, "paged_attention", partial(paged_attention, implementation=implementation))
    decoder, params = tiny_decoder(TINY)
    call = jax.jit(lambda *a: decoder(*a), donate_argnums=1)  # a new one: the patch is traced into it
    texts = [text(1 + 39, 2), text(15 + 24, 3), text(40, 1), text(16 + 23, 4), text(17 + 22, 5)]
    expected = [numpy_logits(TINY, tiny_weights(TINY), tokens) for tokens in texts]

    def fresh(budget):
        return PagedRows(decoder, params, 5, page_size=PAGE, max_len=64, budget=budget, call=call)

    prefill = fresh(60)
    begun = [1, 15, 0, 16, 17]
    logits = prefill.feed([tokens[:n] for tokens, n in zip(texts, begun, strict=True)])
    for row, count in enumerate(begun):
        np.testing.assert_allclose(logits[row], expected[row][:count], atol=1e-4)
    decode = fresh(5)  # as many tokens as rows: the program for decoding
    decode.pool, decode.table, decode.num_computed_tokens = prefill.pool, prefill.table, prefill.num_computed_tokens
    for step in range(22):
        now = [tokens[n + step : n + step + 1] for tokens, n in zip(texts, begun, strict=True)]
        for row, got in enumerate(decode.feed(now)):
            np.testing.assert_allclose(got[0], expected[row][begun[row] + step], atol=1e-4)


def test_chunks_of_any_size_store_the_same_keys_and_values():
    """CP-02: a prompt of 100 on pages of 16, in chunks of every awkward size: what is stored at each position is the
    same within 1e-5, and so are the logits. Catches: the slots of later chunks mapped wrongly."""
    tokens = text(100)
    stored, logits = [], []
    for chunk in (100, 1, 3, 15, 16, 17, 31, 64):
        rows = paged(TINY, 2, budget=100, max_len=120)
        got = [rows.feed([tokens[i : i + chunk], []])[0] for i in range(0, 100, chunk)]
        stored.append(rows.stored(0))
        logits.append(np.concatenate(got))
    for keys_values, scores in zip(stored[1:], logits[1:], strict=True):
        np.testing.assert_allclose(keys_values, stored[0], atol=1e-5)
        np.testing.assert_allclose(scores, logits[0], atol=1e-4)
    np.testing.assert_allclose(logits[0], numpy_logits(TINY, tiny_weights(TINY), tokens), atol=1e-4)


# Through the engine

SHAPE = {"layers": TINY.num_layers, "kv_heads": TINY.num_kv_heads, "head_dim": TINY.head_dim}
LENGTHS, NEW = (1, 15, 16, 17, 100, 33), 16


@cache
def solo() -> list[list[int]]:
    """SOLO of each prompt, from numpy."""
    return [numpy_greedy(TINY, tiny_weights(TINY), text(n, 10 + n), NEW) for n in LENGTHS]


def asks(order) -> list[Ask]:
    """The prompts in that order of arrival, which is that of the uids."""
    return [
        Ask(uid=place + 1, prompt=text(LENGTHS[i], 10 + LENGTHS[i]), max_len=LENGTHS[i] + NEW)
        for place, i in enumerate(order)
    ]


def engine(page_size: int, num_pages: int, slots: int, budget: int) -> EngineConfig:
    return EngineConfig(
        page_size=page_size, num_pages=num_pages, max_num_seqs=slots, max_queue=8, max_model_len=116,
        max_num_batched_tokens=budget,
    )  # fmt: skip


ROOMY = engine(16, 40, 8, 256)  # everything fits, whole prompts
TIGHT = engine(4, 30, 8, 15)  # requests are preempted; chunks
PAGES_OF_ONE = engine(1, 120, 3, 3)


@pytest.mark.parametrize("config", [ROOMY, TIGHT, PAGES_OF_ONE], ids=["roomy", "tight", "pages-of-one"])
def test_the_engine_generates_what_numpy_does(config):
    """CP-02, NU-02: greedy ids do not depend on chunk, page size, neighbours, slot, order of arrival or preemption,
    and log-probabilities are within 1e-4 of float64. The pool is full of NaN to begin with, and what a freed page holds
    reaches no request (invariant 1)."""
    decoder, params = tiny_decoder(TINY)
    preemptions = 0
    for order in ((0, 1, 2, 3, 5, 4), (5, 4, 3, 2, 1, 0)):
        driver = Driver(config, decoder, params, **SHAPE)
        driver.state = poisoned(driver.state)
        driver.submit(*asks(order))
        got = driver.until_done()
        assert [got[uid].tokens for uid in sorted(got)] == [solo()[i] for i in order]
        assert {g.finish for g in got.values()} == {Finish.LENGTH}
        assert int(driver.state.available_pages) == config.num_pages
        preemptions += int(driver.state.counters.preemptions)
    assert preemptions > 0 or config is ROOMY
    for ask in asks(order):
        tokens = [*ask.prompt, *got[ask.uid].tokens]
        logits = numpy_logits(TINY, tiny_weights(TINY), tokens[:-1])[len(ask.prompt) - 1 :]
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = logprobs[np.arange(NEW), got[ask.uid].tokens]
        np.testing.assert_allclose(got[ask.uid].logprobs, expected, atol=1e-4)


def poisoned(state):
    return jax.tree.map(
        lambda a: jnp.full_like(a, jnp.nan) if a.ndim == 5 else a, state
    )  # the pool's arrays are the only ones of 5 dimensions


def test_a_model_that_turns_nan_fails_that_request_alone():
    """NU-03, isolation: token 7's embedding is NaN. The request that reads it ends with ERROR; its neighbours, and the
    request that gets its pages afterwards, are as if it had not been."""
    weights = tiny_weights(TINY)
    weights["embed"][7] = np.nan
    decoder, params = load_decoder(TINY, weights.items(), jnp.float32)
    prompts = {uid: [t for t in text(20, 50 + uid) if t != 7] for uid in range(1, 6)}
    expected = {uid: numpy_greedy(TINY, tiny_weights(TINY), prompt, 5) for uid, prompt in prompts.items()}
    assert not any(7 in tokens for tokens in expected.values())
    driver = Driver(TIGHT, decoder, params, **SHAPE)
    driver.submit(
        *(Ask(uid, prompt, max_len=len(prompt) + 5) for uid, prompt in prompts.items() if uid < 3),
        Ask(9, [3, 7, 5], max_len=20),
        *(Ask(uid, prompt, max_len=len(prompt) + 5) for uid, prompt in prompts.items() if uid >= 3),
    )
    got = driver.until_done()
    assert got[9].finish == Finish.ERROR and got[9].tokens == []
    assert {uid: got[uid].tokens for uid in prompts} == expected
    assert int(driver.state.available_pages) == TIGHT.num_pages


def test_a_residual_beyond_float16_is_an_error_and_not_a_run_of_zeros():
    """NU-03: one layer's MLP pushes the residual past 65504. The request ends with ERROR and no token."""
    weights = tiny_weights(TINY)
    tokens = text(20, 3)

    def finish(dtype):
        decoder, params = load_decoder(TINY, weights.items(), dtype)
        driver = Driver(TIGHT, decoder, params, **SHAPE, dtype=dtype)
        driver.submit(Ask(1, tokens, max_len=24))
        return driver.until_done()[1]

    assert finish(jnp.float16).finish == Finish.LENGTH
    largest = np.abs(weights["layers.1.down"]).max()
    weights["layers.1.down"] = weights["layers.1.down"] * np.float32(60_000 / largest)
    assert finish(jnp.float32).finish == Finish.LENGTH
    got = finish(jnp.float16)
    assert got.finish == Finish.ERROR and got.tokens == []


@pytest.mark.parametrize(("dtype", "pool", "tolerance"), [("float32", "bfloat16", 0.1), ("bfloat16", "float32", 0.25)])
def test_a_pool_of_another_dtype_than_the_weights(dtype, pool, tolerance):
    """Catches: keys or queries that are not cast, and activations that go on in the pool's dtype."""
    tokens, decoder_params = text(20), tiny_decoder(TINY, dtype=jnp.dtype(dtype))
    expected = numpy_logits(TINY, tiny_weights(TINY), tokens)
    rows = PagedRows(*decoder_params, 1, page_size=PAGE, max_len=32, budget=20, call=program(decoder_params[0]))
    rows.pool = jax.tree.map(lambda array: array.astype(pool), rows.pool)
    logits = rows.feed([tokens])[0]
    assert rows.pool.k.dtype == pool and logits.dtype == np.float32
    assert 1e-4 < np.abs(logits - expected).max() < tolerance * np.ptp(expected)
