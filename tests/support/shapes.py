"""Configurations that tests need for their sizes alone; see `tiny` for a model that runs.

What a test costs is what it compiles: 2 to 4 seconds for a burst, 1 to 2 for a step, per token budget. `jax.jit` finds
a program that an earlier test of the process compiled where decoder (equal fields, see `stubs.Traces`), sizes,
policies, trace and the kind of preemption are the same. So a test takes ENGINE, or ENGINE with TIGHT, and READER,
unless it is about something else. These are values and cost nothing: prefix caching on or off, the seed,
`steps_per_burst` with a budget larger than the slots, `swap_page_cost` with preemption="auto" (0 swaps always, 1e9
never). These compile anew: another `num_pages`, `page_size`, `max_model_len`, `max_num_seqs`, `max_queue`, budget,
policy, trace.
"""

from dataclasses import replace

from jpaged.bench.gpu_check import LLAMA_8B
from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from support.stubs import HistoryDecoder

#: what an engine must know of the decoders in `stubs`
STUB_MODEL = ModelConfig(
    family="stub", vocab_size=64, hidden_size=2, intermediate_size=2, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=2, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip

VOCAB = 32
#: STUB_MODEL with READER's vocabulary
MODEL = replace(STUB_MODEL, vocab_size=VOCAB, eos_token_ids=(31,))
#: The decoder for whatever is not about decoders: it reads the pool back. It never emits its `nan_token`.
READER = HistoryDecoder(VOCAB, nan_token=31)
#: Four slots, three places in the queue, and pages for one and a half of the longest requests.
ENGINE = EngineConfig(
    page_size=4, num_pages=24, max_num_seqs=4, max_num_batched_tokens=16, token_budgets=(16,), max_queue=3,
    max_model_len=64, dtype="float32",
)  # fmt: skip
#: What makes an ENGINE preempt: pages for one of the longest.
TIGHT = {"num_pages": 8, "max_model_len": 32}

#: Llama 3.1 70B
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64)
#: Qwen2.5 0.5B, without the biases of its projections: 7 query heads share a KV head
QWEN_HALF_B = ModelConfig(
    family="llama", vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_dim=64, rms_norm_eps=1e-6, rope_theta=1_000_000.0, max_position_embeddings=32_768,
    tie_word_embeddings=True,
)  # fmt: skip
