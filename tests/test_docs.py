"""The documents: links lead somewhere, commands and options exist, printed figures are printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from draftmill.tools.cli import COMMANDS, cli, main
from tests.sources import CLONE

PAGES = [CLONE / "README.md", CLONE / "CONTRIBUTING.md", *sorted((CLONE / "docs").rglob("*.md"))]
README_LINES = 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_short() -> None:
    assert len((CLONE / "README.md").read_text().splitlines()) < README_LINES


def _typed() -> list[tuple[str, str]]:
    """(page, command line) of every draftmill command in the pages, as a person would type it."""
    found = []
    for page in PAGES:
        text = page.read_text()
        if page.name == "reference.md":
            continue  # made from the commands themselves
        blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
        indented = re.findall(r"^ {4}(.+)$", text, re.MULTILINE)
        for line in [*"\n".join(blocks).splitlines(), *indented]:
            for part in re.split(r";|&&|\$ ", line.partition("#")[0]):
                words = part.strip().removeprefix("do ")
                if words.startswith("draftmill "):
                    found.append((page.name, words))
        for words in re.findall(r"`(draftmill [^`]+)`", text):
            found.append((page.name, words))
    return found


@pytest.mark.parametrize(("page", "line"), _typed())
def test_every_command_and_option_in_the_pages_exists(page: str, line: str) -> None:
    words = shlex.split(line.replace("…", "X").partition(" | ")[0])[1:]
    if words[:1] == ["--debug"] or words[0].isupper():
        return  # an option of the program, or a word that stands for any command
    assert words[0] in COMMANDS, f"{page}: {line}"
    context = click.Context(cli, info_name="draftmill")
    command = cli.get_command(context, words[0])
    if isinstance(command, click.Group) and len(words) > 1:
        command = command.get_command(context, words[1].partition("|")[0])
    assert command is not None, f"{page}: {line}"
    known = {option for each in command.params for option in each.opts} | {"--help", "-h"}
    for word in words[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{page}: {word} in {line}"


def test_figures_of_the_night_are_those_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (CLONE / "docs" / "overnight.md").read_text()
    block = re.search(r"```\n\$ draftmill (.+)\n((?:.|\n)*?)```", text)
    assert block is not None
    with pytest.raises(SystemExit):
        main(shlex.split(block[1]))
    assert capsys.readouterr().out == block[2]
    for figure in re.findall(r"(?:generate|extract|train) +(\S+ (?:h|min)):", block[2]):
        assert text.count(figure) > 1, f"{figure} is in the command's output alone"


COMMAND = re.compile(
    r"`(?:draftmill|pytest|bench|make) [^`]+`|^ {4}(?:draftmill|make) ", re.MULTILINE
)
# a number with a unit, a decimal fraction, a number of thousands
FIGURE = re.compile(
    r"\d+(?:[.,]\d+)? (?:%|s|ms|MB|GB|nats|steps/s)\b|\b\d+\.\d{2,}\b|\b\d+,\d{3}\b"
)
MEASURED = [
    page
    for page in PAGES
    if page.parent.name in ("decisions", "experiments") or page.stem == "performance"
]


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.name)
def test_pages_with_figures_name_what_gives_them(page: Path) -> None:
    text = page.read_text()
    if FIGURE.search(text):
        assert COMMAND.search(text) or re.search(r"`tests/\S+\.py`", text)
    for path in re.findall(r"\btests/[\w/]+\.py", text):
        assert (CLONE / path).is_file(), f"{page.name}: {path}"


def test_decisions_are_numbered_once() -> None:
    names = [path.name for path in (CLONE / "docs" / "decisions").iterdir()]
    numbers = [re.match(r"\d{4}(?=-)", name) for name in names]
    assert all(numbers), names
    assert len({found[0] for found in numbers if found}) == len(names)


def test_drawings_are_whole() -> None:
    for path in (CLONE / "docs").rglob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert root.get("aria-label")
        assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", "")
