"""Parts of a context back together, each weighed by its share of the softmax (flash-decoding), in one order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.plan import Plan


def merge(out: jax.Array, lse: jax.Array, plan: Plan, group: int) -> tuple[jax.Array, jax.Array]:
    """What each query's parts amount to. Of the first parts only what is a query's is read.

    Args:
        out: `[parts, kv_heads, used, head_dim]` float32, every part's own softmax; row `place * group + h` belongs to
            the tile's query `place` and the `h`th of the heads that share a KV head. Whatever was in memory where
            was not written.
        lse: `[parts, kv_heads, used]` float32, its natural log-sum-exp.
        group: query heads that share a KV head.

    Returns:
        `[tokens, kv_heads, group, head_dim]` and `[tokens, kv_heads, group]`, float32; for padding 0 and -inf.
    """
    tiles = plan.first_extra.shape[0]
    padding = plan.token_tile == tiles
    tile = jnp.minimum(plan.token_tile, tiles - 1)

    def of_token(array: jax.Array, part: jax.Array) -> jax.Array:  # [parts, kv_heads, used, ...] -> [tokens, ...]
        sizes = (1, array.shape[1], group, *array.shape[3:])
        rest = (0,) * (array.ndim - 3)
        take = jax.vmap(lambda n, place: lax.dynamic_slice(array, (n, 0, place * group, *rest), sizes)[0])
        return take(part, plan.token_place)

    merged, total = of_token(out, tile), of_token(lse, tile)
    if out.shape[0] > tiles:
        extra = _extra_parts(out[tiles:], lse[tiles:], plan.tile[tiles:], tiles)
        first = plan.first_extra[tile]
        cut = (first < out.shape[0] - tiles)[:, None, None]
        more, more_share, more_most, ill = (of_token(a, jnp.minimum(first, out.shape[0] - tiles - 1)) for a in extra)
        more, more_share = jnp.where(cut[..., None], more, 0), jnp.where(cut, more_share, 0)
        more_most = jnp.where(cut, more_most, -jnp.inf)
        most = jnp.maximum(total, more_most)
        weight, more_weight = jnp.exp(total - most), jnp.exp(more_most - most)
        share = weight + more_share * more_weight
        merged = (merged * weight[..., None] + more * more_weight[..., None]) / share[..., None]
        total = jnp.where(cut & ill, jnp.nan, jnp.log(share) + most)
        merged = jnp.where((cut & ill)[..., None], jnp.nan, merged)
    return jnp.where(padding[:, None, None, None], 0, merged), jnp.where(padding[:, None, None], -jnp.inf, total)


def _extra_parts(out: jax.Array, lse: jax.Array, tile: jax.Array, tiles: int) -> tuple[jax.Array, ...]:
    """The extra parts `[extra, kv_heads, used, ...]` of each one's tile, added up: outputs, shares, the largest
    log-sum-exp that they are relative to, and whether one of them was not finite.

    They are added by a product with ones and zeros, and a zero does not silence a NaN: what was never written, and
    what a request left that has turned NaN, is taken out before, and remembered.
    """
    written = (tile < tiles)[:, None, None]
    lse, out = jnp.where(written, lse, -jnp.inf), jnp.where(written[..., None], out, 0)
    same = tile[:, None] == tile  # [extra, extra]
    finite = jnp.all(jnp.isfinite(out), axis=-1) & (lse < jnp.inf)

    def any_or_largest(values):
        return jnp.max(jnp.where(same[:, :, None, None], values, -jnp.inf), axis=1)

    def total(values):
        return jnp.einsum("te,e...->t...", same.astype(jnp.float32), values, precision="highest")

    most = any_or_largest(jnp.where(finite, lse, -jnp.inf))
    weight = jnp.where(finite, jnp.exp(lse - jnp.where(most == -jnp.inf, 0, most)), 0)
    added = total(jnp.where(finite[..., None], out, 0) * weight[..., None])
    return added, total(weight), most, any_or_largest(jnp.where(finite, 0.0, 1.0)) > 0
