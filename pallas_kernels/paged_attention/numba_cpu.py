"""Ragged paged attention for a CPU, in float32.

A unit of work is a tile of up to `TILE` queries of one request, with the query heads of one KV head, or of all:

                       chunk 0    chunk 1    chunk 2         keys of the request, `CHUNK` at a time
    tile of queries   | scores  | scores  | sco.....         products of 4 rows x 16 columns in registers
      x shared heads  | softmax, online, a row at a time
                      | @ values, read where they lie in their pages

Keys are turned while they are read, for the product that follows; values are not copied at all. What a page holds
past the end of its request is never read. A row's chunks lie at fixed places of its request and are taken in order,
so that its result depends neither on the tile it is in nor on the number of threads.

The online softmax is that of Milakov and Gimelshein 2018, as in FlashAttention.
"""

from __future__ import annotations

import math

import numpy as np

from pallas_kernels.cpu import ffi
from pallas_kernels.cpu.simd import (
    add,
    compiled,
    exp,
    fma,
    inlined,
    larger,
    largest,
    load,
    load_float,
    load_int32,
    load_word,
    mul,
    splat,
    store,
    store_float,
    store_word,
    sub,
    total,
    transpose,
)
from pallas_kernels.cpu.units import FLOAT, LANES, VECTOR, WORD
from pallas_kernels.paged_attention.numba_call import BLOCK_COLUMNS, BLOCK_ROWS, CHUNK, TILE, round_up

_LINE = CHUNK * FLOAT  # bytes of a row of scores, and of a row of turned keys
_NOTHING = np.float32(-1e30)  # finite, so that a hidden chunk does not make the running maximum inf - inf
_HIDDEN = np.float32(-np.inf)


_round_up = compiled(round_up)


@compiled
def _multiply_add(a, a_stride, b, b_rows, depth, c, c_stride, rows, columns):
    """`c += a @ b` for `c` `[rows, columns]`, multiples of a block. All are addresses, strides are bytes between rows;
    row `i` of `b` begins at `b` plus word `i` of `b_rows`."""
    for row in range(0, rows, BLOCK_ROWS):
        a0 = a + row * a_stride
        a1, a2, a3 = a0 + a_stride, a0 + 2 * a_stride, a0 + 3 * a_stride
        for column in range(0, columns * FLOAT, BLOCK_COLUMNS * FLOAT):
            at0 = c + row * c_stride + column
            at1, at2, at3 = at0 + c_stride, at0 + 2 * c_stride, at0 + 3 * c_stride
            c00, c01 = load(at0), load(at0 + VECTOR)
            c10, c11 = load(at1), load(at1 + VECTOR)
            c20, c21 = load(at2), load(at2 + VECTOR)
            c30, c31 = load(at3), load(at3 + VECTOR)
            for i in range(depth):
                at_b = b + load_word(b_rows + i * WORD) + column
                b0, b1 = load(at_b), load(at_b + VECTOR)
                x = splat(load_float(a0 + i * FLOAT))
                c00, c01 = fma(x, b0, c00), fma(x, b1, c01)
                x = splat(load_float(a1 + i * FLOAT))
                c10, c11 = fma(x, b0, c10), fma(x, b1, c11)
                x = splat(load_float(a2 + i * FLOAT))
                c20, c21 = fma(x, b0, c20), fma(x, b1, c21)
                x = splat(load_float(a3 + i * FLOAT))
                c30, c31 = fma(x, b0, c30), fma(x, b1, c31)
            store(at0, c00), store(at0 + VECTOR, c01)
            store(at1, c10), store(at1 + VECTOR, c11)
            store(at2, c20), store(at2 + VECTOR, c21)
            store(at3, c30), store(at3 + VECTOR, c31)


@compiled
def _turn(keys, rows, count, aligned, head_dim, turned):
    """`turned` `[head_dim, CHUNK]` from `count` keys at `keys` plus the words of `rows`; `aligned`: each block of
    `LANES` keys lies in one page."""
    whole = count // LANES * LANES if aligned else 0
    for key in range(0, whole, LANES):
        source = keys + load_word(rows + key * WORD)
        for d in range(0, head_dim, LANES):
            transpose(source + d * FLOAT, head_dim * FLOAT, turned + d * _LINE + key * FLOAT, _LINE)
    for key in range(whole, count):
        source = keys + load_word(rows + key * WORD)
        for d in range(head_dim):
            store_float(turned + d * _LINE + key * FLOAT, load_float(source + d * FLOAT))


@compiled
def _soften(line, width, first, last, soft_cap, top, norm, result, head_dim):
    """One row of the online softmax: scores `[width]` at `line`, of which `first : last` are seen, become weights;
    the running maximum and sum at `top` and `norm` and the `result` so far are brought up to date."""
    if soft_cap > 0:
        for key in range(first, last):
            at = line + key * FLOAT
            store_float(at, soft_cap * math.tanh(load_float(at) / soft_cap))
    for key in range(first):
        store_float(line + key * FLOAT, _HIDDEN)
    for key in range(max(last, 0), width):
        store_float(line + key * FLOAT, _HIDDEN)
    highest = load(line)
    for at in range(line + VECTOR, line + width * FLOAT, VECTOR):
        highest = larger(highest, load(at))
    before = load_float(top)
    now = max(before, largest(highest))
    level, summed = splat(now), splat(np.float32(0))
    for at in range(line, line + width * FLOAT, VECTOR):
        weights = exp(sub(load(at), level))
        summed = add(summed, weights)
        store(at, weights)
    shrunk = np.float32(math.exp(before - now))
    store_float(top, now)
    store_float(norm, load_float(norm) * shrunk + total(summed))
    if shrunk != 1:
        factor = splat(shrunk)
        for at in range(result, result + head_dim * FLOAT, VECTOR):
            store(at, mul(factor, load(at)))


@inlined
def _attend(
    queries, keys, values, out, table, position, count, first_head, num_heads, shared, heads, kv_heads, page_size,
    head_dim, scale, soft_cap, window, memory,
):  # fmt: skip
    """Attention of `count` queries of one request, the first at `position`, of the query heads of `num_heads` KV heads
    from `first_head`. `queries` and `out` are addresses of the first query's heads, `keys` and `values` of the layer's
    pages, `table` of the request's row of the page table."""
    vector_bytes, token_bytes = head_dim * FLOAT, heads * head_dim * FLOAT
    rows = count * shared
    padded = _round_up(rows, BLOCK_ROWS)
    # Words first, so that they are aligned.
    key_rows = memory
    turned_rows = key_rows + CHUNK * WORD
    turned = turned_rows + head_dim * WORD
    scores = turned + head_dim * _LINE
    tile = scores + padded * _LINE
    result = tile + num_heads * padded * vector_bytes
    top = result + num_heads * padded * vector_bytes
    norm = top + num_heads * padded * FLOAT

    zero, factor = splat(np.float32(0)), splat(scale)
    for head in range(num_heads):
        for row in range(padded):
            index = head * padded + row
            source = queries + row // shared * token_bytes
            source += ((first_head + head) * shared + row % shared) * vector_bytes
            for d in range(0, vector_bytes, VECTOR):
                store(tile + index * vector_bytes + d, mul(load(source + d), factor) if row < rows else zero)
                store(result + index * vector_bytes + d, zero)
            store_float(top + index * FLOAT, _NOTHING)
            store_float(norm + index * FLOAT, np.float32(0))
    for d in range(head_dim):
        store_word(turned_rows + d * WORD, d * _LINE)

    end, begin = position + count, 0
    if window > 0:
        begin = max(0, position - window + 1) // CHUNK * CHUNK
    head_bytes = page_size * vector_bytes
    for start in range(begin, end, CHUNK):
        size = min(CHUNK, end - start)
        width = _round_up(size, BLOCK_COLUMNS)
        for key in range(size):
            page = load_int32(table + (start + key) // page_size * 4)
            in_page = (start + key) % page_size * vector_bytes
            store_word(key_rows + key * WORD, page * kv_heads * head_bytes + in_page)
        for head in range(num_heads):
            of_head = (first_head + head) * head_bytes
            first_row = head * padded
            _turn(keys + of_head, key_rows, size, page_size % LANES == 0, head_dim, turned)
            for row in range(padded):
                for at in range(scores + row * _LINE, scores + row * _LINE + width * FLOAT, VECTOR):
                    store(at, zero)
            _multiply_add(
                tile + first_row * vector_bytes, vector_bytes, turned, turned_rows, head_dim, scores, _LINE, padded,
                width,
            )  # fmt: skip
            for row in range(rows):
                seen = position + row // shared + 1 - start  # keys of the chunk up to the query itself
                first = max(0, seen - window) if window > 0 else 0
                _soften(
                    scores + row * _LINE, width, min(first, size), min(seen, size), soft_cap,
                    top + (first_row + row) * FLOAT, norm + (first_row + row) * FLOAT,
                    result + (first_row + row) * vector_bytes, head_dim,
                )  # fmt: skip
            _multiply_add(
                scores, _LINE, values + of_head, key_rows, size, result + first_row * vector_bytes, vector_bytes,
                padded, head_dim,
            )  # fmt: skip

    for head in range(num_heads):
        for row in range(rows):
            index = head * padded + row
            target = out + row // shared * token_bytes
            target += ((first_head + head) * shared + row % shared) * vector_bytes
            factor = splat(np.float32(1) / load_float(norm + index * FLOAT))
            for d in range(0, vector_bytes, VECTOR):
                store(target + d, mul(load(result + index * vector_bytes + d), factor))


# Operands and attributes of the operation, in their order.
_QUERIES, _KEYS, _VALUES, _TABLE, _QUERY_START, _KV_LEN, _LAYER = range(7)
_SCALE, _SOFT_CAP, _WINDOW = range(3)


@compiled
def _heads_together(frame):
    """Whether a unit of a row with one query takes all heads: a page is then read at one go, which is faster. Not
    where there are few rows for many threads."""
    start = ffi.data(ffi.argument(frame, _QUERY_START))
    busy = 0
    for row in range(ffi.dimension(ffi.argument(frame, _KV_LEN), 0)):
        busy += load_int32(start + 4 * row) < load_int32(start + 4 * row + 4)
    return busy >= 4 * ffi.dimension(ffi.result(frame, 1), 0)


@compiled
def _units_of_row(count, kv_heads, together):
    """Units of a row with `count` queries."""
    return min(count, 1) if together and count <= 1 else (count + TILE - 1) // TILE * kv_heads


@compiled
def _units(frame):
    start = ffi.data(ffi.argument(frame, _QUERY_START))
    kv_heads = ffi.dimension(ffi.argument(frame, _KEYS), 2)
    together = _heads_together(frame)
    units = 1  # the first clears what is padding
    for row in range(ffi.dimension(ffi.argument(frame, _KV_LEN), 0)):
        units += _units_of_row(load_int32(start + 4 * row + 4) - load_int32(start + 4 * row), kv_heads, together)
    return units


def _run(frame, unit, worker):
    queries, keys = ffi.argument(frame, _QUERIES), ffi.argument(frame, _KEYS)
    tokens, heads, head_dim = ffi.dimension(queries, 0), ffi.dimension(queries, 1), ffi.dimension(queries, 2)
    pages, kv_heads, page_size = ffi.dimension(keys, 1), ffi.dimension(keys, 2), ffi.dimension(keys, 3)
    table, memory = ffi.argument(frame, _TABLE), ffi.result(frame, 1)
    start, length = ffi.data(ffi.argument(frame, _QUERY_START)), ffi.data(ffi.argument(frame, _KV_LEN))
    rows, out = ffi.dimension(table, 0), ffi.data(ffi.result(frame, 0))
    token_bytes, shared = heads * head_dim * FLOAT, heads // kv_heads
    if unit == 0:
        for at in range(out + load_int32(start + 4 * rows) * token_bytes, out + tokens * token_bytes, VECTOR):
            store(at, splat(np.float32(0)))
        return 0
    unit -= 1
    together = _heads_together(frame)
    row = 0
    count = load_int32(start + 4) - load_int32(start)
    while unit >= _units_of_row(count, kv_heads, together):
        unit -= _units_of_row(count, kv_heads, together)
        row += 1
        count = load_int32(start + 4 * row + 4) - load_int32(start + 4 * row)
    if together and count == 1:
        offset, first_head, num_heads = 0, 0, kv_heads
    else:
        offset, first_head, num_heads = unit // kv_heads * TILE, unit % kv_heads, 1
    layer = load_int32(ffi.data(ffi.argument(frame, _LAYER))) * pages * kv_heads * page_size * head_dim * FLOAT
    token = (load_int32(start + 4 * row) + offset) * token_bytes
    _attend(
        ffi.data(queries) + token, ffi.data(keys) + layer, ffi.data(ffi.argument(frame, _VALUES)) + layer, out + token,
        ffi.data(table) + 4 * row * ffi.dimension(table, 1), load_int32(length + 4 * row) - count + offset,
        min(count - offset, TILE), first_head, num_heads, shared, heads, kv_heads, page_size, head_dim,
        load_float(ffi.attribute(frame, _SCALE)), load_float(ffi.attribute(frame, _SOFT_CAP)),
        load_int32(ffi.attribute(frame, _WINDOW)),
        ffi.data(memory) + worker * ffi.dimension(memory, 1) * FLOAT,
    )  # fmt: skip
    return 0


def object_file(name: str) -> bytes:
    """The code of the operation `name`, see `pallas_kernels.cpu.native`. Takes seconds."""
    return ffi.object_file(name, _units, _run)
