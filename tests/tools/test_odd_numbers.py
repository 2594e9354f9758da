"""Any value of any number on the command line or in config.toml: a result, or one clear error."""

from __future__ import annotations

import json
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ConfigError
from draftmill.manifests.sizes import format_size, parse_size
from draftmill.tools.cli import main
from draftmill.tools.settings import SECTIONS, budget_of, load

NUMBERS = [
    "0",
    "-1",
    "1",
    "3",
    "0.5",
    "1e-320",
    "1e-7",
    "1e300",
    "1e15",
    "1e16",
    "nan",
    "inf",
    "-inf",
    "1" + "0" * 400,
    "x",
    "",
    "1_000",
    "٣",
    "0x10",
    "1,5",
]
OPTIONS = [
    "--hidden-size",
    "--layers",
    "--samples",
    "--tokens-per-sample",
    "--completion-tokens",
    "--epochs",
    "--disk-budget",
    "--cost-per-hour",
    "--link-gbps",
]
JOB = {"--hidden-size": "64", "--layers": "4", "--samples": "10", "--tokens-per-sample": "100"}


def ends(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(words)
    seen = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, seen.out, seen.err


@settings(max_examples=250)
@given(
    st.dictionaries(st.sampled_from(OPTIONS), st.sampled_from(NUMBERS), min_size=1),
    st.lists(
        st.tuples(st.sampled_from(["generate", "extract", "train", "x"]), st.sampled_from(NUMBERS))
    ),
    st.booleans(),
)
@example({"--tokens-per-sample": "0.5", "--samples": "1", "--link-gbps": "1"}, [], False)
def test_estimate(
    capsys: pytest.CaptureFixture[str],
    given: dict[str, str],
    rates: list[tuple[str, str]],
    as_json: bool,
) -> None:
    words = [word for pair in {**JOB, **given}.items() for word in pair]
    words += [word for stage, rate in rates for word in ("--rate", f"{stage}={rate}")]
    code, out, err = ends(["estimate", *words, *(["--json"] if as_json else [])], capsys)
    if code:
        assert code == 2
        assert err.strip()
        assert "unexpected" not in err
    elif as_json:
        json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    else:
        assert "nan" not in out.lower()
        assert "e+" not in out


@given(st.integers(0, 10**20))
@example(999_600)
def test_sizes_are_said_without_exponents(size: int) -> None:
    text = format_size(size)
    assert "e" not in text.lower()
    again = float(text.split()[0].replace(",", "")) * parse_size(f"1{text.split()[1]}")
    assert abs(again - size) <= max(0.5, 0.006 * size)


@pytest.mark.parametrize("text", ["9" * 400 + "TB", "99999999PB", "8388608PiB", "1" * 5000])
def test_sizes_beyond_all_disks(text: str) -> None:
    with pytest.raises(ValueError, match=r"more than any file system holds|is not a size"):
        parse_size(text)


# -- config.toml ---------------------------------------------------------------------------------

VALUES = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "0.0",
    "-0.5",
    "1e308",
    "1" + "0" * 30,
    "9" * 15,
    "true",
    '""',
    '"x"',
    '"-5GB"',
    '"0%"',
    '"1e5"',
    '"nan"',
    "[]",
    "[1]",
    '["a"]',
    "[nan]",
    "{}",
    "{a = 1}",
    "1979-05-27",
    "[[1]]",
    '"\\u0000"',
]
KEYS = [(name, item.name) for name, owner in SECTIONS.items() for item in fields(owner)]
_TARGET = {
    "model": '"m"',
    "hidden_size": "8",
    "num_layers": "30",
    "vocab_size": "100",
    "target_layer_ids": "[2, 15, 27]",
}


def _file(path: Path, section: str, key: str, value: str) -> None:
    content: dict[str, dict[str, str]] = {name: {} for name in SECTIONS}
    content["target"] |= _TARGET
    content[section][key] = value
    path.write_text(
        "".join(
            f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in values.items())
            for name, values in content.items()
        )
    )


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_any_value_of_any_key(
    section: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = Dataset(tmp_path / "d")
    dataset.path.mkdir()
    hint = str(typing.get_type_hints(SECTIONS[section])[key])
    for value in VALUES:
        _file(dataset.config_path, section, key, value)
        try:
            found: Any = getattr(getattr(load(dataset), section), key)
        except ConfigError as error:
            wrong = str(error)
        else:
            wrong = None
        if wrong is not None:
            assert wrong.startswith(f"{dataset.config_path} line ")
            assert key in wrong
            continue
        if "float" in hint and "dict" not in hint and isinstance(found, float):
            assert abs(found) < float("inf"), f"{key} = {value} was taken"
    _file(dataset.config_path, section, key, "nan")
    code, _, err = ends(["config", str(dataset.path)], capsys)
    assert code in (0, 1)
    assert "unexpected" not in err


def test_a_share_is_of_the_volume_of_the_dataset(tmp_path: Path) -> None:
    """Too small a share is refused where it is known what it comes to, whatever the key says."""
    dataset = Dataset(tmp_path / "d")
    dataset.path.mkdir()
    _file(dataset.config_path, "dataset", "disk_budget", '"0.0000001%"')
    loaded = load(dataset)
    with pytest.raises(ConfigError, match=r"disk_budget = '0.0000001%': .*(no room|nothing)"):
        budget_of(loaded.dataset, dataset.path)
    _file(dataset.config_path, "dataset", "disk_budget", '"90%"')
    assert (budget_of(load(dataset).dataset, dataset.path) or 0) > 1 << 20
