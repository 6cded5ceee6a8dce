"""From token ids to text, all at once or piece by piece.

Every token stands for a fixed run of bytes, so a text is the UTF-8 decoding of their concatenation. A stream needs no
window of past tokens, and never looks again at what it gave out.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer as Backend


class Pieces(Protocol):
    """What decoding needs of a vocabulary."""

    def token_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes:
        """What one id stands for where text came before it."""

    def first_bytes(self, data: bytes) -> bytes:
        """`data` of a token where no text came before it."""


class IncrementalDetokenizer:
    """Text of a growing sequence, piece by piece.

    The pieces joined are exactly `Tokenizer.decode_continuation`. A character that is split over tokens comes whole;
    bytes that can no longer become valid come at once as U+FFFD, so at most 3 bytes are ever held back.

    Args:
        tokenizer: of the model.
        prompt_ids: what came before; only its end matters: a character begun there is completed here, and a first
            word keeps its space.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Pieces, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # An unfinished character is at most 3 bytes: later tokens cannot depend on anything before them.
        tail: list[bytes] = []
        size = 0
        for token in reversed(prompt_ids):
            tail.append(tokenizer.token_bytes(token, skip_special_tokens))
            size += len(tail[-1])
            if size > 3:
                break
        self._at_start = size == 0
        self._utf8.decode(b"".join(reversed(tail)))

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; may be empty."""
        parts = [self._tokenizer.token_bytes(token, self._skip) for token in ids]
        if self._at_start and (place := next((i for i, data in enumerate(parts) if data), None)) is not None:
            parts[place] = self._tokenizer.first_bytes(parts[place])
            self._at_start = False
        return self._utf8.decode(b"".join(parts))

    def finish(self) -> str:
        """What is still held back: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


class PieceDecoder:
    """What a piece of the vocabulary stands for, as bytes, by the decoder that the backend declares.

    Raises:
        ValueError: the backend's decoder is not known.
    """

    def __init__(self, backend: Backend):
        spec = json.loads(backend.to_str())["decoder"]
        steps = [] if spec is None else spec["decoders"] if spec["type"] == "Sequence" else [spec]
        kinds = [step["type"] for step in steps]
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        # Without a decoder the library joins the pieces with spaces.
        self._prefix, self._strip = (b" ", 1) if spec is None else (b"", 0)
        for step in steps:
            kind = step["type"]
            if kind == "Metaspace":
                self._replacements.append((step["replacement"], " "))
                self._strip = 0 if step.get("prepend_scheme") == "never" else 1
            elif kind == "Replace" and "String" in step["pattern"]:
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
                self._strip = step["start"]
            elif kind not in ("ByteFallback", "Fuse") and not self._byte_level:
                raise ValueError(
                    f"the tokenizer's decoder {kinds} is not supported; supported: none, ByteLevel, "
                    "Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip of leading spaces"
                )

    def __call__(self, piece: str, added: bool) -> bytes:
        """UTF-8 or a part of it, where text came before the piece. `added`: it is one of the added tokens."""
        if self._byte_level:
            # An added token is text, not bytes written as letters.
            if not added and all(letter in _BYTE_OF_LETTER for letter in piece):
                return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
            return piece.encode("utf-8", "replace")
        if self._byte_fallback and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return self._prefix + piece.encode("utf-8", "replace")

    def first(self, data: bytes) -> bytes:
        """`data` at the start of a text: without the space that encoding put before it."""
        for _ in range(self._strip):
            data = data.removeprefix(b" ")
        return data


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte, as GPT-2 defined it."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()
