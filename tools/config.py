"""`draftmill config`: the settings that count for a dataset, and where each of them comes from."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from draftmill.builder.requests.api_key import VARIABLES
from draftmill.manifests import config
from draftmill.manifests.dataset import Dataset
from draftmill.tools.render import console
from draftmill.tools.settings import LISTS, OPTIONS, SECTIONS, load
from draftmill.tools.terminal import echo_json


def document(opened: Dataset) -> dict[str, Any]:
    """Section → key → value, default, where it is from, and the option that goes before it.

    A section that may come several times, like [[sources]], is a list of such tables.
    `environment` says of each variable only whether it is set: they hold keys.
    """
    settings = load(opened)
    text = opened.config_path.read_text(encoding="utf-8")

    def table(section: str, values: Any, entry: int | None = None) -> dict[str, Any]:
        found = {}
        for item in dataclasses.fields(values):
            line = config.line_of(text, section, item.name, entry)
            found[item.name] = {
                "value": getattr(values, item.name),
                "default": None if item.default is dataclasses.MISSING else item.default,
                "from": "default" if line is None else f"{opened.config_path.name}:{line}",
                "option": OPTIONS.get((section, item.name)),
            }
        return found

    found: dict[str, Any] = {name: table(name, getattr(settings, name)) for name in SECTIONS}
    for name in LISTS:
        entries = enumerate(getattr(settings, name))
        found[name] = [table(name, values, number) for number, values in entries]
    found["environment"] = {name: bool(os.environ.get(name)) for name in VARIABLES}
    return found


def tables(found: dict[str, Any]) -> list[Table]:
    """One table for each section, and for each entry of one that comes several times."""
    shown = []
    for section, keys in found.items():
        if section == "environment":
            table = _table(f"[{section}]")
            for key, is_set in keys.items():
                table.add_row(key, "set" if is_set else "not set")
            shown.append(table)
        elif isinstance(keys, list):
            shown += [_section(f"[[{section}]]", entry) for entry in keys]
        else:
            shown.append(_section(f"[{section}]", keys))
    return shown


def _section(title: str, keys: dict[str, Any]) -> Table:
    table = _table(title)
    for key, item in keys.items():
        changed = item["value"] != item["default"]
        value = "unset" if item["value"] is None else json.dumps(item["value"])
        origin = item["from"]
        if origin != "default" and not changed:
            origin += " (the default)"
        if item["option"]:
            origin += f"; for one run: {item['option']}"
        table.add_row(key, Text(value, style="bold" if changed else ""), Text(origin, "dim"))
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    for column in ("key", "value", "from"):
        table.add_column(column, overflow="fold")
    return table


@click.command("config")
@click.argument("dataset")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with stable keys.")
def config_command(dataset: str, as_json: bool) -> None:
    """Show the settings of DATASET and where each comes from: a default, or a line of config.toml.

    Values that differ from their default are bold. A mistake in the file is an error with its
    line. Keys for servers come from the environment only, and are never shown.

    \b
    draftmill config DATASET
    """
    found = document(Dataset.open(dataset))
    if as_json:
        echo_json(found)
        return
    screen = console()
    for table in tables(found):
        screen.print(table)
        screen.print()
