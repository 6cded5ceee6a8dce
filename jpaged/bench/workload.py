"""What a benchmark runs: a list of requests, from a file or from a seed, known by the hash of its content.

The file is one JSON object. `meta` is free text about where the requests are from; the counts in it (`n`,
`prompt_tokens`, `output_tokens`) are checked where they are given. `requests` is a list of
`{id, arrival_s, prompt_token_ids, max_tokens}`. Decoding is greedy and ignores end-of-sequence, so that every
engine does the same work.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jpaged.request import Request, SamplingParams

FIELDS = ("id", "arrival_s", "prompt_token_ids", "max_tokens")
MAX_TOKEN_ID = 2**31


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: when it arrives (seconds from the start), its prompt, and how many tokens it gets."""

    request_id: str
    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int

    def to_request(self) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)
        return Request(self.request_id, self.prompt_token_ids, params)


@dataclass(frozen=True)
class Workload:
    """Requests in the order they are submitted. Two workloads with one `sha256` are the same work."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    description: str = ""

    def __post_init__(self):
        if not self.requests:
            raise ValueError(f"{self.name}: a workload needs at least one request")

    @cached_property
    def sha256(self) -> str:
        """Of the requests alone: ids, arrivals, prompts and lengths, in order; hexadecimal."""
        rows = [[r.request_id, r.arrival_s, r.prompt_token_ids, r.max_tokens] for r in self.requests]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt_token_ids) for r in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens that a complete run generates."""
        return sum(r.max_tokens for r in self.requests)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of the longest request: the least `max_model_len` for all of them."""
        return max(len(r.prompt_token_ids) + r.max_tokens for r in self.requests)

    @property
    def max_token_id(self) -> int:
        return max(max(r.prompt_token_ids) for r in self.requests)

    def head(self, count: int) -> Workload:
        """The first `count` requests."""
        if not 1 <= count <= len(self.requests):
            raise ValueError(f"{self.name} has {len(self.requests)} requests; asked for the first {count}")
        return Workload(f"{self.name}[:{count}]", self.requests[:count], self.description)

    def summary(self) -> dict[str, Any]:
        """What a report says about it."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "requests": len(self.requests),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "description": self.description,
        }

    def to_json(self) -> dict[str, Any]:
        """The file format."""
        return {
            "meta": {
                "name": self.name,
                "description": self.description,
                "n": len(self.requests),
                "prompt_tokens": self.prompt_tokens,
                "output_tokens": self.output_tokens,
            },
            "requests": [
                {
                    "id": r.request_id,
                    "arrival_s": r.arrival_s,
                    "prompt_token_ids": list(r.prompt_token_ids),
                    "max_tokens": r.max_tokens,
                }
                for r in self.requests
            ],
        }


def load_workload(path: str | Path) -> Workload:
    """Reads and checks a workload file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: naming the file, the field, and what was found there.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    return parse_workload(data, where=str(path), name=path.stem)


def parse_workload(data: Any, *, where: str, name: str) -> Workload:
    """Checks the decoded content of a workload file; `where` begins every error."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: must be a JSON object with 'meta' and 'requests', got {_shown(data)}")
    if unknown := sorted(set(data) - {"meta", "requests"}):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; known: 'meta', 'requests'")
    meta, rows = data.get("meta", {}), data.get("requests")
    if not isinstance(meta, Mapping):
        raise ValueError(f"{where}: meta must be an object, got {_shown(meta)}")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{where}: requests must be a list with at least one request, got {_shown(rows)}")
    requests = tuple(_parse_request(row, f"{where}: requests[{i}]") for i, row in enumerate(rows))
    seen: dict[str, int] = {}
    for i, request in enumerate(requests):
        if (first := seen.setdefault(request.request_id, i)) != i:
            raise ValueError(f"{where}: requests[{i}].id {request.request_id!r} is also the id of requests[{first}]")
    workload = Workload(str(meta.get("name", name)), requests, str(meta.get("description", "")))
    counts = {
        "n": len(requests), "prompt_tokens": workload.prompt_tokens, "output_tokens": workload.output_tokens,
    }  # fmt: skip
    for key, count in counts.items():
        if meta.get(key, count) != count:
            raise ValueError(f"{where}: meta.{key} is {_shown(meta[key])}, but the requests hold {count}")
    return workload


def _parse_request(row: Any, where: str) -> WorkloadRequest:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} must be an object, got {_shown(row)}")
    if missing := [f for f in FIELDS if f not in row]:
        raise ValueError(f"{where}.{missing[0]} is missing")
    if unknown := sorted(set(row) - set(FIELDS)):
        raise ValueError(f"{where}.{unknown[0]} is not a known field; known: {FIELDS}")
    request_id, arrival, prompt, max_tokens = (row[f] for f in FIELDS)
    if isinstance(request_id, bool) or not isinstance(request_id, int | str):
        raise ValueError(f"{where}.id must be an integer or a string, got {_shown(request_id)}")
    number = isinstance(arrival, int | float) and not isinstance(arrival, bool)
    if not number or not math.isfinite(arrival) or arrival < 0:
        raise ValueError(f"{where}.arrival_s must be a finite number of seconds >= 0, got {_shown(arrival)}")
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{where}.prompt_token_ids must be a list of at least one id, got {_shown(prompt)}")
    for i, token in enumerate(prompt):
        if not _is_count(token) or not 0 <= token < MAX_TOKEN_ID:
            raise ValueError(f"{where}.prompt_token_ids[{i}] must be a token id >= 0, got {_shown(token)}")
    if not _is_count(max_tokens) or max_tokens < 1:
        raise ValueError(f"{where}.max_tokens must be an integer of at least 1, got {_shown(max_tokens)}")
    return WorkloadRequest(str(request_id), float(arrival), tuple(prompt), max_tokens)


def synthetic_workload(
    count: int,
    *,
    seed: int,
    token_ids: tuple[int, int],
    prompt_tokens: tuple[int, int] = (16, 512),
    output_tokens: tuple[int, int] = (8, 256),
    shared_prefix: int = 0,
) -> Workload:
    """Requests with log-uniform lengths and uniform token ids; the same arguments give the same requests.

    Args:
        count: requests.
        seed: of all draws.
        token_ids: lowest and highest id a prompt may have, both included.
        prompt_tokens: shortest and longest prompt, both included.
        output_tokens: least and most tokens to generate, both included.
        shared_prefix: tokens that every prompt begins with, as after one system prompt; `prompt_tokens` follow them.
    """
    if not _is_count(count) or count < 1:
        raise ValueError(f"count must be an integer of at least 1, got {count!r}")
    if not _is_count(shared_prefix) or shared_prefix < 0:
        raise ValueError(f"shared_prefix must be a number of tokens >= 0, got {shared_prefix!r}")
    for name, bounds, least in (
        ("token_ids", token_ids, 0), ("prompt_tokens", prompt_tokens, 1), ("output_tokens", output_tokens, 1),
    ):  # fmt: skip
        low, high = bounds
        if not (_is_count(low) and _is_count(high) and least <= low <= high < MAX_TOKEN_ID):
            raise ValueError(f"{name} must be (low, high) with {least} <= low <= high, got {bounds!r}")
    # only `random()` of this generator is promised to stay the same between Python versions
    draw = random.Random(seed).random

    def log_uniform(low: int, high: int) -> int:
        return min(high, int(low * ((high + 1) / low) ** draw()))

    def ids(length: int) -> tuple[int, ...]:
        low, high = token_ids
        return tuple(low + int(draw() * (high + 1 - low)) for _ in range(length))

    prefix = ids(shared_prefix)
    requests = []
    for i in range(count):
        prompt_length, output_length = log_uniform(*prompt_tokens), log_uniform(*output_tokens)
        requests.append(WorkloadRequest(str(i), 0.0, prefix + ids(prompt_length), output_length))
    low, high = token_ids
    description = (
        f"synthetic, seed {seed}: log-uniform prompts of {prompt_tokens[0]} to {prompt_tokens[1]} tokens and "
        f"outputs of {output_tokens[0]} to {output_tokens[1]}, ids uniform in {low} to {high}"
    )
    name = f"synthetic-{count}-seed{seed}"
    if shared_prefix:
        description += f"; all prompts begin with the same {shared_prefix} tokens"
        name = f"shared-prefix-{shared_prefix}-{name}"
    return Workload(name, tuple(requests), description)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
