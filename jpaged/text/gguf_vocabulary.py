"""The vocabulary in a GGUF file's metadata, as a tokenizer of the `tokenizers` library."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

# values of tokenizer.ggml.token_type: plain, unknown and control pieces; pieces that a user defined
_NORMAL_TYPE = 1
_SPECIAL_TYPES = (2, 3)
_USER_TYPES = (4,)

#: Pieces that end a turn, whatever a file says of them; those of llama.cpp but for the ends of whole texts, which
#: transformers does not stop at unless a model's configuration says so.
END_PIECES = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<turn|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>",
)  # fmt: skip
# what a control piece looks like: <|im_start|>, <start_of_turn>, </s>, [INST]
_CONTROL = re.compile(r"<\|[^<>|\s]+\|>|<\uff5c[^<>\uff5c\s]+\uff5c>|<[|/]?[A-Za-z_][\w-]*\|?>|\[/?[A-Z_]+\]")

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: tokenizer.ggml.pre: the pattern, whether digits stand alone before it, and whether BOS is added by default
_PRE_TOKENIZERS = {
    "gpt-2": (_GPT2_PATTERN, False, False),
    "smollm": (_GPT2_PATTERN, True, False),
    "llama-bpe": (_LLAMA3_PATTERN, False, True),
    "llama3": (_LLAMA3_PATTERN, False, True),
    "llama-v3": (_LLAMA3_PATTERN, False, True),
}


def tokenizer_of_gguf(metadata: Mapping[str, Any], chat_template: str | None = None) -> tuple[Tokenizer, bool]:
    """The tokenizer that GGUF metadata describes, and whether BOS is added unless the file says otherwise.

    Warns of pieces that are typed as plain text, but are control tokens: the ends of turns in `END_PIECES`, and what
    looks like one and is named by `chat_template`. They become special.

    Raises:
        ValueError: the kind of vocabulary or the way of splitting text is not supported, or the vocabulary is damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece)"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("tokenizer.ggml.tokens is missing or empty: the GGUF file has no vocabulary")
    _check_pieces(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ValueError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    mistyped = _mistyped(tokens, types, chat_template or "")
    if mistyped:
        warnings.warn(
            f"the GGUF file types {', '.join(mistyped)} as plain text, but by name and chat template they are control "
            "tokens; they are taken as such, as in llama.cpp",
            stacklevel=2,
        )
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in _SPECIAL_TYPES or t in mistyped]
    user = [t for t, kind in zip(tokens, types, strict=True) if kind in _USER_TYPES and t not in mistyped]
    tokenizer, add_bos = (
        _byte_level(metadata, vocab) if kind == "gpt2" else _sentencepiece(metadata, vocab, frozenset(special))
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in user])
    return tokenizer, add_bos


def end_pieces(tokens: Sequence[str]) -> list[str]:
    """Pieces of a vocabulary that end a turn, in the order of `END_PIECES`."""
    return [piece for piece in END_PIECES if piece in set(tokens)]


def _check_pieces(tokens: Sequence[Any]) -> None:
    """Raises ValueError for a piece that is no text. The reader keeps bytes that are no UTF-8 as lone surrogates."""
    for i, piece in enumerate(tokens):
        if not isinstance(piece, str):
            raise ValueError(f"tokenizer.ggml.tokens[{i}] is {piece!r:.80}, not a text: the vocabulary is damaged")
        try:
            piece.encode("utf-8")
        except UnicodeEncodeError:
            data = piece.encode("utf-8", "surrogateescape")
            raise ValueError(
                f"tokenizer.ggml.tokens[{i}] is {data!r:.80}, which is not valid UTF-8: the vocabulary is damaged, or "
                "was written by a converter with a fault; convert the model again, or use its Hugging Face directory"
            ) from None


def _mistyped(tokens: Sequence[str], types: Sequence[int], chat_template: str) -> list[str]:
    """Pieces that are control tokens by their names, and are not typed so."""
    named = set(_CONTROL.findall(chat_template))
    return [
        piece
        for piece, kind in zip(tokens, types, strict=True)
        if (kind == _NORMAL_TYPE and piece in named) or (kind not in _SPECIAL_TYPES and piece in END_PIECES)
    ]


def _bpe(**options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(**options))
    except Exception as error:  # the library raises bare Exception for a merge of pieces that are not there
        raise ValueError(f"the vocabulary and the merges do not belong together: {error}") from error


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(_PRE_TOKENIZERS)}. Another rule would "
            "split text wrongly without an error: use the model's Hugging Face directory instead"
        )
    pattern, digits, add_bos = _PRE_TOKENIZERS[pre]
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError("tokenizer.ggml.merges is missing: byte-level BPE needs it")
    pairs = [tuple(merge.split(" ")) for merge in merges]  # a space within a piece is written as another letter
    tokenizer = _bpe(vocab=vocab, merges=pairs, ignore_merges=pattern is _LLAMA3_PATTERN)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Digits(individual_digits=True)] if digits else []),
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, add_bos


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int], special: frozenset[str]
) -> tuple[Tokenizer, bool]:
    """BPE in the order of the scores: SentencePiece joins the neighbours whose union scores highest. It never joins
    letters into a `special` piece."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocab):
        raise ValueError("tokenizer.ggml.scores must hold one score a token: a SentencePiece vocabulary needs it")
    pairs = [
        (-scores[i], vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, i in vocab.items()
        if piece not in special
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = _bpe(
        vocab=vocab,
        merges=[pair[3:] for pair in sorted(pairs)],
        unk_token=None if unknown is None else metadata["tokenizer.ggml.tokens"][unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if space else []), normalizers.Replace(" ", "▁")]
    )
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True
