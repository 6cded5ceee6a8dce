"""The order of requests: policies, pure functions of arrays that the compiled step calls.

A policy gives each request a number. The smallest goes first, and among equal ones the request that came first:

    def shortest_prompt_first(requests):
        return requests.num_prompt_tokens

    EngineConfig(admission=shortest_prompt_first)

`admission` orders the queue. `victim` orders the running requests: the first is served first, and the last is preempted
where pages run out, or for a request of the queue that stands before it in this order. The engine applies an order and
nothing else, so a policy cannot lose a page, overfill a step or change a token. A victim policy sees only what never
changes of a request, so the first of the running requests goes on until it ends, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyRequests:
    """What a policy knows of N requests. A place without a request means nothing, and neither does its number."""

    arrival: jax.Array  # [N] int32, its place in the order of submission
    priority: jax.Array  # [N] int32, as the caller gave it; as in vLLM the smaller goes first
    num_prompt_tokens: jax.Array  # [N] int32
    max_len: jax.Array  # [N] int32, tokens that it ends with at the latest, prompt included


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueuedRequests(PolicyRequests):
    """What an admission policy knows of the requests in the queue."""

    num_tokens: jax.Array  # [N] int32, tokens of the prompt, and those generated before it was preempted
    cached_tokens: jax.Array  # [N] int32, its first tokens that are cached, as far as hashes say


#: (requests) -> `[N]`, integers or floating point
Policy = Callable[[Any], jax.Array]


def by_priority(requests: PolicyRequests) -> jax.Array:
    """The default: the smaller `priority` goes first, and among equal ones the request that came first."""
    return requests.priority


def first_come_first_served(requests: PolicyRequests) -> jax.Array:
    """In the order of submission, whatever the priorities."""
    return requests.arrival


def shortest_prompt_first(requests: PolicyRequests) -> jax.Array:
    """Short answers to most requests soon; long prompts wait while there are shorter ones."""
    return requests.num_prompt_tokens


def longest_prefix_hit_first(requests: QueuedRequests) -> jax.Array:
    """The request with the most cached tokens, before their pages are taken. For admission."""
    return -requests.cached_tokens


def name_of(policy: Policy) -> str:
    """Its full name, for files: a function of the same name elsewhere is another."""
    name = getattr(policy, "__qualname__", None)
    return repr(policy) if name is None else f"{policy.__module__}.{name}"


def named(name: str) -> Policy:
    """The policy of this module with the full name `name`.

    Raises:
        ValueError: it is not one of them; it cannot be found by its name.
    """
    module, _, function = name.rpartition(".")
    if module != __name__ or function not in POLICIES:
        raise ValueError(f"the policy {name} is not one of {__name__} ({', '.join(POLICIES)})")
    return POLICIES[function]


POLICIES: dict[str, Policy] = {
    policy.__name__: policy
    for policy in (by_priority, first_come_first_served, shortest_prompt_first, longest_prefix_hit_first)
}
