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
from draftmill.tools.settings import OPTIONS, SECTIONS, load


def document(opened: Dataset) -> dict[str, Any]:
    """Section → key → value, default, where it is from, and the option that goes before it.

    `environment` says of each variable only whether it is set: they hold keys.
    """
    settings = load(opened)
    text = opened.config_path.read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for section, owner in SECTIONS.items():
        values = getattr(settings, section)
        found[section] = {}
        for item in dataclasses.fields(owner):
            line = config.line_of(text, section, item.name)
            found[section][item.name] = {
                "value": getattr(values, item.name),
                "default": None if item.default is dataclasses.MISSING else item.default,
                "from": "default" if line is None else f"{opened.config_path.name}:{line}",
                "option": OPTIONS.get((section, item.name)),
            }
    found["environment"] = {name: bool(os.environ.get(name)) for name in VARIABLES}
    return found


def tables(found: dict[str, Any]) -> list[Table]:
    """One table for each section."""
    shown = []
    for section, keys in found.items():
        table = Table(title=f"[{section}]", title_justify="left", box=None,
                      show_header=False, pad_edge=False)  # fmt: skip
        for column in ("key", "value", "from"):
            table.add_column(column, overflow="fold")
        for key, item in keys.items():
            if section == "environment":
                table.add_row(key, "set" if item else "not set")
                continue
            changed = item["value"] != item["default"]
            value = "unset" if item["value"] is None else json.dumps(item["value"])
            origin = item["from"]
            if origin != "default" and not changed:
                origin += " (the default)"
            if item["option"]:
                origin += f"; for one run: {item['option']}"
            table.add_row(key, Text(value, style="bold" if changed else ""), Text(origin, "dim"))
        shown.append(table)
    return shown


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
        click.echo(json.dumps(found, indent=2))
        return
    screen = console()
    for table in tables(found):
        screen.print(table)
        screen.print()
