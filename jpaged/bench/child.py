"""The process that runs one engine, `python -m jpaged.bench.child JOB OUTCOME`; see `bench.compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jpaged.bench.compare import BenchJob, Outcome
from jpaged.startup import quiet_start, use_cores


def run_job(job: BenchJob) -> Outcome:
    """Loads the model and runs the workload, with progress on stderr."""
    if job.threads is not None:
        use_cores(job.threads)  # before JAX is imported: it starts one thread a core
    quiet_start()
    import jax
    from tqdm import tqdm

    from jpaged.bench.run import load, run_engine
    from jpaged.config import EngineConfig

    def bar(name: str, total: int) -> tqdm:
        return tqdm(total=total, desc=name, unit="tok", file=sys.stderr, dynamic_ncols=True)

    config = EngineConfig(**job.config).for_platform(jax.default_backend())
    say(f"{job.name}: loading {job.model}")
    loaded = load(job.model, config.dtype)
    return run_engine(
        job.engine,
        loaded,
        job.workload.make(loaded.model_config.vocab_size),
        config,
        model=job.model,
        batch_size=job.static_batch_size,
        own_process=True,
        breakdown=job.breakdown,
        say=say,
        bar=bar,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Reads the job, writes the outcome; 2 for a fault of the input, said in one line on stderr."""
    from checkpoints.fetch import FetchError

    asked, answered = map(Path, arguments)
    job = BenchJob.from_json(json.loads(asked.read_text(encoding="utf-8")))
    try:
        outcome = run_job(job)
    except (ValueError, FetchError) as error:
        say(f"error: {error}")
        return 2
    answered.write_text(json.dumps(outcome.to_json()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
