"""What an engine holds on the host, as `jpaged.record.saving` keeps it, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from jpaged.record import saving
from jpaged.record.snapshot import pack_state
from jpaged.runtime.books import Books, Progress, Row
from jpaged.step import EngineState, Status


def held_requests(books: Books) -> tuple[saving.HeldRequest, ...]:
    """The requests that have not ended, in the order of submission.

    Raises:
        ValueError: one of them is a beam search, which the host drives.
    """
    if held := [row.request.request_id for row in books if row.request.candidates]:
        raise ValueError(f"a beam search cannot be saved while it runs: request {held[0]!r}")
    return tuple(
        saving.HeldRequest(
            request=held.request,
            uids=tuple(row.uid for row in held.rows.values()),
            indices=tuple(row.request.index for row in held.rows.values()),
            pending=tuple(row.uid for row in held.rows.values() if not row.on_device),
            before=tuple(row.before for row in held.rows.values()),
            events=tuple(held.events()),
        )
        for held in books.held.values()
    )


def save(
    directory: str | Path, state: EngineState, host: saving.HostState, config: EngineConfig, model: ModelConfig,
    params: Any, files: Mapping[str, str] | None,
) -> Path:  # fmt: skip
    """Writes a directory; see `saving.save`. A trace is left out."""
    state = replace(state, record=replace(state.record, decisions=None))
    return saving.save(
        directory, pack_state(state), host, config=replace(config, trace=False), model=model, params=params,
        files=files,
    )  # fmt: skip


def seeds_of(saved: saving.Saved) -> dict[int, int]:
    """The seed of each request that is in the saved state, by uid.

    Raises:
        ValueError: the state and the host's books do not name the same requests.
    """
    arrays, requests = saved.arrays, saved.host.requests
    on_device = {uid for held in requests for uid in held.uids if uid not in held.pending}
    live = arrays["requests.status"] != Status.FREE
    uids = arrays["requests.uid"][live].tolist()
    if set(uids) != on_device:
        raise ValueError(
            f"{saved.path} is damaged: its state holds the requests {sorted(uids)}, and {saving.ENGINE_FILE} says "
            f"{sorted(on_device)}"
        )
    return dict(zip(uids, arrays["requests.sampling.seed"][live].tolist(), strict=True))


def fill(rows: Sequence[Row], progress: Sequence[Progress], held: saving.HeldRequest, seeds: Mapping[int, int]) -> None:
    """Gives `rows` of a request, opened anew, what they had when they were saved."""
    for one in progress:
        one.add(event for event in held.events if event.index == one.index)
    for row, before in zip(rows, held.before, strict=True):
        row.before, row.seed = before, seeds.get(row.uid)
