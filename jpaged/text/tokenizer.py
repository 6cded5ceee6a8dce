"""Text to token ids and back, incremental decoding, and chat templates.

Encoding is that of the `tokenizers` library. Decoding is ours, on bytes: every token stands for a fixed run
of bytes, so a text is the UTF-8 decoding of their concatenation, and a stream needs no window of past tokens
and no second look at what it already gave out.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Backend

from checkpoints.huggingface import read_json
from jpaged.text.gguf_vocabulary import tokenizer_of_gguf

# what a template can raise: its own errors, and those of Python expressions in it
_TEMPLATE_ERRORS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class Tokenizer:
    """The vocabulary, special tokens and chat template of one model.

    Args:
        backend: a tokenizer of the `tokenizers` library.
        bos_token: begins a prompt; None: the model has none.
        eos_tokens: end a text; the first one is what templates see as `eos_token`.
        add_bos: whether `encode` puts one BOS before a text; None: as the backend's post-processor does.
        chat_template: a jinja2 template, or None.

    Raises:
        ValueError: a special token is not in the vocabulary, or the backend's decoder is not known.
    """

    def __init__(
        self,
        backend: _Backend,
        *,
        bos_token: str | None = None,
        eos_tokens: Sequence[str] = (),
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ):
        self._backend = backend
        self.bos_token = bos_token
        self.bos_token_id = None if bos_token is None else self._id_of(bos_token, "bos_token")
        self.eos_tokens = tuple(eos_tokens)
        self.eos_token_ids = tuple(dict.fromkeys(self._id_of(token, "eos_token") for token in eos_tokens))
        self.chat_template = chat_template
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._bytes = _ByteDecoder(backend)
        self._cache: dict[int, bytes] = {}
        self._prefix = self._prefix_of(add_bos)
        self._template: Any = None

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], *, chat_template: str | None = None) -> Tokenizer:
        """From a directory with tokenizer.json, or from the metadata of a GGUF file.

        Args:
            source: what `Checkpoint.tokenizer_source` holds.
            chat_template: a jinja2 template to use instead of the stored one.

        Raises:
            ValueError: a file is missing or damaged, or the kind of vocabulary is not supported.
        """
        if isinstance(source, Mapping):
            return cls._from_gguf(source, chat_template)
        return cls._from_directory(Path(source), chat_template)

    @classmethod
    def _from_directory(cls, path: Path, chat_template: str | None) -> Tokenizer:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{path} has no tokenizer.json: transformers' fast tokenizers write one")
        try:
            backend = _Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for anything it cannot parse
            raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error
        # a file saved with them would cut or pad every prompt
        backend.no_truncation()
        backend.no_padding()
        settings = path / "tokenizer_config.json"
        config = read_json(settings) if settings.is_file() else {}
        # a special token is a string there, or an object with its content
        bos, eos = (
            token["content"] if isinstance(token, Mapping) else token
            for token in (config.get("bos_token"), config.get("eos_token"))
        )
        return cls(
            backend,
            bos_token=bos,
            eos_tokens=() if eos is None else (eos,),
            add_bos=config.get("add_bos_token"),
            chat_template=chat_template or _stored_template(path, config),
        )

    @classmethod
    def _from_gguf(cls, metadata: Mapping[str, Any], chat_template: str | None) -> Tokenizer:
        backend, add_bos = tokenizer_of_gguf(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]

        def special(name: str) -> str | None:
            token = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if token is None:
                return None
            if not 0 <= token < len(tokens):
                raise ValueError(f"tokenizer.ggml.{name}_token_id is {token}, beyond {len(tokens)} tokens")
            return tokens[token]

        ends = (special("eos"), special("eot"), special("eom"))
        return cls(
            backend,
            bos_token=special("bos"),
            eos_tokens=tuple(dict.fromkeys(end for end in ends if end is not None)),
            add_bos=metadata.get("tokenizer.ggml.add_bos_token", add_bos),
            chat_template=chat_template or metadata.get("tokenizer.chat_template"),
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. An embedding may have more rows; their ids decode to nothing."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`.

        With `add_special_tokens`, what the tokenizer puts before a text is there exactly once, also when the
        text already begins with it; what it would append (EOS) is left out, because a prompt is to be
        continued.

        Raises:
            ValueError: `text` is not a string, or holds half of a surrogate pair.
        """
        _check_text(text, "text")
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if not add_special_tokens or ids[: len(self._prefix)] == self._prefix:
            return ids
        return self._prefix + ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; U+FFFD stands for bytes that are not valid UTF-8. Unknown ids give nothing."""
        return self.decode_continuation((), ids, skip_special_tokens)

    def decode_continuation(
        self, prompt_ids: Sequence[int], ids: Iterable[int], skip_special_tokens: bool = True
    ) -> str:
        """The text that `ids` add after `prompt_ids`: what `IncrementalDetokenizer` gives, all at once."""
        stream = IncrementalDetokenizer(self, prompt_ids, skip_special_tokens=skip_special_tokens)
        return stream.push(ids) + stream.finish()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation, written by the model's template; only the template adds special tokens.

        Args:
            messages: dictionaries with the strings "role" and "content".
            add_generation_prompt: whether the assistant's turn is opened at the end.

        Raises:
            ValueError: no template, messages of another form, or an error that the template raises.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text that `apply_chat_template` encodes. Raises the same errors."""
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template: give one as chat_template=..., or put the prompt "
                "together and use generate"
            )
        _check_messages(messages)
        try:
            if self._template is None:
                self._template = _template_environment().from_string(self.chat_template)
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token or "",
                eos_token=self.eos_tokens[0] if self.eos_tokens else "",
                tools=None,
                documents=None,
            )
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template refused these messages: {error}") from error

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, model={type(self._backend.model).__name__}, "
            f"bos_token={self.bos_token!r}, eos_tokens={self.eos_tokens!r}, "
            f"chat_template={'yes' if self.chat_template else 'no'})"
        )

    def fingerprint(self) -> str:
        """A number in letters, the same for tokenizers that decode every id to the same bytes."""
        digest = hashlib.sha256()
        for token in range(self.vocab_size):
            data = self.token_bytes(token)
            digest.update(len(data).to_bytes(4, "little") + data)
        return digest.hexdigest()[:16]

    def _id_of(self, token: str, what: str) -> int:
        found = self._backend.token_to_id(token)
        if found is None:
            raise ValueError(f"{what} {token!r} is not in the vocabulary")
        return found

    def _prefix_of(self, add_bos: bool | None) -> list[int]:
        """The ids that go before every text."""
        plain = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        begins = (i for i in range(len(full)) if plain and full[i : i + len(plain)] == plain)
        # a vocabulary without this letter: all that was added, less what would end the prompt
        begin = next(begins, None)
        ends = set(self.eos_token_ids) - {self.bos_token_id}
        prefix = [token for token in full if token not in ends] if begin is None else full[:begin]
        if add_bos is None or self.bos_token_id is None:
            return prefix
        without = [token for token in prefix if token != self.bos_token_id]
        return [self.bos_token_id, *without] if add_bos else without

    def token_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes:
        """What one id stands for where text came before it: UTF-8, or a part of it. Unknown ids: nothing."""
        if skip_special_tokens and token in self._special:
            return b""
        found = self._cache.get(token)
        if found is None:
            piece = self._backend.id_to_token(token) if 0 <= token < 2**32 else None
            found = b"" if piece is None else self._bytes(piece, token in self._added)
            self._cache[token] = found
        return found


class IncrementalDetokenizer:
    """Text of a growing sequence, piece by piece.

    The pieces joined are exactly `Tokenizer.decode_continuation`. A character that is split over tokens comes
    whole; bytes that can no longer become valid come at once as U+FFFD, so at most 3 bytes are ever held
    back.

    Args:
        tokenizer: of the model.
        prompt_ids: what came before; only its end matters: a character begun there is completed here, and a
            first word keeps its space.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # an unfinished character is at most 3 bytes: later tokens cannot depend on anything before them
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
        parts = []
        for token in ids:
            data = self._tokenizer.token_bytes(token, self._skip)
            if self._at_start and data:
                data = self._tokenizer._bytes.at_start(data)
                self._at_start = False
            parts.append(data)
        return self._utf8.decode(b"".join(parts))

    def finish(self) -> str:
        """What is still held back: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


class _ByteDecoder:
    """What a piece of the vocabulary stands for, as bytes, by the decoder that the backend declares."""

    def __init__(self, backend: _Backend):
        state = json.loads(backend.to_str())
        spec = state["decoder"]
        steps = [] if spec is None else spec["decoders"] if spec["type"] == "Sequence" else [spec]
        kinds = [step["type"] for step in steps]
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        # without a decoder the library joins the pieces with spaces
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
        if self._byte_level:
            # an added token is text, not bytes written as letters
            if not added and all(letter in _BYTE_OF_LETTER for letter in piece):
                return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
            return piece.encode("utf-8", "replace")
        if self._byte_fallback and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return self._prefix + piece.encode("utf-8", "replace")

    def at_start(self, data: bytes) -> bytes:
        """The first piece of a text: without the space that encoding put before it."""
        for _ in range(self._strip):
            data = data.removeprefix(b" ")
        return data


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte, as GPT-2 defined it."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


def _stored_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The template beside the tokenizer, in transformers' order: own file, JSON file, configuration."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    stored: Any = config.get("chat_template")
    if (path / "chat_template.json").is_file():
        stored = read_json(path / "chat_template.json").get("chat_template")
    if isinstance(stored, list):  # several, by name
        return {entry["name"]: entry["template"] for entry in stored}.get("default")
    return stored


def _template_environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [loopcontrols]}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _check_text(text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds half of a surrogate pair at position {error.start}: it is not valid Unicode text"
        ) from error


def _check_messages(messages: Any) -> None:
    example = 'a list like [{"role": "user", "content": "Hello"}]'
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be {example}, got {messages!r:.80}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a dictionary, got {message!r:.80}; messages are {example}")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"messages[{i}] has no {key!r}; messages are {example}")
            _check_text(message[key], f"messages[{i}][{key!r}]")
