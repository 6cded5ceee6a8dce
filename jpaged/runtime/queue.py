"""The queue on the host: requests that have no row on the device yet, in the order of the admission policy.

The device has rows for `max_queue` waiting requests, and the policy orders those in every step. What waits beyond them
is ordered here by the same policy, so that the requests on the device are always the first of all that wait. The policy
is called with what never changes of a request that has not begun, so its number is computed once, for all requests that
came since the last burst together. The host does not know what of a prompt is cached: `cached_tokens` is 0 here, and a
policy that looks at it orders the requests that have a row.
"""

from __future__ import annotations

import heapq
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.policy import Policy, QueuedRequests

#: Requests that one call of the policy orders; a static shape.
_AT_ONCE = 256

#: Smaller goes first: the policy's number, and then the uid, which grows in the order of submission.
Rank = tuple[float, int]


@partial(jax.jit, static_argnums=0)
def _numbers(policy: Policy, waiting: QueuedRequests) -> jax.Array:
    return jnp.asarray(policy(waiting))


class HostQueue:
    """Uids in the order of a policy; adding and taking one costs the logarithm of how many there are."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._new: list[tuple[int, tuple[int, ...]]] = []  # not ordered yet: uid, fields of `QueuedRequests`
        self._heap: list[Rank] = []
        self._ranks: dict[int, Rank] = {}  # of those in the heap that still wait

    def __len__(self) -> int:
        return len(self._ranks) + len(self._new)

    def add(self, uid: int, *, priority: int, num_prompt_tokens: int, max_len: int, num_tokens: int) -> None:
        """Queues a request. Cheap and safe in any thread: it is ordered when the first is asked for."""
        self._new.append((uid, (uid, priority, num_prompt_tokens, max_len, num_tokens, 0)))

    def has(self, uid: int) -> bool:
        """Whether a request waits here. Call `order` before."""
        return uid in self._ranks

    def put_back(self, rank: Rank) -> None:
        """Queues a request whose rank is known."""
        self._ranks[rank[1]] = rank
        heapq.heappush(self._heap, rank)

    def discard(self, uid: int) -> None:
        """Takes a request out, wherever it stands; it need not be here. Call `order` before."""
        self._ranks.pop(uid, None)
        if len(self._heap) > 2 * len(self._ranks) + _AT_ONCE:  # mostly of requests that were taken out
            self._heap = list(self._ranks.values())
            heapq.heapify(self._heap)

    def first(self) -> Rank | None:
        """The rank of the request that goes first; None: none waits. Call `order` before."""
        while self._heap:
            if self._heap[0][1] in self._ranks:
                return self._heap[0]
            heapq.heappop(self._heap)  # it was discarded
        return None

    def pop(self) -> Rank:
        """Takes out the first, which must be there."""
        rank = self.first()
        assert rank is not None
        heapq.heappop(self._heap)
        del self._ranks[rank[1]]
        return rank

    def order(self) -> None:
        """Gives requests that came since the last call their places."""
        while self._new:
            some = self._new[:_AT_ONCE]
            table = np.zeros((_AT_ONCE, len(fields(QueuedRequests))), np.int32)
            table[: len(some)] = [values for _, values in some]
            with jax.default_device(_cpu()):
                numbers = np.asarray(_numbers(self._policy, QueuedRequests(*table.T)))[: len(some)]
            if numbers.dtype.kind == "f":
                numbers = np.where(np.isnan(numbers), np.inf, numbers)  # last, as in the step
            for (uid, _), number in zip(some, numbers.tolist(), strict=True):
                self.put_back((number, uid))
            del self._new[: len(some)]

    def clear(self) -> None:
        """Forgets every request."""
        self._new.clear()
        self._heap.clear()
        self._ranks.clear()


def _cpu() -> Any:
    """The host's own device: on a GPU the policy would wait for the burst that runs."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None
