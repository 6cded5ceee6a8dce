"""Where the pages of preempted requests are while they wait on the host.

The host has a pool of *chunks*, each of a few pages that are moved together. What is in them is not part of the state;
which request has which is. A request keeps its chunks from the moment it loses its slot until it is resumed, ends,
or becomes another:

    request   t0 t1 .. t7 | t8 .. t15 | t16 t17         computed 18, pages of 4, chunks of 2 pages
    table     5             0           7               chunk 5: its pages 0 and 1; chunk 7: its page 4, and nothing

    S  slots          R  request rows         M  pages a request can have
    H  chunks         C  chunks a request can have: ceil(M / CHUNK_PAGES)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jpaged.pool import CHUNK_PAGES
from jpaged.step.decisions import Placed
from jpaged.step.status import NO_REQUEST

#: Fills unused places of tables of chunks.
NO_CHUNK = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Notes:
    """What an exchange did, until the next step has it in its record."""

    left: jax.Array  # [S] int32, uid of the request that lost this slot; NO_REQUEST: none
    to_host: jax.Array  # [S] bool, whether its pages went there
    discarded: jax.Array  # [] int32, tokens of the others, which must compute them again
    restored: jax.Array  # [] int32, requests resumed with pages of the host
    placed: Placed  # pages that they got; of no length where no trace is kept

    @classmethod
    def empty(cls, slots: int, most_placed: int) -> Notes:
        none = jnp.full(slots, NO_REQUEST, jnp.int32)
        return cls(none, jnp.zeros(slots, bool), jnp.int32(0), jnp.int32(0), Placed.empty(most_placed))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Swap:
    """The host's pool, as the state knows it."""

    free: jax.Array  # [H] bool, chunks that no request has
    table: jax.Array  # [R, C] int32, the chunks of each request, in order; NO_CHUNK where there is none
    num_computed_tokens: (
        jax.Array
    )  # [R] int32, tokens whose keys and values they hold; 0: the request is not on the host
    page_cost: jax.Array  # [] float32, what moving a page there and back costs, in tokens that are computed meanwhile
    notes: Notes

    @classmethod
    def empty(cls, *, chunks: int, rows: int, columns: int, slots: int, page_cost: float, most_placed: int) -> Swap:
        """Nothing on the host. `columns` is M."""
        return cls(
            free=jnp.ones(chunks, bool),
            table=jnp.full((rows, -(-columns // CHUNK_PAGES)), NO_CHUNK, jnp.int32),
            num_computed_tokens=jnp.zeros(rows, jnp.int32),
            page_cost=jnp.float32(page_cost),
            notes=Notes.empty(slots, most_placed),
        )

    @property
    def num_chunks(self) -> int:
        return self.free.shape[0]

    def without(self, rows: jax.Array) -> Swap:
        """When the requests `rows` `[R] bool` have nothing on the host any more."""
        gone = jnp.where(rows[:, None] & (self.table != NO_CHUNK), self.table, self.num_chunks)
        return replace(
            self,
            free=self.free.at[gone].set(True, mode="drop"),
            table=jnp.where(rows[:, None], NO_CHUNK, self.table),
            num_computed_tokens=jnp.where(rows, 0, self.num_computed_tokens),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moves:
    """Which pages are to be copied to the host, and then which back. Nothing else may touch the pool before."""

    out_chunk: jax.Array  # [L] int32; H where unused
    out_pages: jax.Array  # [L, CHUNK_PAGES] int32; the scratch page where a chunk has fewer
    in_chunk: jax.Array  # [L] int32; H where unused
    in_pages: jax.Array  # [L, CHUNK_PAGES] int32; P, which is dropped, for what is not wanted back
