"""Configurations that tests need for their sizes alone; see `tiny` for a model that runs."""

from dataclasses import replace

from jpaged.bench.gpu_check import LLAMA_8B
from jpaged.models.spec import ModelConfig

#: what an engine must know of the decoders in `stubs`
STUB_MODEL = ModelConfig(
    family="stub", vocab_size=64, hidden_size=2, intermediate_size=2, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=2, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip

#: Llama 3.1 70B
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64)
#: Qwen2.5 0.5B, without the biases of its projections: 7 query heads share a KV head
QWEN_HALF_B = ModelConfig(
    family="llama", vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_dim=64, rms_norm_eps=1e-6, rope_theta=1_000_000.0, max_position_embeddings=32_768,
    tie_word_embeddings=True,
)  # fmt: skip
