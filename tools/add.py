"""`draftmill add`: prompts from files into a dataset."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import click

from draftmill.builder.sources.conversations import FORMATS, TURNS, Format, Turns
from draftmill.builder.sources.read import SourceError, read_source, source_name
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import SourceFileError
from draftmill.manifests.types import Prompt
from draftmill.manifests.writer import AddReport, DatasetWriter
from draftmill.tools.render import say
from draftmill.tools.settings import load, writer_options

_SHOWN_ERRORS = 20


class Skipped:
    """Lines that could not be used: counted, the first ones shown."""

    def __init__(self) -> None:
        self.count = 0

    def prompts(self, items: Iterable[Prompt | SourceError]) -> Iterator[Prompt]:
        """The prompts of a source; problems are told and counted on the way."""
        for item in items:
            if isinstance(item, Prompt):
                yield item
                continue
            self.count += 1
            if self.count <= _SHOWN_ERRORS:
                say(f"skipped {item}")
            elif self.count == _SHOWN_ERRORS + 1:
                say("further lines are skipped without a message")


def add_source(
    writer: DatasetWriter,
    source: str,
    *,
    format: Format = "auto",
    name: str | None = None,
    limit: int | None = None,
    turns: Turns = "last",
) -> tuple[AddReport, int]:
    """Add one source; returns what was added and how many of its lines were skipped."""
    skipped = Skipped()
    items = read_source(Path(source), format=format, name=name, turns=turns)
    prompts = skipped.prompts(items)
    return writer.add_prompts(prompts if limit is None else islice(prompts, limit)), skipped.count


@click.command("add")
@click.argument("dataset")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--format",
    default="auto",
    show_default=True,
    type=click.Choice(FORMATS),
    help="Form of the rows.",
)
@click.option("--name", help="Name of the source in the dataset (default: the file's name).")
@click.option("--license", "licence", help="Licence of the sources, for the model card.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many prompts per source.")
@click.option(
    "--turns",
    default="last",
    show_default=True,
    type=click.Choice(TURNS),
    help="Which user turns of a conversation become prompts.",
)
def add_command(
    dataset: str,
    sources: tuple[str, ...],
    format: Format,
    name: str | None,
    licence: str | None,
    limit: int | None,
    turns: Turns,
) -> None:
    """Add the prompts of SOURCE... to DATASET; those it has already are not added again.

    \b
    Sources: JSONL with `messages`, `prompt` or ShareGPT `conversations`; Parquet of the same; a
    Hugging Face dataset folder.
    draftmill add DATASET open-perfectblend/ --limit 25000
    """
    opened = Dataset.open(dataset)
    for source in sources:  # before anything is added
        if not Path(source).exists():
            raise SourceFileError(f"{source}: no such file or folder; nothing was added")
    with opened.writer(**writer_options(opened, load(opened))) as writer:
        for source in sources:
            report, skipped = add_source(
                writer, source, format=format, name=name, limit=limit, turns=turns
            )
            if licence:
                writer.set_license(name or source_name(Path(source)), licence)
            click.echo(
                f"{source}: {report.added:,} added, {report.known:,} known already, "
                f"{skipped:,} skipped"
            )
        total = writer.count("pending")
    click.echo(f"{total:,} prompts pending; next: draftmill build {shlex.quote(dataset)} --serve")
