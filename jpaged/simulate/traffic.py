"""Traffic: requests as plain arrays, for a simulation of many of them.

Tokens are not stored. A token is a hash of its place and of whose it is: the request's own, or, in the part of a prompt
that others begin with too, its group's. So prompts are equal where they are said to be and nowhere else, and a hundred
thousand of them are a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.step.sharing.index import token_hash

#: Requests of one simulation: their numbers are int32.
_MOST = 2**31 - 2


class TimedRequest(Protocol):
    """What `Traffic.of` reads of a request; `jpaged.bench.workload.WorkloadRequest` has it."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def max_tokens(self) -> int: ...


@dataclass(frozen=True)
class Traffic:
    """N requests in the order in which they arrive, as numpy arrays. A single value is every request's.

    A prompt may share its beginning on several levels: its first `shared_len[i, 0]` tokens are those of the group
    `group[i, 0]`, those after them up to `shared_len[i, 1]` those of the group `group[i, 1]`, and so on.

    Raises:
        ValueError: naming the field, the request, and what is allowed.
    """

    arrival_s: Any  # [N] float64, seconds from the start, none less than the one before
    prompt_len: Any  # [N] int32
    output_len: Any  # [N] int32, tokens that it gets, all of them
    priority: Any = 0  # [N] int32, as in `jpaged.policy`
    group: Any = 0  # [N, L] int32, at least 0; `[N]` is one level
    shared_len: Any = 0  # [N, L] int32, tokens up to which it shares

    def __post_init__(self):
        given = {f.name: np.asarray(getattr(self, f.name)) for f in fields(self)}
        count = len(next((array for array in given.values() if array.ndim), [0]))
        for name, array in given.items():
            array = self._fitted(name, array, np.float64 if name == "arrival_s" else np.int32)
            levels = name in ("group", "shared_len")
            if array.ndim == 0:
                array = np.broadcast_to(array, count)
            if levels and array.ndim == 1:
                array = array[:, None]
            if array.shape[0] != count or array.ndim != 1 + levels:
                raise ValueError(f"{name} must have an entry for each of {count} requests, got shape {array.shape}")
            object.__setattr__(self, name, array)
        if not 1 <= count <= _MOST:
            raise ValueError(f"traffic needs at least one request, and at most {_MOST:,}; got {count:,}")
        if self.group.shape != self.shared_len.shape:
            raise ValueError(
                f"group and shared_len must have the same levels, got shapes {self.group.shape} and "
                f"{self.shared_len.shape}"
            )
        self._check("arrival_s", ~np.isfinite(self.arrival_s) | (self.arrival_s < 0), "a finite number of seconds >= 0")
        sooner = np.concatenate([[False], np.diff(self.arrival_s) < 0])
        self._check("arrival_s", sooner, "no less than that of the one before: sort the requests by it")
        for name, least in (("prompt_len", 1), ("output_len", 1), ("group", 0), ("shared_len", 0)):
            self._check(name, getattr(self, name) < least, f"at least {least}")
        longer = self.shared_len > self.prompt_len[:, None]
        self._check("shared_len", longer, "no more than its prompt_len")
        self._check("shared_len", np.diff(self.shared_len, axis=1) < 0, "no less than on the level before")

    @staticmethod
    def _fitted(name: str, array: np.ndarray, kind: type) -> np.ndarray:
        """`array` as that kind of numbers."""
        fits = np.can_cast(array.dtype, kind, "same_kind") or array.dtype.kind == "u" or not array.size
        fitted: np.ndarray = array.astype(kind) if fits else array
        if not fits or not np.array_equal(fitted, array, equal_nan=True):
            raise ValueError(
                f"{name} must be numbers that fit in {kind.__name__}, got {array.dtype}, up to {array.max()}"
            )
        return fitted

    def _check(self, name: str, wrong: np.ndarray, allowed: str) -> None:
        if wrong.any():
            first = int(np.argwhere(wrong)[0, 0])
            raise ValueError(f"{name} of request {first} must be {allowed}, got {getattr(self, name)[first]}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __repr__(self) -> str:
        return (
            f"Traffic({len(self):,} requests in {self.arrival_s[-1]:,.1f} s, {self.prompt_tokens:,} prompt and "
            f"{self.output_tokens:,} output tokens)"
        )

    @property
    def prompt_tokens(self) -> int:
        return int(self.prompt_len.sum(dtype=np.int64))

    @property
    def output_tokens(self) -> int:
        return int(self.output_len.sum(dtype=np.int64))

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of the longest request: the least `max_model_len` for all of them."""
        return int((self.prompt_len.astype(np.int64) + self.output_len).max())

    def prompt(self, index: int) -> list[int]:
        """The tokens of request `index`, as the simulation has them, each in [0, 2**31)."""
        place = np.arange(self.prompt_len[index], dtype=np.int32)
        return tokens_of(np.int32(index), self.group[index], self.shared_len[index], place, np).tolist()

    @classmethod
    def random(
        cls,
        count: int,
        *,
        seed: int,
        per_s: float,
        prompt_tokens: tuple[int, int] = (16, 512),
        output_tokens: tuple[int, int] = (8, 256),
        priorities: int | Sequence[int] = 0,
        groups: int = 1,
        shared_tokens: int = 0,
    ) -> Traffic:
        """Requests that arrive independently of each other, with log-uniform lengths; the same arguments give the same
        requests with one version of numpy.

        Args:
            count: requests.
            seed: of all draws.
            per_s: requests that arrive in a second, on average; inf: all at once.
            prompt_tokens, output_tokens: least and most, both included.
            priorities: one for all, or those from which each request's is drawn.
            groups: how many system prompts there are; each request belongs to one.
            shared_tokens: length of those, in front of `prompt_tokens`.
        """
        for name, (low, high) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
            if not 1 <= low <= high:
                raise ValueError(f"{name} must be (low, high) with 1 <= low <= high, got {(low, high)}")
        if count < 1 or groups < 1 or shared_tokens < 0 or not per_s > 0:
            raise ValueError(
                "count and groups must be at least 1, shared_tokens at least 0 and per_s more than 0, got "
                f"{count}, {groups}, {shared_tokens} and {per_s}"
            )
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(1 / per_s, count)

        def log_uniform(low: int, high: int) -> np.ndarray:
            lengths = (low * ((high + 1) / low) ** rng.random(count)).astype(np.int32)
            return np.minimum(lengths, high)

        return cls(
            arrival_s=np.cumsum(gaps) - gaps[0],
            prompt_len=shared_tokens + log_uniform(*prompt_tokens),
            output_len=log_uniform(*output_tokens),
            priority=rng.choice(np.atleast_1d(np.asarray(priorities, np.int32)), count),
            group=rng.integers(0, groups, count, np.int32),
            shared_len=shared_tokens,
        )

    @classmethod
    def of(cls, requests: Iterable[TimedRequest]) -> Traffic:
        """Of requests with tokens, as in a workload file (`load_workload(path).requests`): the same lengths, and equal
        tokens where theirs are equal. Priorities are 0."""
        ordered = sorted(requests, key=lambda request: request.arrival_s)
        group, shared_len = _levels([tuple(request.prompt_token_ids) for request in ordered])
        return cls(
            arrival_s=np.array([request.arrival_s for request in ordered], np.float64),
            prompt_len=np.array([len(request.prompt_token_ids) for request in ordered], np.int32),
            output_len=np.array([request.max_tokens for request in ordered], np.int32),
            group=group,
            shared_len=shared_len,
        )


def _levels(prompts: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Groups and lengths `[N, L]` with which prompts are equal where these are."""
    order = sorted(range(len(prompts)), key=lambda index: prompts[index])

    def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    # In their order, neighbours share the most: all of a run share what its neighbours do at least.
    shared = [common(prompts[a], prompts[b]) for a, b in pairwise(order)]
    levels: list[list[tuple[int, int]]] = [[] for _ in prompts]
    runs, groups = [(0, len(prompts), 0)], 0
    while runs:
        begin, end, depth = runs.pop()
        if end - begin < 2:
            continue
        least = min(shared[begin : end - 1])
        if least > depth:
            for place in range(begin, end):
                levels[order[place]].append((groups, least))
            groups += 1
        cuts = [begin, *(place + 1 for place in range(begin, end - 1) if shared[place] == least), end]
        runs += [(a, b, least) for a, b in pairwise(cuts)]
    most = max(1, *(len(of_one) for of_one in levels))
    padded = [of_one + [of_one[-1] if of_one else (0, 0)] * (most - len(of_one)) for of_one in levels]
    table = np.array(padded, np.int32)
    return table[..., 0], table[..., 1]


def tokens_of(index: Any, group: Any, shared_len: Any, place: Any, xp: Any = jnp) -> jax.Array:
    """The tokens `[..., T]` int32, in [0, 2**31), of requests.

    Args:
        index: `[...]` int32, numbers of the requests.
        group, shared_len: `[..., L]` int32.
        place: `[T]` int32.
        xp: numpy or `jax.numpy`, that of the arrays.
    """
    owner = xp.broadcast_to(index[..., None], (*index.shape, *place.shape))
    for level in reversed(range(group.shape[-1])):
        inside = place < shared_len[..., level, None]
        owner = xp.where(inside, -1 - group[..., level, None], owner)
    words = token_hash(owner, xp.broadcast_to(place, owner.shape))
    return (words[..., 0] >> np.uint32(1)).astype(np.int32)
