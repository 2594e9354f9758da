"""`draftmill bench`: measures a part of draftmill beside its peers, in one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table


@click.command("bench")
@click.argument("name", type=click.Choice(["shards"]))
@click.option("--states", metavar="FILE", help="A .npy of bf16 bit patterns, uint16 [T, L, H].")
@click.option("--rounds", default=5, show_default=True, help="Medians are of so many rounds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list with stable keys.")
def bench_command(name: str, states: str | None, rounds: int, as_json: bool) -> None:
    """Measure a part of draftmill beside its peers. Ratios count: machines are noisy.

    \b
    draftmill bench shards      codecs against plain zstd, on hidden states of the embedded model
    """
    from draftmill.tools import bench_shards

    found = bench_shards.run(Path(states) if states else None, rounds=rounds)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        Console().print(_table(found))


def _table(found: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("name", "value", "unit", "baseline", "ratio"):
        table.add_column(column, justify="left" if column in ("name", "unit") else "right")
    for row in found:
        cells = (row["name"], row["value"], row["unit"], row["baseline"], row["ratio"])
        table.add_row(*(f"{c:,.3g}" if isinstance(c, float) else str(c or "") for c in cells))
    return table
