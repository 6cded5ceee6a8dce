"""Simulated time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MICROSECONDS = 1_000_000


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clock:
    """Times as whole seconds and microseconds, so that adding is exact for as long as one likes."""

    seconds: Any  # int32
    microseconds: Any  # int32, in [0, 1,000,000)

    @classmethod
    def of(cls, seconds: np.ndarray) -> Clock:
        """Times given as float64, to the nearest microsecond. Numpy arrays."""
        whole, rest = np.divmod(np.rint(seconds * _MICROSECONDS).astype(np.int64), _MICROSECONDS)
        return cls(whole.astype(np.int32), rest.astype(np.int32))

    def to_float(self) -> np.ndarray:
        """Seconds, as float64 on the host."""
        return np.asarray(self.seconds) + np.asarray(self.microseconds) / _MICROSECONDS

    def after(self, seconds: jax.Array) -> Clock:
        """So many seconds later, float32, to the nearest microsecond."""
        more = jnp.rint(seconds * _MICROSECONDS).astype(jnp.int32)
        carry, rest = jnp.divmod(self.microseconds + more % _MICROSECONDS, _MICROSECONDS)
        return Clock(self.seconds + more // _MICROSECONDS + carry, rest)

    def reaches(self, other: Clock) -> jax.Array:
        """Whether `other` is not later."""
        same = self.seconds == other.seconds
        return (self.seconds > other.seconds) | (same & (self.microseconds >= other.microseconds))

    def where(self, condition: jax.Array, other: Clock) -> Clock:
        """This where `condition` holds, else `other`."""
        return jax.tree.map(partial(jnp.where, condition), self, other)

    def noted(self, index: jax.Array, now: Clock) -> Clock:
        """With `now` at the places `index`; those out of range are dropped."""
        return jax.tree.map(lambda times, time: times.at[index].set(time, mode="drop"), self, now)
