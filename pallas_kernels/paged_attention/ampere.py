"""Ragged paged attention for Ampere, in Pallas Mosaic GPU: the work list of `mosaic_gpu.py`, without TMA and wgmma.

One block of four warps for each part and KV head. Its threads copy rows of keys and values themselves, 16 bytes at a
time (`cp.async`): every thread looks up the page of the row that it copies, so a page may have any size. `stages - 1`
blocks of keys are on their way while one is used:

    shared memory    | block i: in use | block i+1: arriving | block i+2: arriving |     stages = 3
                       ^ when all have read it, block i+3 is copied into its place

The products are `mma.sync`, of 16 rows a warp. Where a tile has 64 rows, as in prefill, each warp has 16 of them and
all columns; where it has fewer, as in decoding, the warps share out the columns, and the weights go from one to the
others through shared memory.

A score is masked before it counts, but a weight of 0 does not silence a NaN among the values: in the block where a
row ends, what lies past the end is set to zero in shared memory.

Pallas's interpreter has neither `cp.async` nor `mma.sync`: `_Device` is what is compiled, `_Interpreted` what stands
for it. All else is the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cards import Card
from pallas_kernels.paged_attention.plan import num_rows
from pallas_kernels.paged_attention.softmax import log_sum_exp, weigh

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.tuning import Tuning

#: most rows of a tile: queries times the query heads that share a KV head
TILE = 64
_ROWS = (16, 32, TILE)
_THREADS = 128
_COPY_BYTES = 16  # of one cp.async
_REDUCTION = 2048  # shared memory for sums over columns that warps share out
_RESERVED = 1024  # shared memory that the driver takes of every block of threads


def attend(
    queries: jax.Array, k_pages: jax.Array, v_pages: jax.Array, layer: jax.Array, page_table: jax.Array,
    work: jax.Array, *, tile_tokens: int, group: int, tuning: Tuning, card: Card, scale: float,
    sliding_window: int | None, soft_cap: float | None, interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The kernel: every part's own softmax, as `mosaic_gpu._attend`."""
    import jax.experimental.pallas as pl

    plgpu = _mosaic_gpu()

    kv_heads, page_size, head_dim = k_pages.shape[2:]
    parts, dtype = work.shape[0], k_pages.dtype
    block, stages = tuning.block, tuning.stages
    used = num_rows(tile_tokens, group)
    rows = rows_of_tile(used, head_dim)
    warps = rows // 16  # that share out the rows of a tile
    queries = jnp.pad(queries, ((0, 0), (0, rows - used), (0, 0)))

    machine = _Interpreted(block, page_size) if interpret else _Device(block, page_size)
    width = _transforms(head_dim, dtype)[0].tiling[-1]
    columns = [pl.ds(start, width) for start in range(0, head_dim, width)]
    left = plgpu.Layout.MMA_LHS(dtype, m_warps=warps)
    right = plgpu.Layout.MMA_RHS(dtype, m_warps=warps)
    layout = plgpu.Layout.MMA_ACC(dtype, m_warps=warps)

    def zeros(size):
        return plgpu.layout_cast(jnp.zeros((rows, size), jnp.float32), layout)

    def kernel(
        q_ref, k_ref, v_ref, layer_ref, table, work_ref, out_ref, lse_ref, q_smem, k_smem, v_smem, *scratch
    ):  # fmt: skip
        part, head = lax.axis_index("part"), lax.axis_index("head")
        blocks = work_ref[part, 5] - work_ref[part, 4]
        weights_smem, scratch = (scratch[0], scratch[1:]) if warps < 4 else (None, scratch)

        @pl.when(blocks > 0)
        def attend_part():
            row, start, position, length, begin = (work_ref[part, column] for column in range(5))
            place = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.reduce(1))
            # Rows past the tile's queries stand for no query; they see what the last of the row sees.
            query = jnp.minimum(position + lax.div(place, jnp.int32(group)), length - 1)

            def fetch(i):
                @pl.when(i < blocks)
                def copy():
                    slot = lax.rem(i, jnp.int32(stages))
                    machine.fetch(
                        (k_ref, v_ref), (k_smem.at[slot], v_smem.at[slot]), table, slot, scratch,
                        layer=layer_ref[0], head=head, row=row, first_key=(begin + i) * block,
                        last_page=lax.div(length - 1, jnp.int32(page_size)),
                    )  # fmt: skip

                machine.close_group()

            def zero_past_the_end(slot, first_key):
                by_rows = plgpu.Layout.MMA_ACC(dtype, m_warps=min(4, block // 16))  # can be stored, as `right` cannot
                for column in columns:
                    stage = v_smem.at[slot, :, column]
                    values = plgpu.load(stage, layout=by_rows)
                    key = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=by_rows)
                    plgpu.store(stage, jnp.where(first_key + key < length, values, jnp.zeros_like(values)))

            def step(i, carry):
                outs, most, total = carry
                slot = lax.rem(i, jnp.int32(stages))
                first_key = (begin + i) * block
                machine.wait(slot, stages - 2, scratch)
                fetch(i + stages - 1)  # into the slot of the block before, which all have read

                scores = zeros(block)
                for column in columns:
                    queries = plgpu.load(q_smem.at[:, column], layout=left)
                    keys = plgpu.load(k_smem.at[slot, :, column].T, layout=right)
                    scores = machine.product(scores, queries, keys)
                weights, decay, most, total = weigh(
                    scores, most, total, query, first_key, layout, scale=scale, sliding_window=sliding_window,
                    soft_cap=soft_cap,
                )  # fmt: skip
                if weights_smem is None:
                    weights = machine.as_operand(weights, dtype, layout, left)
                else:
                    weights_smem[...] = weights.astype(dtype)
                    weights = plgpu.load(weights_smem, layout=left)

                pl.when(first_key + block > length)(partial(zero_past_the_end, slot, first_key))
                outs = tuple(
                    machine.product(
                        out * lax.broadcast_in_dim(decay, out.shape, [0]),
                        weights,
                        plgpu.load(v_smem.at[slot, :, column], layout=right),
                    )
                    for out, column in zip(outs, columns, strict=True)
                )
                return outs, most, total

            for i in range(stages - 1):
                fetch(jnp.int32(i))
            for column in columns:
                plgpu.store(
                    q_smem.at[:, column],
                    plgpu.load(q_ref.at[head, pl.ds(start, rows), column], layout=left, optimized=False),
                )

            def by_row(value):
                return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), layout.reduce(1))

            carry = (tuple(zeros(width) for _ in columns), by_row(-jnp.inf), by_row(0))
            outs, most, total = lax.fori_loop(0, blocks, step, carry)

            share = 1 / jnp.where(total == 0, jnp.float32(1), total)
            for out, column in zip(outs, columns, strict=True):
                out *= lax.broadcast_in_dim(share, out.shape, [0])
                plgpu.store(out_ref.at[part, head, :, column], out, optimized=False)
            plgpu.store(lse_ref.at[part, head], log_sum_exp(most, total), optimized=False)

    def operand(*shape):
        return plgpu.SMEM(shape, dtype, transforms=_transforms(shape[-1], dtype))

    stage = operand(stages, block, head_dim)
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((parts, kv_heads, rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((parts, kv_heads, rows), jnp.float32),
        ),
        scratch_types=(
            operand(rows, head_dim), stage, stage, *([operand(rows, block)] if warps < 4 else []),
            *machine.scratch(stages),
        ),
        grid=(kv_heads, parts),  # the last may be larger than 65535
        grid_names=("head", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=_REDUCTION if warps < 4 else 0),
        interpret=interpret,
    )(queries, k_pages, v_pages, layer, page_table, work)  # fmt: skip
    return out[:, :, :used], lse[:, :, :used]


def shared_bytes(head_dim: int, block: int, stages: int) -> int:
    """Shared memory of one block of threads: the stages, and the most that a tile has beside them."""
    beside = (2 * rows * head_dim + (2 * rows * block + _REDUCTION if rows < TILE else 0) for rows in _ROWS)
    return max(beside) + 2 * stages * 2 * block * head_dim


def blocks(head_dim: int) -> tuple[int, ...]:
    """Keys that a block can have: some, of those that the threads copy in whole steps."""
    return (32, 64) if head_dim % 32 == 0 else (64,)


def fitting(head_dim: int, card: Card) -> tuple[int, int]:
    """Keys of a block, and stages: so many that two blocks of threads share a core, and one computes while the other
    waits, if need be with the smaller block; else what one can have. Wide heads leave fewer registers for scores."""
    sizes = tuple(reversed(blocks(head_dim))) if head_dim <= 128 else (32,)
    together = (card.shared_bytes + _RESERVED) // 2 - _RESERVED
    for limit in (together, card.shared_bytes):
        for block in sizes:
            for stages in range(4, 1, -1):
                if shared_bytes(head_dim, block, stages) <= limit:
                    return block, stages
    raise ValueError(f"two stages of {sizes} keys of {head_dim} do not fit {card.shared_bytes} bytes of shared memory")


def _mosaic_gpu() -> Any:
    """Pallas's module of that name: it is not typed alike in all versions of JAX."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return plgpu


def _transforms(columns: int, dtype: Any) -> tuple[Any, Any]:
    """How operands of products lie in shared memory: in tiles of eight rows, swizzled so that no two share a bank."""
    plgpu = _mosaic_gpu()

    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def rows_of_tile(used: int, head_dim: int) -> int:
    """Rows of a tile: as few as hold `used`. The warps that do not share out rows share out columns, by eights."""
    return next(rows for rows in _ROWS if used <= rows and head_dim % (8 * TILE // rows) == 0)


class _Device:
    """What an A100 runs."""

    def __init__(self, block: int, page_size: int):
        self.block, self.page_size = block, page_size

    def scratch(self, stages: int) -> Sequence[Any]:
        return ()

    def fetch(self, sources, stages, table, slot, scratch, **place):
        """Starts to copy one block of keys and of values, `[block, head_dim]`, into their stages."""
        plgpu = _mosaic_gpu()

        transforms = _transforms(stages[0].shape[-1], stages[0].dtype)
        plain, tiled = plgpu.RefType(), plgpu.RefType(transforms)
        names = ("layer", "head", "row", "first_key", "last_page")
        scalar = plgpu.Layout.WG_SPLAT(())
        arguments = (*sources, *stages, table, *(place[name] for name in names))

        @plgpu.inline_mgpu(arg_types=(plain, plain, tiled, tiled, plain, *(scalar for _ in names)))
        def copy(ctx, keys, values, key_stage, value_stage, table, *place):
            _copy_rows(
                (keys, values), (key_stage, value_stage), table, *(scalar.registers.item() for scalar in place),
                block=self.block, page_size=self.page_size, swizzle=transforms[1].swizzle,
            )  # fmt: skip

        copy(*arguments)

    def close_group(self):
        """Makes the copies that were started since the last call one group."""
        plgpu = _mosaic_gpu()

        @plgpu.inline_mgpu()
        def commit(ctx):
            from jaxlib.mlir.dialects import nvvm

            nvvm.cp_async_commit_group()

        commit()

    def wait(self, slot, groups, scratch):
        """Until all but the last `groups` groups have arrived, for all threads, and all threads are here."""
        plgpu = _mosaic_gpu()

        @plgpu.inline_mgpu()
        def wait(ctx):
            from jax.experimental.mosaic.gpu.utils import warpgroup_barrier
            from jaxlib.mlir.dialects import nvvm

            nvvm.cp_async_wait_group(groups)
            warpgroup_barrier()

        wait()

    def product(self, total, a, b):
        """`total + a @ b`, in float32."""
        plgpu = _mosaic_gpu()

        return plgpu.mma(total, a, b)

    def as_operand(self, weights, dtype, layout, left):
        """Results of a product as an operand of the next: where each warp has whole rows, a thread has the same
        elements of both, in the same order."""
        plgpu = _mosaic_gpu()

        @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(weights.shape, dtype, layout=left))
        def convert(ctx, array):
            from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
            from jax.experimental.mosaic.gpu.utils import dtype_to_ir_type

            target = left.to_mgpu()
            registers = array.astype(dtype_to_ir_type(dtype)).registers.reshape(target.registers_shape(array.shape))
            return FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

        return convert(weights)


class _Interpreted:
    """The same for Pallas's interpreter, which has a TMA unit: a copy for every stretch of rows that lie together."""

    def __init__(self, block: int, page_size: int):
        self.block, self.page_size = block, page_size
        self.together = math.gcd(block, page_size)

    def scratch(self, stages):
        plgpu = _mosaic_gpu()

        return (plgpu.Barrier(num_arrivals=2 * self.block // self.together, num_barriers=stages),)

    def fetch(self, sources, stages, table, slot, scratch, *, layer, head, row, first_key, last_page):
        import jax.experimental.pallas as pl

        plgpu = _mosaic_gpu()

        for start in range(0, self.block, self.together):
            key = first_key + start
            page = table[row, jnp.minimum(lax.div(key, jnp.int32(self.page_size)), last_page)]
            rows = pl.ds(lax.rem(key, jnp.int32(self.page_size)), self.together)
            for source, stage in zip(sources, stages, strict=True):
                plgpu.copy_gmem_to_smem(
                    source.at[layer, page, head, rows], stage.at[pl.ds(start, self.together)], scratch[0].at[slot]
                )

    def close_group(self):
        pass

    def wait(self, slot, groups, scratch):
        plgpu = _mosaic_gpu()

        plgpu.barrier_wait(scratch[0].at[slot])
        plgpu.commit_smem()

    def product(self, total, a, b):
        return total + jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")

    def as_operand(self, weights, dtype, layout, left):
        return weights.astype(dtype)


def _copy_rows(sources, stages, table, layer, head, row, first_key, last_page, *, block, page_size, swizzle):
    """Every thread's share of the copies of a block.

    Rows lie in tiles of eight, each of `swizzle` bytes. Threads next to each other copy what lies together in a row of
    a tile, and a thread has the same place in all tiles that it copies, so that addresses differ by constants.

    Args:
        sources: of keys and of values, `[layers, pages, kv_heads, page_size, head_dim]` in device memory.
        stages: `[block / 8, head_dim / columns of a tile, 8, columns of a tile]` in shared memory.
        table: `[rows, max_pages]`. layer, head, row, first_key, last_page: int32, the same for all threads.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

    i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
    _, pages, heads, _, head_dim = ir.MemRefType(sources[0].type).shape
    chunks = swizzle // _COPY_BYTES  # of a row of a tile
    tiles = 2 * head_dim // swizzle  # side by side
    at_once = _THREADS // (8 * chunks)  # tiles one below the other
    if block % (8 * at_once):
        raise ValueError(f"a block of {block} keys is not copied in whole steps of {8 * at_once}")

    def c(value, type=i32):
        return utils.c(value, type)

    def wide(value):
        return arith.extui(i64, value)

    def index(value):
        return arith.index_cast(ir.IndexType.get(), value)

    starts = [utils.memref_ptr(source) for source in sources]
    starts = [llvm.addrspacecast(llvm.PointerType.get(address_space=1), start) for start in starts]
    ends = [utils.memref_ptr(stage) for stage in stages]

    thread = arith.remui(utils.thread_idx(), c(_THREADS))
    tile, within = arith.divui(thread, c(8 * chunks)), arith.remui(thread, c(8 * chunks))
    chunk = arith.remui(within, c(chunks))
    place = arith.addi(arith.muli(tile, c(8)), arith.divui(within, c(chunks)))
    swizzled = arith.xori(within, arith.remui(arith.divui(within, c(8)), c(chunks)))
    target = arith.addi(arith.muli(tile, c(tiles * 8 * swizzle)), arith.muli(swizzled, c(_COPY_BYTES)))
    ends = [utils.getelementptr(end, [target], i8) for end in ends]
    of_layer = arith.muli(wide(layer), c(pages, i64))
    for first in range(0, block // 8, at_once):
        key = arith.addi(first_key, arith.addi(place, c(8 * first)))
        page = arith.minui(arith.divui(key, c(page_size)), last_page)
        number = arith.addi(of_layer, wide(memref.load(table, [index(row), index(page)])))
        of_head = arith.addi(arith.muli(number, c(heads, i64)), wide(head))
        in_pool = arith.addi(arith.muli(of_head, c(page_size, i64)), wide(arith.remui(key, c(page_size))))
        source = arith.addi(arith.muli(in_pool, c(2 * head_dim, i64)), wide(arith.muli(chunk, c(_COPY_BYTES))))
        for start, end in zip(starts, ends, strict=True):
            start = utils.getelementptr(start, [source], i8)
            for column in range(tiles):
                nvvm.cp_async_shared_global(
                    utils.getelementptr(end, [(first * tiles + column) * 8 * swizzle], i8),
                    utils.getelementptr(start, [column * swizzle], i8), _COPY_BYTES, nvvm.LoadCacheModifierKind.CG,
                )  # fmt: skip
