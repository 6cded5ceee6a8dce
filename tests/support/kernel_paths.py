"""Which paths of the GPU kernels a case takes: what is chosen while the kernel is traced, and each arm of what the
kernel chooses while it runs. Found from the plan of the case, without running a kernel.

A path that is added to a kernel is added here; `tests/kernels/test_core_cases.py` says whether a core case takes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np

from pallas_kernels.cards import CARDS, Card
from pallas_kernels.paged_attention import ampere, mosaic_gpu, tensor_cores
from pallas_kernels.paged_attention import plan as plans
from pallas_kernels.paged_attention.cases import Case, integers
from pallas_kernels.paged_attention.plan import SWIZZLED_ROWS, Plan, num_rows
from pallas_kernels.paged_attention.tuning import Tuning, kind_of, tile_rows, tuning_for

#: cores of the cards on which cases are interpreted: so few that each goes through several parts
CORES = 3


def few_cores(name: str) -> Card:
    """The card of `CARDS` as cases are interpreted on it."""
    return replace(CARDS[name], cores=CORES)


@dataclass(frozen=True)
class Call:
    """A case on a card, and what follows from both before anything runs."""

    case: Case
    card: Card
    tuning: Tuning
    group: int
    tile_tokens: int
    plan: Plan

    @classmethod
    def of(cls, case: Case, card: Card) -> Call:
        card = mosaic_gpu.card_for(card, case.page_size, case.head_dim)
        kind = kind_of(case.num_tokens, len(case.rows))
        tuning = tuning_for(card, kind, case.head_dim)
        group = case.heads // case.kv_heads
        align = SWIZZLED_ROWS // math.gcd(SWIZZLED_ROWS, group)
        tile_tokens = 1
        if kind == "mixed":
            tile_tokens = max(1, tuning.tiles * tile_rows(card) // group // align * align)
        _, start, lengths = integers(case)
        # In numpy: JAX would compile every operation for every shape.
        with mock.patch.object(plans, "jnp", np):
            plan = plans.make_plan(
                start, lengths, tokens=case.num_tokens, tile_tokens=tile_tokens, align=align, block=tuning.block,
                extra_parts=-(-tuning.extra_parts * card.cores // case.kv_heads), sliding_window=case.sliding_window,
            )  # fmt: skip
        return cls(case, card, tuning, group, tile_tokens, plan)

    def paths(self) -> dict[str, bool]:
        """Every path that there is on this card, and whether this call takes it."""
        return self._of_all() | self._of_kernel()

    def _of_all(self) -> dict[str, bool]:
        case, plan, block = self.case, self.plan, self.tuning.block
        blocks = plan.end - plan.begin
        seen = blocks > 0
        tiles = len(plan.first_extra)
        last_query = np.minimum(plan.position + self.tile_tokens, plan.length) - 1
        window = case.sliding_window
        return {
            "every row decodes": self.tile_tokens == 1 and kind_of(case.num_tokens, len(case.rows)) == "decode",
            "prefill chunks": self.tile_tokens > 1,
            "a tile that is not full": bool((seen & (plan.length - plan.position < self.tile_tokens)).any()),
            "a row of several tiles": bool((np.bincount(plan.row[:tiles][seen[:tiles]]) > 1).any()),
            "a part that sees no keys": bool((~seen).any()),
            "no part sees a key": not seen.any(),
            "a context cut into parts": bool((plan.first_extra < len(blocks) - tiles).any()),
            "contexts that are not cut beside one that is": bool(
                (plan.first_extra[seen[:tiles]] < len(blocks) - tiles).any()
                and (plan.first_extra[seen[:tiles]] == len(blocks) - tiles).any()
            ),
            "several blocks of keys": bool((blocks > 1).any()),
            "one block of keys": bool((blocks == 1).any()),
            "a block in which the row ends": bool((seen & (plan.end * block > plan.length)).any()),
            "a block in which the row does not end": bool((seen & (plan.end * block <= plan.length)).any()),
            "a sliding window": window is not None,
            "a window that begins in a later block": window is not None and bool((plan.begin[:tiles] > 0).any()),
            "a query that sees nothing of the first block": window is not None
            and bool((seen & ((plan.begin + 1) * block <= last_query - window + 1)).any()),
            "a soft cap": case.soft_cap is not None,
            "padding": case.padding > 0,
            "one KV head": case.kv_heads == 1,
            "query heads that align tiles": SWIZZLED_ROWS % self.group == 0 and self.group > 1,
            "query heads that do not": SWIZZLED_ROWS % self.group != 0,
            "pages of one token": case.page_size == 1,
            "pages larger than a block": case.page_size > block,
            "pages that a block holds whole": block % case.page_size == 0,
            "pages cut by a block": block % case.page_size != 0,
        }

    def _of_kernel(self) -> dict[str, bool]:
        if self.card.kernel == "ampere":
            return self._of_ampere()
        assert self.card.kernel is not None
        return self._of_warpgroups(tensor_cores.TENSOR_CORES[self.card.kernel])

    def _of_ampere(self) -> dict[str, bool]:
        """Of `ampere.py`. On a later card: that its pages are copied by rows."""
        head_dim, stages = self.case.head_dim, self.tuning.stages
        blocks = self.plan.end - self.plan.begin
        rows = ampere.rows_of_tile(num_rows(self.tile_tokens, self.group), head_dim)
        return {
            "rows are copied by threads": True,
            **{f"a tile of {size} rows": rows == size for size in ampere._ROWS},
            **{f"blocks of {size} keys": self.tuning.block == size for size in (32, 64)},
            "columns in one piece": head_dim <= 64 and head_dim % 64 == 0,
            "columns in several": head_dim > 64,
            "fewer blocks than are asked for ahead": bool(((blocks > 0) & (blocks < stages - 1)).any()),
            "a stage is used again": bool((blocks > stages).any()),
        }

    def _of_warpgroups(self, cores: tensor_cores.TensorCores) -> dict[str, bool]:
        """Of `mosaic_gpu._attend` with `cores`."""
        case, plan, tuning = self.case, self.plan, self.tuning
        block, head_dim = tuning.block, case.head_dim
        used, of_one = num_rows(self.tile_tokens, self.group), num_rows(1, self.group)
        width, out_width = cores.columns(head_dim)
        own = head_dim // cores.sharing(head_dim)
        piece = math.gcd(case.page_size, block)
        parts, heads = len(plan.begin), case.kv_heads
        blocks = plan.end - plan.begin
        seen = blocks > 0
        rows = np.minimum(plan.length - plan.position, self.tile_tokens) * self.group
        ends = seen & (plan.end * block > plan.length)
        nth, before = np.zeros(self.card.cores, int), np.zeros(self.card.cores, int)
        for item in range(parts * heads):
            count = int(blocks[item // heads])
            nth[item % len(nth)] += count > 0
            before[item % len(nth)] += count
        second = tuning.tiles > 1 and used > cores.tile
        return {
            "a core without a part": bool((nth == 0).any()),
            "a last round of cores that is not full": parts * heads % self.card.cores != 0,
            "a slot of queries is used again": bool((nth > tuning.query_slots).any()),
            "a stage is used again": bool((before > tuning.stages).any()),
            "fewer blocks than stages": bool((before < tuning.stages).any()),
            "one compute warpgroup": tuning.tiles * cores.sharing(head_dim) == 1,
            "two tiles side by side": second,
            "the second tile computes": second and bool((seen & (rows > cores.tile)).any()),
            "the second tile passes by": second and bool((seen & (rows <= cores.tile)).any()),
            "the second tile waits for the row's end": second and bool((ends & (rows > cores.tile)).any()),
            "the second tile passes the row's end": second and bool((ends & (rows <= cores.tile)).any()),
            "two warpgroups share a tile": cores.sharing(head_dim) > 1,
            "a tile is one query": used == of_one,
            "of a tile one query is written": used > of_one and bool((seen & (rows <= of_one)).any()),
            "a tile is written whole": used > of_one and bool((seen & (rows > of_one)).any()),
            "a page is one copy": piece == case.page_size and piece % SWIZZLED_ROWS == 0,
            "a page is several copies": piece < case.page_size and piece % SWIZZLED_ROWS == 0,
            "copies of less than a swizzled tile": piece % SWIZZLED_ROWS != 0,
            "columns of values in one operand": own == width,
            "columns of values in several": own > width,
            "columns of values that 64 does not divide": own % 64 != 0,
            **{f"swizzled rows of {n} bytes": mosaic_gpu._swizzle(width, block, 2) == n for n in (32, 64, 128)},
            "outputs written an operand at a time": out_width == width,
            **{f"outputs written {n} columns at a time": out_width == n < width for n in (16, 32)},
        }


def paths(case: Case, name: str) -> dict[str, bool]:
    """The paths that there are for `case` on the card called `name`, and whether it takes them. Where the card runs the
    kernel for Ampere, whose paths an Ampere card's cases take, that is one path more."""
    call = Call.of(case, few_cores(name))
    if call.card.kernel != CARDS[name].kernel:
        return {"pages copied by rows": True}
    return call.paths()
