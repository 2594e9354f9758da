"""Makes docs/reference.md: every command and every setting, from the code that defines them.

`python -m draftmill.tools.reference > docs/reference.md`; a test fails when the page is old.
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterator

import click

from draftmill.tools.cli import COMMANDS, cli
from draftmill.tools.settings import LISTS, SECTIONS


def page() -> str:
    """The whole page as Markdown."""
    lines = [
        "# Reference",
        "",
        "Made by `python -m draftmill.tools.reference` from the code; do not edit.",
        "",
        "Exit codes: 0 done; 1 error; 2 usage; 3 stopped at the disk budget, the dataset can be",
        "trained on; 4 done, but rows remain timed out or failed; 130 interrupted, everything",
        "acknowledged is kept.",
        "",
        "## Commands",
        "",
    ]
    context = click.Context(cli, info_name="draftmill", **cli.context_settings)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        for words, each in with_subcommands(command, context, name):
            lines += [f"### {words}", "", "```", _help(each, context, words), "```", ""]
    lines += ["## Settings", "", "Sections and keys of `config.toml`.", ""]
    labels = {f"[{name}]": settings for name, settings in SECTIONS.items()}
    labels |= {f"[[{name}]]": settings for name, settings in LISTS.items()}
    for label, settings in labels.items():
        lines += [f"### {label}", "", "| key | default | meaning |", "|---|---|---|"]
        for item in dataclasses.fields(settings):
            default = "" if item.default in (None, "") else f"`{item.default}`"
            text = " ".join(str(item.metadata["help"]).split()).replace("|", "\\|")
            lines.append(f"| `{item.name}` | {default} | {text} |")
        lines.append("")
    return "\n".join(lines)


def with_subcommands(
    command: click.Command, parent: click.Context, name: str
) -> Iterator[tuple[str, click.Command]]:
    """A command and those below it, each with its words."""
    yield name, command
    if isinstance(command, click.Group):
        for below in command.list_commands(parent):
            inner = command.get_command(parent, below)
            assert inner is not None
            yield from with_subcommands(inner, parent, f"{name} {below}")


def _help(command: click.Command, parent: click.Context, name: str) -> str:
    # A fixed width, so that the page does not depend on who makes it.
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=90, max_content_width=90
    )
    return textwrap.dedent(command.get_help(context)).strip()


if __name__ == "__main__":
    sys.stdout.write(page())
