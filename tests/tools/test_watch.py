"""The live view: it fits a terminal, tells a dead process from a quiet one, needs no database."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DatasetError
from draftmill.tools.status import watch
from tests.tools import story


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return story.make(tmp_path_factory.mktemp("watch") / "night", generate=60, extract=30)


def shown(found: dict[str, Any], *, age: float = 1.0, alive: bool = True, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    now = found["time"] + age
    console.print(watch.view("night", found, rates=[1.0, 5.0, 9.0], now=now, alive=alive))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def found(dataset: Dataset) -> dict[str, Any]:
    return watch.read(dataset) | {"running": story.running()}


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_a_terminal(found: dict[str, Any], width: int) -> None:
    lines = shown(found, width=width).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)


def test_it_says_what_runs(found: dict[str, Any]) -> None:
    text = shown(found)
    for words in (
        "92 of 150",
        "2,912",
        "▁▅█",
        "3 rejected",
        "timed out",
        "41 min to 63 min",
        "in all, ",
    ):
        assert words in text
    assert f"{found['truncated']} truncated" in text
    assert found["truncated"]
    assert "no news" not in text
    assert "no news for 50 s" in shown(found, age=50)


def test_a_process_that_is_gone_is_told_from_one_that_is_quiet(found: dict[str, Any]) -> None:
    text = shown(found, alive=False, age=420)
    assert "has been gone for 7 min" in text
    assert "tokens/s" not in text


def test_nothing_runs(dataset: Dataset) -> None:
    assert "nothing runs" in shown(watch.read(dataset))


@given(st.lists(st.integers(0, 10**7), min_size=6, max_size=6))
def test_every_state_that_is_there_is_seen(counts: list[int]) -> None:
    names = [name for name, _, _ in watch._STATES]
    prompts = {"total": sum(counts), **dict(zip(names, counts, strict=True))}
    console = Console(file=io.StringIO(), width=100)
    console.print(watch._prompts(prompts))
    bar = console.file.getvalue().splitlines()[0]  # type: ignore[attr-defined]
    for (_, mark, _), count in zip(watch._STATES, counts, strict=True):
        assert (mark in bar) == (count > 0)


def test_it_does_not_touch_the_database(tmp_path: Path) -> None:
    dataset = story.make(tmp_path / "ds", prompts=5, generate=3, extract=1)
    dataset.manifest_path.write_bytes(b"not a database")
    dataset.snapshot_path.unlink()
    assert watch.read(dataset)["prompts"]["total"] == 5
    dataset.status_path.write_text("{")
    with pytest.raises(DatasetError, match="draftmill status"):
        watch.read(dataset)


def command(dataset: Dataset, *words: str) -> list[str]:
    program = [sys.executable, "-m", "draftmill.tools"]
    return [*program, "status", str(dataset.path), "--watch", *words]


@pytest.mark.slow
def test_scripts_get_one_document_a_line(dataset: Dataset) -> None:
    with subprocess.Popen(command(dataset, "--json"), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(2):
            assert json.loads(child.stdout.readline())["prompts"]["total"] == 200
        child.send_signal(signal.SIGINT)
        assert child.wait() == 130


@pytest.mark.slow
def test_a_terminal_gets_the_view_and_its_own_screen_back(dataset: Dataset) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
    child = subprocess.Popen(
        command(dataset), stdin=theirs, stdout=theirs, stderr=theirs, env=env, close_fds=True
    )
    os.close(theirs)
    seen = b""
    while b"disk" not in seen:
        seen += os.read(ours, 4096)
    child.send_signal(signal.SIGINT)
    try:
        while True:
            seen += os.read(ours, 4096)
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert child.wait() == 130
    assert b"\x1b[?1049h" in seen, "not on a screen of its own"
    assert b"\x1b[?1049l" in seen, "the old screen did not come back"
