"""From a request to the arrays of a batch: what every engine on the host does before anything is traced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpaged.models.spec import ModelConfig
from jpaged.request import MAX_STOP_TOKENS, Request, SamplingParams
from jpaged.step import NO_REQUEST
from jpaged.step.sampling.params import Asked


def stop_ids(params: SamplingParams, model: ModelConfig) -> list[int]:
    """Ids that end a request: the model's own unless it ignores them, and those it names."""
    own = () if params.ignore_eos else model.eos_token_ids
    return list(dict.fromkeys((*own, *params.stop_token_ids)))


def check_request(request: Request, model: ModelConfig, *, max_model_len: int, page_size: int, num_pages: int) -> None:
    """Raises ValueError, in words, if `request` can never run with these sizes."""
    prompt, vocab = request.prompt_token_ids, model.vocab_size
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: it needs at least one token")
    if len(prompt) > max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and needs {-(-len(prompt) // page_size)} pages of {page_size}; "
            f"max_model_len is {max_model_len} and the pool has {num_pages} pages"
        )
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocab:
            raise ValueError(f"prompt token ids must be integers in [0, {vocab}), got {token!r}")
    if outside := [token for token in request.params.stop_token_ids if token >= vocab]:
        raise ValueError(f"stop_token_ids {outside} lie outside the vocabulary of {vocab}")
    if not 0 <= request.candidates <= vocab:
        raise ValueError(f"{request.candidates} candidates were asked for; the vocabulary has {vocab}")
    if (count := len(stop_ids(request.params, model))) > MAX_STOP_TOKENS:
        raise ValueError(f"{count} stop tokens, the model's own included, are more than {MAX_STOP_TOKENS}")


def fill_row(
    batch: Any, place: int, uid: int, request: Request, model: ModelConfig, *, max_model_len: int, seed: int,
    namespace: int, parent: int = NO_REQUEST, generated: Sequence[int] = (),
) -> None:  # fmt: skip
    """Writes `request` into row `place` of a `Submission` of numpy arrays. `seed` is used where it names none; `parent`
    is the uid of another continuation of the same prompt; `generated` are tokens that the request has got already."""
    prompt = request.prompt_token_ids
    batch.valid[place] = True
    batch.uid[place] = uid
    batch.tokens[place, : len(prompt)] = prompt
    batch.tokens[place, len(prompt) : len(prompt) + len(generated)] = generated
    batch.num_tokens[place] = len(prompt) + len(generated)
    batch.num_prompt_tokens[place] = len(prompt)
    stops = stop_ids(request.params, model)
    seed = seed if request.params.seed is None else request.params.seed
    batch.sampling.fill(place, Asked(request.params, len(prompt), max_model_len, stops, seed))
    batch.namespace[place] = namespace
    batch.priority[place] = request.priority
    batch.beam[place] = request.candidates > 0
    batch.parent[place] = parent


def branch(uid: int, new_uid: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `jpaged.step.sharing.fork` takes, for one request."""
    return np.array([uid], np.int32), np.array([new_uid], np.int32), np.array([seed], np.uint32)


class Namespaces:
    """Numbers for all that makes equal tokens mean different keys. Two have one number only if they are equal."""

    def __init__(self):
        self._numbers: OrderedDict[tuple[str | None, int], int] = OrderedDict()  # the last used is last
        self._used = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, salt: str | None, weight_version: int, *, most: int) -> int:
        """The number of a salt with some version of the weights. The last `most` are remembered: one that was not
        asked for since gets another, so that nothing is found for it."""
        key = salt, weight_version
        number = self._numbers.pop(key, self._used)
        self._used += number == self._used
        self._numbers[key] = number
        if len(self._numbers) > most:
            self._numbers.popitem(last=False)
        return number

    def to_json(self) -> dict[str, Any]:
        """What it remembers, in values that JSON has."""
        return {"numbers": [[*key, number] for key, number in self._numbers.items()], "used": self._used}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Namespaces:
        """From what `to_json` gave."""
        namespaces = cls()
        namespaces._numbers.update({(salt, version): number for salt, version, number in values["numbers"]})
        namespaces._used = values["used"]
        return namespaces
