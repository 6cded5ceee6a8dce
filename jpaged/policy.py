"""Who goes first: policies, as pure functions of arrays that the compiled step calls.

A policy gives each request a number. The request with the smallest goes first, and of equal ones that which came first:

    def shortest_prompt_first(candidates):
        return candidates.prompt_len

    EngineConfig(admission=shortest_prompt_first)

`admission` orders the queue. `victim` orders those who run: the last of them makes room where pages run out, or for a
request of the queue that stands before it in this order, and the first is served first. The engine applies an order
and nothing else, so a policy cannot lose a page, overfill a step or change a token. A victim policy sees what never
changes of a request, so that the first of all who run goes on until it ends, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidates:
    """What a policy knows of N requests. Where there is none it means nothing, and neither does the policy's number."""

    arrival: jax.Array  # [N] int32, place in the order of submission
    priority: jax.Array  # [N] int32, as the caller gave it; as in vLLM the smaller goes first
    prompt_len: jax.Array  # [N] int32
    max_len: jax.Array  # [N] int32, tokens that it ends with at the latest, prompt included


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Waiting(Candidates):
    """What an admission policy knows of the requests in the queue."""

    num_tokens: jax.Array  # [N] int32, tokens of the prompt, and those generated before it was preempted
    cached_tokens: jax.Array  # [N] int32, of its first ones, those that are computed already, as far as hashes say


#: (candidates) -> `[N]`, integers or floating point
Policy = Callable[[Any], jax.Array]


def by_priority(candidates: Candidates) -> jax.Array:
    """The default: who has the smaller `priority`, and of equals who came first."""
    return candidates.priority


def first_come_first_served(candidates: Candidates) -> jax.Array:
    """Whatever the priorities."""
    return candidates.arrival


def shortest_prompt_first(candidates: Candidates) -> jax.Array:
    """Short answers to most requests soon; long prompts wait while there are shorter ones."""
    return candidates.prompt_len


def longest_prefix_hit_first(candidates: Waiting) -> jax.Array:
    """Who has the most tokens cached, before they are evicted. For admission."""
    return -candidates.cached_tokens


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
