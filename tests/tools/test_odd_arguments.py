"""Arguments that are no text, and addresses that are none: one line, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftmill.tools.cli import main

BAD = os.fsdecode(b"caf\xe9")
SIZES = ("--hidden-size", "64", "--layers", "8", "--vocab-size", "100")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    main_ends("init", "ds", "--target", "m", *SIZES)
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    return tmp_path


def main_ends(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(str(ended.value.code))


@pytest.mark.parametrize(
    "words",
    [
        ("init", "new", "--target", BAD, *SIZES),
        ("init", BAD, "--target", "m", *SIZES),
        ("add", "ds", "p.jsonl", "--name", BAD),
        ("add", "ds", "p.jsonl", "--license", BAD),
        ("sql", "ds", f"SELECT '{BAD}'"),
        ("evict", "ds", "--all", "--source", BAD),
        ("retry", "ds", "--failed", "--source", BAD),
        ("generate", "ds", "--url", f"http://{BAD}:1"),
        ("generate", "ds", "--url", f"http://{'a' * 80}:1"),
        ("doctor", "--url", "http://..:1"),
        ("doctor", "ds", "--url", "http://a b:1"),
        ("estimate", "--model", BAD),
        ("status", BAD),
        ("export", "ds", BAD),
    ],
    ids=lambda words: f"{words[0]} {words[-1]!r}",
)
def test_one_line_says_so(
    place: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    main_ends("add", "ds", "p.jsonl")
    before = sorted(os.listdir(place))
    capsys.readouterr()
    assert main_ends(*words) in (1, 2)
    said = capsys.readouterr().err.splitlines()
    assert said
    assert not any("unexpected" in line for line in said)
    assert sorted(os.listdir(place)) == before


def test_a_file_whose_name_is_no_text_is_taken_as_it_is(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.rename("p.jsonl", BAD + ".jsonl")
    assert main_ends("add", "ds", BAD + ".jsonl") == 0
    assert main_ends("add", "ds", BAD + ".jsonl") == 0  # known by its content
    capsys.readouterr()
    assert main_ends("sql", "ds", "SELECT DISTINCT source FROM samples") == 0
    source = capsys.readouterr().out.splitlines()[1]
    source.encode()
    assert main_ends("retry", "ds", "--failed", "--source", source) == 0
    assert main_ends("status", "ds", "--json") == 0


def test_a_source_of_the_config_whose_path_is_no_text(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TOML is UTF-8: such a file can only be named on the command line, and the file says where."""
    config = place / "ds" / "config.toml"
    with config.open("ab") as file:
        file.write(b'\n[[sources]]\npath = "caf\xe9.jsonl"\n')
    assert main_ends("add", "ds") == 1
    assert "is not UTF-8 at byte" in capsys.readouterr().err
