"""Streaming: the pieces joined are the text, characters come whole, and nothing is held back for long."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_files import (
    SENTENCEPIECE,
    byte_level_tokenizer,
    metaspace_tokenizer,
    sentencepiece_metadata,
)  # fmt: skip
from tokenizers import Tokenizer as Backend
from tokenizers import models

from jpaged.text.detokenize import IncrementalDetokenizer
from jpaged.text.tokenizer import Tokenizer

BYTES = Tokenizer(byte_level_tokenizer(), bos_token="<s>", eos_tokens=["</s>"])
PIECES = Tokenizer.load(sentencepiece_metadata())
METASPACE = Tokenizer(metaspace_tokenizer(), bos_token="<s>", eos_tokens=["</s>"])
BOTH = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte-fallback"])
BOS, EOS = 1, 2


def piece(text):
    return SENTENCEPIECE.index(text)


def byte_ids(data):
    """In both vocabularies the ids of single bytes begin at 3."""
    return [3 + byte for byte in data]


def stream(tokenizer, prompt, ids):
    """One id at a time: the deltas, and what finishing adds."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [detokenizer.push([token]) for token in ids], detokenizer.finish()


# DT-02: spaces


@pytest.mark.parametrize("tokenizer", [PIECES, METASPACE], ids=["sentencepiece", "metaspace"])
@pytest.mark.parametrize("prompt", [[], [BOS], [BOS, piece("▁abc")], [BOS, piece("▁abc"), piece("▁")]])
def test_words_do_not_run_together(tokenizer, prompt):
    ids = [piece(p) for p in ("▁Hello", ",", "▁world")]
    deltas, rest = stream(tokenizer, prompt, ids)
    expected = "Hello, world" if prompt in ([], [BOS]) else " Hello, world"
    assert "".join(deltas) + rest == expected
    assert deltas == [expected.removesuffix(", world"), ",", " world"]
    backend = tokenizer._backend
    assert backend.decode(prompt + ids).removeprefix(backend.decode(prompt)) == expected


def test_a_prompt_that_ends_in_a_space():
    assert PIECES.decode(PIECES.encode("abc ")) == "abc "
    deltas, _ = stream(PIECES, PIECES.encode("abc "), [piece("Hello"), piece("▁world")])
    assert deltas == ["Hello", " world"]


def test_pieces_without_a_decoder_are_joined_by_spaces_as_the_library_does():
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([0, 1, 2]) == backend.decode([0, 1, 2]) == "a b c"
    assert stream(tokenizer, [0], [1, 2]) == ([" b", " c"], "")


# DT-03: bytes


@BOTH
def test_an_emoji_in_four_tokens_arrives_whole(tokenizer):
    ids = [*byte_ids(b"\n"), *byte_ids("🌟".encode()), *byte_ids(b"!")]
    deltas, rest = stream(tokenizer, tokenizer.encode("ab"), ids)
    assert deltas == ["\n", "", "", "", "🌟", "!"]
    assert rest == ""


@BOTH
def test_a_stray_byte_before_a_letter_is_one_replacement(tokenizer):
    deltas, rest = stream(tokenizer, [], byte_ids(b"\xe2a"))
    assert "".join(deltas) + rest == "\ufffda"
    other, _ = stream(tokenizer, [], byte_ids("é".encode()))
    assert other == ["", "é"]


@BOTH
def test_an_end_within_a_character_is_the_same_streamed_or_not(tokenizer):
    ids = byte_ids(b"a" + "🌟".encode()[:2])
    deltas, rest = stream(tokenizer, [BOS], ids)
    assert deltas == ["a", "", ""]
    assert rest == "\ufffd"
    assert tokenizer.decode_continuation([BOS], ids) == tokenizer.decode(ids) == "a\ufffd"


@BOTH
def test_a_character_begun_in_the_prompt_is_completed(tokenizer):
    whole = "🌟".encode()
    for cut in range(1, 4):
        deltas, rest = stream(tokenizer, [BOS, *byte_ids(b"xyz" + whole[:cut])], byte_ids(whole[cut:]))
        assert "".join(deltas) + rest == "🌟"


def test_no_names_of_pieces_and_no_special_tokens():
    ids = [piece("▁Hello"), piece("<0x0A>"), EOS, BOS, piece("abc"), 10**6]
    deltas, rest = stream(PIECES, [BOS, piece("ab")], ids)
    assert "".join(deltas) + rest == " Hello\nabc"
    shown = IncrementalDetokenizer(PIECES, [], skip_special_tokens=False)
    assert shown.push([piece("abc"), EOS]) == "abc</s>"
    assert PIECES.decode([-1, 10**9]) == ""


# DT-04: bytes that never become valid


@BOTH
def test_endless_partial_bytes_keep_flowing(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("a"))
    emitted, times = 0, []
    for count, token in enumerate(byte_ids(b"\x80" * 4000), start=1):
        begin = time.perf_counter()
        emitted += len(detokenizer.push([token]))
        times.append(time.perf_counter() - begin)
        assert count - emitted <= 8
    assert emitted + len(detokenizer.finish()) == 4000
    # the median of each part, so that a pause of the machine does not decide
    first, last = sorted(times[:500])[250], sorted(times[-500:])[250]
    assert last < 3 * first


def test_a_long_prompt_costs_nothing_per_token():
    prompt = byte_ids(b"x" * 200_000)
    begin = time.perf_counter()
    IncrementalDetokenizer(BYTES, prompt).push(byte_ids(b"yz"))
    assert time.perf_counter() - begin < 0.05


# the general law

tokens = st.integers(0, 258)
chunked = st.lists(st.lists(tokens, max_size=5), max_size=12)
texts = st.text(alphabet="aé€🌟 \n", max_size=6).map(lambda text: byte_ids(text.encode()))


@BOTH
@given(
    prompt=st.one_of(texts, st.lists(tokens, max_size=6)),
    chunks=st.one_of(chunked, st.lists(texts, max_size=6)),
)
@settings(max_examples=150, deadline=None)
def test_pieces_joined_are_the_text(tokenizer, prompt, chunks):
    ids = [token for chunk in chunks for token in chunk]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    joined = "".join(detokenizer.push(chunk) for chunk in chunks) + detokenizer.finish()
    assert joined == tokenizer.decode_continuation(prompt, ids)
    backend = tokenizer._backend
    before, together = backend.decode(prompt), backend.decode(prompt + ids)
    # the library counts U+FFFD otherwise for byte fallback; and a prompt may end within a character
    valid = "\ufffd" not in together and "\ufffd" not in before
    if valid or (tokenizer is BYTES and not before.endswith("\ufffd")):
        assert joined == together.removeprefix(before)
