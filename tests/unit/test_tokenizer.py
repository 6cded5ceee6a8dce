"""Text to ids: special tokens exactly once, chat templates, vocabularies from GGUF, and what is refused."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_files import (
    SENTENCEPIECE,
    byte_letters,
    byte_level_tokenizer,
    gguf_metadata,
    metaspace_tokenizer,
    sentencepiece_metadata,
    write_tokenizer,
)  # fmt: skip
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from checkpoints import GGUFSource, fetch
from jpaged.text.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent.parent / "data/smollm2-greedy.json").read_text(encoding="utf-8"))["cases"]
HELLO = [{"role": "user", "content": "Hi"}]
BOS, EOS = 1, 2


def ids_of(text):
    return [3 + byte for byte in text.encode()]


@pytest.fixture(scope="module")
def smollm():
    """The tokenizer of the built-in model, from its real file."""
    return Tokenizer.load(GGUFSource(fetch.builtin("smollm2-135m")).metadata)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["id"]))
def test_golden_prompts_and_texts(smollm, case):
    if "messages" in case:
        ids = smollm.apply_chat_template(case["messages"])
    else:
        ids = smollm.encode(case["prompt"])
    assert ids == case["prompt_token_ids"]
    assert smollm.decode(case["output_token_ids"]) == case["text"]
    assert smollm.decode_continuation(ids, case["output_token_ids"]) == case["text"]


def test_the_built_in_tokenizer_says_what_it_is(smollm):
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_ids) == (49152, 1, (2,))
    assert repr(smollm) == (
        "Tokenizer(vocab_size=49152, model=BPE, bos_token='<|im_start|>', eos_tokens=('<|im_end|>',), "
        "chat_template=yes)"
    )


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_survives_the_round_trip_but_for_bytes_that_are_not_in_the_vocabulary(smollm, text):
    # some control characters, and lead bytes that Unicode hardly assigns, are not in this model's vocabulary
    held = {byte for byte, letter in enumerate(byte_letters()) if smollm._backend.token_to_id(letter) is not None}
    assert held >= set(range(32, 127)) | {9, 10, 13} | set(range(0x80, 0xC0)) | set(range(0xC3, 0xF1))
    expected = bytes(byte for byte in text.encode() if byte in held).decode("utf-8", "replace")
    assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == expected


# TK-01: special tokens exactly once


@pytest.mark.parametrize("eos", [False, True])
def test_one_bos_and_no_eos_whether_generated_or_chatted(tmp_path, eos):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level_tokenizer(bos=True, eos=eos), template=template))
    expected = [BOS, *ids_of("Hi")]
    assert tokenizer.encode("Hi") == expected
    assert tokenizer.apply_chat_template(HELLO) == expected
    assert tokenizer.encode("<s>Hi") == expected
    assert tokenizer.encode("Hi", add_special_tokens=False) == expected[1:]
    assert tokenizer.encode("") == [BOS]


def test_a_template_without_bos_gets_what_it_says(tmp_path):
    path = write_tokenizer(
        tmp_path, byte_level_tokenizer(bos=True), template="{{ messages[0].content }}{{ eos_token }}"
    )
    assert Tokenizer.load(path).apply_chat_template(HELLO) == [*ids_of("Hi"), EOS]


@pytest.mark.parametrize(
    ("processor", "flag", "expected"),
    [(True, None, True), (True, True, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_the_flag_decides_and_else_the_post_processor(tmp_path, processor, flag, expected):
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "add_eos_token": True}
    config |= {} if flag is None else {"add_bos_token": flag}
    path = write_tokenizer(tmp_path, byte_level_tokenizer(bos=processor, eos=True), config)
    assert Tokenizer.load(path).encode("x") == [BOS] * expected + ids_of("x")


def test_a_vocabulary_without_the_probing_letter():
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "Z": 2}, unk_token="Z"))
    assert Tokenizer(backend, bos_token="<s>", add_bos=True).encode("Z") == [0, 2]


# TK-02: chat templates


def test_without_a_template_the_error_says_how_to_give_one(tmp_path):
    path = write_tokenizer(tmp_path, byte_level_tokenizer())
    with pytest.raises(ValueError, match=r"no chat template: give one as chat_template="):
        Tokenizer.load(path).apply_chat_template(HELLO)
    tokenizer = Tokenizer.load(path, chat_template="{{ messages[0].role }}")
    assert tokenizer.apply_chat_template(HELLO) == ids_of("user")


def test_a_template_is_found_wherever_it_is_kept(tmp_path):
    for name, stored in {
        "plain": {"chat_template": "config"},
        "named": {"chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "config"}]},
    }.items():
        path = write_tokenizer(tmp_path / name, byte_level_tokenizer(), {**stored, "bos_token": None})
        assert Tokenizer.load(path).render_chat(HELLO) == "config"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.load(path).render_chat(HELLO) == "json"
    (path / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.load(path).render_chat(HELLO) == "jinja"


def test_what_templates_may_use(tmp_path):
    template = (
        "{%- for m in messages %}\n    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m.content | tojson }}{{ eos_token }}\n{%- endfor %}\n"
        "{% if add_generation_prompt %}|{{ strftime_now('%Y') | length }}{% endif %}"
    )
    tokenizer = Tokenizer(byte_level_tokenizer(), bos_token="<s>", eos_tokens=["</s>"], chat_template=template)
    messages = [{"role": "user", "content": 'é"<'}, {"role": "skip", "content": "no"}]
    assert tokenizer.render_chat(messages) == '"é\\"<"</s>|4'
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == '"é\\"<"</s>'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused these messages: roles must alternate"),
        ("{% if %}", "refused"),
        ("{{ nothing.there }}", "refused.*undefined"),
        ("{{ messages[0].content + 1 }}", "refused"),
        ("{{ 1 / 0 }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ raise_exception.__globals__['json'] }}", "refused"),
    ],
)
def test_an_error_of_the_template_is_a_value_error(template, message):
    tokenizer = Tokenizer(byte_level_tokenizer(), chat_template=template)
    with pytest.raises(ValueError, match=message):
        tokenizer.render_chat(HELLO)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list like"),
        ([], "messages must be a list like"),
        ({"role": "user", "content": "x"}, "messages must be a list like"),
        (["Hi"], r"messages\[0\] must be a dictionary"),
        ([HELLO], r"messages\[0\] must be a dictionary"),
        ([*HELLO, {"role": "user"}], r"messages\[1\] has no 'content'"),
        ([{"content": "x"}], r"messages\[0\] has no 'role'"),
        ([{"role": "user", "content": None}], r"messages\[0\]\['content'\] must be a string, got NoneType"),
        (
            [{"role": "user", "content": "a\ud83d"}],
            r"messages\[0\]\['content'\] holds half of a surrogate pair",
        ),
    ],
)
def test_messages_of_another_form_are_refused(messages, message):
    tokenizer = Tokenizer(byte_level_tokenizer(), chat_template="{{ messages }}")
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template(messages)


def test_text_that_is_no_text_is_refused():
    tokenizer = Tokenizer(byte_level_tokenizer())
    with pytest.raises(ValueError, match="half of a surrogate pair at position 2"):
        tokenizer.encode("ab\udc00c")
    for wrong in (b"bytes", None, 3, ["x"]):
        with pytest.raises(ValueError, match="text must be a string"):
            tokenizer.encode(wrong)


# vocabularies


def test_a_directory_that_holds_no_tokenizer_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    path = write_tokenizer(tmp_path, byte_level_tokenizer(), {"eos_token": "<end>"})
    with pytest.raises(ValueError, match="eos_token '<end>' is not in the vocabulary"):
        Tokenizer.load(path)


def test_a_stored_truncation_does_not_cut_prompts(tmp_path):
    backend = byte_level_tokenizer(bos=False)
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    assert Tokenizer.load(write_tokenizer(tmp_path, backend)).encode("abcdefgh") == ids_of("abcdefgh")


def test_a_decoder_that_is_not_known_is_refused():
    backend = byte_level_tokenizer()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"decoder \['WordPiece'\] is not supported; supported: .*ByteLevel"):
        Tokenizer(backend)


def byte_level_metadata(pre, merges):
    tokens = ["<pad>", "<s>", "</s>", *byte_letters(), *(merge.replace(" ", "") for merge in merges)]
    return gguf_metadata() | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.pre": pre,
    }


@pytest.mark.parametrize(
    ("pre", "bos", "pieces"),
    [
        ("smollm", False, ["1", "2", "3", "4", "Ġ", "Ġ", "Ġa", "1"]),
        ("gpt-2", False, ["12", "34", "Ġ", "Ġ", "Ġa", "1"]),
        ("llama-bpe", True, ["12", "3", "4", "ĠĠ", "Ġa", "1"]),
    ],
)
def test_the_rule_of_splitting_follows_the_file(pre, bos, pieces):
    metadata = byte_level_metadata(pre, ["1 2", "3 4", "Ġ a", "Ġ Ġ"])
    tokens = metadata["tokenizer.ggml.tokens"]
    if pre != "llama-bpe":  # the pair of spaces is a piece, and only one rule leaves it together
        pieces = ["ĠĠ" if piece == "Ġ" else piece for piece in pieces]
        pieces.remove("ĠĠ")
    tokenizer = Tokenizer.load(metadata)
    ids = tokenizer.encode("1234   a1")
    assert [tokens[i] for i in ids[bos:]] == pieces
    assert (ids[0] == BOS) == bos
    assert tokenizer.decode(ids) == "1234   a1"
    flagged = Tokenizer.load(metadata | {"tokenizer.ggml.add_bos_token": not bos})
    assert (flagged.encode("a")[0] == BOS) == (not bos)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model is 'bert'; supported: 'gpt2'.*'llama'"),
        ({"tokenizer.ggml.pre": "viking"}, r"tokenizer\.ggml\.pre is 'viking'; supported: .*smollm"),
        ({"tokenizer.ggml.tokens": []}, r"tokenizer\.ggml\.tokens is missing or empty"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, r"tokenizer\.ggml\.tokens holds 'a' twice"),
        ({"tokenizer.ggml.token_type": [1]}, r"tokenizer\.ggml\.token_type has 1 entries"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"tokenizer.ggml.eos_token_id": 40}, r"tokenizer\.ggml\.eos_token_id is 40, beyond 40 tokens"),
        (
            {"tokenizer.ggml.merges": ["A B", "B A"]},
            r"the vocabulary and the merges do not belong together.*BA",
        ),
        ({"tokenizer.ggml.merges": ["AB"]}, r"the vocabulary and the merges do not belong together"),
    ],
)
def test_gguf_vocabularies_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(gguf_metadata() | changes)


def test_end_tokens_and_template_of_gguf():
    metadata = gguf_metadata(
        tokenizer__ggml__eot_token_id=4, tokenizer__chat_template="{{ bos_token }}A{{ eos_token }}"
    )
    tokenizer = Tokenizer.load(metadata)
    assert tokenizer.eos_token_ids == (2, 4)
    assert tokenizer.apply_chat_template(HELLO) == [1, 3, 2]


def join_by_score(text):
    """SentencePiece by its definition: join the best-scoring pair of neighbours until none is a piece."""
    rank = {piece: i for i, piece in enumerate(SENTENCEPIECE)}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in rank]
        if not pairs:
            break
        i = min(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    ids = []
    for piece in pieces:
        ids += [rank[piece]] if piece in rank else [3 + byte for byte in piece.encode()]
    return ids


@given(st.text(alphabet="Helowrd,abcé x🌟", min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(text):
    tokenizer = Tokenizer.load(sentencepiece_metadata())
    ids = tokenizer.encode(text)
    assert ids == [BOS, *join_by_score(text)]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_without_a_space_in_front():
    tokenizer = Tokenizer.load(sentencepiece_metadata(tokenizer__ggml__add_space_prefix=False))
    assert [SENTENCEPIECE[i] for i in tokenizer.encode("Hello world")] == ["<s>", "Hello", "▁world"]
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores must hold one score a token"):
        Tokenizer.load(sentencepiece_metadata() | {"tokenizer.ggml.scores": [0.0]})


def test_metaspace_decodes_as_the_library_does():
    backend = metaspace_tokenizer()
    tokenizer = Tokenizer(backend, bos_token="<s>")
    ids = [SENTENCEPIECE.index(piece) for piece in ("<s>", "▁Hello", ",", "▁world")]
    assert tokenizer.decode(ids) == backend.decode(ids) == "Hello, world"
