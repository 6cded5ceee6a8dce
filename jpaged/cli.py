"""The command line: `jpaged demo`, `bench`, `convert`, `sizing`, `version`.

Commands import what they need when they run: `jpaged --help` is quick, and nothing starts JAX by accident.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.startup import quiet_start

app = typer.Typer(
    help="Serve language models from a paged KV cache, scheduled inside one compiled JAX step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

BUILTIN_MODEL = "smollm2-135m"
MODEL_HELP = "Built-in name, directory, .gguf file or hub id."


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jpaged {_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve language models from a paged KV cache, scheduled inside one compiled JAX step."""


@app.command()
def version() -> None:
    """Print the versions of jpaged and of JAX, and the devices JAX finds."""
    with _plain_errors():
        quiet_start()
        import jax

        typer.echo(f"jpaged {_version()}")
        typer.echo(f"jax {jax.__version__} on {', '.join(str(d.device_kind) for d in jax.devices())}")


@app.command()
def demo(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = BUILTIN_MODEL,
    plot: Annotated[Path, typer.Option(help="Where the picture of page occupancy goes.")] = Path(
        "jpaged-demo-pages.png"
    ),
) -> None:
    """Chat with a small model from the paged pool, then compare continuous with static batching."""
    with _plain_errors():
        quiet_start()
        from jpaged.demo import run_demo

        if not run_demo(model, plot):
            raise typer.Exit(1)


@app.command()
def bench(
    workload: Annotated[Path | None, typer.Option(help="A workload file; without one, a synthetic mix.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="continuous, static, both, or all: continuous, the same without prefix caching ('unshared'), static. "
            "By default both, and with --shared-prefix all."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = BUILTIN_MODEL,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    synthetic: Annotated[int, typer.Option(min=1, help="Requests of the synthetic mix.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the synthetic mix.")] = 0,
    prompt_tokens: Annotated[
        tuple[int, int], typer.Option(help="Shortest and longest prompt of the synthetic mix.")
    ] = (16, 512),
    output_tokens: Annotated[
        tuple[int, int], typer.Option(help="Least and most output tokens of the synthetic mix.")
    ] = (8, 256),
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts of the synthetic mix begin with, before their own.")
    ] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Slots of the continuous engine.")] = 16,
    static_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of the static engine; by default as many as there are slots.")
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one step.")] = 256,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="By default the longest request of the workload.")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Token slots in a page.")] = 16,
    num_pages: Annotated[int | None, typer.Option(min=1, help="Pages of the pool.")] = None,
    pool_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes of the pool, instead of pages.")] = None,
    steps_per_burst: Annotated[int | None, typer.Option(min=1, help="Most steps of one device call.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    enable_prefix_caching: Annotated[bool, typer.Option(help="Share pages, in the continuous engine.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to run on; by default all.")] = None,
    check: Annotated[bool, typer.Option(help="With several runs: token ids must be identical.")] = True,
    breakdown: Annotated[bool, typer.Option(help="Also profile a second run: where its time goes.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw page occupancy over the steps there.")] = None,
) -> None:
    """Measure a workload, warm and with compile time apart. In a file or a pipe the last line is the report as JSON.

    Each engine runs in a process of its own. The exit status is 1 if a request failed, if a program was
    compiled while the clock ran, or if the engines disagree on a token.
    """
    with _plain_errors():
        from rich.console import Console

        from jpaged.bench.compare import BenchJob, WorkloadSpec, jobs_of, make_report, run_all
        from jpaged.config import EngineConfig

        config: dict[str, Any] = {
            "page_size": page_size,
            "num_pages": num_pages,
            "pool_bytes": pool_bytes,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "steps_per_burst": steps_per_burst,
            "dtype": dtype,
            "enable_prefix_caching": enable_prefix_caching,
        }
        EngineConfig(**config)  # what it refuses is refused here, before a process is started
        for name, path in (("--workload", workload), ("--json", json_file), ("--plot", plot)):
            _check_path(name, path, reading=name == "--workload")
        spec = WorkloadSpec(
            path=None if workload is None else str(workload),
            count=synthetic,
            seed=seed,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared_prefix=shared_prefix,
            head=requests,
        )
        job = BenchJob(
            engine="continuous",
            model=model,
            workload=spec,
            config=config,
            static_batch_size=static_batch_size,
            threads=threads,
            breakdown=breakdown,
        )
        outcomes = run_all(jobs_of(job, engine or ("all" if shared_prefix else "both")))
        report = make_report(outcomes, check=check)
        if plot is not None:
            from jpaged.viz.pages import plot_occupancy

            figure = plot_occupancy(
                {o.result.engine: o.measured.history for o in outcomes},
                page_size={o.result.engine: o.measured.page_size for o in outcomes},
                title=report.workload["name"],
            )
            figure.savefig(plot)
        if json_file is not None:
            report.write(json_file)
        console = Console()
        report.print(console)
        if not console.is_terminal:  # there the line would fill a page; --json writes it to a file
            typer.echo(report.last_line())
    if report.problems:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help=MODEL_HELP)],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The Orbax directory to write; must not exist.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; by default as stored, quantised as float32."),
    ] = None,
) -> None:
    """Read a checkpoint and write it as an Orbax directory that loads without conversion."""
    with _plain_errors():
        quiet_start()
        from jpaged.models.convert import convert as convert_checkpoint

        typer.echo(f"wrote {convert_checkpoint(source, target, dtype)}")


@app.command()
def sizing(
    model: Annotated[
        str | None,
        typer.Argument(help=f"{MODEL_HELP} Its configuration replaces the numbers of the options."),
    ] = None,
    memory: Annotated[str, typer.Option(help="Of the device: 80e9 bytes, 80GB (10**9) or 80GiB (2**30).")] = "80GB",
    utilization: Annotated[float, typer.Option(help="Share of it to use, in (0, 1].")] = 0.9,
    parameters: Annotated[int, typer.Option(min=0, help="Of the model.")] = 8_030_261_248,
    layers: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16: of weights and pool.")] = "bfloat16",
    temporary_bytes: Annotated[int, typer.Option(min=0, help="What the compiled step needs beside.")] = 0,
    page_size: Annotated[int, typer.Option(min=1, help="Token slots in a page.")] = 16,
    reserved: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of contiguous reservations, once or more often.")
    ] = None,
    average: Annotated[int, typer.Option(min=1, help="Average length of a request in pages.")] = 2_000,
) -> None:
    """Work out how many pages, tokens and requests fit. The defaults are Llama 3.1 8B on an 80 GB card."""
    with _plain_errors():
        from jpaged.runtime.sizing import Sizing, dtype_bytes, kv_bytes_per_token, parse_bytes

        if model is not None:
            from jpaged.models.load import load_checkpoint, resolve

            config = load_checkpoint(resolve(model)).config
            parameters, layers = config.num_parameters, config.num_layers
            kv_heads, head_dim = config.num_kv_heads, config.head_dim
        result = Sizing(
            memory_bytes=parse_bytes(memory),
            utilization=utilization,
            weight_bytes=parameters * dtype_bytes(dtype),
            temporary_bytes=temporary_bytes,
            token_bytes=kv_bytes_per_token(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype),
            page_size=page_size,
        )
        typer.echo(result.table(reserved=tuple(reserved or (131_072, 8_192)), average_length=average))


def _check_path(name: str, path: Path | None, *, reading: bool) -> None:
    if path is None:
        return
    if reading and not path.is_file():
        raise ValueError(f"{name}: there is no file {path}")
    if not reading and not path.absolute().parent.is_dir():
        raise ValueError(f"{name}: there is no directory {path.absolute().parent}")


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Faults of the input are a line on stderr and exit status 2; other faults keep their traceback."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        from checkpoints.fetch import FetchError  # only now: it takes half a second
        from jpaged.bench.compare import ChildFailed

        if not isinstance(error, ValueError | FetchError | ChildFailed):
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        return installed_version("jpaged")
    except PackageNotFoundError:  # run from a source tree
        return "(not installed)"


if __name__ == "__main__":
    app()
