"""What a page holds, so that another request can use it: identities of full pages, and the index that finds them.

    request  t0 t1 t2 t3 | t4 t5 t6 t7 | t8 ..         a hash of everything up to the end of each page
                 h0            h1
    index    [h0] -> page 7    [h1] -> page 2          a few pages to a bucket
    page 7:  t0 t1 t2 t3, after nothing, in namespace n
    page 2:  t4 t5 t6 t7, after page 7,  in namespace n

A hash only says where to look. A page is taken for the i-th of a request if its tokens are the same, if the page before
it is the one that was found for i - 1, and if its namespace is the request's: so, by induction, everything before it is
the same too, whatever the hash does. That a page is named as the one before means what it says, because a page that
is handed out anew forgets those that named it.

    P  pages: 1 + num_pages             N  entries of a list of runs: consecutive pages of one request after another
    B  buckets, W  pages in a bucket    K  whose runs they are
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pool import SCRATCH_PAGE

#: Pages in a bucket. With a bucket a page there is one on average, and more than these are once in a million.
WAYS = 8
#: Pages that one lookup asks for at most, or one request's where that is more. What is left over is looked up later.
LOOKUP_PAGES = 2048


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefixes:
    """What each page holds, for lookups; meaningless where not `cached`. A page that no table names
    and that is findable is cached."""

    enabled: jax.Array  # [] bool, whether pages are shared at all
    cached: jax.Array  # [P] bool, full, computed, and in the index
    tokens: jax.Array  # [P, page_size] int32
    before: jax.Array  # [P] int32, page of the tokens before; SCRATCH_PAGE for a request's first page
    namespace: jax.Array  # [P] int32
    depth: jax.Array  # [P] int32, pages before it; also of pages in use that are not cached
    hash: jax.Array  # [P, 2] uint32, of all tokens up to its end
    last_used: jax.Array  # [P] uint32, the last step in which some table named it
    index: jax.Array  # [B, W] int32, pages by their hash; what is not findable there any more counts as empty

    @classmethod
    def empty(cls, num_pages: int, page_size: int, *, enabled: bool) -> Prefixes:
        pages = 1 + num_pages
        ints = jnp.zeros(pages, jnp.int32)
        return cls(
            enabled=jnp.array(enabled), cached=jnp.zeros(pages, bool),
            tokens=jnp.zeros((pages, page_size), jnp.int32), before=ints, namespace=ints, depth=ints,
            hash=jnp.zeros((pages, 2), jnp.uint32), last_used=jnp.zeros(pages, jnp.uint32),
            index=jnp.full((1 << num_pages.bit_length(), WAYS), SCRATCH_PAGE, jnp.int32),
        )  # fmt: skip


# Hashes


def token_hash(token: Any, position: Any) -> Any:
    """What a token adds to the hash of its prefix: `[..., 2]` uint32 from two arrays `[...]`; numpy or JAX.

    The hash of a prefix is the sum over its tokens, so one prefix sum makes those of all pages, and a new token is
    added to the last.
    """
    stack = np.stack if isinstance(token, np.ndarray) else jnp.stack
    token, position = token.astype(np.uint32), position.astype(np.uint32)
    words = [_mix(_mix(token + seed) + position) for seed in (np.uint32(0x9E3779B9), np.uint32(0x3C6EF372))]
    return stack(words, axis=-1)


def _mix(x: Any) -> Any:
    """A permutation of uint32 in which every bit depends on all (lowbias32, by C. Wellons)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def root_hash(namespace: Any) -> Any:
    """The hash of no tokens `[..., 2]`, from namespaces `[...]` int32."""
    return token_hash(namespace, 0 * namespace - 1)  # a position that no token has


def prefix_hashes(tokens: jax.Array, known: jax.Array, namespace: jax.Array, page_size: int) -> jax.Array:
    """Hashes `[N, M, 2]` uint32 of the prefixes that end with each page of the requests `tokens` `[N, T]`: of their
    first `num_tokens` `[N]` tokens, where these end within the page or before it."""
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    words = token_hash(tokens, jnp.broadcast_to(position, tokens.shape))
    words = jnp.where((position[None] < known[:, None])[..., None], words, jnp.uint32(0))
    pages = -(-tokens.shape[1] // page_size)
    words = jnp.pad(words, ((0, 0), (0, pages * page_size - tokens.shape[1]), (0, 0)))
    words = jnp.sum(words.reshape(tokens.shape[0], pages, page_size, 2), axis=2, dtype=jnp.uint32)
    return root_hash(namespace)[:, None] + jnp.cumsum(words, axis=1, dtype=jnp.uint32)


# Lists of runs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Runs:
    """A list with a run of entries for each of K owners, one run after the other, cut at N entries."""

    owners: int = field(metadata={"static": True})  # K
    owner: jax.Array  # [N] int32, whose entry it is
    number: jax.Array  # [N] int32, which of its owner's
    used: jax.Array  # [N] bool, whether there is such an entry; the others mean nothing

    def unbroken(self, good: jax.Array) -> jax.Array:
        """Whether an entry `[N]` is `good` and all before it in its run are."""
        never = jnp.iinfo(jnp.int32).max
        first_bad = jnp.full(self.owners, never, jnp.int32).at[self.owner].min(jnp.where(good, never, self.number))
        return self.number < first_bad[self.owner]


def spread(count: jax.Array, most: int) -> Runs:
    """Runs of `count[k]` `[K] int32` entries, `most` in all."""
    end = jnp.cumsum(count, dtype=jnp.int32)
    place = jnp.arange(most, dtype=jnp.int32)
    # An entry belongs to the one whose run ends after it: so many runs end before.
    ended = jnp.zeros(most, jnp.int32).at[end].add(1, mode="drop")
    owner = jnp.minimum(jnp.cumsum(ended, dtype=jnp.int32), count.shape[0] - 1)
    return Runs(count.shape[0], owner, place - (end - count)[owner], place < end[-1])


# The index


def _bucket(prefixes: Prefixes, hash_: jax.Array) -> jax.Array:
    # From the highest bits, so that to sort by hash is to sort by bucket.
    bits = prefixes.index.shape[0].bit_length() - 1
    return (hash_[..., 0] >> jnp.uint32(32 - bits)).astype(jnp.int32)


def _live(prefixes: Prefixes, bucket: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pages `[..., W]` in the buckets `[...]`, and whether they still belong there."""
    pages = prefixes.index[bucket]
    return pages, prefixes.cached[pages] & (_bucket(prefixes, prefixes.hash[pages]) == bucket[..., None])


def find(
    prefixes: Prefixes, runs: Runs, hash_: jax.Array, tokens: jax.Array, namespace: jax.Array, before: jax.Array
) -> jax.Array:
    """The pages `[N]` int32 that hold what `runs` ask for, as far as each is found without a gap; SCRATCH_PAGE from
    there on.

    Args:
        hash_, tokens, namespace: `[N, 2]`, `[N, page_size]` and `[N]` of each entry.
        before: `[N]` int32, the page before; only those of first entries are looked at.
    """
    pages, live = _live(prefixes, _bucket(prefixes, hash_))
    same = live & jnp.all(prefixes.hash[pages] == hash_[:, None], axis=-1)
    page = jnp.take_along_axis(pages, jnp.argmax(same, axis=1)[:, None], axis=1)[:, 0]
    before = jnp.where(runs.number == 0, before, jnp.roll(page, 1))
    equal = (
        jnp.any(same, axis=1)
        & jnp.all(prefixes.tokens[page] == tokens, axis=1)
        & (prefixes.before[page] == before)
        & (prefixes.namespace[page] == namespace)
    )
    return jnp.where(runs.used & runs.unbroken(equal), page, SCRATCH_PAGE)


def cached_tokens(
    prefixes: Prefixes, hash_: jax.Array, namespace: jax.Array, known: jax.Array, page_size: int
) -> jax.Array:
    """How many tokens `[K]` int32 of the requests with the hashes `[K, M, 2]` seem to be cached, to put them in an
    order: by hashes alone, as no token is read."""
    row, columns = jnp.arange(hash_.shape[0], dtype=jnp.int32), hash_.shape[1]

    def found(page: jax.Array) -> jax.Array:
        own = hash_[row, jnp.minimum(page, columns - 1)]
        pages, live = _live(prefixes, _bucket(prefixes, own))
        same = live & jnp.all(prefixes.hash[pages] == own[:, None], axis=-1)
        return jnp.any(same & (prefixes.namespace[pages] == namespace[:, None]), axis=1)

    # With a page all before it are cached, so the last one is searched for.
    low, high = jnp.zeros_like(known), jnp.where(prefixes.enabled, jnp.maximum(known - 1, 0) // page_size, 0)
    for _ in range(columns.bit_length()):
        middle = (low + high) // 2
        passes = (low < high) & found(middle)
        low, high = jnp.where(passes, middle + 1, low), jnp.where(passes, high, middle)
    return page_size * low


def places(prefixes: Prefixes, hash_: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where in the index new pages go.

    Args:
        hash_: `[N, 2]` of each.
        wanted: `[N]` bool, whether it is new.

    Returns:
        The bucket and the way `[N]` of each, W where its bucket has no room; and whether another of the list has the
        same hash and comes first `[N]`.
    """
    size = hash_.shape[0]
    unwanted = (~wanted).astype(jnp.uint32)
    place = jnp.arange(size, dtype=jnp.int32)
    # Stable: of equal ones the first stays the first.
    unwanted, high, low, order = jax.lax.sort(
        (unwanted, hash_[:, 0], hash_[:, 1], place), num_keys=3, is_stable=True
    )  # fmt: skip
    keys = jnp.stack([unwanted, high, low], axis=-1)
    again = jnp.concatenate([jnp.zeros(1, bool), jnp.all(keys[1:] == keys[:-1], axis=-1)])
    bucket = _bucket(prefixes, keys[:, 1:])
    begins = jnp.concatenate([jnp.ones(1, bool), (bucket[1:] != bucket[:-1]) | (keys[1:, 0] != keys[:-1, 0])])
    rank = place - jax.lax.cummax(jnp.where(begins, place, 0))
    _, live = _live(prefixes, bucket)
    # The rank-th empty way: it is empty and has rank empty ones before it.
    empties = jnp.cumsum(~live, axis=1, dtype=jnp.int32)
    way = jnp.sum(empties <= rank[:, None], axis=1, dtype=jnp.int32)
    back = jnp.zeros(size, jnp.int32).at[order].set(place)
    return bucket[back], way[back], again[back]


def forget(prefixes: Prefixes, which: jax.Array) -> Prefixes:
    """After the pages of `which` `[P] bool` stopped being what they were: no lookup finds them, nor pages that come
    after one of them."""
    return replace(prefixes, cached=prefixes.cached & ~which & ~which[prefixes.before])


# Which page next


def next_to_take(prefixes: Prefixes, refcount: jax.Array, step: jax.Array, columns: int, most: int) -> jax.Array:
    """The `most` pages `[most]` int32 to hand out next: those that are not cached, lowest first; then cached ones,
    least recently used first and, of those last used together, the tail first; then pages in use.

    A page before another is in use whenever that one is, so no page goes before those that need it.

    Args:
        refcount: `[P]`.
        step: `[]` uint32, the number of this step.
        columns: how deep a page can be, a static number.
    """
    bits = (columns - 1).bit_length()
    # Age and depth share 30 bits; pages unused for longer than these count go by depth alone.
    oldest = (1 << (30 - bits)) - 2
    age = jnp.minimum(step - prefixes.last_used, jnp.uint32(oldest)).astype(jnp.int32)
    key = jnp.where(prefixes.cached, 1 + (age << bits) + prefixes.depth, 1 << 30)
    key = jnp.where(refcount == 0, key, 0)
    # As floats of the same order, none of them denormal: `top_k` is a selection for these, and a sort for integers.
    return jax.lax.top_k(jax.lax.bitcast_convert_type(key + (1 << 23), jnp.float32), most)[1]
