"""`draftmill config`: what counts, and where it comes from."""

from __future__ import annotations

import dataclasses
import inspect
import json
import tomllib
from pathlib import Path

import click
import pytest

from draftmill.tools.cli import cli, main
from draftmill.tools.settings import LISTS, OPTIONS, SECTIONS

NUMBERS = ("--target", "m", "--hidden-size", "64", "--layers", "8", "--vocab-size", "100")


@pytest.fixture
def path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    with pytest.raises(SystemExit):
        main(["init", str(tmp_path / "ds"), *NUMBERS])
    capsys.readouterr()
    return tmp_path / "ds"


def shown(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["config", str(path), *words])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.err
    return captured.out


def test_every_key_says_where_it_comes_from(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = path / "config.toml"
    text = config.read_text().replace("max_completion_tokens = 4096", "max_completion_tokens = 99")
    text = text.replace('concurrency = "auto"\n', "", 1)
    config.write_text(text)
    found = json.loads(shown(path, capsys, "--json"))
    assert set(found) == {*SECTIONS, *LISTS, "environment"}
    assert all(found[name] == [] for name in LISTS)
    for section, owner in SECTIONS.items():
        assert set(found[section]) == {item.name for item in dataclasses.fields(owner)}
    changed = found["generate"]["max_completion_tokens"]
    line = text.splitlines().index("max_completion_tokens = 99") + 1
    assert changed == {
        "value": 99, "default": 4096, "from": f"config.toml:{line}", "option": None,
    }  # fmt: skip
    assert found["generate"]["concurrency"]["from"] == "default"
    assert found["generate"]["temperature"]["from"] == "default"
    table = shown(path, capsys)
    for words in ("[generate]", f"config.toml:{line}", "generate --concurrency", "(the default)"):
        assert words in table


SOURCES = """
[[sources]]
path = "first.jsonl"
weight = 3

[[sources]]
limit = 7
path = "second.jsonl"
turns = "last"
"""


def test_every_source_shows_its_values_and_lines(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = path / "config.toml"
    text = config.read_text() + SOURCES
    config.write_text(text)
    lines = text.splitlines()
    found = json.loads(shown(path, capsys, "--json"))["sources"]
    assert len(found) == 2
    names = {item.name for item in dataclasses.fields(LISTS["sources"])}
    said = [tomllib.loads(SOURCES)["sources"][number] for number in (0, 1)]
    for entry, values in zip(found, said, strict=True):
        assert set(entry) == names
        for key, item in entry.items():
            if key not in values:
                assert item["from"] == "default"
                assert item["value"] == item["default"]
                continue
            assert item["value"] == values[key]
            line = int(item["from"].removeprefix("config.toml:"))
            assert lines[line - 1] == f"{key} = {json.dumps(values[key])}"
    assert found[0]["path"]["from"] != found[1]["path"]["from"]
    table = shown(path, capsys)
    assert table.count("[[sources]]") == 2
    for words in ('"first.jsonl"', '"second.jsonl"', found[1]["limit"]["from"]):
        assert words in table


def test_mistakes_are_errors_with_their_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = path / "config.toml"
    config.write_text(config.read_text().replace("max_concurrency = 1024", "max_concurrency = 'x'"))
    with pytest.raises(SystemExit) as ended:
        main(["config", str(path)])
    assert ended.value.code == 1
    line = config.read_text().splitlines().index("max_concurrency = 'x'") + 1
    assert f"config.toml line {line}: max_concurrency" in capsys.readouterr().err


@pytest.mark.parametrize("key", OPTIONS)
def test_the_options_it_names_are_there(key: tuple[str, str]) -> None:
    section, name = key
    assert name in inspect.signature(SECTIONS[section]).parameters
    command, option = OPTIONS[key].split()
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    assert option in {word for each in found.params for word in each.opts}


def test_every_option_that_overrides_a_setting_is_named() -> None:
    named = {tuple(words.split()) for words in OPTIONS.values()}
    for section in ("generate", "extract", "train"):
        fields = {item.name for item in dataclasses.fields(SECTIONS[section])}
        command = cli.get_command(click.Context(cli), section)
        assert command is not None
        for each in command.params:
            if each.name in fields:
                assert (section, each.opts[0]) in named
