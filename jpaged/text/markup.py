"""Special tokens that a chat template writes, apart from the same letters in what a message says.

A user who types `<|im_end|>` means ten characters. Written into a conversation and encoded as usual they are the token
that ends the turn, and what follows forges another one. So such letters are marked in the messages before the template
runs. Of the text that it writes, only what carries no mark counts as a special token; the rest is encoded as text.
Conversations whose messages spell no special token are not touched at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

# Characters that Unicode keeps free for use within a program: no text holds them.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class Markup:
    """Finds, marks and encodes special tokens that messages spell.

    Args:
        backend: of the model's tokenizer.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        self._special = frozenset(special)
        # Of two that begin at the same place the library takes the longer one.
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._renamed: dict[str, tuple[Backend, dict[int, int]]] = {}

    def mark(self, messages: Sequence[Mapping[str, Any]], template: str) -> tuple[list[Any], str | None]:
        """The messages with a mark before each special token that they spell, and the mark; None: they spell none.

        Args:
            messages: of a conversation.
            template: its text, so that a mark is chosen that is not in it.
        """
        texts = list(_texts(messages))
        if not any(self._spelled.search(text) for text in texts):
            return [dict(message) for message in messages], None
        taken = {letter for text in (template, *texts) for letter in text if letter in _MARKS}
        mark = next((letter for letter in _MARKS if letter not in taken), None)
        if mark is None:
            raise ValueError("the messages spell special tokens, and hold every noncharacter from U+FDD0 to U+FDEF")

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                return self._spelled.sub(lambda match: f"{mark}{match[0]}", value)
            if isinstance(value, Mapping):
                return {marked(key): marked(item) for key, item in value.items()}
            return [marked(item) for item in value] if isinstance(value, (list, tuple)) else value

        return [marked(message) for message in messages], mark

    def encode(self, text: str, mark: str) -> list[int]:
        """The ids of a text with marks: a special token that follows a mark is encoded as text."""
        # In `renamed` every special token begins with the mark, so that no other text can be one.
        pattern = re.compile(f"{mark}?(?:{self._spelled.pattern})|{mark}")
        renamed, ids = self._backend_of(mark)
        text = pattern.sub(lambda match: match[0][1:] if match[0][0] == mark else mark + match[0], text)
        return [ids.get(token, token) for token in renamed.encode(text, add_special_tokens=False).ids]

    def _backend_of(self, mark: str) -> tuple[Backend, dict[int, int]]:
        """The backend with the mark before the name of each special token, and its ids that are others."""
        if mark not in self._renamed:
            state = json.loads(self._backend.to_str())
            names = {token: mark + token for token in self._special}
            for token in state["added_tokens"]:
                token["content"] = names.get(token["content"], token["content"])
            model = state["model"]
            if isinstance(model["vocab"], dict):
                model["vocab"] = {names.get(piece, piece): token for piece, token in model["vocab"].items()}
            else:  # of Unigram, pieces with their scores
                model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
            if "merges" in model:
                pairs = [tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in model["merges"]]
                model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & self._special]
            model |= {"unk_token": names.get(model["unk_token"], model["unk_token"])} if "unk_token" in model else {}
            state |= {"post_processor": None, "truncation": None, "padding": None}
            renamed = Backend.from_str(json.dumps(state))
            others: dict[int, int] = {}
            for token in {token.content for token in self._backend.get_added_tokens_decoder().values()}:
                new, old = renamed.token_to_id(names.get(token, token)), self._backend.token_to_id(token)
                if new is not None and old is not None and new != old:
                    others[new] = old
            self._renamed[mark] = renamed, others
        return self._renamed[mark]


def _texts(value: Any) -> Any:
    """Every text in a nest of messages, lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
