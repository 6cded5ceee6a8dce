"""Ragged paged attention for Hopper and Blackwell, in Pallas Mosaic GPU: TMA by page number, an online softmax.

The work is a list of parts (see `plan.py`) times KV heads. Each core runs one block of threads, which goes through its
share of the list. Its warpgroups have different tasks, so that loads of the next part are under way before this one
ends:

    memory    reads page numbers, asks the TMA unit for queries, keys and values, `stages` blocks of keys ahead
    compute   scores = queries @ keys', online softmax, out += weights @ values; one or two warpgroups, with the same
              keys: each has a tile of queries, or on Hopper, where head_dim is over 128, half of the values' columns

    pool, in device memory                          shared memory, one stage
    [layers, pages, kv_heads, page_size, head_dim]  keys [block, head_dim]    values [block, head_dim]
      page 7 |################|  ---- one TMA copy ---->  |################|
      page 2 |################|  ---------------------->  |################|
      page 9 |#####...........|  ---------------------->  |#####...........|  past the end: never weighed

Keys and values of one KV head in one page lie together, so a page is one copy, whatever its number; the swizzle
that the products want is made by the TMA unit on the way. Where pages and blocks do not divide each other, a copy is
the largest piece that divides both. The queries of all heads that share a KV head are rows of one operand, a tile. The
products are in `tensor_cores.py`. Scores, softmax and accumulators are float32.

A score is masked before it counts, but a weight of 0 does not silence a NaN among the values: in the block where a
row ends, what lies past the end is set to zero in shared memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cards import CARDS, Card, Kernel, target_card, target_kind
from pallas_kernels.paged_attention import ampere
from pallas_kernels.paged_attention.merge import merge
from pallas_kernels.paged_attention.plan import SWIZZLED_ROWS, make_plan, num_rows
from pallas_kernels.paged_attention.softmax import log_sum_exp, weigh
from pallas_kernels.paged_attention.tensor_cores import TENSOR_CORES
from pallas_kernels.paged_attention.tuning import BLOCK, Tuning, kind_of, tile_rows, tuning_for

#: bytes that a place in shared memory is a multiple of where the TMA unit copies to
_TMA_BYTES = 128

#: query heads that can share a KV head: they are rows of one tile
_MOST_SHARED = min(cores.tile for cores in TENSOR_CORES.values())
#: The JAX from which on a kernel is tested: older ones lack what it is written with.
NEEDS_JAX: dict[Kernel, tuple[int, int]] = {"ampere": (0, 12), "hopper": (0, 11), "blackwell": (0, 12)}


def missing(queries: jax.Array, k_pages: jax.Array, return_lse: bool = False) -> str | None:
    """Why the kernel cannot compute these operands here, as the end of a sentence; None if it can."""
    card = target_card()
    if card is None:
        return f"it is written for NVIDIA's GPUs of compute capability 8.0 and later, and this is {target_kind()}"
    if card.kernel is None:
        return f"it needs compute capability 8.0 or later, and {card.name} has {'.'.join(map(str, card.capability))}"
    page_size, head_dim = k_pages.shape[3:]
    used = card_for(card, page_size, head_dim)
    needed = needed_jax(used)
    if jax.__version_info__ < needed:
        pages = "" if used is card else f" with pages of {page_size} tokens and head_dim {head_dim}"
        return f"on {card.name}{pages} it needs JAX {'.'.join(map(str, needed))}, and this is {jax.__version__}"
    return unsupported(queries, k_pages)


def needed_jax(card: Card) -> tuple[int, int]:
    """The JAX that a card's kernel needs."""
    if card.kernel is None:
        raise ValueError(f"{card.name} has compute capability {card.capability}, for which there is no kernel")
    return NEEDS_JAX[card.kernel]


def card_for(card: Card, page_size: int, head_dim: int) -> Card:
    """The card with the kernel that it runs for such pages: its own; but where its TMA unit cannot copy pieces of such
    pages the one for Ampere, which copies rows, and which every later card runs."""
    if card.kernel not in TENSOR_CORES:
        return card
    width, _ = TENSOR_CORES[card.kernel].columns(head_dim)
    if page_size * _swizzle(width, BLOCK, 2) % _TMA_BYTES == 0:
        return card
    return replace(card, name=f"{card.name}-by-rows", kernel="ampere")


def unsupported(queries: jax.Array, k_pages: jax.Array) -> str | None:
    """Why no kernel takes the shapes and dtypes of these operands, as the end of a sentence; None if one does."""
    heads, head_dim = queries.shape[1:]
    kv_heads = k_pages.shape[2]
    if queries.dtype != k_pages.dtype or k_pages.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {queries.dtype} and pages {k_pages.dtype}; both must be bfloat16, or both float16"
    if head_dim % 16 or head_dim > 256 or (head_dim > 128 and head_dim % 32):
        return f"head_dim is {head_dim}; it must be a multiple of 16 up to 128, or of 32 up to 256"
    if heads // kv_heads > _MOST_SHARED:
        return f"{heads // kv_heads} query heads share a KV head; at most {_MOST_SHARED} can"
    return None


def paged_attention_mosaic_gpu(
    queries, k_pages, v_pages, layer, page_table, query_start, kv_len,
    *, scale, sliding_window=None, soft_cap=None, return_lse=False, card: Card | None = None,
    tuning: Tuning | None = None, interpret: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `paged_attention`. What it cannot compute says `missing`.

    Args:
        card: what is compiled for; None: `target_card`.
        tuning: tiles, blocks and stages; None: `tuning_for` the card and the shapes.
        interpret: as in `pallas_call`: `InterpretGPUParams` runs the kernel on a CPU, also in float32.

    Raises:
        ValueError: for a card without a kernel; for a tuning of several tiles where the kernel computes one at a time.
    """
    card = card_for(card or target_card() or CARDS["h100"], *k_pages.shape[3:])
    needed_jax(card)  # or an error: there is no kernel
    tuning = tuning or tuning_for(card, kind_of(queries.shape[0], kv_len.shape[0]), queries.shape[2])
    if tuning.tiles > 1 and card.kernel == "ampere":
        raise ValueError(f"{tuning} has {tuning.tiles} tiles side by side; on {card.name} there can be one")
    return _paged_attention(
        queries, k_pages, v_pages, jnp.asarray(layer, jnp.int32), page_table, query_start, kv_len, scale=scale,
        sliding_window=sliding_window, soft_cap=soft_cap, return_lse=return_lse, card=card, tuning=tuning,
        interpret=interpret,
    )  # fmt: skip


# Traced once for all layers of a model: the layer is an operand.
@partial(
    jax.jit,
    static_argnames=("scale", "sliding_window", "soft_cap", "return_lse", "card", "tuning", "interpret"),
)
def _paged_attention(
    queries, k_pages, v_pages, layer, page_table, query_start, kv_len,
    *, scale, sliding_window, soft_cap, return_lse, card, tuning, interpret,
):  # fmt: skip
    tokens, heads, head_dim = queries.shape
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    # A tile in device memory begins where a swizzled tile in shared memory can.
    align = SWIZZLED_ROWS // math.gcd(SWIZZLED_ROWS, group)
    tile_tokens = 1
    if kind_of(tokens, kv_len.shape[0]) == "mixed":
        tile_tokens = max(1, tuning.tiles * tile_rows(card) // group // align * align)
    plan = make_plan(
        query_start, kv_len, tokens=tokens, tile_tokens=tile_tokens, align=align, block=tuning.block,
        extra_parts=-(-tuning.extra_parts * card.cores // kv_heads), sliding_window=sliding_window,
    )  # fmt: skip

    used = num_rows(tile_tokens, group)
    aligned = queries.reshape(tokens, kv_heads, group, head_dim)[plan.aligned].swapaxes(0, 1)
    aligned = aligned.reshape(kv_heads, -1, head_dim)
    aligned = jnp.pad(aligned, ((0, 0), (0, used), (0, 0)))  # the last tile may not be full

    work = jnp.stack([plan.row, plan.start * group, plan.position, plan.length, plan.begin, plan.end], axis=1)
    attend = ampere.attend if card.kernel == "ampere" else _attend
    part_out, part_lse = attend(
        aligned, k_pages, v_pages, layer[None], page_table, work, tile_tokens=tile_tokens, group=group, tuning=tuning,
        card=card, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    out, lse = merge(part_out, part_lse, plan, group)
    out = out.astype(queries.dtype).reshape(queries.shape)
    return (out, lse.reshape(tokens, heads)) if return_lse else out


def _slices(columns: list[Any], width: int) -> list[Any]:
    """The same columns, in slices of `width`."""
    return [type(c)(start, width, 1) for c in columns for start in range(c.start, c.start + c.size, width)]


def _swizzle(width: int, block: int, itemsize: int) -> int:
    """Bytes of a row of a swizzled tile. Both operands of a product have one swizzle, so all have: values, of which
    `width` columns are an operand, and weights, `block` wide."""
    fits = math.gcd(width, block) * itemsize
    return next(swizzle for swizzle in (128, 64, 32) if fits % swizzle == 0)


def _attend(
    queries: jax.Array, k_pages: jax.Array, v_pages: jax.Array, layer: jax.Array, page_table: jax.Array,
    work: jax.Array, *, tile_tokens: int, group: int, tuning: Tuning, card: Card, scale: float,
    sliding_window: int | None, soft_cap: float | None, interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The kernel: every part's own softmax.

    Args:
        queries: `[kv_heads, places, head_dim]`, `group` rows a query; each tile's begin at a multiple of 8 rows.
        work: `[parts, 6]` int32: the row of the batch, the place of the tile's first query, its position, the row's
            length, and the blocks of keys that the part sees, from one up to before another.

    Returns:
        `[parts, kv_heads, used, head_dim]` and the natural log-sum-exp `[parts, kv_heads, used]`, both float32, where
        `used` rows hold `tile_tokens` queries. Not written for parts that see no keys, and past a part's queries.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    kv_heads, page_size, head_dim = k_pages.shape[2:]
    parts, dtype = work.shape[0], k_pages.dtype
    block, stages = tuning.block, tuning.stages
    items = parts * kv_heads
    cores = min(card.cores, items)
    tensor_cores = TENSOR_CORES[card.kernel]
    tile, sharing = tensor_cores.tile, tensor_cores.sharing(head_dim)
    computing = tuning.tiles * sharing  # warpgroups
    width, out_width = tensor_cores.columns(head_dim)
    used, of_one = num_rows(tile_tokens, group), num_rows(1, group)
    swizzle = _swizzle(width, block, dtype.itemsize)
    wide = swizzle // dtype.itemsize
    piece = math.gcd(page_size, block)
    narrow = piece % SWIZZLED_ROWS != 0
    copies = block // piece * (head_dim // wide if narrow else 1)

    def kernel(
        q_ref, k_ref, v_ref, layer_ref, table, work_ref, out_ref, lse_ref,
        q_smem, k_smem, v_smem, all_weights, all_outs, all_lse, q_ready, k_ready, v_ready, q_free, k_free, v_free,
        v_clean, *all_scratch,
    ):  # fmt: skip
        core, warpgroup = lax.axis_index("core"), lax.axis_index("warpgroup")

        k_tiles, v_tiles = k_smem, v_smem
        if narrow and not interpret:
            (k_smem, k_tiles), (v_smem, v_tiles) = k_smem, v_smem

        def narrow_copies(source, tiles, slot, tile, row, barrier):
            """Copies `source`, fewer rows than the 8 of a swizzled tile, to a tile of a stage from `row` of it on.

            A swizzled tile is 8 rows of `swizzle` bytes, one after the other, and the swizzle is a function of the
            address (CUDA programming guide, tensor memory access, swizzle modes): some rows of it can be a copy, to a
            place that is a multiple of 128 bytes. Pallas offers whole tiles of an operand, so the same memory is named
            a second time, as tiles; the interpreter has no tiles, and is given the same rows and columns.
            """
            for c in range(head_dim // wide):
                column = pl.ds(c * wide, wide)
                if interpret:
                    target = tiles.at[slot, pl.ds(tile * SWIZZLED_ROWS + row, piece), column]
                else:
                    target = tiles.at[slot, tile, c, pl.ds(row, piece)]
                plgpu.copy_gmem_to_smem(source.at[:, column], target, barrier)

        def for_each_part(body):
            """`body(part, head, nth, before, blocks)` for the parts of this core that see keys: the `nth` of them,
            `before` blocks after the first. Returns how many parts and blocks there were."""

            def item(i, carry):
                at = i * cores + core
                part, head = lax.div(at, jnp.int32(kv_heads)), lax.rem(at, jnp.int32(kv_heads))
                # The last round is not full. No part is read that is not there, and none is done twice.
                part = jnp.minimum(part, parts - 1)
                blocks = jnp.where(at < items, work_ref[part, 5] - work_ref[part, 4], 0)
                nth, before = carry
                pl.when(blocks > 0)(lambda: body(part, head, nth, before, blocks))
                return nth + jnp.where(blocks > 0, 1, 0), before + blocks

            return lax.fori_loop(0, pl.cdiv(items, cores), item, (jnp.int32(0), jnp.int32(0)))

        def compute(mine, part, head, nth, before, blocks):
            """What is this warpgroup's of the part's tiles, if anything is."""
            rows = jnp.minimum(work_ref[part, 3] - work_ref[part, 2], tile_tokens) * group
            first_row = mine // sharing * tile
            busy = partial(attend, mine, first_row, part, head, nth, before, blocks, rows)
            idle = partial(pass_by, part, nth, before, blocks)
            if first_row == 0:
                busy()
            elif first_row >= used:
                idle()
            else:
                pl.when(rows > first_row)(busy)
                pl.when(rows <= first_row)(idle)

        def pass_by(part, nth, before, blocks):
            """Keeps in step with the others."""
            length, begin = work_ref[part, 3], work_ref[part, 4]
            plgpu.barrier_wait(q_ready.at[lax.rem(nth, jnp.int32(tuning.query_slots))])

            def step(i, _):
                slot = lax.rem(before + i, jnp.int32(stages))
                plgpu.barrier_wait(k_ready.at[slot])
                plgpu.barrier_arrive(k_free.at[slot])
                plgpu.barrier_wait(v_ready.at[slot])
                pl.when((begin + i + 1) * block > length)(lambda: plgpu.barrier_wait(v_clean.at[slot]))
                plgpu.barrier_arrive(v_free.at[slot])

            lax.fori_loop(0, blocks, step, None)
            plgpu.barrier_arrive(q_free.at[lax.rem(nth, jnp.int32(tuning.query_slots))])

        def attend(mine, first_row, part, head, nth, before, blocks, rows):
            weights_smem, out_smem, lse_smem = all_weights.at[mine], all_outs.at[mine], all_lse.at[mine]
            scratch = all_scratch[mine * len(all_scratch) // computing :][: len(all_scratch) // computing]
            own_columns = [pl.ds(mine % sharing * (head_dim // sharing), head_dim // sharing)]
            columns = _slices(own_columns, width)
            position, length, begin = work_ref[part, 2], work_ref[part, 3], work_ref[part, 4]
            q_slot = lax.rem(nth, jnp.int32(tuning.query_slots))
            plgpu.barrier_wait(q_ready.at[q_slot])
            layout = tensor_cores.layout()
            place = first_row + plgpu.broadcasted_iota(jnp.int32, (tile,), 0, layout=layout.reduce(1))
            # Rows past the tile's queries stand for no query; they see what the last of the row sees.
            query = jnp.minimum(position + lax.div(place, jnp.int32(group)), length - 1)

            def zero_past_the_end(slot, first_key):
                if first_row:
                    plgpu.barrier_wait(v_clean.at[slot])
                    return
                for column in columns:
                    stage = v_smem.at[slot, :, column]
                    values = plgpu.layout_cast(stage[...], plgpu.Layout.WGMMA)
                    key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
                    stage[...] = jnp.where(first_key + key < length, values, jnp.zeros_like(values))
                plgpu.commit_smem()
                if tuning.tiles > 1:
                    plgpu.barrier_arrive(v_clean.at[slot])

            def step(i, carry):
                outs, most, total = carry
                slot = lax.rem(before + i, jnp.int32(stages))
                first_key = (begin + i) * block
                plgpu.barrier_wait(k_ready.at[slot])

                scores = tensor_cores.scores(q_smem.at[q_slot, pl.ds(first_row, tile)], k_smem.at[slot], scratch)
                plgpu.barrier_arrive(k_free.at[slot])
                weights, decay, most, total = weigh(
                    scores, most, total, query, first_key, layout, scale=scale, sliding_window=sliding_window,
                    soft_cap=soft_cap,
                )  # fmt: skip
                weights_smem[...] = weights.astype(dtype)

                plgpu.barrier_wait(v_ready.at[slot])
                # Of two tiles that share the values the first's does it.
                pl.when(first_key + block > length)(partial(zero_past_the_end, slot, first_key))
                plgpu.commit_smem()

                outs = tensor_cores.add(outs, decay, weights_smem, v_smem.at[slot], columns, i == 0, scratch)
                plgpu.barrier_arrive(v_free.at[slot])
                return outs, most, total

            def by_row(value):
                return plgpu.layout_cast(jnp.full((tile,), value, jnp.float32), layout.reduce(1))

            carry = (tensor_cores.start(columns), by_row(-jnp.inf), by_row(0))
            outs, most, total = lax.fori_loop(0, blocks, step, carry)
            plgpu.barrier_arrive(q_free.at[q_slot])

            def write(source, target, *column):
                """To device memory, the tile's rows: all of them, or where it is one query, only its."""

                def copy(count):
                    plgpu.copy_smem_to_gmem(
                        source.at[pl.ds(0, count)], target.at[part, head, pl.ds(first_row, count), *column]
                    )

                whole = min(tile, used - first_row)
                if first_row or whole == of_one:
                    copy(whole)
                else:
                    pl.when(rows <= of_one)(partial(copy, of_one))
                    pl.when(rows > of_one)(partial(copy, whole))

            share = 1 / jnp.where(total == 0, jnp.float32(1), total)
            for index, column in enumerate(_slices(own_columns, out_width)):
                out = tensor_cores.read(outs, index, column, scratch)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was written before has left shared memory
                out_smem[...] = out * lax.broadcast_in_dim(share, out.shape, [0])
                if column.start == 0:
                    lse_smem[...] = log_sum_exp(most, total)
                plgpu.commit_smem()
                write(out_smem, out_ref, column)
                if column.start == 0:
                    write(lse_smem, lse_ref)

        def fetch(layer, part, head, nth, before, blocks):
            row, start, length, begin = work_ref[part, 0], work_ref[part, 1], work_ref[part, 3], work_ref[part, 4]
            last_page = lax.div(length - 1, jnp.int32(page_size))
            q_slot = lax.rem(nth, jnp.int32(tuning.query_slots))
            pl.when(nth >= tuning.query_slots)(partial(plgpu.barrier_wait, q_free.at[q_slot]))
            start = pl.multiple_of(start, SWIZZLED_ROWS)
            plgpu.copy_gmem_to_smem(
                q_ref.at[head, pl.ds(start, used)], q_smem.at[q_slot, pl.ds(0, used)], q_ready.at[q_slot]
            )

            def step(i, _):
                slot = lax.rem(before + i, jnp.int32(stages))
                first_key = (begin + i) * block

                def place(c):
                    """Page number of the block's `c`th piece, and where in the page it is. Past the row's last page,
                    that page again: every stage gets as many copies."""
                    key = first_key + c * piece
                    page = lax.div(key, jnp.int32(page_size))
                    return table[row, jnp.minimum(page, last_page)], key - page * page_size

                if not narrow:
                    # All numbers are loaded before the first is used.
                    places = [place(c) for c in range(block // piece)]
                for ref, smem, ready, free in ((k_ref, k_tiles, k_ready, k_free), (v_ref, v_tiles, v_ready, v_free)):
                    pl.when(before + i >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                    barrier = ready.at[slot]
                    if not narrow:
                        for c, (number, offset) in enumerate(places):
                            source = ref.at[layer, number, head]
                            if piece < page_size:
                                source = source.at[pl.ds(pl.multiple_of(offset, SWIZZLED_ROWS), piece)]
                            plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(c * piece, piece)], barrier)
                        continue

                    def fill(tile, _, ref=ref, smem=smem, barrier=barrier):
                        for c in range(SWIZZLED_ROWS // piece):
                            number, offset = place(tile * (SWIZZLED_ROWS // piece) + c)
                            source = ref.at[layer, number, head, pl.ds(offset, piece)]
                            narrow_copies(source, smem, slot, tile, c * piece, barrier)

                    lax.fori_loop(0, block // SWIZZLED_ROWS, fill, None)

            lax.fori_loop(0, blocks, step, None)

        for mine in range(computing):

            @pl.when(warpgroup == mine)
            def of_compute(mine=mine):
                if computing > 1:  # as launched, each warpgroup has 168: a third of the core's
                    plgpu.set_max_registers(216, action="increase")
                for_each_part(partial(compute, mine))
                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == computing)
        def of_memory():
            if computing > 1:
                plgpu.set_max_registers(72, action="decrease")
            loaded, blocks = for_each_part(partial(fetch, layer_ref[0]))
            # No later load waits until the last stages are free; a barrier must be left with every arrival seen.
            for count, slots, barriers in ((loaded, tuning.query_slots, (q_free,)), (blocks, stages, (k_free, v_free))):

                def drain(i, _, slots=slots, barriers=barriers):
                    for barrier in barriers:
                        plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(slots))])

                lax.fori_loop(jnp.maximum(count - slots, 0), count, drain, None)

    def operand(*shape):
        """Shared memory for an operand of a product."""
        tiling = plgpu.TilingTransform((SWIZZLED_ROWS, wide))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

    stage = operand(stages, block, head_dim)
    if narrow and not interpret:
        tiles = (stages, block // SWIZZLED_ROWS, head_dim // wide, SWIZZLED_ROWS, wide)
        stage = plgpu.RefUnion(stage, plgpu.SMEM(tiles, dtype, transforms=(plgpu.SwizzleTransform(swizzle),)))
    ready = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=computing, num_barriers=stages)
    slots = tuning.query_slots
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((parts, kv_heads, used, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((parts, kv_heads, used), jnp.float32),
        ),
        scratch_types=(
            operand(slots, tuning.tiles * tile, head_dim), stage, stage, operand(computing, tile, block),
            plgpu.SMEM((computing, tile, out_width), jnp.float32), plgpu.SMEM((computing, tile), jnp.float32),
            plgpu.Barrier(num_barriers=slots), ready, ready,
            plgpu.Barrier(num_arrivals=computing, num_barriers=slots), free, free,
            plgpu.Barrier(num_arrivals=sharing, num_barriers=stages),
            *(scratch for _ in range(computing) for scratch in tensor_cores.scratch(block, head_dim)),
        ),
        grid=(cores,),
        grid_names=("core",),
        num_threads=computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(queries, k_pages, v_pages, layer, page_table, work)  # fmt: skip
