"""Faults of one line, each with the test that must fail: whether the tests would notice.

    python tests/mutants.py            all of them, one after the other
    python tests/mutants.py --list     names, files and tests
    python tests/mutants.py NAME...    some

Each fault is put into a copy of the project, and the one test is run there. The exit status is 1 if a test passes in
spite of its fault, or if the text that a fault replaces is not there once: then the fault is to be written anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("jpaged", "pallas_kernels", "checkpoints", "tests", "pyproject.toml")
#: What pytest exits with where tests ran and some failed; anything else is no verdict on a fault.
FAILED, PASSED = 1, 0


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old` (once there) becomes `new`; then `test` fails."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> str:
        """Puts the fault in; returns the text as it was. Raises ValueError if `old` is not there once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {count} times in {self.file}, not once")
        (root / self.file).write_text(text.replace(self.old, self.new))
        return text


def _of(file: str, *faults: tuple[str, str, str, str]) -> list[Mutant]:
    return [Mutant(name, file, old, new, f"tests/{test}") for name, old, new, test in faults]


MUTANTS = [
    *_of(
        "jpaged/step/stop.py",
        (
            "stop-is-called-length",
            "jnp.where(stops, Finish.STOP,",
            "jnp.where(stops, Finish.LENGTH,",
            "unit/test_step.py::test_a_stop_token_ends_and_is_kept",
        ),
        (
            "one-token-too-many",
            "(num_tokens >= sampling.max_len)",
            "(num_tokens > sampling.max_len)",
            "unit/test_step.py::test_exactly_the_tokens_asked_for",
        ),
        (
            "no-min-tokens",
            "(num_tokens < sampling.min_len)",
            "(num_tokens < 0)",
            "unit/test_step.py::test_no_stop_token_before_min_tokens",
        ),
    ),
    *_of(
        "jpaged/step/step.py",
        (
            "token-in-a-prompt",
            "due = slots.occupied & (tokens > 0) & (computed == requests.num_tokens[row])",
            "due = slots.occupied & (tokens > 0)",
            "unit/test_step.py::test_the_first_token_comes_with_the_last_chunk",
        ),
        (
            "nan-is-no-error",
            "failed = slots.occupied & (tokens > 0) & ~healthy",
            "failed = slots.occupied & (tokens < 0) & ~healthy",
            "unit/test_step.py::test_a_broken_request_fails_alone_and_leaves_its_pages",
        ),
        (
            "padding-not-counted",
            "padded_tokens + budget - total",
            "padded_tokens + budget",
            "unit/test_step.py::test_counters_add_up",
        ),
    ),
    *_of(
        "jpaged/step/scheduling/grant.py",
        (
            "more-than-the-budget",
            "dtype=jnp.int32) + 1, 0, 1)",
            "dtype=jnp.int32) + 9, 0, 1)",
            "unit/test_schedule.py::test_one_token_each_and_then_the_oldest_first",
        ),
        (
            "rest-of-budget-unused",
            ".set(first + more)",
            ".set(first)",
            "unit/test_schedule.py::test_one_token_each_and_then_the_oldest_first",
        ),
        (
            "a-page-too-many",
            "// page_size) - slots.num_pages, 0)",
            "// page_size) - slots.num_pages + 1, 0)",
            "unit/test_schedule.py::test_scheduling_takes_the_lowest_free_pages_slot_by_slot",
        ),
        (
            "tokens-without-pages",
            "return jnp.minimum(tokens, (slots.num_pages",
            "return jnp.maximum(tokens, (slots.num_pages",
            "unit/test_schedule.py::test_tokens_are_cut_where_their_pages_are_not_there",
        ),
    ),
    *_of(
        "jpaged/step/scheduling/admit.py",
        # Pages and tokens are prefix sums, so a request that does not fit hides those after it. One that waits for the
        # host does not.
        (
            "overtaking",
            "enters = jnp.cumsum(~fits) == 0",
            "enters = fits",
            "property/test_step_oracle.py::test_500_random_steps_with_a_pool_on_the_host",
        ),
        (
            "no-page-reserved",
            "pages = spoken_for + running + rank +",
            "pages = spoken_for + rank +",
            "unit/test_schedule.py::test_who_comes_in",
        ),
        (
            "admitted-without-tokens",
            "(tokens_before < budget)",
            "(tokens_before <= budget)",
            "unit/test_schedule.py::test_who_comes_in",
        ),
    ),
    *_of(
        "jpaged/step/scheduling/evict.py",
        (
            "a-victim-too-many",
            "(needed <= state.available_pages",
            "(needed < state.available_pages",
            "unit/test_schedule.py::test_the_youngest_make_room",
        ),
        (
            "shared-page-counted-free",
            "bits_of(place[None] < place[:, None])",
            "bits_of(place[None] < 0 * place[:, None])",
            "unit/test_schedule.py::test_a_page_comes_back_with_the_last_who_holds_it",
        ),
    ),
    *_of(
        "jpaged/step/scheduling/pack.py",
        (
            "context-without-the-chunk",
            "slots.num_computed_tokens[slot] + count, 0)",
            "slots.num_computed_tokens[slot], 0)",
            "unit/test_schedule.py::test_packing_leaves_no_gap_and_padding_touches_nobody",
        ),
    ),
    *_of(
        "jpaged/step/pages.py",
        (
            "reference-kept",
            "return holders & ~dropped, refcount - jnp.sum(gone",
            "return holders & ~dropped, refcount - 0 * jnp.sum(gone",
            "unit/test_pages.py::test_pages_are_given_back_from_a_column_on",
        ),
        (
            "given-back-a-column-late",
            "dtype=jnp.uint32)[:, column]",
            "dtype=jnp.uint32)[:, column - 1]",
            "unit/test_pages.py::test_pages_are_given_back_from_a_column_on",
        ),
        (
            "table-overwritten",
            "column = num_pages[runs.owner] + runs.number",
            "column = runs.number",
            "unit/test_pages.py::test_pages_are_appended_lowest_first_slot_after_slot",
        ),
    ),
    *_of(
        "jpaged/step/sharing/index.py",
        (
            "hash-is-trusted",
            "jnp.all(prefixes.tokens[page] == tokens, axis=1)",
            "True",
            "unit/test_prefix.py::test_everything_is_compared_and_not_the_hash_alone",
        ),
        (
            "namespaces-mixed",
            "(prefixes.namespace[page] == namespace)",
            "True",
            "unit/test_prefix.py::test_everything_is_compared_and_not_the_hash_alone",
        ),
        (
            "stale-page-after",
            "& ~which & ~which[prefixes.before]",
            "& ~which",
            "unit/test_prefix.py::test_what_comes_after_a_page_goes_with_it",
        ),
        (
            "head-before-tail",
            "(age << bits) + prefixes.depth",
            "(age << bits) - prefixes.depth",
            "unit/test_prefix.py::test_pages_are_taken_in_order",
        ),
    ),
    *_of(
        "jpaged/step/sampling/sample.py",
        (
            "banned-is-drawn",
            "draw(allowed.T, sampling, num_tokens)",
            "draw(columns.T, sampling, num_tokens)",
            "unit/test_sample.py::test_banned_ids_are_never_chosen_and_odd_ones_ban_nothing",
        ),
    ),
    *_of(
        "jpaged/step/sampling/draw.py",
        (
            "position-not-in-the-key",
            "jnp.stack([zero, position.astype(jnp.uint32)])",
            "jnp.stack([zero, zero])",
            "unit/test_sample.py::test_seed_and_position_make_the_key",
        ),
        (
            "temperature-upside-down",
            "/ temperature[:, None]",
            "* temperature[:, None]",
            "unit/test_sample.py::test_draws_follow_the_distribution",
        ),
    ),
    *_of(
        "jpaged/step/sampling/logprobs.py",
        (
            "logprob-not-normalised",
            "return chosen - top - jnp.log",
            "return chosen - jnp.log",
            "unit/test_sample.py::test_log_probabilities_are_those_of_the_model",
        ),
    ),
    *_of(
        "pallas_kernels/paged_attention/plan.py",
        (
            "last-block-unread",
            "last // block + 1 - first",
            "last // block - first",
            "kernels/test_plan.py::test_every_query_sees_every_key_that_it_should_once",
        ),
        (
            "place-beyond-the-tile",
            "token_place=within % tile_tokens",
            "token_place=within",
            "kernels/test_plan.py::test_every_query_sees_every_key_that_it_should_once",
        ),
        (
            "window-a-block-late",
            "jnp.maximum(position - sliding_window + 1, 0) // block",
            "jnp.maximum(position - sliding_window + 4, 0) // block",
            "kernels/test_plan.py::test_every_query_sees_every_key_that_it_should_once",
        ),
    ),
    *_of(
        "pallas_kernels/paged_attention/numba_cpu.py",
        (
            "own-key-unseen",
            "seen = position + row // shared + 1 - start",
            "seen = position + row // shared - start",
            "kernels/test_paged_attention.py::test_every_case[page16-numba]",
        ),
    ),
    *_of(
        "pallas_kernels/paged_attention/xla.py",
        (
            "own-key-unseen-by-xla",
            "(key_position[:, None] <= query_position)",
            "(key_position[:, None] < query_position)",
            "kernels/test_paged_attention.py::test_every_case[page16-xla]",
        ),
    ),
    *_of(
        "jpaged/models/load.py",
        (
            "rotary-rows-as-stored",
            "interleaved=self._plan.interleaved)",
            "interleaved=False)",
            "unit/test_loading.py::test_gguf_and_shards_hold_the_same_model",
        ),
        (
            "first-layer-for-all",
            ".format(i=weight.layer)",
            ".format(i=0)",
            "unit/test_loading.py::test_every_parameter_holds_what_its_name_says",
        ),
        (
            "spare-head-unseen",
            "if not np.array_equal(one, other):",
            "if False:",
            "unit/test_loading.py::test_tied_with_another_head_stored_uses_the_embedding_and_says_so",
        ),
    ),
]


def run(mutant: Mutant, root: Path) -> int:
    """pytest's exit status for the mutant's test in the copy `root`."""
    before = mutant.apply(root)
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", mutant.test]
    try:
        return subprocess.run(command, cwd=root, env=environment, capture_output=True).returncode
    finally:
        (root / mutant.file).write_text(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults to try; all if none is named")
    parser.add_argument("--list", action="store_true", help="print the faults and try none")
    arguments = parser.parse_args()
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := sorted(set(arguments.names) - set(by_name)):
        parser.error(f"no fault is called {', '.join(unknown)}; --list shows all {len(by_name)}")
    chosen = [by_name[name] for name in arguments.names] or MUTANTS
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name:32} {mutant.file:42} {mutant.test}")
        return 0
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in FOLDERS:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, root / name)
        for mutant in chosen:
            start = time.perf_counter()
            try:
                status = run(mutant, root)
            except ValueError as error:
                verdict = f"not applied: {error}"
            else:
                verdict = {FAILED: "killed", PASSED: "survived"}.get(status, f"no verdict: pytest exited with {status}")
            bad += verdict != "killed"
            print(f"{mutant.name:32} {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} killed")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
