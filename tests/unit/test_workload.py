"""Workload files and synthetic workloads: what is accepted, what is refused and in which words."""

import json
import math
from dataclasses import FrozenInstanceError

import pytest

from jpaged.bench.workload import Workload, WorkloadRequest, load_workload, synthetic_workload


def row(**changes):
    return {"id": 0, "arrival_s": 0.0, "prompt_token_ids": [5, 6, 7], "max_tokens": 4, **changes}


def write(tmp_path, data, name="mix.json"):
    path = tmp_path / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_file_is_read(tmp_path):
    meta = {"description": "two", "n": 2, "prompt_tokens": 5, "output_tokens": 7}
    second = row(id="b", arrival_s=1.5, prompt_token_ids=[1, 2], max_tokens=3)
    workload = load_workload(write(tmp_path, {"meta": meta, "requests": [row(), second]}))
    assert workload.name == "mix"
    assert (workload.prompt_tokens, workload.output_tokens) == (5, 7)
    assert (workload.max_request_tokens, workload.max_token_id) == (7, 7)
    assert workload.requests[1] == WorkloadRequest("b", 1.5, (1, 2), 3)
    request = workload.requests[0].to_request()
    assert request.request_id == "0"
    assert request.prompt_token_ids == (5, 6, 7)
    assert request.params.temperature == 0
    assert request.params.max_tokens == 4
    assert request.params.ignore_eos is True
    with pytest.raises(FrozenInstanceError):
        workload.name = "other"


def test_what_is_written_is_read_again(tmp_path):
    workload = synthetic_workload(5, seed=3, token_ids=(0, 99))
    again = load_workload(write(tmp_path, workload.to_json()))
    assert again == workload
    assert again.sha256 == workload.sha256


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "not a JSON file"),
        ("[]", r"must be a JSON object with 'meta' and 'requests', got \[\]"),
        ({"meta": {}, "requests": []}, "requests must be a list with at least one request"),
        ({"meta": {}}, "requests must be a list with at least one request, got None"),
        ({"requests": [row()], "request": []}, "unknown field 'request'"),
        ({"meta": 3, "requests": [row()]}, "meta must be an object, got 3"),
        ({"requests": [7]}, r"requests\[0\] must be an object, got 7"),
        ({"requests": [row(), {"id": 1}]}, r"requests\[1\].arrival_s is missing"),
        ({"requests": [row(temperature=1)]}, r"requests\[0\].temperature is not a known field"),
        ({"requests": [row(id=None)]}, r"requests\[0\].id must be an integer or a string"),
        ({"requests": [row(id=True)]}, r"requests\[0\].id must be an integer or a string"),
        ({"requests": [row(), row()]}, r"requests\[1\].id '0' is also the id of requests\[0\]"),
        ({"requests": [row(), row(id="0")]}, r"requests\[1\].id '0' is also the id of requests\[0\]"),
        ({"requests": [row(arrival_s=-1)]}, r"requests\[0\].arrival_s must be a finite number"),
        ({"requests": [row(arrival_s="now")]}, r"requests\[0\].arrival_s must be .*got 'now'"),
        (
            '{"requests": [{"id": 0, "arrival_s": NaN, "prompt_token_ids": [1], "max_tokens": 1}]}',
            "arrival_s",
        ),
        (
            {"requests": [row(prompt_token_ids=[])]},
            r"requests\[0\].prompt_token_ids must be a list of at least",
        ),
        ({"requests": [row(prompt_token_ids="abc")]}, r"requests\[0\].prompt_token_ids must be a list"),
        (
            {"requests": [row(prompt_token_ids=[1, -2])]},
            r"prompt_token_ids\[1\] must be a token id >= 0, got -2",
        ),
        (
            {"requests": [row(prompt_token_ids=[1.5])]},
            r"prompt_token_ids\[0\] must be a token id >= 0, got 1.5",
        ),
        ({"requests": [row(prompt_token_ids=[2**31])]}, r"prompt_token_ids\[0\] must be a token id"),
        (
            {"requests": [row(max_tokens=0)]},
            r"requests\[0\].max_tokens must be an integer of at least 1, got 0",
        ),
        ({"requests": [row(max_tokens=True)]}, r"requests\[0\].max_tokens must be an integer"),
        ({"meta": {"n": 2}, "requests": [row()]}, "meta.n is 2, but the requests hold 1"),
        ({"meta": {"output_tokens": 9}, "requests": [row()]}, "meta.output_tokens is 9, .* hold 4"),
    ],
)
def test_errors_name_the_file_and_the_field(tmp_path, data, words):
    path = write(tmp_path, data, name="bad-mix.json")
    with pytest.raises(ValueError, match=words) as caught:
        load_workload(path)
    assert "bad-mix.json" in str(caught.value)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_workload(tmp_path / "none.json")


def test_the_hash_is_of_the_requests_and_of_all_they_hold():
    request = WorkloadRequest("0", 0.0, (1, 2), 3)
    workload = Workload("a", (request,))
    assert workload.sha256 == Workload("renamed", (request,), "described").sha256
    others = [
        WorkloadRequest("1", 0.0, (1, 2), 3),
        WorkloadRequest("0", 0.5, (1, 2), 3),
        WorkloadRequest("0", 0.0, (1, 3), 3),
        WorkloadRequest("0", 0.0, (1, 2), 4),
    ]
    assert len({workload.sha256, *(Workload("a", (other,)).sha256 for other in others)}) == 5


def test_a_seed_fixes_the_synthetic_workload():
    one, same, other = (synthetic_workload(20, seed=s, token_ids=(0, 999)) for s in (7, 7, 8))
    assert one == same
    assert one.sha256 == same.sha256 != other.sha256
    # fixed for good: a changed generator would silently make old numbers incomparable
    assert one.sha256.startswith("2e73a61cad56a87b")


def test_synthetic_lengths_are_log_uniform_and_within_their_bounds():
    workload = synthetic_workload(2000, seed=0, token_ids=(10, 19), prompt_tokens=(4, 64), output_tokens=(1, 16))
    prompts = [len(r.prompt_token_ids) for r in workload.requests]
    outputs = [r.max_tokens for r in workload.requests]
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (4, 64, 1, 16)
    # log-uniform over [4, 65): half of the lengths lie below the geometric mean
    below = sum(n < math.sqrt(4 * 65) for n in prompts) / len(prompts)
    assert abs(below - 0.5) < 0.04
    ids = {t for r in workload.requests for t in r.prompt_token_ids}
    assert ids == set(range(10, 20))


def test_a_shared_prefix_comes_before_prompts_of_the_usual_lengths():
    """Catches: prompts that go on alike after the prefix, or whose own part is shorter for it."""
    settings = {"seed": 3, "token_ids": (0, 999), "prompt_tokens": (4, 9), "output_tokens": (2, 5)}
    workload = synthetic_workload(20, **settings, shared_prefix=50)
    prompts = [r.prompt_token_ids for r in workload.requests]
    assert len({p[:50] for p in prompts}) == 1
    assert len({p[50] for p in prompts}) > 10
    assert {len(p) - 50 for p in prompts} == set(range(4, 10))
    assert workload.name == "shared-prefix-50-synthetic-20-seed3"
    assert workload.sha256.startswith("6432a55654591d0b")  # fixed for good
    assert workload == synthetic_workload(20, **settings, shared_prefix=50)
    assert synthetic_workload(20, **settings, shared_prefix=0) == synthetic_workload(20, **settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shared_prefix": -1}, "shared_prefix must be a number of tokens >= 0, got -1"),
        ({"count": 0}, "count must be"),
        ({"token_ids": (5, 4)}, "token_ids must be"),
        ({"prompt_tokens": (0, 4)}, "prompt_tokens must be"),
        ({"output_tokens": (1.0, 4)}, "output_tokens must be"),
    ],
)
def test_synthetic_bounds_are_checked(change, words):
    settings = {"count": 3, "seed": 0, "token_ids": (0, 9), **change}
    with pytest.raises(ValueError, match=words):
        synthetic_workload(settings.pop("count"), **settings)


def test_the_head_of_a_workload():
    workload = synthetic_workload(5, seed=0, token_ids=(0, 9))
    assert workload.head(2).requests == workload.requests[:2]
    with pytest.raises(ValueError, match="has 5 requests; asked for the first 6"):
        workload.head(6)
