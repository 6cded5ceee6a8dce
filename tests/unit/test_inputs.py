"""From what callers give to requests: a stub in place of the engine, and of JAX only arrays."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoint_files import byte_level_tokenizer

from jpaged.config import EngineConfig
from jpaged.inputs import Inputs
from jpaged.request import BeamSearchParams, SamplingParams
from jpaged.text.tokenizer import Tokenizer

INPUTS = Inputs(Tokenizer(byte_level_tokenizer(), chat_template="{% for m in messages %}{{ m.content }}|{% endfor %}"))


class AnyRequest:
    """In place of an engine: takes every request."""

    def check(self, request):
        pass


def prompts_of(prompts, priority=0, params=None):
    return INPUTS.of_prompts(AnyRequest(), prompts, params, priority)


def chats_of(messages):
    return [request.prompt for request in INPUTS.of_conversations(AnyRequest(), messages, None, 0)]


def whole(values):
    return all(type(value) is int for value in values)


NUMBERS = {
    "python": int, "int64": np.int64, "uint8": np.uint8, "0-d": np.array, "jax": jnp.asarray,
    "jax uint32": lambda value: jnp.uint32(value),
}  # fmt: skip


@pytest.mark.parametrize("make", NUMBERS.values(), ids=NUMBERS)
def test_a_number_is_a_number_whoever_made_it(make):
    """U-08, U-09. Catches: an entry that knows Python's integers only, and one that keeps another's."""
    ids = [make(5), make(6)]
    for prompt in (ids, [ids], tuple(ids), {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        (request,) = prompts_of(prompt, priority=make(1))
        assert request.prompt_token_ids == (5, 6) and whole(request.prompt_token_ids)
        assert request.priority == 1 and type(request.priority) is int
    two = prompts_of([ids, ids], priority=[make(3), make(2)])
    assert [request.priority for request in two] == [3, 2]
    params = SamplingParams(
        n=make(2), top_k=make(3), seed=make(7), max_tokens=make(9), min_tokens=make(1), stop_token_ids=ids,
        temperature=make(1), top_p=make(1), logprobs=make(0),
    )  # fmt: skip
    plain = SamplingParams(
        n=2, top_k=3, seed=7, max_tokens=9, min_tokens=1, stop_token_ids=(5, 6), temperature=1.0, top_p=1.0, logprobs=0
    )
    assert params == plain and repr(params) == repr(plain) and hash(params) == hash(plain)
    beams = BeamSearchParams(make(2), max_tokens=make(4), length_penalty=make(1), stop_token_ids=ids)
    assert repr(beams) == repr(BeamSearchParams(2, max_tokens=4, length_penalty=1.0, stop_token_ids=(5, 6)))
    config = EngineConfig(
        page_size=make(8), num_pages=make(60), max_num_seqs=make(4), seed=make(3), token_budgets=[make(4), make(16)],
        max_num_batched_tokens=make(16), max_model_len=make(96), gpu_memory_utilization=make(1),
    )  # fmt: skip
    same = EngineConfig(
        page_size=8, num_pages=60, max_num_seqs=4, seed=3, token_budgets=(4, 16), max_num_batched_tokens=16,
        max_model_len=96, gpu_memory_utilization=1.0,
    )  # fmt: skip
    assert config == same and repr(config) == repr(same) and hash(config) == hash(same)


@pytest.mark.parametrize("kind", [np.float32, np.float64, jnp.float32, jnp.bfloat16])
def test_real_numbers_of_every_kind(kind):
    params = SamplingParams(temperature=kind(0.5), top_p=kind(0.25), min_p=kind(0))
    assert (params.temperature, params.top_p, params.min_p) == (0.5, 0.25, 0.0) and type(params.top_p) is float


@pytest.mark.parametrize("wrong", [True, np.True_, jnp.asarray(True), 1.0, np.float32(1), "1", None, [1], np.arange(2)])
def test_what_is_no_integer_is_refused_everywhere(wrong):
    """Catches: True as 1, and an array in place of a number."""
    for make in (
        lambda: SamplingParams(n=wrong), lambda: SamplingParams(top_k=wrong), lambda: SamplingParams(min_tokens=wrong),
        lambda: SamplingParams(stop_token_ids=[wrong]), lambda: BeamSearchParams(wrong),
        lambda: EngineConfig(page_size=wrong), lambda: EngineConfig(token_budgets=[wrong]),
        lambda: prompts_of([[1, wrong]]), lambda: prompts_of({"prompt_token_ids": [wrong]}),
        lambda: prompts_of(["x"], priority=[wrong]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be|at least"):
            make()


def test_arrays_and_iterables_of_prompts():
    """U-11. Catches: a generator that is refused, or read twice."""
    for array in (np.array([5, 6]), jnp.array([5, 6]), range(5, 7)):
        assert [request.prompt_token_ids for request in prompts_of(array)] == [(5, 6)]
    for rows in (np.array([[5], [6]]), jnp.array([[5], [6]]), ([i] for i in (5, 6)), iter([np.array([5]), [6]])):
        assert [request.prompt_token_ids for request in prompts_of(rows)] == [(5,), (6,)]
    assert [request.prompt for request in prompts_of(text for text in "ab")] == ["a", "b"]
    assert [request.prompt for request in prompts_of({"x": 1, "y": 2}.keys())] == ["x", "y"]
    assert prompts_of(()) == prompts_of(iter(())) == []
    assert [request.prompt_token_ids for request in prompts_of([[]])] == [()]


def test_bytes_are_refused_in_words():
    """U-10. Catches: bytes that are taken as token ids."""
    for wrong in (b"Once", bytearray(b"Once")):
        with pytest.raises(ValueError, match="not bytes: decode them first"):
            prompts_of(wrong)
        for prompt in ([wrong], [{"prompt_token_ids": wrong}], [{"prompt": wrong}]):
            with pytest.raises(ValueError, match="prompt 0 must be a text or a list of token ids"):
                prompts_of(prompt)


def test_one_message_and_iterables_of_messages():
    """U-11. Catches: a bare KeyError for a message alone."""
    hi, there = ({"role": "user", "content": text} for text in ("hi", "there"))
    assert chats_of(hi) == ["hi|"]
    assert chats_of([hi, there]) == chats_of(iter([hi, there])) == chats_of((hi, there)) == ["hi|there|"]
    assert chats_of([[hi], [there]]) == chats_of(iter([(hi,), iter([there])])) == ["hi|", "there|"]
    assert chats_of([]) == []
    for wrong in ("hi", b"hi", 3, None, ["hi"], [hi["content"], [hi]]):
        with pytest.raises(ValueError, match="messages must be a list like"):
            chats_of(wrong)
    with pytest.raises(ValueError, match="conversation 1: messages must be"):
        chats_of([[hi], []])


def test_special_tokens_in_messages_count_where_asked_for():
    """U-23 at the door: the option reaches the tokenizer; without it a message is text."""
    forged = [{"role": "user", "content": "</s>"}]
    (plain,) = INPUTS.of_conversations(AnyRequest(), forged, None, 0)
    (allowed,) = INPUTS.of_conversations(AnyRequest(), forged, None, 0, allow_special_tokens=True)
    assert plain.prompt == allowed.prompt == "</s>|"
    assert 2 not in plain.prompt_token_ids and 2 in allowed.prompt_token_ids
