"""A running engine saved and restored: every token is the one that it would have been, with more or fewer pages. A stub
decoder reads the pool back, so that a page that is lost, stale or somebody else's shows in what it emits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import Ask, Driver
from support.shapes import STUB_MODEL
from support.stubs import STUB_SHAPE, HistoryDecoder

from checkpoints import orbax
from jpaged.config import EngineConfig
from jpaged.policy import shortest_prompt_first
from jpaged.record.saving import Saved
from jpaged.record.snapshot import pack_state, unpack_state
from jpaged.record.stats import TokenEvent
from jpaged.request import Request, SamplingParams
from jpaged.runtime.engine import Engine
from jpaged.step import EngineState, Slots, make_state, violations
from jpaged.step.sharing.index import Prefixes

VOCAB = 32
MODEL = replace(STUB_MODEL, vocab_size=VOCAB, eos_token_ids=(31,))
CONFIG = EngineConfig(
    page_size=4, num_pages=14, max_num_seqs=4, max_num_batched_tokens=16, token_budgets=(16,), max_model_len=32,
    max_queue=3, dtype="float32",
)  # fmt: skip
READER = HistoryDecoder(VOCAB)
#: Which the stub does not look at.
PARAMS = {"weight": np.arange(3, dtype=np.float32)}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make(config=CONFIG, params=PARAMS, model=MODEL, **changes) -> Engine:
    return Engine(READER, params, model, replace(config, **changes))


def mix(seed: int, count: int = 16) -> list[Request]:
    """One or three continuations, greedy and sampled, with and without a seed of their own, two salts, two priorities;
    half begin alike."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        prompt = [5, 6, 7, 8, 9, 10, 11, 12] * (number % 2) + rng.integers(0, 30, rng.integers(1, 11)).tolist()
        params = replace(GREEDY, max_tokens=int(rng.integers(2, 14)))
        if number % 3:
            params = replace(params, temperature=3.0, top_k=20, seed=number if number % 3 == 1 else None)
        if number % 4 == 3:
            params = replace(params, n=3)
        salt = "salt" if number % 5 == 0 else None
        requests.append(Request(str(number), tuple(prompt), params, "a text", salt, int(rng.integers(0, 2))))
    return requests


@dataclass
class Run:
    """An engine and what came out of it, by request; of continuations after the first by "request.index"."""

    engine: Engine
    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]

    @classmethod
    def of(cls, engine: Engine) -> Run:
        """Begins with what `engine` says that came out before."""
        run = cls(engine, {}, {})
        for _, events in engine.unfinished():
            run.note(events)
        return run

    def burst(self) -> None:
        self.note(self.engine.burst())

    def note(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.token_id is not None:
                name = f"{event.request_id}.{event.index}" if event.index else event.request_id
                self.tokens.setdefault(name, []).append(event.token_id)
                self.logprobs.setdefault(name, []).append(event.logprob)

    def until_done(self, check: Callable[[EngineState], list[str]] = lambda state: []) -> Run:
        for _ in range(2000):
            if not self.engine.has_work:
                return self
            self.burst()
            assert check(self.engine.state) == []
        raise AssertionError("the engine makes no progress")


def in_use(engine: Engine) -> int:
    return engine.stats().in_use_pages


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A directory of an engine in the middle of its work: requests run, wait on the device, and wait on the host."""
    engine = make(num_pages=30)
    for request in mix(0):
        engine.submit(request)
    for _ in range(8):
        engine.burst()
    return engine.save_state(tmp_path_factory.mktemp("snapshot") / "saved")


def test_every_token_is_the_one_it_would_have_been(tmp_path):
    """Random mixes, saved at random bursts, and gone on with in as many, fewer and more pages. Catches: a page, a
    table, a key, a queue or a generator that is lost or mixed up; one that is renumbered here and not there; a save
    that changes the engine which goes on; an output that begins only after the restore."""
    seen, fewer = set(), 12
    for seed in range(3):
        rng = np.random.default_rng(seed)
        requests = mix(seed)
        # Of those that are in the state from the first burst on: who is given up before that draws no seed.
        first = sorted(requests, key=lambda request: request.priority)[: CONFIG.max_num_seqs + CONFIG.max_queue]
        given_up = [first[number].request_id for number in rng.choice(len(first), 2, replace=False)]
        when = {int(burst) for burst in rng.integers(2, 26, 3)}
        abort_at = int(rng.integers(2, 20))

        def start(requests=requests) -> Run:
            run = Run.of(make())
            for request in requests:
                run.engine.submit(request)
            return run

        whole, run = start(), start()
        directories = []
        for burst in range(28):
            for one in (whole, run):
                if burst == abort_at:
                    one.engine.abort(given_up)
                one.burst()
            if burst in when:
                directory = run.engine.save_state(tmp_path / f"{seed}-{burst}")
                directories.append((burst, directory, in_use(run.engine), pack_state(run.engine.state)))
        whole.until_done(), run.until_done()
        assert (run.tokens, run.logprobs) == (whole.tokens, whole.logprobs), "saving changed the engine"
        for request in requests:
            if request.params.temperature == 0 and request.request_id not in given_up:
                expected = READER.continuation(request.prompt_token_ids, request.params.max_tokens)
                assert whole.tokens[request.request_id] == expected

        for burst, directory, used, arrays in directories:
            for num_pages in (CONFIG.num_pages, fewer, 30):
                engine = make(num_pages=num_pages)
                if used > num_pages:
                    with pytest.raises(ValueError, match=f"{used} pages are in use .* and the pool has {num_pages}"):
                        engine.load_state(Saved(directory))
                    continue
                engine.load_state(Saved(directory))
                assert violations(engine.state) == []
                if num_pages == CONFIG.num_pages:
                    again = pack_state(engine.state)
                    assert arrays.keys() == again.keys()
                    for name, array in arrays.items():
                        np.testing.assert_array_equal(again[name], array, err_msg=name)
                if burst < abort_at:
                    engine.abort(given_up)
                again = Run.of(engine).until_done(violations)
                for name, tokens in again.tokens.items():
                    if name.partition(".")[0] not in given_up:
                        assert tokens == whole.tokens[name], (seed, burst, num_pages, name)
                        assert again.logprobs[name] == whole.logprobs[name]
                seen |= {("pages", num_pages), ("shared", bool((arrays["refcount"][:] > 1).any()))}
                seen |= {("host queue", any(held.pending for held in Saved(directory).host.requests))}
                seen |= {("cached", bool((arrays["refcount"] == 0).any())), ("aborted", burst < abort_at)}
        stats = whole.engine.stats()
        seen |= {("preempted", stats.preemptions > 0), ("found", stats.prefix_hits > 0)}
    for name in ("shared", "host queue", "cached", "aborted", "preempted", "found"):
        assert (name, True) in seen, f"no mix had anything {name}"
    assert {("pages", number) for number in (14, 12, 30)} <= seen


def test_what_comes_after_is_as_it_would_have_been(tmp_path):
    """New requests after the restore draw the seeds, get the numbers and find the pages of before. Catches: a generator
    or a counter that begins anew, and a salt that finds what another has cached, or nothing of its own."""

    def late() -> list[Request]:
        new = [replace(request, request_id=f"new {request.request_id}", cache_salt="new") for request in mix(3)]
        return new + [replace(request, request_id=f"late {request.request_id}") for request in mix(3)]

    first = Run.of(make(num_pages=30))
    for request in mix(3):
        first.engine.submit(request)
    first.until_done()
    directory = first.engine.save_state(tmp_path / "saved")
    second = Run.of(make(num_pages=30))
    second.engine.load_state(Saved(directory))
    assert not second.engine.has_work
    runs = []
    for run in (first, second):
        run.tokens.clear()
        before = run.engine.stats()
        for request in late():
            run.engine.submit(request)
        run.until_done(violations)
        stats = run.engine.stats()
        assert stats.prefix_hits > before.prefix_hits
        runs.append((run.tokens, replace(stats, num_programs=0, compile_seconds=0.0)))
    assert runs[0] == runs[1]


def test_only_pages_that_hold_something_are_on_disk(tmp_path):
    """Catches: a pool that is saved as a whole. Every page is full of noise, which nothing compresses."""
    config = replace(CONFIG, num_pages=2000)
    driver = Driver(config, READER, layers=32, kv_heads=1, head_dim=2)
    keys, values = (jax.random.normal(key, driver.state.pool.k.shape) for key in jax.random.split(jax.random.key(0)))
    driver.state = replace(driver.state, pool=replace(driver.state.pool, k=keys, v=values))
    driver.submit(Ask(1, range(10), 30), Ask(2, range(20), 30))
    for _ in range(4):
        driver.step()
    arrays = pack_state(driver.state)
    used, page_bytes = int((np.asarray(driver.state.refcount) > 0).sum()) - 1, driver.state.pool.nbytes // 2001
    assert arrays["pool.k"].nbytes + arrays["pool.v"].nbytes == len(arrays["pages"]) * page_bytes
    assert used == len(arrays["pages"]) == 8
    path = orbax.save(tmp_path / "saved", arrays)
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert on_disk < driver.state.pool.nbytes // 50


def test_a_pool_larger_than_a_chunk_is_moved_whole(monkeypatch):
    """Catches: chunks that overlap, or a last one that is cut off or padded into somebody's page."""
    driver = Driver(replace(CONFIG, num_pages=30), READER)
    driver.submit(*(Ask(uid, range(uid, uid + 11), 30) for uid in range(4)))
    for _ in range(6):
        driver.step()
    expected = pack_state(driver.state)
    monkeypatch.setattr("jpaged.record.snapshot._CHUNK_BYTES", 5 * driver.state.pool.nbytes // 31)
    arrays = pack_state(driver.state)
    assert len(expected["pages"]) % 5
    state = unpack_state(arrays, make_state(replace(CONFIG, num_pages=30), **STUB_SHAPE))
    for found in (arrays, pack_state(state)):
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert violations(state) == []


def test_a_packed_state_does_not_change_when_the_engine_goes_on():
    """Catches: arrays of the device among what is packed, which the next step takes."""
    driver = Driver(replace(CONFIG, num_pages=30), READER)
    driver.submit(Ask(1, range(10), 30))
    driver.step()
    arrays = pack_state(driver.state)
    copies = {name: array.copy() for name, array in arrays.items()}
    driver.until_done()
    for name, array in copies.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)


def cached(*prompts) -> dict[str, np.ndarray]:
    """A packed state in which all pages of `prompts`, served one after the other, are cached."""
    driver = Driver(replace(CONFIG, num_pages=30), READER)
    for uid, prompt in enumerate(prompts):
        driver.submit(Ask(uid, prompt, len(prompt) + 1))
        driver.until_done()
    return pack_state(driver.state)


def test_cached_pages_without_room_are_dropped_tail_first():
    """Catches: a page that is kept without the one before it, or in place of one that was used later."""
    arrays = cached(range(1, 18), range(11, 28), range(2, 19))
    assert len(arrays["pages"]) == 12
    state = unpack_state(arrays, make_state(replace(CONFIG, num_pages=9), **STUB_SHAPE))
    assert violations(state) == []
    prefixes = jax.tree.map(np.asarray, state.prefixes)
    found = [(int(prefixes.tokens[page, 0]), int(prefixes.depth[page])) for page in np.flatnonzero(prefixes.cached)]
    later = [(first + 4 * depth, depth) for first in (11, 2) for depth in range(4)]
    assert sorted(found) == sorted([(1, 0), *later])
    assert (int(state.cached_pages), int(state.free_pages)) == (9, 0)


def test_a_page_that_the_index_has_no_room_for_is_left_out_with_those_after_it():
    """Catches: pages that count as findable and are in no bucket, or that hang on one that is not."""
    arrays = cached(range(1, 18), range(11, 28), range(2, 19))
    arrays["prefixes.hash"][:] = 0  # all in one bucket
    state = unpack_state(arrays, make_state(replace(CONFIG, num_pages=30), **STUB_SHAPE))
    prefixes = jax.tree.map(np.asarray, state.prefixes)
    found = np.flatnonzero(prefixes.cached)
    assert 4 <= len(found) <= 8
    assert set(found) <= set(prefixes.index[0]) and not prefixes.index[1:].any()
    for page in found:
        assert prefixes.depth[page] == 0 or prefixes.cached[prefixes.before[page]]


def test_fields_with_pages_are_known():
    """Catches: a new field of `Slots` or `Prefixes` that has a place for each page, or numbers of pages, and is carried
    as if it had not. Fields of the others are carried as they are, whatever they mean."""
    assert {field.name for field in fields(Slots)} == {
        "occupied", "request", "num_computed_tokens", "entered", "num_pages", "page_table",
    }, "is it a number of a page? then it belongs to snapshot._PAGE_NUMBERS"  # fmt: skip
    assert {field.name for field in fields(Prefixes)} == {
        "enabled", "cached", "tokens", "before", "namespace", "depth", "hash", "last_used", "index",
    }, "see snapshot._has_pages and _PAGE_NUMBERS"  # fmt: skip


def test_a_state_of_other_fields_or_sizes_is_refused():
    """Catches: a field that is filled with nothing, or dropped, without a word; a pool lost by a refusal."""
    driver = Driver(replace(CONFIG, num_pages=30), READER)
    driver.submit(Ask(1, range(10), 30))
    driver.step()
    arrays, empty = pack_state(driver.state), make_state(CONFIG, **STUB_SHAPE)
    for wrong, words in (
        (
            {name: array for name, array in arrays.items() if name != "requests.sampling.seed"},
            r"has no requests\.sampling\.seed",
        ),
        (arrays | {"requests.lora": arrays["requests.sampling.seed"]}, r"has requests\.lora, unknown here"),
        (
            arrays | {"slots.num_computed_tokens": arrays["slots.num_computed_tokens"][:3]},
            r"slots\.num_computed_tokens .* int32\[3\], .* int32\[4\]",
        ),
        (arrays | {"pages": np.array([1, 1, 2], np.int32)}, "must be different and positive"),
    ):
        with pytest.raises(ValueError, match=words):
            unpack_state(wrong, empty)
    with pytest.raises(ValueError, match="restored into an empty one"):
        unpack_state(arrays, driver.state)
    with pytest.raises(ValueError, match=r"record\.\w+ of the saved state .* max_num_seqs"):
        unpack_state(arrays, make_state(replace(CONFIG, max_num_seqs=3, max_queue=4), **STUB_SHAPE))
    assert violations(unpack_state(arrays, empty)) == []


def test_another_model_or_other_weights_are_refused(saved):
    """Catches: keys of one model read by another. The checksum sees an exchange of two elements, and a sign."""
    with pytest.raises(ValueError, match=r"another model, of rms_norm_eps 1e-05 \(here 0\.1\)"):
        make(model=replace(MODEL, rms_norm_eps=0.1)).load_state(Saved(saved))
    for other in ([0.0, 2.0, 1.0], [-0.0, 1.0, 2.0]):
        with pytest.raises(ValueError, match=r"other weights: 1 differ, the first is \['weight'\]"):
            make(num_pages=30, params={"weight": np.array(other, np.float32)}).load_state(Saved(saved))
    make(num_pages=30, params={"weight": jnp.arange(3.0)}).load_state(Saved(saved))


def test_an_engine_that_cannot_take_it_says_so_and_goes_on(saved):
    small = make(num_pages=8)
    with pytest.raises(ValueError, match=r"\d+ pages are in use in the saved state, and the pool has 8: set"):
        small.load_state(Saved(saved))
    with pytest.raises(ValueError, match="saved with max_queue 3 and cannot go on with 5; what may change is a"):
        make(max_queue=5).load_state(Saved(saved))
    small.submit(mix(1)[0])
    with pytest.raises(RuntimeError, match="while 1 requests have not ended"):
        small.load_state(Saved(saved))
    assert len(Run.of(small).until_done(violations).tokens["0"]) == mix(1)[0].params.max_tokens


def test_the_configuration_comes_back_but_for_what_may_change(saved, tmp_path):
    """Catches: a size that is changed and silently not used; a policy that is guessed."""
    assert Saved(saved).config() == replace(CONFIG, num_pages=30).for_platform("cpu")
    assert Saved(saved).config(num_pages=20).num_pages == 20
    assert Saved(saved).config(pool_bytes=1 << 20).num_pages is None
    with pytest.raises(ValueError, match="saved with page_size 4 and cannot go on with 8"):
        Saved(saved).config(page_size=8)
    with pytest.raises(ValueError, match="saved with seed 0 and cannot go on with 1"):
        Saved(saved).config(seed=1)

    def mine(requests):
        return requests.num_prompt_tokens

    for policy in (shortest_prompt_first, mine):
        engine = make(admission=policy)
        engine.submit(mix(1)[0])
        directory = engine.save_state(tmp_path / policy.__name__)
        assert Saved(directory).config(admission=mine).admission is mine
        if policy is shortest_prompt_first:
            assert Saved(directory).config().admission is shortest_prompt_first
        else:
            with pytest.raises(ValueError, match=r"mine is not one of jpaged\.policy .*, as admission="):
                Saved(directory).config()


def edited(saved: Path, copy: Path, file: str, change: Callable[[dict], None]) -> Path:
    shutil.copytree(saved, copy)
    values = json.loads((copy / file).read_text())
    change(values)
    (copy / file).write_text(json.dumps(values))
    return copy


def test_a_directory_that_is_not_whole_is_refused(saved, tmp_path, monkeypatch):
    """Catches: half a state taken for a whole one. What was being written when the process ended is never found."""
    engine = make()
    engine.submit(mix(1)[0])
    with pytest.raises(ValueError, match="already exists: give a new directory"):
        engine.save_state(saved)
    with monkeypatch.context() as patch:

        def killed(*_):
            raise KeyboardInterrupt

        patch.setattr(orbax.os, "replace", killed)
        patch.setattr(orbax.shutil, "rmtree", lambda *_, **__: None)  # as after a kill, which clears nothing up
        with pytest.raises(KeyboardInterrupt):
            engine.save_state(tmp_path / "half")
    with pytest.raises(ValueError, match=r"half has no checkpoint\.json"):
        Saved(tmp_path / "half")
    engine.save_state(tmp_path / "half")  # what is left of it is in nobody's way
    Saved(tmp_path / "half")

    for part, words in (("arrays", "arrays is missing"), ("files/engine.json", r"engine\.json cannot be read")):
        copy = tmp_path / Path(part).name
        shutil.copytree(saved, copy)
        (shutil.rmtree if (copy / part).is_dir() else Path.unlink)(copy / part)
        with pytest.raises(ValueError, match=words):
            Saved(copy)

    def first_is_lost(values):
        values["host"]["requests"].remove(next(held for held in values["host"]["requests"] if not held["pending"]))

    lost = edited(saved, tmp_path / "lost", "files/engine.json", first_is_lost)
    with pytest.raises(ValueError, match="lost is damaged: its state holds the requests"):
        make(num_pages=30).load_state(Saved(lost))
    odd = edited(saved, tmp_path / "odd", "files/engine.json", lambda values: values["host"].pop("seeds"))
    with pytest.raises(ValueError, match=r"HostState has not the same fields here: \['seeds'\]"):
        Saved(odd)


def test_another_version_is_refused_and_another_jax_is_said(saved, tmp_path):
    later = edited(saved, tmp_path / "later", "checkpoint.json", lambda values: values["metadata"].update(version=99))
    with pytest.raises(ValueError, match=r"format and version \('jpaged-engine', 99\), and this jpaged reads"):
        Saved(later)
    orbax.save(tmp_path / "weights", {"embed": np.ones(3)})
    with pytest.raises(ValueError, match="no running engine, or another jpaged saved it"):
        Saved(tmp_path / "weights")
    older = edited(saved, tmp_path / "older", "checkpoint.json", lambda values: values["metadata"].update(jax="0.1"))
    with pytest.warns(UserWarning, match=r"saved with JAX 0\.1 and goes on with"):
        Saved(older)
