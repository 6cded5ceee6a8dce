"""A running engine as named arrays on the host, and back: pure functions of `EngineState`.

    arrays = pack_state(state)                               `state` stays as it is, and can run on
    state = unpack_state(arrays, make_state(config, ...))    perhaps elsewhere, with other pages, on other devices

Every leaf of the state is an array, by its path: "requests.num_tokens", "slots.page_table", "counters.steps".
Leaves with a place for each page hold only the pages that are used or cached, whose numbers are in "pages":

    pages        3  7  8                      n pages; nothing of the others is kept, and nothing of the scratch page
    pool.k       [layers, n, kv_heads, page_size, head_dim]
    refcount     1  0  2                      page 7 is cached
    page_table   [[3 8 0] [8 0 0]]            as it was: pages by their numbers

A page keeps its number where the other pool has it, and gets a free one where not. The index is made anew, as its size
is that of the pool. Pages that wait in the host's pool (`EngineState.swap`) are left out: their requests compute them
again. Nothing else is looked at: a field that is added to the state is carried without a change here, unless it has a
place for each page, or holds numbers of pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pool import SCRATCH_PAGE, KVPool
from jpaged.runtime.host_pool import read_pages, write_pages
from jpaged.step import EngineState, Status
from jpaged.step.sharing.index import WAYS, Prefixes, places

#: The name of the numbers of the pages, beside the leaves of the state.
PAGES = "pages"
#: Leaves whose values are numbers of pages.
_PAGE_NUMBERS = frozenset({"slots.page_table", "prefixes.before"})
#: Leaves that follow from the others and the size of the pool.
_DERIVED = frozenset({"prefixes.index", "holders"})
#: Keys and values that are moved at a time: what reading and writing a pool needs beside it on the device.
_CHUNK_BYTES = 1 << 26


def pack_state(state: EngineState) -> dict[str, np.ndarray]:
    """Copies a state to the host, by the names that the module describes. `state` may be donated afterwards.

    Returns:
        A numpy array for each leaf but "prefixes.index", and "pages" `[n] int32`, the pages that some table names or
        that can be found, lowest first.
    """
    leaves = _leaves(state)
    # Copied: a view would hold buffers that the next step is to take.
    refcount, findable = np.array(state.refcount), np.array(state.prefixes.cached)
    refcount[SCRATCH_PAGE] = 0
    pages = np.flatnonzero((refcount > 0) | findable).astype(np.int32)
    arrays = {PAGES: pages}
    for name, leaf in leaves.items():
        if name in _DERIVED or _in_pool(name) or _on_host(name):
            continue
        arrays[name] = np.array(leaf)[pages] if _has_pages(name) else np.array(leaf)
    # Past the end of a table stands what is of no meaning.
    arrays["slots.page_table"] = np.array(state.slots.named_pages)
    return arrays | _read_pool(state.pool, pages)


def unpack_state(arrays: Mapping[str, Any], state: EngineState) -> EngineState:
    """Puts what `pack_state` gave into an empty state, on whose devices, in whose sharding, and with whose policies it
    goes on. Cached pages for which there is no room are left out: least recently used first, tail before head.

    Args:
        arrays: by name.
        state: of `make_state`, with the sizes of the one that was packed; the number of its pages may be another. Its
            pool is donated, unless an error is raised.

    Raises:
        ValueError: `state` holds requests or pages, a field is missing, unknown, or of another shape or dtype, or the
            pool is smaller than the pages in use.
    """
    leaves = _leaves(state)
    _check(arrays, state, leaves)
    kept, numbers = _renumbered(arrays, state.pool.num_pages)
    new = numbers[arrays[PAGES][kept]]
    host: dict[str, np.ndarray] = {}
    for name, leaf in leaves.items():
        if name in _DERIVED or _in_pool(name) or _on_host(name):
            continue
        values = np.asarray(arrays[name])
        if name in _PAGE_NUMBERS:
            values = numbers[values]
        if _has_pages(name):
            host[name] = np.array(leaf)
            host[name][new] = values[kept]
        else:
            host[name] = values
    host |= _indexed({name: host[f"prefixes.{name}"] for name in ("cached", "before", "depth", "hash")}, state.prefixes)
    host["holders"] = _holders(host, state)
    pool = _write_pool(state.pool, {name: arrays[f"pool.{name}"] for name in ("k", "v")}, kept, new)

    def filled(path: Any, leaf: jax.Array) -> jax.Array:
        name = _name(path)
        # Copied, as the state will be donated: on a CPU the array may else be the buffer of the numpy array.
        return leaf if _in_pool(name) or _on_host(name) else _placed(jnp.array(host[name], copy=True), leaf)

    return jax.tree_util.tree_map_with_path(filled, replace(state, pool=pool))


def _placed(array: jax.Array, like: jax.Array) -> jax.Array:
    """`array` where `like` is; nowhere in particular if that is so too, for then they share compiled programs."""
    return jax.device_put(array, like.sharding) if like.committed else array


# Names


def _leaves(state: EngineState) -> dict[str, jax.Array]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _in_pool(name: str) -> bool:
    return name.startswith("pool.")


def _on_host(name: str) -> bool:
    return name.startswith("swap.")


def _has_pages(name: str) -> bool:
    """Whether a leaf that is not of the pool has a place for each page: its first axis."""
    return name == "refcount" or (name.startswith("prefixes.") and name not in {"prefixes.enabled", *_DERIVED})


def _check(arrays: Mapping[str, Any], state: EngineState, leaves: Mapping[str, jax.Array]) -> None:
    live = np.asarray(state.requests.status) != Status.FREE
    if live.any() or int(state.available_pages) < state.pool.num_pages or np.asarray(state.prefixes.cached).any():
        raise ValueError("a state is restored into an empty one: give what make_state returns")
    names = {PAGES, *(name for name in leaves if name not in _DERIVED and not _on_host(name))}
    if missing := sorted(names - arrays.keys()):
        raise ValueError(f"the saved state has no {', '.join(missing)}: another version of jpaged wrote it")
    if unknown := sorted(arrays.keys() - names):
        raise ValueError(f"the saved state has {', '.join(unknown)}, unknown here: another version of jpaged wrote it")
    pages = arrays[PAGES]
    count = len(pages)
    for name in sorted(names - {PAGES}):
        shape, dtype = list(leaves[name].shape), leaves[name].dtype
        if _in_pool(name) or _has_pages(name):
            shape[1 if _in_pool(name) else 0] = count
        array = arrays[name]
        if (list(array.shape), array.dtype) != (shape, dtype):
            raise ValueError(
                f"{name} of the saved state is {array.dtype}{list(array.shape)}, and here it would be {dtype}{shape}: "
                "model, page_size, max_model_len, max_num_seqs, max_queue, dtype and kv_cache_dtype must be those that "
                "it was saved with; num_pages may be another"
            )
    named = set(pages.tolist())
    if len(named) < count or SCRATCH_PAGE in named or any(number < 0 for number in named):
        raise ValueError(f"the pages of the saved state must be different and positive numbers, got {pages}")
    in_use = int(np.sum(arrays["refcount"] > 0))
    if in_use > state.pool.num_pages:
        raise ValueError(
            f"{in_use} pages are in use in the saved state, and the pool has {state.pool.num_pages}: set num_pages to "
            f"{in_use} at least ({count} keep the cached pages too)"
        )


# Pages


def _renumbered(arrays: Mapping[str, Any], num_pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Places in "pages" of those that there is room for `[kept] int64`, and a table from old numbers of pages to new
    ones; SCRATCH_PAGE for those that are gone."""
    pages, in_use = np.asarray(arrays[PAGES]), np.asarray(arrays["refcount"]) > 0
    # As in `prefix.next_to_take`. A page is used no later than the one before it, and is deeper: it never stays alone.
    age = arrays["counters.steps"] - arrays["prefixes.last_used"]  # uint32, it may have wrapped
    order = np.lexsort((pages, arrays["prefixes.depth"], age, ~in_use))
    kept = np.sort(order[:num_pages])
    largest = max(int(np.max(arrays[name], initial=SCRATCH_PAGE)) for name in (PAGES, *_PAGE_NUMBERS))
    numbers = np.full(1 + largest, SCRATCH_PAGE, np.int32)
    stay = pages[kept][pages[kept] <= num_pages]
    move = pages[kept][pages[kept] > num_pages]
    numbers[stay] = stay
    numbers[move] = np.setdiff1d(np.arange(1, 1 + num_pages, dtype=np.int32), stay)[: len(move)]
    return kept, numbers


def _indexed(pages: Mapping[str, np.ndarray], empty: Prefixes) -> dict[str, np.ndarray]:
    """The index of the findable pages, and which are findable then: a bucket that is full leaves a page out, and with
    it those that come after it. `pages`: fields of `Prefixes`."""
    bucket, way, _ = (np.asarray(found) for found in _places(empty, pages["hash"], pages["cached"]))
    findable = pages["cached"] & (way < WAYS)
    for page in sorted(np.flatnonzero(findable), key=pages["depth"].__getitem__):
        findable[page] = pages["before"][page] == SCRATCH_PAGE or findable[pages["before"][page]]
    index = np.full(empty.index.shape, SCRATCH_PAGE, np.int32)
    found = np.flatnonzero(findable)
    index[bucket[found], way[found]] = found
    return {"prefixes.cached": findable, "prefixes.index": index}


def _holders(host: Mapping[str, np.ndarray], state: EngineState) -> np.ndarray:
    """The slots that hold each page, a bit each, from the tables."""
    holders = np.zeros(state.holders.shape, np.uint32)
    for slot, count in enumerate(host["slots.num_pages"]):
        holders[slot // 32, host["slots.page_table"][slot, :count]] |= np.uint32(1 << slot % 32)
    return holders


_places = jax.jit(places)


# The pool


def _chunk(pool: KVPool) -> int:
    """Pages that are moved at a time."""
    return min(pool.num_pages, max(1, _CHUNK_BYTES * (1 + pool.num_pages) // pool.nbytes))


def _read_pool(pool: KVPool, pages: np.ndarray) -> dict[str, np.ndarray]:
    size = _chunk(pool)
    out = {}
    for name in ("k", "v"):
        array = getattr(pool, name)
        out[f"pool.{name}"] = np.empty((array.shape[0], len(pages), *array.shape[2:]), array.dtype)
    for start in range(0, len(pages), size):
        some = pages[start : start + size]
        wanted = np.full(size, SCRATCH_PAGE, np.int32)  # padding, so that one program reads them all
        wanted[: len(some)] = some
        chunk = read_pages(pool, wanted)
        for name in ("k", "v"):
            out[f"pool.{name}"][:, start : start + len(some)] = np.asarray(getattr(chunk, name))[:, : len(some)]
    return out


def _write_pool(pool: KVPool, packed: Mapping[str, Any], kept: np.ndarray, new: np.ndarray) -> KVPool:
    size, empty = _chunk(pool), pool
    for start in range(0, len(kept), size):
        some = kept[start : start + size]
        number = np.full(size, 1 + pool.num_pages, np.int32)  # padding, which is dropped
        number[: len(some)] = new[start : start + size]
        chunk: dict[str, Any] = {}
        for name, array in packed.items():
            chunk[name] = np.zeros((array.shape[0], size, *array.shape[2:]), array.dtype)
            chunk[name][:, : len(some)] = array[:, some]
        pool = write_pages(pool, number, KVPool(**chunk))
    return jax.tree.map(_placed, pool, empty)
