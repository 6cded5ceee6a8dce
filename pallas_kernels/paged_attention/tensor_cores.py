"""The two products of attention on the tensor cores of two generations, behind one interface.

Hopper's `wgmma` accumulates in the registers of a warpgroup, Blackwell's `tcgen05` in a memory of its own, which is
loaded to be used and stored to be changed. All else of the kernel is the same for both.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax


class TensorCores(Protocol):
    """What the kernel asks of a generation. `scratch` is what `scratch()` described, as references.

    Attributes:
        tile: rows of an operand.
    """

    tile: int

    def most_tiles(self, head_dim: int) -> int:
        """Tiles that a block of threads can compute at the same time."""

    def sharing(self, head_dim: int) -> int:
        """Warpgroups that compute one tile: each all scores, and its share of the columns of the values."""

    def columns(self, head_dim: int) -> tuple[int, int]:
        """Columns of the values that are one operand, and columns that are written out at a time."""

    def layout(self) -> Any:
        """How an array of `[tile, n]` lies in the registers of a warpgroup."""

    def scratch(self, block: int, head_dim: int) -> tuple[Any, ...]:
        """What a compute warpgroup needs beside shared memory."""

    def scores(self, queries: Any, keys: Any, scratch: tuple[Any, ...]) -> jax.Array:
        """`queries @ keys.T`, float32 `[tile, block]`."""

    def start(self, columns: list[Any]) -> Any:
        """Sums of weighted values before there are any."""

    def add(
        self, outs: Any, decay: jax.Array, weights: Any, values: Any, columns: list[Any], first: Any, scratch: Any
    ) -> Any:
        """`outs * decay + weights @ values`, of `columns` of the values; `first`: there is nothing in `outs` yet."""

    def read(self, outs: Any, index: int, column: Any, scratch: Any) -> jax.Array:
        """The sums of `column`, the `index`th that is written out, float32 `[tile, columns]`."""


class Wgmma:
    """Hopper."""

    tile = 64

    def most_tiles(self, head_dim):
        return 2 // self.sharing(head_dim)

    def sharing(self, head_dim):
        return 1 if head_dim <= 128 else 2  # the sums of 256 columns do not fit the registers of one

    def columns(self, head_dim):
        own = head_dim // self.sharing(head_dim)
        width = 64 if own % 64 == 0 else own
        return width, width

    def layout(self):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        return plgpu.Layout.WGMMA

    def scratch(self, block, head_dim):
        return ()

    def scores(self, queries, keys, scratch):
        return self._product(queries, keys.T, keys.shape[0])

    def start(self, columns):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        zeros = (jnp.zeros((self.tile, column.size), jnp.float32) for column in columns)
        return tuple(plgpu.layout_cast(array, self.layout()) for array in zeros)

    def add(self, outs, decay, weights, values, columns, first, scratch):
        added = (self._product(weights, values.at[:, column], column.size) for column in columns)
        return tuple(
            out * lax.broadcast_in_dim(decay, out.shape, [0]) + more for out, more in zip(outs, added, strict=True)
        )

    def read(self, outs, index, column, scratch):
        return outs[index]

    def _product(self, a, b, columns):
        import jax.experimental.pallas as pl
        import jax.experimental.pallas.mosaic_gpu as plgpu

        def multiply(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((self.tile, columns), jnp.float32))


class Tcgen05:
    """Blackwell. The sums stay in the tensor cores' memory: `[128, head_dim]` of 128 lanes with 512 columns."""

    tile = 128

    def most_tiles(self, head_dim):
        return 2 if head_dim <= 128 else 1  # 512 columns of the tensor cores' memory

    def sharing(self, head_dim):
        return 1

    def columns(self, head_dim):
        out_width = 32 if head_dim % 32 == 0 and head_dim <= 128 else 16  # shared memory is short
        return 64 if head_dim % 64 == 0 else head_dim, out_width

    def layout(self):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        return plgpu.Layout.TCGEN05

    def scratch(self, block, head_dim):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        return (
            plgpu.TMEM((self.tile, block), jnp.float32),
            plgpu.TMEM((self.tile, head_dim), jnp.float32),
            plgpu.Barrier(orders_tensor_core=True),
        )

    def scores(self, queries, keys, scratch):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        scores, _, done = scratch
        plgpu.tcgen05_mma(scores, queries, keys.T, done, accumulate=False)
        plgpu.barrier_wait(done)
        return self._load(scores)

    def start(self, columns):
        return ()

    def add(self, outs, decay, weights, values, columns, first, scratch):
        import jax.experimental.pallas as pl
        import jax.experimental.pallas.mosaic_gpu as plgpu

        _, sums, done = scratch

        @pl.when(jnp.logical_not(first))
        def shrink():
            for column in columns:
                some = sums.at[:, column]
                array = self._load(some)
                plgpu.async_store_tmem(some, array * lax.broadcast_in_dim(decay, array.shape, [0]))
            plgpu.commit_tmem()

        plgpu.tcgen05_mma(sums, weights, values, done, accumulate=jnp.logical_not(first))
        plgpu.barrier_wait(done)
        return ()

    def read(self, outs, index, column, scratch):
        return self._load(scratch[1].at[:, column])

    def _load(self, ref):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        array = plgpu.async_load_tmem(ref, layout=self.layout())
        plgpu.wait_load_tmem()
        return array


#: by the kernel of a card
TENSOR_CORES: dict[str | None, TensorCores] = {"hopper": Wgmma(), "blackwell": Tcgen05()}
