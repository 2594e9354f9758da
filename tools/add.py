"""`draftmill add`: prompts from files into a dataset."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from draftmill.builder.sources.conversations import FORMATS, MODES, TURNS, Format, Mode, Turns
from draftmill.builder.sources.mix import SourceReport, add_sources
from draftmill.builder.sources.read import SourceError
from draftmill.builder.sources.settings import SourceSettings
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import SourceFileError, UsageError
from draftmill.manifests.writer import DatasetWriter
from draftmill.tools.render import say
from draftmill.tools.settings import load, writer_options
from draftmill.tools.terminal import echo

_SHOWN_ERRORS = 20


class Skipped:
    """Lines that could not be used: the first ones are shown."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, error: SourceError) -> None:
        self._count += 1
        if self._count <= _SHOWN_ERRORS:
            say(f"skipped {error}")
        elif self._count == _SHOWN_ERRORS + 1:
            say("further lines are skipped without a message")


def add_source(writer: DatasetWriter, source: str, *, name: str) -> SourceReport:
    """Add all prompts of one source."""
    sources = [SourceSettings(path=source, name=name)]
    return add_sources(writer, sources, folder=Path(), total=None, on_error=Skipped())[0]


@click.command("add")
@click.argument("dataset")
@click.argument("sources", nargs=-1, metavar="[SOURCE...]")
@click.option("--format", type=click.Choice(FORMATS), help="Form of the rows. Default: auto.")
@click.option("--name", help="Name of the source in the dataset (default: the file's name).")
@click.option("--license", help="Licence of the source's texts; model cards show it.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="The most prompts per SOURCE, or in all from [[sources]]; chosen by their content.",
)
@click.option(
    "--turns",
    type=click.Choice(TURNS),
    help="Which turns of a conversation become prompts. Default: last.",
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help="regenerate (the default): the target model answers. prefill: the answers in the source "
    "are kept, and only their hidden states are extracted.",
)
def add_command(
    dataset: str,
    sources: tuple[str, ...],
    format: Format | None,
    name: str | None,
    license: str | None,
    limit: int | None,
    turns: Turns | None,
    mode: Mode | None,
) -> None:
    """Add the prompts of SOURCE... to DATASET; those it has already are not added again.

    \b
    Sources: JSONL with `messages`, `prompt` or ShareGPT `conversations`; Parquet of the same; a
    Hugging Face dataset folder.
    draftmill add DATASET open-perfectblend/ --limit 25000

    Without SOURCE, all [[sources]] in config.toml are added, each up to its limit and together up
    to max_prompts, in the proportion of their weights.
    """
    given = {"name": name, "format": format, "turns": turns, "mode": mode, "license": license}
    given = {key: value for key, value in given.items() if value is not None}
    opened = Dataset.open(dataset)
    settings = load(opened)
    if sources:
        try:
            chosen = [SourceSettings(path=each, limit=limit, **given) for each in sources]  # type: ignore[arg-type]
        except ValueError as error:
            raise UsageError(str(error)) from error
        folder, total = Path(), None
    else:
        if given:
            raise UsageError(f"--{next(iter(given))} goes with a SOURCE, or into [[sources]]")
        if not settings.sources:
            raise UsageError(f"name a SOURCE, or list some as [[sources]] in {opened.config_path}")
        chosen, folder = list(settings.sources), opened.path
        total = limit or settings.dataset.max_prompts
    for source in chosen:  # before anything is touched
        if not (folder / source.path).exists():
            raise SourceFileError(
                f"{folder / source.path}: no such file or folder; nothing was added"
            )
    with opened.writer(**writer_options(opened, settings)) as writer:
        reports = add_sources(writer, chosen, folder=folder, total=total, on_error=Skipped())
        for source in chosen:
            if source.license:
                writer.set_license(source.label, source.license)
        pending = writer.count("pending")
    for source, report in zip(chosen, reports, strict=True):
        echo(_line(source.path if sources else report.name, report))
    echo(f"{pending:,} prompts pending; next: draftmill build {shlex.quote(dataset)} --serve")


def _line(name: str, report: SourceReport) -> str:
    line = (
        f"{name}: {report.added:,} added, {report.known:,} known already, "
        f"{report.skipped:,} skipped"
    )
    if report.wanted is not None:
        line += f"; its share is {report.wanted:,} of {report.found or 0:,}"
    return line
