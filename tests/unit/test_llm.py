"""The Python API on a tiny random model with a byte-level tokenizer: one token a byte."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import jax
import numpy as np
import pytest
from support.beams import exhaustive, log_softmax
from support.checkpoint_files import HIDDEN, byte_level_tokenizer, hf_config, hf_tensors, write_hf, write_tokenizer
from support.numpy_llama import numpy_logits

from checkpoints import HuggingFaceSource
from jpaged import LLM, BeamSearchParams, EngineConfig, FinishReason, SamplingParams
from jpaged.models.load import load_checkpoint, resolve
from jpaged.request import Request

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG = EngineConfig(
    page_size=8, num_pages=60, max_num_seqs=4, max_num_batched_tokens=16, token_budgets=(16,), max_model_len=96,
    max_queue=4, dtype="float32",
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WITH_LOGPROBS = replace(GREEDY, logprobs=0)


def write_model(path, template=None, seed=5, **changes):
    """A random model that speaks bytes: ids 0, 1, 2 are special, byte b is 3 + b."""
    rng = np.random.default_rng(seed)
    tables = {name: rng.normal(0, 1, (259, HIDDEN)).astype(np.float32) for name in ("embed", "head")}
    tensors = hf_tensors() | {"model.embed_tokens.weight": tables["embed"], "lm_head.weight": tables["head"]}
    write_hf(path, hf_config(vocab_size=259, **changes), tensors)
    write_tokenizer(path, byte_level_tokenizer(), template=template)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"), TEMPLATE)


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(directory, config=CONFIG) as llm:
        yield llm


def test_one_or_many_texts_or_ids(llm):
    one = llm.generate("Hello", GREEDY, use_tqdm=False)
    ids = llm.generate(one[0].prompt_token_ids, GREEDY, use_tqdm=False)
    both = llm.generate(["Hello", {"prompt_token_ids": one[0].prompt_token_ids}], GREEDY, use_tqdm=False)
    array = llm.generate(np.asarray(one[0].prompt_token_ids), GREEDY, use_tqdm=False)
    expected = one[0].outputs[0]
    assert len(expected.token_ids) == 6 and expected.finish_reason == "length" and one[0].prompt == "Hello"
    assert ids[0].prompt is None
    for output in (*ids, *both, *array):
        assert output.outputs[0].token_ids == expected.token_ids
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_results_keep_the_order_of_the_prompts(llm):
    prompts = [f"prompt {i}" * (1 + i % 3) for i in range(23)]
    params = [replace(GREEDY, max_tokens=1 + (7 * i) % 11) for i in range(23)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    for i in (0, 7, 22):
        alone = llm.generate(prompts[i], params[i], use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == outputs[i].outputs[0].token_ids


def test_seeded_sampling_does_not_depend_on_the_batch(llm):
    """SA and NU-02: a seed gives the same tokens alone, in company, and in another slot."""
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7, max_tokens=8, ignore_eos=True)
    alone = llm.generate("abc", params, use_tqdm=False)[0].outputs[0].token_ids
    other = replace(params, seed=8, top_k=0, top_p=1.0)
    batch = llm.generate(["x", "yy", "abc", "zzz", "abc"], [other, GREEDY, params, other, params], use_tqdm=False)
    assert batch[2].outputs[0].token_ids == batch[4].outputs[0].token_ids == alone
    unseeded = [o.outputs[0].token_ids for o in llm.generate(["abc"] * 4, replace(params, seed=None), use_tqdm=False)]
    assert len({tuple(ids) for ids in unseeded}) > 1


def test_logprobs_are_of_the_chosen_tokens(llm):
    """And they are there only where they were asked for."""
    both = llm.generate(["Hello"] * 2, [GREEDY, WITH_LOGPROBS], use_tqdm=False)
    plain, completion = (output.outputs[0] for output in both)
    assert plain.logprobs is None and plain.cumulative_logprob == completion.cumulative_logprob
    chosen = [one[token].logprob for one, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert all(len(one) == 1 for one in completion.logprobs)
    assert all(value <= 0 for value in chosen)
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_chat_uses_the_template_and_one_bos(llm):
    conversation = [{"role": "user", "content": "Hi"}]
    one = llm.chat(conversation, GREEDY, use_tqdm=False)
    longer = [*conversation, {"role": "user", "content": "again"}]
    many = llm.chat([conversation, longer], GREEDY, use_tqdm=False)
    assert one[0].prompt == "<user>Hi\n<assistant>"
    assert one[0].prompt_token_ids.count(1) <= 1
    assert many[0].outputs[0].token_ids == one[0].outputs[0].token_ids
    with pytest.raises(ValueError, match=r"conversation 1: .*no such role"):
        llm.chat([conversation, [{"role": "nobody", "content": ""}]], GREEDY)


def test_a_model_without_a_template_says_so(tmp_path):
    """TK-02: and takes one that is passed."""
    write_model(tmp_path)
    with LLM(tmp_path, config=CONFIG) as llm, pytest.raises(ValueError, match="chat_template="):
        llm.chat([{"role": "user", "content": "Hi"}])
    with LLM(tmp_path, config=CONFIG, chat_template=TEMPLATE) as llm:
        answer = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)[0]
        assert answer.prompt == "<user>Hi\n<assistant>"


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["good", []], "prompt 1: the prompt is empty"),
        (["good", "x" * 97], r"prompt 1: the prompt has \d+ tokens and needs 13 pages"),
        (["good", [1, 5000]], "prompt 1: prompt token ids"),
        (["good", 3], "prompt 1 must be"),
        (["good", {"text": "x"}], "prompt 1 must have"),
        (7, "prompts must be"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm, prompts, words):
    """ST-04, ST-05: the error names the prompt; nothing was scheduled, and the next call works."""
    steps = llm.stats().steps
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert (stats.steps, stats.in_use_pages, stats.waiting) == (steps, 0, 0)
    assert len(llm.generate("good", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6


def test_as_many_parameters_as_prompts(llm):
    with pytest.raises(ValueError, match="2 prompts need as many"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="must be SamplingParams"):
        llm.generate(["a"], [{"temperature": 0}], use_tqdm=False)


def test_stream_is_generate_in_pieces(llm):
    """DT: deltas in order, joined they are the text; the last event of each prompt is its end."""
    prompts = ["one", "two two", "three"]
    params = replace(GREEDY, max_tokens=20)
    whole = llm.generate(prompts, params, use_tqdm=False)
    texts, ids, ended = [""] * 3, [[], [], []], []
    for event in llm.stream(prompts, params):
        assert event.index not in ended
        texts[event.index] += event.delta_text
        ids[event.index] += event.delta_token_ids
        if event.finished:
            ended.append(event.index)
    assert texts == [o.outputs[0].text for o in whole]
    assert ids == [o.outputs[0].token_ids for o in whole]
    assert sorted(ended) == [0, 1, 2]


def test_several_continuations_of_a_prompt(llm):
    """SA-10: in the order of `index`, each with its text, its ids and its end, different ones and the same again; with
    temperature 0 all equal. A stream names whose piece it is."""
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=9, ignore_eos=True)
    one, other = llm.generate(["one", "two two"], params, use_tqdm=False)
    for output in (one, other):
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert len({completion.text for completion in output.outputs}) == 3
        for completion in output.outputs:
            own = replace(params, n=1, seed=4 + completion.index)
            alone = llm.generate(output.prompt, own, use_tqdm=False)[0].outputs[0]
            assert (alone.text, alone.token_ids) == (completion.text, completion.token_ids)
            assert alone.cumulative_logprob == pytest.approx(completion.cumulative_logprob, abs=1e-4)
            assert completion.finish_reason == "length"
    texts, ended = {}, []
    for event in llm.stream(["one", "two two"], params):
        place = event.index, event.continuation
        assert place not in ended and event.output.outputs[event.continuation].finished() == event.finished
        texts[place] = texts.get(place, "") + event.delta_text
        ended += [place] * event.finished
        assert event.output.finished == all((event.index, index) in ended for index in range(3))
    assert texts == {(i, c.index): c.text for i, output in enumerate((one, other)) for c in output.outputs}
    [again] = llm.generate("one", params, use_tqdm=False)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in one.outputs]
    [greedy] = llm.generate("one", replace(params, temperature=0), use_tqdm=False)
    assert len({tuple(c.token_ids) for c in greedy.outputs}) == 1
    with pytest.raises(ValueError, match="n must be at least 1; got 0"):
        SamplingParams(n=0)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_beam_search_finds_what_a_plain_search_of_all_continuations_finds(llm, directory, length_penalty):
    """More prompts than there are slots for, beside a stream: the same sequences with the same scores, in their order;
    and all pages back."""
    checkpoint = load_checkpoint(resolve(directory))
    weights = {name: np.asarray(value) for name, value in checkpoint.parameters("float32")}
    prompts = ["Hello", "a", "the quick brown fox"]
    stop = llm.generate(prompts[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids[2]
    params = BeamSearchParams(3, max_tokens=7, length_penalty=length_penalty, stop_token_ids=[stop])
    stream = llm.stream("beside", replace(GREEDY, max_tokens=30))
    beside = [next(stream)]
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    beside += stream
    ends = {stop, *llm.model_config.eos_token_ids}
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.prompt_token_ids
        assert (output.prompt, ids) == (prompt, llm.tokenizer.encode(prompt))

        def model(tokens, ids=ids):
            return log_softmax(numpy_logits(checkpoint.config, weights, [*ids, *tokens])[-1])

        expected = exhaustive(params, ends, 7, model)
        assert [one.tokens for one in output.sequences] == [[*ids, *tokens] for _, tokens in expected]
        for one, (score, tokens) in zip(output.sequences, expected, strict=True):
            assert one.score == pytest.approx(score, abs=1e-4)
            assert one.cum_logprob == pytest.approx(sum(one.logprobs)) and len(one.logprobs) == len(tokens)
            stopped = tokens[-1] in ends
            assert one.finish_reason == ("stop" if stopped else "length")
            assert one.stop_reason == (stop if tokens[-1] == stop else None)
            assert one.text == llm.tokenizer.decode([*ids, *tokens[: len(tokens) - stopped]])[len(prompt) :]
    stopped = any(one.finish_reason == "stop" for output in outputs for one in output.sequences)
    assert stopped or length_penalty > 0
    alone = llm.generate("beside", replace(GREEDY, max_tokens=30), use_tqdm=False)[0].outputs[0]
    assert "".join(event.delta_text for event in beside) == alone.text
    assert llm.stats().in_use_pages == llm.stats().running == 0


def test_beams_that_can_never_run_are_refused(llm, directory):
    with pytest.raises(ValueError, match=r"5 beams need 5 slots and up to .* there are 4 slots"):
        llm.beam_search("x", BeamSearchParams(5), use_tqdm=False)
    with (
        LLM(directory, config=replace(CONFIG, num_pages=20)) as small,
        pytest.raises(ValueError, match=r"prompt 0: 4 beams need 4 slots and up to 40 pages .* and 20 pages"),
    ):
        small.beam_search(["x", "y"], BeamSearchParams(4, max_tokens=70), use_tqdm=False)
    with pytest.raises(ValueError, match="prompt 0 has 96 tokens: nothing can follow"):
        llm.beam_search([[5] * 96], BeamSearchParams(2), use_tqdm=False)
    assert llm.beam_search([], BeamSearchParams(2), use_tqdm=False) == []
    assert not llm.engine.has_work


def test_a_beam_search_that_is_interrupted_leaves_nothing(llm, monkeypatch):
    def interrupted(budget, candidates):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.device, "program", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search("x", BeamSearchParams(2), use_tqdm=False)
    monkeypatch.undo()
    assert not llm.engine.has_work and llm.stats().in_use_pages == 0
    assert len(llm.beam_search("x", BeamSearchParams(2), use_tqdm=False)[0].sequences) == 2


def test_streams_that_are_open_at_once_do_not_hinder_each_other(llm):
    """NB: two streams taken in turn, a generate within them, and a stream that is kept and never finished. Catches: a
    lock held between two pieces, and events of another stream's request."""
    params = replace(GREEDY, max_tokens=12)
    one, two, three = (llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in ("one", "two", "3"))
    kept = llm.stream("kept", replace(GREEDY, max_tokens=60))
    next(kept)
    got, inside = ([], []), []
    for pieces in zip(llm.stream("one", params), llm.stream("two", params), strict=True):
        for ids, piece in zip(got, pieces, strict=True):
            ids += piece.delta_token_ids
        if not inside:
            inside = llm.generate("3", params, use_tqdm=False)[0].outputs[0].token_ids
    assert (*got, inside) == (one, two, three)
    kept.close()
    assert (llm.stats().running, llm.stats().in_use_pages) == (0, 0)


def test_a_slow_reader_gets_everything_in_order(llm):
    """DT-05: 8 streams in threads of their own, read slower than they are made; the end comes last."""
    params = replace(GREEDY, max_tokens=40)
    prompts = [f"prompt {number}" for number in range(8)]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    got: list[list[int]] = [[] for _ in prompts]
    ends: list[list[bool]] = [[] for _ in prompts]

    def read(number):
        for piece in llm.stream(prompts[number], params):
            time.sleep(0.005)
            got[number] += piece.delta_token_ids
            ends[number].append(piece.finished)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected
    assert all(not any(end[:-1]) and end[-1] for end in ends)


def test_a_burst_that_fails_is_an_error_for_the_call_that_ran_it(llm, monkeypatch):
    """Others go on, and the next call works."""
    expected = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    first, second = llm.stream("first", GREEDY), llm.stream("second", GREEDY)
    next(first), next(second)

    def broken(budget, candidates):
        raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.device, "program", broken)
        with pytest.raises(OSError, match="gone"):
            list(first)
    whole = llm.generate("second", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert list(second)[-1].output.outputs[0].token_ids == whole
    assert llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_leaving_a_stream_early_frees_its_pages(llm):
    for _ in llm.stream(["a" * 40] * 7, replace(GREEDY, max_tokens=40)):
        break
    stats = llm.stats()
    assert (stats.in_use_pages, stats.running, stats.waiting) == (0, 0, 0)


def test_stop_token_is_returned_but_not_shown(llm):
    """ST-02: token ids include the stopping token, the text does not."""
    free = llm.generate("Hello", replace(GREEDY, max_tokens=12), use_tqdm=False)[0].outputs[0]
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    stopped = llm.generate("Hello", replace(GREEDY, max_tokens=12, stop_token_ids=[stop]), use_tqdm=False)[0].outputs[0]
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, stop)
    shown = llm.generate("Hello", replace(GREEDY, max_tokens=first), use_tqdm=False)[0].outputs[0].text if first else ""
    assert stopped.text == shown


def test_works_inside_a_running_loop_and_in_threads(llm):
    """NB-03: from a coroutine, from a thread, and from several threads at once."""
    expected = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    def ids():
        return llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    async def inside():
        return ids()

    assert asyncio.run(inside()) == expected
    found = []
    threads = [threading.Thread(target=lambda: found.append(ids())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3


def test_progress_counts_prompts(llm, capsys):
    """NB-04: one bar a call, its total the prompts, full at the end; off is silent."""
    llm.generate(["a", "b", "c"], replace(GREEDY, n=2))
    assert "3/3" in capsys.readouterr().err
    llm.beam_search(["a", "b"], BeamSearchParams(2, max_tokens=3))
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a"], GREEDY, use_tqdm=False)
    llm.beam_search("a", BeamSearchParams(2, max_tokens=3), use_tqdm=False)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_a_cell_run_again_takes_no_more_memory(directory):
    """NB-01: rebinding the name frees the old engine; close() frees at once, twice is harmless."""

    def live() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = live()
    for _ in range(3):
        llm = LLM(directory, config=CONFIG)
        llm.generate("Hello", GREEDY, use_tqdm=False)
        during = live()
    assert during > before
    once = during - before
    llm = LLM(directory, config=CONFIG)  # the old one is alive while this one is made
    assert live() - before <= once * 1.01
    llm.close()
    llm.close()
    assert repr(llm).endswith("closed)")
    with pytest.raises(RuntimeError, match="was closed"):
        llm.generate("Hello")
    del llm
    assert live() <= before * 1.01 + 4096


def test_a_prompt_sent_again_is_found(llm):
    """What was found is in the output and in the statistics, once a request; a salt of another finds nothing."""
    assert llm.reset_prefix_cache()
    before = llm.stats()
    text = "The same prompt, sent several times."
    first, second = (llm.generate(text, GREEDY, use_tqdm=False)[0] for _ in range(2))
    length = len(first.prompt_token_ids)
    whole = (length - 1) // 8 * 8
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, whole)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.outputs[0].cumulative_logprob == pytest.approx(first.outputs[0].cumulative_logprob)
    salted = [{"prompt": text, "cache_salt": "x"}, {"prompt_token_ids": first.prompt_token_ids, "cache_salt": "x"}]
    found = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for prompt in salted]
    assert found == [0, whole]
    streamed = [event.output.num_cached_tokens for event in llm.stream(text, GREEDY)]
    assert set(streamed) == {whole}
    stats = llm.stats()
    assert stats.prefix_queries - before.prefix_queries == 5 * length
    assert stats.prefix_hits - before.prefix_hits == 3 * whole
    assert stats.cached_pages > 0
    assert stats.total_pages == stats.free_pages + stats.cached_pages + stats.in_use_pages
    with pytest.raises(ValueError, match=r"prompt 1: cache_salt must be a text"):
        llm.generate(["good", {"prompt": text, "cache_salt": ""}], GREEDY)


def test_the_cache_is_not_reset_while_a_stream_is_open(llm):
    stream = llm.stream("abc", replace(GREEDY, max_tokens=30))
    next(stream)
    assert not llm.reset_prefix_cache()
    stream.close()
    assert llm.reset_prefix_cache() and llm.stats().cached_pages == 0


def test_updated_weights_are_those_of_the_other_checkpoint(directory, tmp_path, monkeypatch):
    """PC-02: nothing of the old weights is found, and the output is that of an engine that never had them."""
    write_model(tmp_path / "other", seed=6)
    write_model(tmp_path / "turned", seed=6, rope_theta=5000.0)
    with LLM(directory, config=CONFIG) as llm, LLM(tmp_path / "other", config=CONFIG) as cold:
        text = "a prompt of some pages"
        old = llm.generate(text, GREEDY, use_tqdm=False)[0]
        programs = llm.stats().num_programs
        llm.update_weights(tmp_path / "other")
        new, again = (llm.generate(text, GREEDY, use_tqdm=False)[0] for _ in range(2))
        expected = cold.generate(text, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert old.outputs[0].token_ids != new.outputs[0].token_ids == again.outputs[0].token_ids == expected
        assert new.num_cached_tokens == 0 < again.num_cached_tokens
        assert llm.stats().num_programs == programs
        with pytest.raises(ValueError, match=r"another configuration than .*: rope_theta 5000\.0 \(here 10000\.0\)"):
            llm.update_weights(tmp_path / "turned")
        stream = llm.stream(text, GREEDY)
        next(stream)
        with pytest.raises(RuntimeError, match="have not ended"):
            llm.update_weights(directory)
        stream.close()
        assert llm.generate(text, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
        # A checkpoint that turns out to be damaged when its weights are read leaves no usable weights, and says so.
        programs = llm.stats().num_programs  # one more: what aborts a stream
        read = HuggingFaceSource.read

        def cut_short(source, name, rows=None):
            if "layers.1" in name:
                (tmp_path / "cut/model.safetensors").write_bytes(b"")
            return read(source, name, rows)

        write_model(tmp_path / "cut", seed=7)
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"bytes when it was opened") as caught:
            patch.setattr(HuggingFaceSource, "read", cut_short)
            llm.update_weights(tmp_path / "cut")
        assert any("no usable weights now" in note for note in caught.value.__notes__)
        for refused in (lambda: llm.generate(text, GREEDY), lambda: llm.params, lambda: llm.save_state(tmp_path / "s")):
            with pytest.raises(RuntimeError, match=r"no usable weights, because .* replace them again"):
                refused()
        llm.update_weights(tmp_path / "other")
        healed = llm.generate(text, GREEDY, use_tqdm=False)[0]
        assert healed.outputs[0].token_ids == expected and healed.num_cached_tokens == 0
        assert llm.stats().num_programs == programs


def taken(output) -> tuple:
    """What a caller gets of an output: all but times and how much was found computed."""
    (completion,) = output.outputs
    return output.request_id, output.prompt, output.prompt_token_ids, completion, output.finished


@pytest.fixture(scope="module")
def interrupted(directory, tmp_path_factory):
    """A saved LLM with two streams open, one of which has an output that nobody took; and all outputs as they came out
    of the LLM that was not interrupted, in the order of submission."""
    params = [replace(WITH_LOGPROBS, max_tokens=4 + 9 * (i % 2)) for i in range(7)]
    params[2] = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True)  # whose seed the engine draws
    with LLM(directory, config=CONFIG) as llm:
        first = llm.stream([f"Ünïcode 🌟 {i}" for i in range(7)], params)
        second = llm.stream("short", replace(GREEDY, max_tokens=2))
        outputs = {}
        next(first), next(second)
        while "7" in [request.request_id for request, _ in llm.engine.unfinished()]:
            if (event := next(first)).finished:
                outputs[event.output.request_id] = event.output
        begun = set(outputs)
        path = llm.save_state(tmp_path_factory.mktemp("llm") / "saved")
        for event in (*first, *second):
            outputs[event.output.request_id] = event.output
        return path, [outputs[str(number)] for number in range(8) if str(number) not in begun]


def test_a_restored_llm_gives_the_outputs_that_it_would_have_given(interrupted, directory, tmp_path):
    """Ids, texts and log-probabilities, with more pages, moved weights, and after a second save. Catches: text or
    log-probabilities that begin after the restore, an output that had ended and was not taken, another order."""
    path, expected = interrupted
    assert 2 <= len(expected) < 8 and len(expected[-1].outputs[0].token_ids) == 2
    moved = tmp_path / "moved"
    moved.symlink_to(directory)
    with LLM.restore(path, model=moved, num_pages=80) as llm:
        assert (llm.config.num_pages, llm.stats().total_pages) == (80, 80)
        # A call of its own goes between, and has an id of its own.
        other = llm.generate("another", GREEDY, use_tqdm=False)[0]
        assert other.request_id not in {output.request_id for output in expected}
        again = llm.save_state(tmp_path / "again")
        outputs = llm.resume(use_tqdm=False)
        assert [taken(output) for output in outputs] == [taken(output) for output in expected]
        assert llm.resume(use_tqdm=False) == [] and llm.stats().in_use_pages == 0
    with LLM.restore(again) as llm:
        assert [taken(output) for output in llm.resume(use_tqdm=False)] == [taken(output) for output in expected]


RESTORED = """
import sys, json, dataclasses
from jpaged import LLM
outputs = LLM.restore(sys.argv[1]).resume(use_tqdm=False)
print(json.dumps([dataclasses.asdict(output.outputs[0]) for output in outputs]))
"""


def test_another_process_goes_on(interrupted):
    """Catches: what is found only in the process that saved it."""
    path, expected = interrupted
    result = subprocess.run([sys.executable, "-c", RESTORED, str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == json.loads(json.dumps([asdict(output.outputs[0]) for output in expected]))


def test_requests_of_the_engine_itself_are_resumed_too(directory, tmp_path):
    """Catches: a request that no stream waits for, and its tokens from before."""
    with LLM(directory, config=CONFIG) as llm:
        expected = llm.generate("Hello", WITH_LOGPROBS, use_tqdm=False)[0]
        llm.engine.submit(Request("mine", tuple(expected.prompt_token_ids), WITH_LOGPROBS, "Hello"))
        events = [event for _ in range(3) for event in llm.engine.burst()]
        assert 0 < len(events) < 6
        llm.save_state(tmp_path / "saved")
    with LLM.restore(tmp_path / "saved") as llm:
        (output,) = llm.resume(use_tqdm=False)
    assert (output.request_id, output.outputs[0].token_ids) == ("mine", expected.outputs[0].token_ids)
    assert output.outputs[0].logprobs == expected.outputs[0].logprobs


def test_what_cannot_be_restored_is_refused(interrupted, directory, tmp_path):
    path, _ = interrupted
    write_model(tmp_path / "other", seed=6)
    with pytest.raises(ValueError, match=r"other weights: \d+ differ, the first is "):
        LLM.restore(path, model=tmp_path / "other")
    with pytest.raises(ValueError, match="saved with page_size 8 and cannot go on with 16"):
        LLM.restore(path, page_size=16)
    with pytest.raises(ValueError, match=r"llm\.json cannot be read"), LLM(directory, config=CONFIG) as llm:
        llm.engine.save_state(tmp_path / "engine only")
        LLM.restore(tmp_path / "engine only")
    with pytest.raises(RuntimeError, match="was closed"):
        llm.save_state(tmp_path / "closed")


def test_repr_and_stats_are_worth_reading(llm):
    assert "4 slots" in repr(llm) and "60 pages of 8 tokens" in repr(llm)
    assert "compiled in" in str(llm.stats())
    output = llm.generate("Hello", GREEDY, use_tqdm=False)[0]
    assert "prompt_tokens=" in repr(output) and "finish_reason='length'" in repr(output)


def test_unknown_models_and_fields_are_refused(tmp_path):
    with pytest.raises(ValueError, match="smollm2-135m"):
        LLM(str(tmp_path / "nothing-here"))
    with pytest.raises(TypeError, match="max_seqs"):
        LLM("smollm2-135m", max_seqs=3)


def test_pictures_and_replays_of_what_ran(directory, llm):
    """Catches: a trace that is read before it is there, a picture of another step; tokens that a trace changes."""
    asked = ["Hello", "Hello, world, and all who live in it", "Good morning", "Hello, world, and all of you"] * 2
    plain = [output.outputs[0].token_ids for output in llm.generate(asked, GREEDY, use_tqdm=False)]
    with LLM(directory, config=replace(CONFIG, num_pages=14), trace=True) as traced:
        with pytest.raises(ValueError, match="0 requests and 0 steps"):
            traced.plot_timeline()
        assert traced.plot_pages().axes[1].get_title(loc="left") == "now"
        outputs = traced.generate(asked, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        labels = traced.plot_timeline().axes[0].get_yticklabels()
        assert [label.get_text() for label in labels] == [output.request_id for output in outputs]
        fullest = int(np.argmax([step.pages_in_use for step in traced.engine.history])) + 1
        over_time, grid = traced.plot_pages().axes
        assert grid.get_title(loc="left") == f"step {fullest}, when most pages were in use"
        assert over_time.lines[-1].get_xdata()[0] == fullest
        assert traced.plot_pages(2).axes[1].get_title(loc="left") == "step 2"
        with pytest.raises(ValueError, match=f"steps 1 to {len(traced.trace)}; got step 99"):
            traced.plot_pages(99)
        jax.tree.map(np.testing.assert_array_equal, traced.replay(), traced.engine.state)
        assert int(traced.replay(2).counters.steps) == 2


def test_without_a_trace_there_is_the_present(llm):
    figure = llm.plot_pages()
    assert figure.axes[1].get_title(loc="left").split()[0] == "now"
    assert len(figure.axes[0].patches) == 3  # the engine's history is there all the same
    for needs_one in (llm.plot_timeline, llm.replay, lambda: llm.trace):
        with pytest.raises(ValueError, match=r"the trace of .* is off: make the LLM with trace=True"):
            needs_one()
    with pytest.raises(ValueError, match="pages of step 3 are known where the engine keeps a trace"):
        llm.plot_pages(3)
