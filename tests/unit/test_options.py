"""Options of an LLM by their names here and in vLLM; nothing is loaded."""

from __future__ import annotations

import inspect

import pytest
from support.checkpoint_files import (
    byte_level_tokenizer,
    gguf_metadata,
    hf_config,
    write_gguf,
    write_hf,
    write_tokenizer,
)

from jpaged import LLM, EngineConfig, Tokenizer
from jpaged.inputs import tokenizer_for
from jpaged.models.load import load_checkpoint
from jpaged.options import FIXED, RENAMED, engine_fields


def test_options_stand_in_the_signature():
    """U-33. Catches: `**options` that hide every option from help and completion."""
    shown = inspect.signature(LLM).parameters
    for name, parameter in inspect.signature(EngineConfig).parameters.items():
        assert shown[name].default == parameter.default and shown[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(shown)[:4] == ["model", "config", "tokenizer", "chat_template"]


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"tensor_parallel_size": 1, "enforce_eager": False, "trust_remote_code": False, "quantization": None}, {}),
        ({"disable_log_stats": True, "block_size": 16}, {"page_size": 16}),
        ({"swap_space": 4, "preemption": "swap"}, {"swap_space_bytes": 4 * 2**30, "preemption": "swap"}),
        ({"swap_space": 0}, {}),
        ({"num_gpu_blocks_override": 9, "max_num_seqs": 2}, {"num_pages": 9, "max_num_seqs": 2}),
    ],
)
def test_names_of_vllm_are_understood(options, fields):
    """U-34."""
    assert engine_fields(options) == fields
    EngineConfig(**fields)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_seqs": 3}, TypeError, "LLM has no option 'max_seqs'; did you mean 'max_num_seqs'"),
        ({"tokeniser": "x"}, TypeError, "did you mean 'tokenizer'"),
        ({"xyzzy": 3}, TypeError, r"LLM has no option 'xyzzy'; help\(LLM\) lists them"),
        ({"tensor_parallel_size": 2}, ValueError, "tensor_parallel_size can only be 1 here, got 2: an LLM runs on one"),
        ({"enforce_eager": True}, ValueError, "enforce_eager can only be False here, got True: the step is always"),
        ({"trust_remote_code": 0}, ValueError, "trust_remote_code can only be False here, got 0"),
        ({"quantization": "awq"}, ValueError, "quantization can only be None here, got 'awq': a .gguf file"),
        ({"swap_space": 4}, ValueError, r"swap_space=4 \(GiB\) needs preemption='swap' or preemption='auto'"),
        ({"swap_space": "4", "preemption": "auto"}, ValueError, "swap_space must be a number, got '4'"),
        ({"block_size": 8, "page_size": 8}, ValueError, "are the same option"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_words(options, error, words):
    """U-33, U-34. Catches: an option that is dropped, and an error about another class."""
    with pytest.raises(error, match=words):
        engine_fields(options)


def test_no_name_stands_twice():
    own = set(inspect.signature(EngineConfig).parameters)
    assert not own & (RENAMED.keys() | FIXED.keys()) and not RENAMED.keys() & FIXED.keys()
    assert {field for field, _ in RENAMED.values()} <= own


def test_a_tokenizer_is_given_as_such_or_as_a_path(tmp_path):
    """U-07. Catches: a chat template that is dropped, and a path that fails after the weights were read."""
    write_hf(tmp_path / "model", hf_config())
    write_tokenizer(tmp_path / "model", byte_level_tokenizer(), template="own")
    checkpoint = load_checkpoint(tmp_path / "model")
    gguf = write_gguf(tmp_path / "other.gguf", gguf_metadata())
    loaded = Tokenizer.load(tmp_path / "model")
    template = "{{ messages[0].content }}"
    for given in (None, loaded, tmp_path / "model", str(tmp_path / "model"), gguf):
        assert tokenizer_for(checkpoint, given, template).chat_template == template
    assert tokenizer_for(checkpoint, None, None).chat_template == "own" == loaded.chat_template
    assert tokenizer_for(checkpoint, loaded, None) is loaded
    for wrong in (3, byte_level_tokenizer()):
        with pytest.raises(ValueError, match=r"tokenizer must be a jpaged\.Tokenizer, a directory or a \.gguf file"):
            tokenizer_for(checkpoint, wrong, None)
    (tmp_path / "model" / "model.safetensors").unlink()  # the weights: they are not needed for the refusal
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        tokenizer_for(checkpoint, "nowhere", None)
