"""The table of tunings, and the search for the fastest, with a stand-in for the clock of a card."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from pallas_kernels.cards import CARDS
from pallas_kernels.paged_attention import tuning as table
from pallas_kernels.paged_attention.tune import cases, neighbours, search, write
from pallas_kernels.paged_attention.tuning import (
    KINDS,
    Tuning,
    candidates,
    default,
    entry,
    shared_bytes,
    timed,
    tuning_for,
)


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256])
def test_every_class_has_a_tuning_that_fits(head_dim, kind, name):
    """Catches: a head_dim for which no stages fit; a decoding tile split over warpgroups; shared memory left idle."""
    card = CARDS[name]
    tuning = tuning_for(card, kind, head_dim)
    assert shared_bytes(tuning, card, head_dim) <= card.shared_bytes
    assert tuning.tiles == 1 or kind == "mixed"
    if name != "a100":  # there a core has two blocks of threads, see test_ampere.py
        fuller = replace(tuning, stages=tuning.stages + 1)
        assert tuning.stages == 6 or shared_bytes(fuller, card, head_dim) > card.shared_bytes
    assert all(shared_bytes(t, card, head_dim) <= card.shared_bytes for t in candidates(card, kind, head_dim))
    assert default(card, kind, head_dim) in candidates(card, kind, head_dim)


def test_what_was_timed_goes_before_the_default(tmp_path, monkeypatch):
    """Catches: a table that is written and not read; an older entry of a class that stays."""
    path = tmp_path / "tunings.json"
    path.write_text("[]")
    card, first, second = CARDS["h200"], Tuning(1, 64, 3, 1, 4), Tuning(1, 128, 2, 2, 1)
    write(path, [entry(card, "decode", 128, first, date="2026-01-01"), entry(card, "mixed", 128, first)])
    write(path, [entry(card, "decode", 128, second)])
    monkeypatch.setattr(table, "timed", lambda: timed(path))
    assert tuning_for(card, "decode", 128) == second
    assert tuning_for(card, "mixed", 128) == first
    assert tuning_for(card, "decode", 64) == default(card, "decode", 64)
    assert len(json.loads(path.read_text())) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_goes_where_it_is_faster(kind):
    """Catches: a search that stays where it began, takes what cannot be compiled, or measures a tuning twice."""
    card, measured = CARDS["h200"], []
    target = next(
        t for t in candidates(card, kind, 64) if (t.block, t.query_slots, t.extra_parts, t.stages) == (128, 1, 4, 4)
    )

    def measure(tuning: Tuning) -> float:
        measured.append(tuning)
        if tuning.stages == 6 and tuning.block == 128:
            raise ValueError("spills")
        apart = zip(vars(tuning).values(), vars(target).values(), strict=True)
        return 1.0 + sum(abs(a - b) / max(a, b) for a, b in apart)

    best, taken = search(card, kind, 64, measure, say=lambda text: None)
    assert taken <= measure(default(card, kind, 64)) and taken < 1.2 and best.block == 128 and best.extra_parts == 4
    assert len(set(measured[:-1])) == len(measured) - 1 < len(candidates(card, kind, 64))


def test_a_neighbour_differs_in_one_choice_and_its_stages():
    """Catches: a larger block that is never tried because the stages of the smaller no longer fit beside it."""
    card = CARDS["h200"]
    among = candidates(card, "decode", 128)
    start = default(card, "decode", 128)
    found = neighbours(start, among)
    assert start not in found
    wider = [t for t in found if t.block == 128]
    assert wider and all(t.stages < start.stages and t.query_slots == start.query_slots for t in wider)


def test_classes_are_timed_with_cases_of_their_kind():
    """Catches: a decoding class that is timed with a prompt."""
    for kind in KINDS:
        for case in cases(kind, 96):
            assert case.head_dim == 96 and table.kind_of(case.num_tokens, len(case.rows)) == kind


def test_without_a_card_it_says_what_it_needs():
    """Catches: a trace of the compiler in place of a sentence."""
    result = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.paged_attention.tune"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1 and "timing it on" in result.stderr and "here is cpu" in result.stderr
