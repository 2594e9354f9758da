"""The command `draftmill report`: terminal tables, JSON or one HTML file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import UsageError, why
from draftmill.tools.render import console, say
from draftmill.tools.report.document import document
from draftmill.tools.report.gather import gather
from draftmill.tools.report.sections import sections, snapshot_note
from draftmill.tools.status.command import budget_and_staging
from draftmill.tools.terminal import echo_json


def read(path: str) -> dict[str, Any]:
    """The document of `report --json`, from the database or, while it is written, its snapshot."""
    opened = Dataset.open(path)
    with opened.reader() as reader:
        snapshot = None
        if reader.writer_pid is not None:
            age_s = max(0.0, time.time() - opened.snapshot_path.stat().st_mtime)
            snapshot = {"writer_pid": reader.writer_pid, "age_s": round(age_s, 1)}
        status = reader.summary(**budget_and_staging(opened))
        facts = gather(reader.manifest, opened.prompts_dir)
    return document(facts, status, dataset=path, now=time.time(), snapshot=snapshot)


def show(found: dict[str, Any], screen: Console) -> None:
    """The report as tables, for a person at a terminal."""
    if note := snapshot_note(found):
        screen.print(note, style="yellow")
    for part in sections(found):
        screen.print()
        screen.rule(part.title, align="left", style="dim")
        screen.print(part.text, highlight=False)
        for grid in part.grids:
            if not grid.rows:
                continue
            table = Table(box=None, header_style="dim", pad_edge=False)
            for place, name in enumerate(grid.columns):
                left = place < grid.words
                table.add_column(name, justify="left" if left else "right", overflow="fold")
            for row in grid.rows:
                table.add_row(*row)
            screen.print()
            screen.print(grid.title, style="bold")
            screen.print(table)


def _write(path: Path, text: str) -> None:
    """Into a file, whole or not at all; straight into what is there and no file, like a pipe."""
    # A dataset's names are bytes, and not all bytes are text.
    data = text.encode(errors="replace")
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        files.write_atomic(path, data, "report")


@click.command("report")
@click.argument("dataset")
@click.option("--html", metavar="FILE", help="Write one HTML page with charts; opens anywhere.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with stable keys.")
def report_command(dataset: str, html: str | None, as_json: bool) -> None:
    """Show what DATASET costs on disk, what went wrong, and what is missing from it.

    Disk by stage, source, shard and length, with a forecast; errors by class, server and time;
    lengths of completed, truncated, timed-out and missing rows; throughput and the controller's
    decisions. Works while another process writes the dataset.

    \b
    draftmill report DATASET
    draftmill report DATASET --html report.html
    """
    found = read(dataset)
    if as_json:
        echo_json(found)
    if html is not None:
        # Plots are for pages only: no other command loads their library.
        from draftmill.tools.report.page import page

        try:
            _write(Path(html), page(found))
        except (OSError, ValueError) as error:
            raise UsageError(f"--html {html!r}: {why(error)}") from error
        say(f"{html} written")
    if not as_json and html is None:
        show(found, console())
