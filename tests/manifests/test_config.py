"""config.toml: what is written can be read, and every mistake names file, line and key."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from draftmill.manifests import config
from draftmill.manifests.errors import ConfigError


def key(default: Any) -> Any:
    return field(default=default, metadata={"help": "first line\nsecond line"})


@dataclass(frozen=True, kw_only=True)
class Numbers:
    count: int = key(3)
    rate: float = key(0.5)
    limit: float | None = key(None)
    name: str = key('a "quoted" ä')
    fast: bool = key(True)
    ids: tuple[int, ...] = key((1, 2))
    mode: Literal["one", "two"] = key("one")
    level: int | Literal["auto"] = key("auto")
    extra: dict[str, Any] = field(
        default_factory=lambda: {"a": [1, "x"]}, metadata={"help": "anything"}
    )

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count: at least 1, not {self.count}")


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "config.toml"
    path.write_text(text)
    found = config.read(path, {"numbers": Numbers, "other": Numbers}, {"many": Numbers})
    assert found.pop("many") == () or "[[many]]" in text
    return found


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    wanted = Numbers(count=7, limit=2.0, ids=(), level=4, extra={})
    text = config.render({"numbers": wanted})
    assert "# first line\n# second line\ncount = 7\n" in text
    assert read(tmp_path, text) == {"numbers": wanted, "other": Numbers()}


def test_whole_numbers_are_numbers(tmp_path: Path) -> None:
    assert read(tmp_path, "[numbers]\nrate = 2\nlimit = 3")["numbers"].rate == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[numbers]\n\ncount = 'x'", r"config.toml line 3: count must be a whole number, not 'x'"),
        ("[numbers]\ncount = true", "line 2: count must be a whole number"),
        ("[numbers]\nfast = 1", "line 2: fast must be true or false"),
        ("[numbers]\n\n\ncount = 0", "line 4: count: at least 1, not 0"),
        ("[numbers]\ncuont = 1", "line 2: unknown key 'cuont' .* did you mean 'count'"),
        ("[other]\ncount = 1\n[numbres]\ncount = 1", "line 3: unknown section .* 'numbers'"),
        ("count = 1", "line 1: unknown key 'count'"),
        ("numbers = 1", "line 1: numbers must be a section"),
        ("# x\n[numbers.extra]\na = 1\n[other.ids]\nx = 1", "line 4: ids must be a list"),
        ("numbers.count = 1\nnumbers.fast = 2", "line 2: fast must be true or false"),
        ("['numbers']\n'fast' = 2", "line 2: fast must be true or false"),
        ("[ numbers ]\n  fast=2", "line 2: fast must be true or false"),
        ("[[numbers]]\nfast = 2", "line 1: numbers must be a section"),
        ("[numbers]\nmode = 'three'", "line 2: mode must be one of 'one', 'two'"),
        ("[numbers]\nlevel = 'fast'", "line 2: level must be a whole number or one of 'auto'"),
        ("[numbers]\nids = [1, 'b']", "line 2: ids must be a list of which each is a whole number"),
        ("[numbers]\nids = 1", "line 2: ids must be a list"),
        ("[numbers]\nextra = 1", "line 2: extra must be a table"),
        ("[numbers\ncount = 1", "not valid TOML"),
        ("[[many]]\ncount = 1\n[[many]]\ncount = 0", "line 4: count: at least 1, not 0"),
        ("[[many]]\nrate = 1\n[[many]]\n\ncuont = 0", r"line 5: unknown key .* in \[\[many\]\]"),
        ("[[many]]\ncount = 1\n[numbers]\ncount = 0", "line 4: count: at least 1, not 0"),
        ("[many]\ncount = 1", r"line 1: many must be a list of sections: \[\[many\]\]"),
        ("[[numbers]]\ncount = 1", "line 1: numbers must be a section"),
        ("[numbers]\nrate = nan", "line 2: rate must be a number of ordinary size, not nan"),
        ("[numbers]\nrate = -inf", "line 2: rate must be a number of ordinary size"),
        (f"[numbers]\nrate = {10**400}", "line 2: rate must be a number of ordinary size"),
        (f"[numbers]\ncount = {10**30}", "line 2: count must be a number of ordinary size"),
    ],
)
def test_mistakes_name_file_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config.read(tmp_path / "none.toml", {})


def test_lists_of_sections_are_shown_commented_out(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    text = config.render({"numbers": Numbers()}, {"many": Numbers})
    path.write_text(text)
    assert config.read(path, {"numbers": Numbers}, {"many": Numbers})["many"] == ()
    start = text.index("# [[many]]")
    path.write_text(text[:start] + text[start:].replace("\n# ", "\n").replace("# [[", "[[", 1))
    found = config.read(path, {"numbers": Numbers}, {"many": Numbers})
    assert found["many"] == (Numbers(),)
    path.write_text("[[many]]\ncount = 2\n[[many]]\ncount = 4\n")
    found = config.read(path, {"numbers": Numbers}, {"many": Numbers})
    assert [each.count for each in found["many"]] == [2, 4]
    assert config.where(path, "many", "count", 1) == f"{path} line 4"
    assert config.where(path, "many", "rate", 1) == f"{path} line 3"


def test_every_key_of_a_written_file_has_its_line() -> None:
    text = config.render({"numbers": Numbers(), "other": Numbers()})
    lines = text.splitlines()
    for section in ("numbers", "other"):
        for item in fields(Numbers):
            number = config.line_of(text, section, item.name)
            if item.name == "limit":
                assert number is None  # unset, so it is a comment
                continue
            assert number is not None
            assert lines[number - 1].startswith(f"{item.name} =")
            headers = [line for line in lines[:number] if line.startswith("[")]
            assert headers[-1] == f"[{section}]"
