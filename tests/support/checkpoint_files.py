"""Tiny checkpoints of every kind, written to a temporary directory: random weights, real formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB, HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 40, 32, 64, 2, 4, 2, 8


def hf_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny Llama; `None` in `changes` removes a field."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTER,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.46.0",
        "use_cache": True,
        "vocab_size": VOCAB,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None or key not in changes}


def hf_tensors(
    *, head: bool = True, kv_heads: int = KV_HEADS, prefix: str = "", seed: int = 0
) -> dict[str, np.ndarray]:
    """Random float32 tensors under Hugging Face names."""
    random = np.random.default_rng(seed)

    def new(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": new(VOCAB, HIDDEN), "model.norm.weight": new(HIDDEN)}
    if head:
        tensors["lm_head.weight"] = new(VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": new(HIDDEN),
            layer + "post_attention_layernorm.weight": new(HIDDEN),
            layer + "self_attn.q_proj.weight": new(HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": new(kv_heads * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": new(kv_heads * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": new(HIDDEN, HEADS * HEAD_DIM),
            layer + "mlp.gate_proj.weight": new(INTER, HIDDEN),
            layer + "mlp.up_proj.weight": new(INTER, HIDDEN),
            layer + "mlp.down_proj.weight": new(HIDDEN, INTER),
        }
    return {prefix + name: tensor for name, tensor in tensors.items()}


def write_hf(
    path: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    generation: dict[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """A Hugging Face directory; with `shards` > 1 the tensors are dealt out, and there is an index."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = hf_tensors() if tensors is None else tensors
    (path / "config.json").write_text(json.dumps(hf_config() if config is None else config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[shard::shards]
        save_file({n: tensors[n] for n in names}, path / name)
        weight_map |= dict.fromkeys(names, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows, as its convert_hf_to_gguf.py writes it."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(hf: dict[str, np.ndarray], kv_heads: int = KV_HEADS) -> dict[str, np.ndarray]:
    """The same model under GGUF names."""
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    result = {}
    for name, tensor in hf.items():
        stem = name.removesuffix(".weight")
        if stem in whole:
            result[whole[stem] + ".weight"] = tensor
            continue
        _, _, i, part = stem.split(".", 3)
        if part.endswith("q_proj"):
            tensor = permute(tensor, HEADS)
        if part.endswith("k_proj"):
            tensor = permute(tensor, kv_heads)
        result[f"blk.{i}.{parts[part]}.weight"] = tensor
    return result


def gguf_metadata(**changes: Any) -> dict[str, Any]:
    """Keys of a tiny model with a byte-level vocabulary; in `changes` a dot is two underscores."""
    metadata: dict[str, Any] = {
        "llama.vocab_size": VOCAB,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INTER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<pad>", "<s>", "</s>", *(chr(ord("A") + i) for i in range(VOCAB - 3))],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (VOCAB - 3),
        "tokenizer.ggml.merges": ["A B", "C D"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[-2:] = ["AB", "CD"]
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    architecture: str = "llama",
) -> Path:
    """A GGUF file. A tensor is an array, or the bytes of quantised rows with their type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (gguf_metadata() if metadata is None else metadata).items():
        _add(writer, key, value)
    for name, tensor in (gguf_tensors(hf_tensors()) if tensors is None else tensors).items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def byte_letters() -> list[str]:
    """The letters of a byte-level vocabulary, in the order of the bytes they stand for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def byte_level_tokenizer(*, bos: bool = True, eos: bool = False) -> Tokenizer:
    """Ids 0, 1, 2 are <pad>, <s>, </s>; byte b is id 3 + b. `bos` and `eos`: what its post-processor adds."""
    vocab = {letter: 3 + byte for byte, letter in enumerate(byte_letters())}
    backend = Tokenizer(models.BPE(vocab={"<pad>": 0, "<s>": 1, "</s>": 2} | vocab, merges=[]))
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos or eos:
        single = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    return backend


_JOINED = [
    "▁a", "He", "ll", "llo", "Hello", "▁Hello", "▁w", "or", "ld", "orld", "▁world", "ab", "abc", "▁abc",
]  # fmt: skip
SENTENCEPIECE = [
    "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Helowrd,abcé", *_JOINED,
]  # fmt: skip


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a small SentencePiece vocabulary with byte fallback; earlier pieces score higher."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCEPIECE,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(SENTENCEPIECE))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(SENTENCEPIECE) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    return metadata


def metaspace_tokenizer() -> Tokenizer:
    """The same pieces as `sentencepiece_metadata`, decoded by Metaspace as older Llama tokenizers are."""
    merges = [("He", "llo"), ("▁", "Hello"), ("▁w", "orld")]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(SENTENCEPIECE)}, merges=merges, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return backend


def write_tokenizer(
    path: Path, backend: Tokenizer, config: dict[str, Any] | None = None, template: str | None = None
) -> Path:
    """tokenizer.json, tokenizer_config.json, and chat_template.jinja where a template is given."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} if config is None else config
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path
