"""`draftmill status` and `draftmill sql`: what a dataset holds, also while it is being written.

What needs long to import is imported where it is needed: while a writer runs, its own document is
shown, and `status --json` then costs no more than the start of Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import click

from draftmill.manifests.errors import ConfigError
from draftmill.manifests.layout import Layout
from draftmill.manifests.published import published
from draftmill.manifests.sizes import format_size
from draftmill.tools.terminal import echo, echo_json

# So that a line of tab-separated values stays one.
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table

    from draftmill.manifests.dataset import Dataset


def document(path: str) -> dict[str, Any]:
    """The document of `status --json`: the writer's own while one runs, else measured now."""
    found = published(Layout(path))
    return measured(path) if found is None else found


def measured(path: str) -> dict[str, Any]:
    """The same from the database."""
    from draftmill.manifests.dataset import Dataset

    opened = Dataset.open(path)
    with opened.reader() as reader:
        return reader.summary(**budget_and_staging(opened))


def budget_and_staging(opened: Dataset) -> dict[str, Any]:
    """Arguments for `summary` from the settings; none where the settings cannot be read."""
    from draftmill.tools.render import say
    from draftmill.tools.settings import load, writer_options

    try:
        options = writer_options(opened, load(opened))
    except ConfigError as error:
        say(f"{error}; shown without budget and staging")
        return {}
    return {"budget_bytes": options["budget_bytes"], "staging": options["staging"]}


def tables(path: str, found: dict[str, Any]) -> list[Table]:
    """The figures of a dataset as tables for a person."""
    from rich.table import Table

    prompts = Table(title=path, title_justify="left", show_header=False, box=None)
    total = found["prompts"]["total"]
    for state, count in found["prompts"].items():
        share = f"{100 * count / total:.1f} %" if total and state != "total" else ""
        prompts.add_row(state.replace("_", " "), f"{count:,}", share)
    tokens = found["tokens"]
    prompts.add_row("prompt tokens", f"{tokens['prompt']:,}", "")
    prompts.add_row("completion tokens", f"{tokens['completion']:,}", "")
    prompts.add_row("extracted tokens", f"{tokens['extracted']:,}", "")
    prompts.add_row("truncated", f"{found['truncated']:,}", "")
    given = found["off_policy"]
    if given["prompts"]:
        prompts.add_row("off-policy prompts", f"{given['prompts']:,}", "given answers")
        prompts.add_row("off-policy tokens", f"{given['completion_tokens']:,}", "of completions")
    disk = found["disk"]
    sizes = Table(show_header=False, box=None)
    used = format_size(disk["used_bytes"])
    if disk["budget_bytes"]:
        share = 100 * disk["used_bytes"] / disk["budget_bytes"]
        used += f" of {format_size(disk['budget_bytes'])} ({share:.0f} %)"
    sizes.add_row("used", used)
    for key in ("completions_bytes", "hidden_states_bytes", "manifest_bytes", "staging_bytes"):
        sizes.add_row("  " + key.removesuffix("_bytes").replace("_", " "), format_size(disk[key]))
    sizes.add_row("free on the volume", format_size(disk["free_bytes"]))
    if disk["bytes_per_token"]:
        sizes.add_row(
            "hidden states per token",
            f"{disk['bytes_per_token']:,.0f} B stored, {disk['raw_bytes_per_token']:,.0f} B raw "
            f"(ratio {disk['compression_ratio']:.2f})",
        )
        if found["codecs"]:
            sizes.add_row("  stored as", precision_line(found))
        sizes.add_row("samples that still fit", f"{disk['samples_that_still_fit']:,}")
    return [prompts, *_breakdowns(found), sizes]


def precision_line(found: Mapping[str, Any]) -> str:
    """The codecs of the hidden states, and what the lossy ones were measured to cost."""
    words = []
    for name, facts in found["codecs"].items():
        word = "lossless"
        if not facts["lossless"]:
            word = "lossy"
            if (row := found["codec_error"].get(name)) and row["relative_error"]:
                word += f", relative error {max(row['relative_error'].values()):.2g}"
        words.append(f"{name} ({word})")
    return ", ".join(words)


def _breakdowns(found: dict[str, Any]) -> Iterator[Table]:
    """Counts per source where there are several, and reasons of rejection where there are any."""
    from rich.table import Table

    sources = found["sources"]
    if len(sources) > 1:
        columns = [
            key
            for key in next(iter(sources.values()))
            if key == "total" or any(row[key] for row in sources.values())
        ]
        grid = Table(box=None, header_style="bold")
        grid.add_column("source")
        for key in columns:
            grid.add_column(key.replace("_", " "), justify="right")
        for name, row in sources.items():
            grid.add_row(name, *(f"{row[key]:,}" for key in columns))
        yield grid
    if found["rejected"]:
        grid = Table(show_header=False, box=None)
        for stage, gates in found["rejected"].items():
            for gate, count in gates.items():
                grid.add_row(f"rejected at {stage}: {gate.replace('_', ' ')}", f"{count:,}")
        yield grid


@click.command("status")
@click.argument("dataset")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with stable keys.")
@click.option("--watch", is_flag=True, help="A live view, new every 2 seconds until Ctrl-C.")
def status_command(dataset: str, as_json: bool, watch: bool) -> None:
    """Show what DATASET holds: rows per state, tokens, bytes.

    Works while another process writes the dataset. `--watch` shows what that process last
    published and never touches the database; with --json it prints one document a line.

    \b
    draftmill status DATASET --watch
    """
    if watch:
        _watch(dataset, as_json=as_json)
    found = document(dataset)
    if as_json:
        echo_json(found)
    else:
        _show(dataset, found)


def _watch(dataset: str, *, as_json: bool) -> NoReturn:
    from draftmill.manifests.dataset import Dataset
    from draftmill.tools.render import console
    from draftmill.tools.status import watch

    watch.watch(Dataset.open(dataset), as_json=as_json, console=console())


def _show(dataset: str, found: dict[str, Any]) -> None:
    from draftmill.builder.progress import Progress
    from draftmill.tools.render import console, describe

    screen = console()
    for table in tables(dataset, found):
        screen.print(table)
    if running := found.get("running"):
        line = describe(Progress.of(running))
        screen.print(f"{running['stage']} runs in process {found['pid']}: {line}")


@click.command("sql")
@click.argument("dataset")
@click.argument("query")
@click.option("--json", "as_json", is_flag=True, help="Rows as JSON objects, one a line.")
def sql_command(dataset: str, query: str, as_json: bool) -> None:
    """Ask the manifest of DATASET a question in SQL; tables are described in docs/format.md.

    \b
    draftmill sql DATASET "SELECT source, state, count(*) FROM samples GROUP BY ALL"

    A table on a terminal; tab-separated lines otherwise.
    """
    from draftmill.manifests.dataset import Dataset
    from draftmill.tools.render import console

    with Dataset.open(dataset).reader() as reader:
        found = reader.sql(query)
    if as_json:
        for row in found.to_pylist():
            echo_json(row, indent=None, default=str)
        return
    screen = console()
    if screen.is_terminal:
        screen.print(_grid(found))
        return
    # Nothing is cut or wrapped for a file or a pipe: a row is a line, whatever is in it.
    echo("\t".join(found.column_names))
    for row in found.to_pylist():
        echo("\t".join(_cell(value) for value in row.values()))


def _cell(value: Any) -> str:
    return "" if value is None else str(value).translate(_ESCAPES)


def _grid(found: pa.Table) -> Table:
    from rich.table import Table

    grid = Table(box=None, header_style="bold")
    for name in found.column_names:
        grid.add_column(name)
    for row in found.to_pylist():
        grid.add_row(*("" if value is None else str(value) for value in row.values()))
    return grid
