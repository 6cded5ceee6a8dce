"""The vocabulary in a GGUF file's metadata, as a tokenizer of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

# values of tokenizer.ggml.token_type: unknown and control pieces; pieces that a user defined
_SPECIAL_TYPES = (2, 3)
_USER_TYPES = (4,)

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


def tokenizer_of_gguf(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """The tokenizer that GGUF metadata describes, and whether BOS is added unless the file says otherwise.

    Raises:
        ValueError: for a kind of vocabulary or a way of splitting text that is not known here, or one not whole.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece)"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("tokenizer.ggml.tokens is missing or empty: the GGUF file has no vocabulary")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ValueError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    tokenizer, add_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(metadata, vocab)
    for add, kinds in ((tokenizer.add_special_tokens, _SPECIAL_TYPES), (tokenizer.add_tokens, _USER_TYPES)):
        pieces = [token for token, kind in zip(tokens, types, strict=True) if kind in kinds]
        add([AddedToken(piece, normalized=False, special=kinds is _SPECIAL_TYPES) for piece in pieces])
    return tokenizer, add_bos


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


def _sentencepiece(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """BPE in the order of the scores: SentencePiece joins the neighbours whose union scores highest."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocab):
        raise ValueError("tokenizer.ggml.scores must hold one score a token: a SentencePiece vocabulary needs it")
    pairs = [
        (-scores[i], vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, i in vocab.items()
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
