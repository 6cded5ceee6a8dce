"""Text to token ids and back, for one model: vocabulary, special tokens and chat template.

Encoding is that of the `tokenizers` library; decoding is in `jpaged.text.detokenize`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Backend

from checkpoints import GGUFSource
from checkpoints.huggingface import read_json
from jpaged.text.chat import ChatTemplate, check_messages, check_text, read_template, stored_template
from jpaged.text.detokenize import IncrementalDetokenizer, PieceDecoder
from jpaged.text.gguf_vocabulary import end_pieces, tokenizer_of_gguf
from jpaged.text.markup import Markup


class Tokenizer:
    """The vocabulary, special tokens and chat template of one model.

    Args:
        backend: a tokenizer of the `tokenizers` library.
        bos_token: begins a prompt; None: the model has none.
        eos_tokens: end a text; the first one is what templates see as `eos_token`.
        add_bos: whether `encode` puts one BOS before a text; None: as the backend's post-processor does.
        chat_template: a jinja2 template, or the path of one; None: conversations cannot be written.
        special_tokens: what templates see beside `bos_token` and `eos_token`, by name: `pad_token`, `unk_token`.

    Raises:
        ValueError: a special token is not in the vocabulary, the backend's decoder is not known, or `chat_template`
            is neither a template nor a file.
    """

    def __init__(
        self,
        backend: _Backend,
        *,
        bos_token: str | None = None,
        eos_tokens: Sequence[str] = (),
        add_bos: bool | None = None,
        chat_template: str | Path | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        self._backend = backend
        self.bos_token = bos_token
        self.bos_token_id = None if bos_token is None else self._id_of(bos_token, "bos_token")
        self.eos_tokens = tuple(eos_tokens)
        self.eos_token_ids = tuple(dict.fromkeys(self._id_of(token, "eos_token") for token in eos_tokens))
        self._template = None if chat_template is None else ChatTemplate(read_template(chat_template))
        self._names = {**(special_tokens or {}), "bos_token": bos_token or "", "eos_token": ("", *eos_tokens)[:2][-1]}
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._bytes = PieceDecoder(backend)
        self._markup = Markup(backend)
        self._cache: dict[int, bytes] = {}
        self._prefix = self._prefix_of(add_bos)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], *, chat_template: str | Path | None = None) -> Tokenizer:
        """From a directory with tokenizer.json, from a `.gguf` file, or from the metadata of one.

        Args:
            source: the path, or the metadata.
            chat_template: a jinja2 template, or the path of one, to use instead of the stored one.

        Raises:
            ValueError: a file is missing or damaged, or the kind of vocabulary is not supported.
        """
        if not isinstance(source, (str, Path, Mapping)):
            raise ValueError(f"a tokenizer is loaded from a directory or a .gguf file, got {source!r:.80}")
        if chat_template is not None:
            chat_template = read_template(chat_template)
        if isinstance(source, Mapping):
            return cls._from_gguf(source, chat_template)
        path = Path(source).expanduser()
        if path.is_file() and path.suffix == ".gguf":
            return cls._from_gguf(GGUFSource(path).metadata, chat_template)
        return cls._from_directory(path, chat_template)

    @classmethod
    def _from_directory(cls, path: Path, chat_template: str | None) -> Tokenizer:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{path} has no tokenizer.json: transformers' fast tokenizers write one")
        try:
            backend = _Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for anything it cannot parse
            raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error
        # A file saved with them would cut or pad every prompt.
        backend.no_truncation()
        backend.no_padding()
        settings = path / "tokenizer_config.json"
        config = read_json(settings) if settings.is_file() else {}
        named = _named_tokens(path, config)
        eos = named.get("eos_token")
        loaded = cls(
            backend,
            bos_token=named.get("bos_token"),
            eos_tokens=() if eos is None else (eos,),
            add_bos=config.get("add_bos_token"),
            special_tokens=named,
        )
        return loaded._with_template(stored_template(path, config) if chat_template is None else chat_template)

    @classmethod
    def _from_gguf(cls, metadata: Mapping[str, Any], chat_template: str | None) -> Tokenizer:
        template = metadata.get("tokenizer.chat_template") if chat_template is None else chat_template
        backend, add_bos = tokenizer_of_gguf(metadata, template)
        tokens = metadata["tokenizer.ggml.tokens"]

        def special(name: str) -> str | None:
            token = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if token is None:
                return None
            if not 0 <= token < len(tokens):
                raise ValueError(f"tokenizer.ggml.{name}_token_id is {token}, beyond {len(tokens)} tokens")
            return tokens[token]

        names = {"pad_token": "padding", "unk_token": "unknown", "sep_token": "seperator"}  # GGUF spells it so
        ends = (special("eos"), special("eot"), special("eom"), *end_pieces(tokens))
        loaded = cls(
            backend,
            bos_token=special("bos"),
            eos_tokens=tuple(dict.fromkeys(end for end in ends if end is not None)),
            add_bos=metadata.get("tokenizer.ggml.add_bos_token", add_bos),
            special_tokens={name: token for name, key in names.items() if (token := special(key)) is not None},
        )
        return loaded._with_template(template)

    def with_chat_template(self, chat_template: str | Path) -> Tokenizer:
        """This tokenizer with another jinja2 template, given as text or as the path of one."""
        return copy.copy(self)._with_template(read_template(chat_template))

    def _with_template(self, text: str | None) -> Tokenizer:
        self._template = None if text is None else ChatTemplate(text)
        return self

    @property
    def chat_template(self) -> str | None:
        """The text of the jinja2 template; None: there is none."""
        return None if self._template is None else self._template.source

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
        check_text(text, "text")
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
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        allow_special_tokens: bool = False,
    ) -> list[int]:
        """The ids of a conversation, written by the model's template; only the template adds special tokens.

        They are those of transformers' `apply_chat_template`, but for messages that spell a special token: what a
        message says is text, also where it says `<|im_end|>`.

        Args:
            messages: dictionaries with the strings "role" and "content".
            add_generation_prompt: whether the assistant's turn is opened at the end.
            allow_special_tokens: special tokens that a message spells are special tokens, as in transformers.

        Raises:
            ValueError: no template, messages of another form, or an error that the template raises.
        """
        return self.chat(messages, add_generation_prompt, allow_special_tokens=allow_special_tokens)[1]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text that `apply_chat_template` encodes. Raises the same errors."""
        return self._render(messages, add_generation_prompt, mark=False)[0]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        allow_special_tokens: bool = False,
    ) -> tuple[str, list[int]]:
        """Text and ids of a conversation: what `render_chat` and `apply_chat_template` give, at once."""
        text, mark = self._render(messages, add_generation_prompt, mark=not allow_special_tokens)
        if mark is None:
            return text, self.encode(text, add_special_tokens=False)
        return text.replace(mark, ""), self._markup.encode(text, mark)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, *, mark: bool
    ) -> tuple[str, str | None]:
        """The text that the template writes, and the mark in it before special tokens that messages spell."""
        if self._template is None:
            raise ValueError(
                "this model has no chat template: give one as chat_template=..., or put the prompt "
                "together and use generate"
            )
        check_messages(messages)
        written, found = [dict(message) for message in messages], None
        if mark:
            written, found = self._markup.mark(messages, self._template.source)
        return self._template.render(written, add_generation_prompt=add_generation_prompt, **self._names), found

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

    def first_bytes(self, data: bytes) -> bytes:
        """`data`, of `token_bytes`, where no text came before it: without the space that encoding put there."""
        return self._bytes.first(data)


def _named_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name, in transformers' order. special_tokens_map.json goes before tokenizer_config.json, unless
    that describes its added tokens and so is of a version that writes all of them there; then it fills what is missing.
    """
    file = path / "special_tokens_map.json"
    stored = read_json(file) if file.is_file() else {}
    both = {**stored, **config} if "added_tokens_decoder" in config else {**config, **stored}
    named = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        # A token is a string, or an object with its content; None in one file gives way to the other.
        token = next((one for one in (both.get(name), stored.get(name), config.get(name)) if one is not None), None)
        if isinstance(token, Mapping):
            token = token["content"]
        if token is not None:
            named[name] = token
    return named
