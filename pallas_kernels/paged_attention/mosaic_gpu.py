"""Ragged paged attention for Hopper and Blackwell, in Pallas Mosaic GPU: TMA by page number, an online softmax.

The work is a list of parts (see `plan.py`) times KV heads. Each core runs one block of threads, which goes through its
share of the list. Its warpgroups have different tasks, so that loads of the next part are under way before this one
ends:

    memory    reads page numbers, asks the TMA unit for queries, keys and values, `stages` blocks of keys ahead
    compute   scores = queries @ keys', online softmax, out += weights @ values

    pool, in device memory                          shared memory, one stage
    [layers, pages, kv_heads, page_size, head_dim]  keys [block, head_dim]    values [block, head_dim]
      page 7 |################|  ---- one TMA copy ---->  |################|
      page 2 |################|  ---------------------->  |################|
      page 9 |#####...........|  ---------------------->  |#####...........|  past the end: never weighed

Keys and values of one KV head in one page lie together, so a page is one copy, whatever its number; the swizzle
that the products want is made by the TMA unit on the way. The queries of all heads that share a KV head are one
operand: `tile_tokens * group` rows of 64 or 128. The products are in `tensor_cores.py`. Scores, softmax and
accumulators are float32.

A score is masked before it counts, but a weight of 0 does not silence a NaN among the values: in the block where a
row ends, what lies past the end is set to zero in shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cards import CARDS, Card, target_card, target_kind
from pallas_kernels.paged_attention import ampere
from pallas_kernels.paged_attention.plan import Plan, make_plan, num_tiles
from pallas_kernels.paged_attention.tensor_cores import TENSOR_CORES, TensorCores

#: keys of a block
_BLOCK = 64
_LOG2E = math.log2(math.e)

#: query heads that can share a KV head: they are rows of one tile
_MOST_SHARED = min(cores.tile for cores in TENSOR_CORES.values())
#: JAX that has what the kernel is written with, and with which it is tested, by architecture
NEEDS_JAX = {"sm_80": (0, 12), "sm_90a": (0, 11), "sm_100a": (0, 12)}


@dataclass(frozen=True)
class Tuning:
    """What may be chosen for a card and a class of shapes.

    Attributes:
        block: keys of one stage, a multiple of 64; on Ampere of 32 where head_dim is one of 64.
        stages: blocks of keys in flight.
        query_slots: tiles of queries in shared memory: with two, the next part's are there when it starts.
        extra_parts: pieces that long contexts are cut into, beyond one for each tile and KV head: so many a core.
    """

    block: int
    stages: int
    query_slots: int = 2
    extra_parts: int = 2

    def shared_bytes(self, head_dim: int, cores: TensorCores) -> int:
        """Shared memory of one block of threads, with 3 KiB for barriers, reductions and alignment."""
        warpgroups, _, columns = cores.split(head_dim)
        queries = self.query_slots * cores.tile * head_dim * 2
        stages = self.stages * 2 * self.block * head_dim * 2
        own = cores.tile * (self.block * 2 + columns * 4)  # weights, outputs on their way to memory
        return queries + stages + warpgroups * own + cores.tile * 4 + 3072


def fitting(head_dim: int, card: Card) -> Tuning:
    """As many stages as the card's shared memory holds."""
    if card.architecture == ampere.ARCHITECTURE:
        return Tuning(*ampere.fitting(head_dim, card), query_slots=1)
    tunings = [Tuning(_BLOCK, stages, slots) for slots in (2, 1) for stages in range(6, 1, -1)]
    cores = TENSOR_CORES[card.architecture]
    return next(t for t in tunings if t.shared_bytes(head_dim, cores) <= card.shared_bytes)


def shared_bytes(head_dim: int, card: Card) -> int:
    """Shared memory of one block of threads, with `fitting`."""
    tuning = fitting(head_dim, card)
    if card.architecture == ampere.ARCHITECTURE:
        return ampere.shared_bytes(head_dim, tuning.block, tuning.stages)
    return tuning.shared_bytes(head_dim, TENSOR_CORES[card.architecture])


def missing(queries: jax.Array, k_pages: jax.Array, return_lse: bool = False) -> str | None:
    """Why the kernel cannot compute these operands here, as the end of a sentence; None if it can."""
    card = target_card()
    if card is None:
        return f"it is written for {', '.join(CARDS).upper()}, and this is {target_kind()}"
    needed = NEEDS_JAX[card.architecture]
    if jax.__version_info__ < needed:
        return f"on {card.name} it needs JAX {'.'.join(map(str, needed))}, and this is {jax.__version__}"
    return unsupported(queries, k_pages, any_page=card.architecture == ampere.ARCHITECTURE)


def unsupported(queries: jax.Array, k_pages: jax.Array, any_page: bool = False) -> str | None:
    """What there is no kernel for in the shapes and dtypes of these operands, as the end of a sentence."""
    heads, head_dim = queries.shape[1:]
    kv_heads, page_size = k_pages.shape[2:4]
    if queries.dtype != k_pages.dtype or k_pages.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {queries.dtype} and pages {k_pages.dtype}; both must be bfloat16, or both float16"
    if head_dim % 16 or head_dim > 256 or (head_dim > 128 and head_dim % 32):
        return f"head_dim is {head_dim}; it must be a multiple of 16 up to 128, or of 32 up to 256"
    if heads // kv_heads > _MOST_SHARED:
        return f"{heads // kv_heads} query heads share a KV head; at most {_MOST_SHARED} can"
    if not any_page and (page_size % 8 or (_BLOCK % page_size and page_size % _BLOCK)):
        return f"page_size is {page_size}; it must be 8, 16, 32 or a multiple of {_BLOCK}"
    return None


def paged_attention_mosaic_gpu(
    queries, k_pages, v_pages, layer, page_table, query_start, kv_len,
    *, scale, sliding_window=None, soft_cap=None, return_lse=False, card: Card | None = None,
    tuning: Tuning | None = None, interpret: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `paged_attention`. What it cannot compute says `missing`.

    Args:
        card: what is compiled for; None: the card that is here, or that the mesh in use describes.
        tuning: blocks and stages; None: `fitting`.
        interpret: as in `pallas_call`: `InterpretGPUParams` runs the kernel on a CPU, also in float32.
    """
    card = card or target_card() or CARDS["h100"]
    return _paged_attention(
        queries, k_pages, v_pages, jnp.asarray(layer, jnp.int32), page_table, query_start, kv_len, scale=scale,
        sliding_window=sliding_window, soft_cap=soft_cap, return_lse=return_lse, card=card,
        tuning=tuning or fitting(queries.shape[2], card), interpret=interpret,
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
    rows = kv_len.shape[0]
    # Where there are no more tokens than rows, nearly all rows decode: a tile is one token.
    tile_tokens = 1 if tokens <= rows else _tile(card) // group
    used = -(-tile_tokens * group // 8) * 8
    tiles = num_tiles(tokens, rows, tile_tokens)
    extra = -(-tuning.extra_parts * card.cores // kv_heads)
    plan = make_plan(
        query_start, kv_len, tokens=tokens, tile_tokens=tile_tokens, block=tuning.block, extra_parts=extra,
        sliding_window=sliding_window,
    )  # fmt: skip

    place = jnp.minimum(plan.token[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32), tokens - 1)
    tiled = queries.reshape(tokens, kv_heads, group, head_dim)[place].swapaxes(1, 2)
    tiled = tiled.reshape(tiles, kv_heads, tile_tokens * group, head_dim)
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, used - tile_tokens * group), (0, 0)))

    work = jnp.stack([plan.row, plan.tile, plan.position, plan.length, plan.begin, plan.end], axis=1)
    kernel = ampere.attend if card.architecture == ampere.ARCHITECTURE else _attend
    part_out, part_lse = kernel(
        tiled, k_pages, v_pages, layer[None], page_table, work, group=group, tuning=tuning, card=card,
        scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    out, lse = _merge(part_out, part_lse, plan, tiles)

    def by_token(tiled):  # [tiles, kv_heads, used, ...] -> [tokens, heads, ...]
        tiled = tiled[:, :, : tile_tokens * group]
        tiled = tiled.reshape(tiles, kv_heads, tile_tokens, group, *tiled.shape[3:]).swapaxes(1, 2)
        packed = tiled[jnp.minimum(plan.token_tile, tiles - 1), plan.token_place]
        return packed.reshape(tokens, heads, *packed.shape[3:])

    padding = plan.token_tile == tiles
    out = jnp.where(padding[:, None, None], 0, by_token(out).astype(queries.dtype))
    return (out, jnp.where(padding[:, None], -jnp.inf, by_token(lse))) if return_lse else out


def _tile(card: Card) -> int:
    return ampere.TILE if card.architecture == ampere.ARCHITECTURE else TENSOR_CORES[card.architecture].tile


def _slices(columns: list[Any], width: int) -> list[Any]:
    """The same columns, in slices of `width`."""
    return [type(c)(start, width, 1) for c in columns for start in range(c.start, c.start + c.size, width)]


def _merge(out: jax.Array, lse: jax.Array, plan: Plan, tiles: int) -> tuple[jax.Array, jax.Array]:
    """Parts `[parts, kv_heads, used, ...]` to tiles, weighed by their share of the softmax, in one order.

    The extra parts are added to their tiles by a product with ones and zeros, and a zero does not silence a NaN: what
    a part without keys left in memory, or one of a request that has turned NaN, is taken out before and put back after.
    """
    written = (plan.end > plan.begin)[:, None, None]
    lse, out = jnp.where(written, lse, -jnp.inf), jnp.where(written[..., None], out, 0)
    extra_lse, extra_out = lse[tiles:], out[tiles:]
    finite = jnp.all(jnp.isfinite(extra_out), axis=-1) & (extra_lse < jnp.inf)
    of_tile = plan.tile[tiles:, None] == jnp.arange(tiles, dtype=jnp.int32)  # [extra, tiles]

    def largest(extra):
        return jnp.max(jnp.where(of_tile[:, :, None, None], extra[:, None], -jnp.inf), axis=0, initial=-jnp.inf)

    def total(extra):
        return jnp.einsum("et,e...->t...", of_tile.astype(jnp.float32), extra, precision="highest")

    most = jnp.maximum(lse[:tiles], largest(jnp.where(finite, extra_lse, -jnp.inf)))
    most = jnp.where(most == -jnp.inf, 0, most)
    weight = jnp.exp(lse[:tiles] - most)
    extra_weight = jnp.exp(extra_lse - most[jnp.minimum(plan.tile[tiles:], tiles - 1)])
    finite &= jnp.isfinite(extra_weight)  # the tile's first part may be the one that is not
    extra_weight = jnp.where(finite, extra_weight, 0)
    extra_out = jnp.where(finite[..., None], extra_out, 0)

    share = weight + total(extra_weight)
    merged = out[:tiles] * weight[..., None] + total(extra_out * extra_weight[..., None])
    merged /= jnp.where(share == 0, 1, share)[..., None]
    ill = largest(jnp.where(finite, 0.0, 1.0)) > 0
    return jnp.where(ill[..., None], jnp.nan, merged), jnp.where(ill, jnp.nan, jnp.log(share) + most)


def _attend(
    tiled: jax.Array, k_pages: jax.Array, v_pages: jax.Array, layer: jax.Array, page_table: jax.Array,
    work: jax.Array, *, group: int, tuning: Tuning, card: Card, scale: float, sliding_window: int | None,
    soft_cap: float | None, interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The kernel: every part's own softmax.

    Returns:
        `[parts, kv_heads, used, head_dim]` and the natural log-sum-exp `[parts, kv_heads, used]`, both float32. Not
        written for parts that see no keys.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    used, head_dim = tiled.shape[2:]
    kv_heads, page_size = k_pages.shape[2:4]
    parts, dtype = work.shape[0], k_pages.dtype
    block, stages = tuning.block, tuning.stages
    per_copy = min(block, page_size)
    copies = block // per_copy
    items = parts * kv_heads
    cores = min(card.cores, items)
    tensor_cores = TENSOR_CORES[card.architecture]
    rows_of_tile = tensor_cores.tile
    computing, width, out_width = tensor_cores.split(head_dim)

    def kernel(
        q_ref, k_ref, v_ref, layer_ref, table, work_ref, out_ref, lse_ref,
        q_smem, k_smem, v_smem, all_weights, all_outs, lse_smem, q_ready, k_ready, v_ready, q_free, k_free, v_free,
        *scratch,
    ):  # fmt: skip
        core, warpgroup = lax.axis_index("core"), lax.axis_index("warpgroup")

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

        def attend(mine, columns, part, head, nth, before, blocks):
            weights_smem, out_smem = all_weights.at[mine], all_outs.at[mine]
            position, length, begin = work_ref[part, 2], work_ref[part, 3], work_ref[part, 4]
            q_slot = lax.rem(nth, jnp.int32(tuning.query_slots))
            plgpu.barrier_wait(q_ready.at[q_slot])
            layout = tensor_cores.layout()
            place = plgpu.broadcasted_iota(jnp.int32, (rows_of_tile,), 0, layout=layout.reduce(1))
            # Rows past the tile's queries stand for no query; they see what the last of the row sees.
            query = jnp.minimum(position + lax.div(place, jnp.int32(group)), length - 1)

            def zero_past_the_end(slot, first_key):
                for column in columns:
                    stage = v_smem.at[slot, :, column]
                    values = plgpu.layout_cast(stage[...], plgpu.Layout.WGMMA)
                    key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
                    stage[...] = jnp.where(first_key + key < length, values, jnp.zeros_like(values))

            def step(i, carry):
                outs, most, total = carry
                slot = lax.rem(before + i, jnp.int32(stages))
                first_key = (begin + i) * block
                plgpu.barrier_wait(k_ready.at[slot])

                scores = tensor_cores.scores(q_smem.at[q_slot], k_smem.at[slot], scratch)
                plgpu.barrier_arrive(k_free.at[slot])
                if soft_cap is None:
                    scores *= scale * _LOG2E
                else:
                    scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * _LOG2E)
                after = query - first_key  # how many keys of the block a query sees, less one
                after = lax.broadcast_in_dim(after, scores.shape, [0])
                key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
                seen = key <= after
                if sliding_window is not None:
                    seen &= key > after - sliding_window
                scores = jnp.where(seen, scores, -jnp.inf)

                new_most = jnp.maximum(most, scores.max(axis=1))
                # A row that has seen nothing yet: -inf less -inf would be no number.
                base = jnp.where(new_most == -jnp.inf, jnp.float32(0), new_most)
                decay = jnp.exp2(most - base)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(base, scores.shape, [0]))
                total = total * decay + weights.sum(axis=1)
                weights_smem[...] = weights.astype(dtype)

                plgpu.barrier_wait(v_ready.at[slot])
                pl.when(first_key + block > length)(partial(zero_past_the_end, slot, first_key))
                plgpu.commit_smem()

                outs = tensor_cores.add(outs, decay, weights_smem, v_smem.at[slot], columns, i == 0, scratch)
                plgpu.barrier_arrive(v_free.at[slot])
                return outs, new_most, total

            def by_row(value):
                return plgpu.layout_cast(jnp.full((rows_of_tile,), value, jnp.float32), layout.reduce(1))

            carry = (tensor_cores.start(columns), by_row(-jnp.inf), by_row(0))
            outs, most, total = lax.fori_loop(0, blocks, step, carry)
            plgpu.barrier_arrive(q_free.at[q_slot])

            share = 1 / jnp.where(total == 0, jnp.float32(1), total)
            for index, column in enumerate(_slices(columns, out_width)):
                out = tensor_cores.read(outs, index, column, scratch)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was written before has left shared memory
                out_smem[...] = out * lax.broadcast_in_dim(share, out.shape, [0])
                if mine == 0 and column.start == 0:
                    lse_smem[...] = jnp.where(total == 0, -jnp.inf, most * (1 / _LOG2E) + jnp.log(total))
                plgpu.commit_smem()
                rows = pl.ds(0, used)
                plgpu.copy_smem_to_gmem(out_smem.at[rows], out_ref.at[part, head, :, column])
                if mine == 0 and column.start == 0:
                    plgpu.copy_smem_to_gmem(lse_smem.at[rows], lse_ref.at[part, head])

        def fetch(layer, part, head, nth, before, blocks):
            row, tile, length, begin = work_ref[part, 0], work_ref[part, 1], work_ref[part, 3], work_ref[part, 4]
            last_page = lax.div(length - 1, jnp.int32(page_size))
            q_slot = lax.rem(nth, jnp.int32(tuning.query_slots))
            pl.when(nth >= tuning.query_slots)(partial(plgpu.barrier_wait, q_free.at[q_slot]))
            plgpu.copy_gmem_to_smem(q_ref.at[tile, head], q_smem.at[q_slot, pl.ds(0, used)], q_ready.at[q_slot])

            def step(i, _):
                slot = lax.rem(before + i, jnp.int32(stages))
                first_key = (begin + i) * block
                page = lax.div(first_key, jnp.int32(page_size))
                # Past the row's last page, that page again: every stage gets as many copies.
                numbers = [table[row, jnp.minimum(page + c, last_page)] for c in range(copies)]
                for ref, smem, ready, free in ((k_ref, k_smem, k_ready, k_free), (v_ref, v_smem, v_ready, v_free)):
                    pl.when(before + i >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                    for c, number in enumerate(numbers):
                        source = ref.at[layer, number, head]
                        if per_copy < page_size:
                            source = source.at[pl.ds(first_key - page * page_size, per_copy)]
                        plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(c * per_copy, per_copy)], ready.at[slot])

            lax.fori_loop(0, blocks, step, None)

        for mine in range(computing):

            @pl.when(warpgroup == mine)
            def compute(mine=mine):
                if computing > 1:  # as launched, each warpgroup has 168: a third of the core's
                    plgpu.set_max_registers(216, action="increase")
                own = pl.ds(head_dim // computing * mine, head_dim // computing)
                for_each_part(partial(attend, mine, _slices([own], width)))
                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == computing)
        def memory():
            if computing > 1:
                plgpu.set_max_registers(72, action="decrease")
            loaded, blocks = for_each_part(partial(fetch, layer_ref[0]))
            # Nobody waits for the last to be used; a barrier is left with every arrival seen.
            for count, slots, barriers in ((loaded, tuning.query_slots, (q_free,)), (blocks, stages, (k_free, v_free))):

                def drain(i, _, slots=slots, barriers=barriers):
                    for barrier in barriers:
                        plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(slots))])

                lax.fori_loop(jnp.maximum(count - slots, 0), count, drain, None)

    def operand(*shape):
        """Shared memory for an operand of wgmma. Both operands of a product have one swizzle, so all have."""
        bits = 8 * dtype.itemsize
        swizzle = plgpu.find_swizzle(math.gcd(width, block) * bits)
        tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

    stage = operand(stages, block, head_dim)
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
            operand(slots, rows_of_tile, head_dim), stage, stage, operand(computing, rows_of_tile, block),
            plgpu.SMEM((computing, rows_of_tile, out_width), jnp.float32), plgpu.SMEM((rows_of_tile,), jnp.float32),
            plgpu.Barrier(num_barriers=slots), ready, ready,
            plgpu.Barrier(num_arrivals=computing, num_barriers=slots), free, free,
            *tensor_cores.scratch(block, head_dim),
        ),
        grid=(cores,),
        grid_names=("core",),
        num_threads=computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(tiled, k_pages, v_pages, layer, page_table, work)  # fmt: skip
