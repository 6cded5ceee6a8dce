"""Pages on the host: chunks of pinned memory beside the pool, and the programs that move them there and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpaged.pool import CHUNK_PAGES, KVPool
from jpaged.step import Moves

read_pages = jax.jit(KVPool.read)
write_pages = jax.jit(KVPool.write, donate_argnums=0)


class HostPool:
    """Chunks of `CHUNK_PAGES` pages each, bit for bit as they were in the pool, and split over devices as it is.

    Which of them hold what is in the state, see `jpaged.step.swap.table`. All of it is allocated here, in JAX's memory
    kind "pinned_host", so that a copy to a GPU needs no other buffer, and want of memory shows at once.

    Args:
        pool: that the pages are of; it is not kept.
        num_chunks: H.
    """

    def __init__(self, pool: KVPool, num_chunks: int):
        self._on_device = jax.tree.map(lambda array: array.sharding, pool)
        self._on_host = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), self._on_device)
        pages = jax.ShapeDtypeStruct((CHUNK_PAGES,), jnp.int32)
        self._read = read_pages.lower(pool, pages).compile()
        chunk = jax.tree.map(
            lambda array, sharding: jax.ShapeDtypeStruct(
                (array.shape[0], CHUNK_PAGES, *array.shape[2:]), array.dtype, sharding=sharding
            ),
            pool,
            self._on_device,
        )
        self._write = write_pages.lower(pool, pages, chunk).compile()
        zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), chunk)
        self._chunks = [jax.device_put(zeros, self._on_host) for _ in range(num_chunks)]

    @property
    def num_programs(self) -> int:
        return 2

    def move(self, pool: KVPool, moves: Moves) -> KVPool:
        """Does what an exchange asks for.

        Args:
            pool: of the state that the exchange returned. Donated, if anything is moved back.
            moves: as numpy arrays.
        """
        used = len(self._chunks)  # no chunk has this number
        for chunk, pages in zip(moves.out_chunk, moves.out_pages, strict=True):
            if chunk < used:
                # First the old one: its memory is the new one's.
                jax.tree.map(lambda array: array.delete(), self._chunks[chunk])
                self._chunks[chunk] = jax.device_put(self._read(pool, pages), self._on_host)
        for chunk, pages in zip(moves.in_chunk, moves.in_pages, strict=True):
            if chunk < used:
                pool = self._write(pool, pages, jax.device_put(self._chunks[chunk], self._on_device))
        return pool

    def close(self) -> None:
        """Frees it. Twice is harmless."""
        for array in jax.tree.leaves(self._chunks):
            array.delete()
        self._chunks = []
