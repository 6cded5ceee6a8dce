"""The queue on the host is in the order of the admission policy, together with the rows on the device."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from support.stories import MODEL, READER, TIGHT

from jpaged.policy import by_priority, first_come_first_served, shortest_prompt_first
from jpaged.request import Request, SamplingParams
from jpaged.runtime.engine import Engine
from jpaged.runtime.queue import HostQueue

#: One slot and two rows for those who wait: hardly any of a queue is on the device.
ONE = replace(
    TIGHT, max_num_seqs=1, max_queue=2, steps_per_burst=1, trace=False, preemption="recompute", swap_space_bytes=None,
    victim=first_come_first_served,
)  # fmt: skip
POLICIES = {
    "priority": (by_priority, lambda r: (r.priority, int(r.request_id))),
    "first come": (first_come_first_served, lambda r: int(r.request_id)),
    "shortest": (shortest_prompt_first, lambda r: (len(r.prompt_token_ids), int(r.request_id))),
    "own": (lambda w: jnp.where(w.priority > 0, jnp.nan, -w.max_len.astype(jnp.float32)), None),
}


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    return [
        Request(str(n), tuple(rng.integers(0, 30, rng.integers(1, 20)).tolist()), params, priority=int(p))
        for n, p in enumerate(rng.integers(0, 5, count))
    ]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["priority", "first come", "shortest"])
def test_the_whole_queue_is_in_the_order_of_the_policy(name, ahead):
    """U-04, 10 times more requests than rows, in one call. Catches: a host that sorts by itself, or numbers arrivals
    when it feeds."""
    admission, key = POLICIES[name]
    engine, asked = Engine(READER, (), MODEL, replace(ONE, admission=admission)), requests(30)
    for one in asked:
        engine.submit(one)
    ended = []
    while engine.has_work:
        ended += [event.request_id for event in engine.burst(ahead=ahead) if event.finish_reason]
    assert ended == [one.request_id for one in sorted(asked, key=key)]


@pytest.mark.parametrize("ahead", [False, True])
def test_who_comes_later_and_stands_before_changes_places_with_who_has_a_row(ahead):
    """Requests come while others wait on the device, each better than all before. Catches: rows of the device kept by
    requests that the policy puts last; one that runs already sent back for it; tokens changed by it."""
    engine = Engine(READER, (), MODEL, replace(ONE, admission=shortest_prompt_first))
    asked = [Request(str(n), (n,) * (20 - n), SamplingParams(temperature=0, max_tokens=6)) for n in range(14)]
    waiting, ended, tokens = list(asked), [], {}
    for one in waiting[:5]:
        engine.submit(one)
    del waiting[:5]
    while engine.has_work:
        for event in engine.burst(ahead=ahead):
            tokens.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason:
                ended.append(int(event.request_id))
        for one in waiting[:3]:
            engine.submit(one)
        del waiting[:3]
    # The first began when there were five. After it the shortest of all that had come were the last.
    assert ended[0] == 4 and ended[1:] == sorted(set(range(14)) - {4}, reverse=True)
    for one in asked:
        known = list(one.prompt_token_ids)
        for token in tokens[one.request_id]:
            assert token == READER.following(known)
            known.append(token)
    assert engine.stats().preemptions == 0


def test_an_own_policy_is_called_for_many_at_once_and_nan_goes_last(monkeypatch):
    """Catches: a call for each request, or for each burst all that wait; a number that cannot be compared."""
    policy, _ = POLICIES["own"]
    shapes = []

    def counted(waiting):
        shapes.append(waiting.priority.shape)
        return policy(waiting)

    queue = HostQueue(counted)
    for uid in range(1, 601):
        queue.add(uid, priority=uid % 2, num_prompt_tokens=3, max_len=3 + uid % 7, num_tokens=3)
    queue.order()
    queue.discard(6)
    queue.order()
    assert len(queue) == 599 and shapes == [(256,)]  # traced once
    taken = [queue.pop()[1] for _ in range(599)]
    even = [uid for uid in range(2, 601, 2) if uid != 6]
    assert taken == [*sorted(even, key=lambda uid: (-(uid % 7), uid)), *range(1, 601, 2)]
    assert queue.first() is None and len(queue) == 0
