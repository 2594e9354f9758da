"""The commands below `draftmill bench`: each measures one part beside its peers and prints
the same list of figures, as a table or as JSON. The measuring is in the module of its name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from draftmill.manifests.sizes import parse_size
from draftmill.tools.bench.experiments.command import on_policy_command, precision_command
from draftmill.tools.render import console, say
from draftmill.tools.terminal import echo_json

Figures = Sequence[Mapping[str, Any]]  # name, value, unit, baseline, ratio


@click.group("bench")
def bench_command() -> None:
    """Measure a part of draftmill beside its peers. Ratios count: machines are noisy."""


def _common(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--json", "as_json", is_flag=True, help="One JSON list, stable keys.")(
        command
    )
    return click.option(
        "--rounds",
        default=5,
        show_default=True,
        type=click.IntRange(min=1),
        help="Medians are of so many rounds.",
    )(command)


@bench_command.command("shards")
@click.option("--states", metavar="FILE", help="A .npy of bf16 bit patterns, uint16 [T, L, H].")
@click.option(
    "--peers", metavar="PYTHON", help="One that has the peers. [default: that of `make bench-env`]"
)
@_common
def shards_command(states: str | None, peers: str | None, rounds: int, as_json: bool) -> None:
    """Codecs and peers against zstd-1, on states of the embedded model.

    \b
    draftmill bench shards
    draftmill bench shards --states mine.npy --json
    """
    from draftmill.tools.bench import peer_process, shards

    python = Path(peers) if peers else peer_process.bench_python()
    if python is None:
        say("zipnn, MDS and safetensors are left out: in a clone, `make bench-env` brings them")
    path = Path(states) if states else None
    show(shards.run(path, rounds=rounds, peers=python), as_json=as_json)


@bench_command.command("loader")
@click.option("--states", metavar="FILE", help="A .npy of bf16 bit patterns, uint16 [T, L, H].")
@click.option("--size", default="512MiB", show_default=True, help="Of the states, in bf16.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda: also train a draft from shards, and from batches that the GPU holds.",
)
@click.option(
    "--part",
    type=click.Choice(["read", "first-batch", "train", "all"]),
    default="all",
    show_default=True,
    help="read: epochs from shards and from files. first-batch: of a million samples.",
)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--steps", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--folder", metavar="DIR", help="Where the samples are made; on the disk to measure.")
@_common
def loader_command(
    states: str | None,
    size: str,
    device: str,
    part: str,
    threads: int,
    steps: int,
    folder: str | None,
    rounds: int,
    as_json: bool,
) -> None:
    """The training loader against speculators' files, on samples made for it at SmolLM2's sizes.

    \b
    draftmill bench loader
    draftmill bench loader --device cuda --size 4GiB --threads 2 --folder /data
    """
    from draftmill.tools.bench import loader, loader_data

    options = loader.LoaderBench(
        bench=loader_data.Bench(
            raw_bytes=parse_size(size), states_file=Path(states) if states else None
        ),
        rounds=rounds,
        threads=threads,
        device=device,
        part=part,
        steps=steps,
    )
    with tempfile.TemporaryDirectory(prefix="draftmill-bench-", dir=folder) as scratch:
        show(loader.run(options, Path(scratch)), as_json=as_json)


@bench_command.command("extract")
@click.option("--states", metavar="FILE", help="A .npy of bf16 bit patterns, uint16 [T, L, H].")
@click.option("--samples", default=96, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--sample-tokens", default=4096, show_default=True, type=click.IntRange(min=32), metavar="N"
)
@click.option("--codec", default="em-zfast", show_default=True)
@click.option("--folder", metavar="DIR", help="Where the datasets go. [default: TMPDIR]")
@_common
def extract_command(
    states: str | None,
    samples: int,
    sample_tokens: int,
    codec: str,
    folder: str | None,
    rounds: int,
    as_json: bool,
) -> None:
    """The extract stage against its codec alone; the server's files are there already.

    \b
    draftmill bench extract
    draftmill bench extract --states mine.npy --folder /data --json
    """
    from draftmill.tools.bench import extract

    found = extract.run(
        Path(states) if states else None,
        rounds=rounds,
        samples=samples,
        sample_tokens=sample_tokens,
        codec=codec,
        **({"folder": Path(folder)} if folder else {}),
    )
    show(found, as_json=as_json)


@bench_command.command("manifest")
@click.option("--completions", default=200_000, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="One JSON list, stable keys.")
def manifest_command(completions: int, as_json: bool) -> None:
    """Completions a second into a new manifest: no server, no payloads.

    \b
    draftmill bench manifest --json
    """
    from draftmill.tools.bench import manifest

    bench = manifest.ManifestBench(completions=completions)
    show(manifest.bench_manifest(bench), as_json=as_json)


@bench_command.command("generate")
@click.option(
    "--part",
    type=click.Choice(["throughput", "story", "all"]),
    default="all",
    show_default=True,
    help="throughput: an instant server. story: a night with a timeout of 1,800 s, replayed.",
)
@click.option("--prompts", default=20_000, show_default=True, type=click.IntRange(min=1000))
@click.option(
    "--scale",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Seconds of the night that pass in one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON list, stable keys.")
def generate_command(part: str, prompts: int, scale: float, as_json: bool) -> None:
    """The generate stage against the tests' fake server. Needs a clone.

    \b
    draftmill bench generate --part throughput --prompts 200000
    draftmill bench generate --part story --json
    """
    from draftmill.tools.bench import generate, story

    found: list[Mapping[str, Any]] = []
    if part != "story":
        found += generate.bench_throughput(generate.ThroughputBench(prompts=prompts))
    if part != "throughput":
        found += story.bench_story(story.StoryBench(scale=scale))
    show(found, as_json=as_json)


def show(found: Figures, *, as_json: bool) -> None:
    """Prints the figures of one bench."""
    if as_json:
        echo_json(found)
    else:
        console().print(_table(found))


def _table(found: Figures) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("name", "value", "unit", "baseline", "ratio"):
        table.add_column(column, justify="left" if column in ("name", "unit") else "right")
    for row in found:
        cells = (row["name"], row["value"], row["unit"], row["baseline"], row["ratio"])
        table.add_row(*(f"{c:,.3g}" if isinstance(c, float) else str(c or "") for c in cells))
    return table


bench_command.add_command(precision_command)
bench_command.add_command(on_policy_command)
