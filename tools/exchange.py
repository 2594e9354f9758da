"""`draftmill export` and `draftmill import`: datasets for speculators, and from there."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import click

from draftmill.builder.exchange.export import export
from draftmill.builder.exchange.imports import import_folder
from draftmill.builder.extraction.intake import Layers
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.sizes import format_size
from draftmill.tools.render import duration, say
from draftmill.tools.settings import load, writer_options
from draftmill.tools.terminal import echo

_SHOWN_REASONS = 5
_LINE_EVERY_S = 10.0


class _Ticker:
    """A line every few seconds: how many of how many samples, and how long the rest takes."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._begun = self._line_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._line_at < _LINE_EVERY_S:
            return
        self._line_at = now
        left_s = (now - self._begun) / done * (total - done)
        say(f"{self._label}: {done:,}/{total:,} samples, about {duration(left_s)} left")


@click.command("export")
@click.argument("dataset")
@click.argument("output")
@click.option("--format", type=click.Choice(["speculators"]), default="speculators")
@click.option("--fp8", is_flag=True, help="Half the bytes, in speculators' form; loses precision.")
def export_command(dataset: str, output: str, format: str, fp8: bool) -> None:
    """Write the extracted samples of DATASET into OUTPUT, a folder that `speculators train` reads.

    \b
    Run it again after a kill, or to add what was extracted since; samples that are there are kept.
    draftmill export DATASET OUTPUT --format speculators
    """
    opened = Dataset.open(dataset)
    target = load(opened).target
    report = export(
        opened,
        Path(output),
        num_layers=len(target.extraction_layer_ids),
        hidden_size=target.hidden_size,
        fp8=fp8,
        say=say,
        on_sample=_Ticker("export"),
    )
    echo(
        f"{output}: {report.written:,} samples written ({report.tokens:,} tokens, "
        f"{format_size(report.bytes)}), {report.kept:,} were there already"
    )
    backend = " --hidden-states-backend fp8" if fp8 else ""
    echo(f"next: speculators train --data-path {shlex.quote(output)}{backend} …")


@click.command("import")
@click.argument("dataset")
@click.argument("folder")
@click.option("--name", help="The source that rows without one of their own get.")
def import_command(dataset: str, folder: str, name: str | None) -> None:
    """Add the samples of FOLDER, prepared for `speculators train`, to DATASET.

    \b
    Completions come from its Arrow table, states from its hs_ROW.safetensors; rows without a file
    can be extracted. Importing again adds only what is missing.
    draftmill import DATASET FOLDER
    """
    opened = Dataset.open(dataset)
    settings = load(opened)
    target, extract = settings.target, settings.extract
    layers = Layers(layer_ids=target.extraction_layer_ids, hidden_size=target.hidden_size)
    with opened.writer(**writer_options(opened, settings)) as writer:
        model = settings.generate.model or target.model
        writer.check_fingerprint(
            "extract", extract.fingerprint(model, layers.layer_ids, layers.hidden_size)
        )
        report = import_folder(
            writer,
            Path(folder),
            source=name or f"import:{Path(folder).resolve().name}",
            layers=layers,
            codec=extract.codec,
            max_seq_len=extract.max_seq_len,
            on_sample=_Ticker("import"),
        )
    echo(
        f"{folder}: {report.new:,} prompts added, {report.known:,} known already, "
        f"{report.useless:,} without a supervised token"
    )
    echo(
        f"{report.completions:,} completions and {report.states:,} hidden states stored, "
        f"{report.rejected:,} rejected, {report.without_states:,} without states"
    )
    if report.narrowed:
        say(
            f"{report.narrowed:,} rows supervised more than one stretch: the last one is the "
            "completion, what stands before it is the prompt"
        )
    for reason in report.reasons[:_SHOWN_REASONS]:
        say(f"rejected: {reason}")
