"""`draftmill build --serve` as a person types it: which servers it starts, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from draftmill.builder.serving import launcher
from draftmill.manifests.dataset import Dataset
from draftmill.tools.cli import main
from tests.fakes.target_server import TargetServer
from tests.tools.served import served

pytestmark = pytest.mark.slow

WHOLE = Path(__file__).parents[1] / "fakes" / "whole_vllm.py"
ASKED = {"messages": [{"role": "user", "content": "why?"}]}
GIVEN = {"messages": [*ASKED["messages"], {"role": "assistant", "content": "because"}]}


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset whose servers are started by a Python with the whole fake vLLM."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {WHOLE} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("WHOLE_VLLM_LOG", str(tmp_path / "started"))
    monkeypatch.setenv("WHOLE_VLLM_OPTIONS", json.dumps({"hidden": 64}))
    monkeypatch.setattr(launcher, "_POLL_S", 0.05)
    monkeypatch.chdir(tmp_path)
    sizes = ("--hidden-size", "64", "--layers", "30", "--vocab-size", "512")
    assert run("init", "ds", "--target", "m", *sizes) == 0
    config = Path("ds/config.toml")
    config.write_text(config.read_text().replace('python = ""', f'python = "{script}"'))
    return tmp_path / "ds"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(str(ended.value.code))


def add(rows: list[dict[str, object]], *words: str) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("add", "ds", "rows.jsonl", *words) == 0


def states(dataset: Path) -> dict[str, int]:
    with Dataset.open(dataset).reader() as reader:
        return {k: v for k, v in reader.summary()["prompts"].items() if v and k != "total"}


@pytest.mark.parametrize(
    ("asked", "given", "started"),
    [(True, False, ["generate", "extract"]), (True, True, ["generate", "extract"]),
     (False, True, ["extract"])],
)  # fmt: skip
def test_it_starts_what_is_needed_and_leaves_nothing(
    dataset: Path, asked: bool, given: bool, started: list[str]
) -> None:
    if asked:
        add([ASKED])
    if given:
        add([GIVEN], "--mode", "prefill")
    assert run("build", "ds", "--serve") == 0
    assert Path("started").read_text().split() == started
    assert states(dataset) == {"extracted": asked + given}
    assert os.listdir(dataset / "staging") == []
    assert not list(dataset.glob("server-*.json"))
    # nothing to do starts nothing
    assert run("build", "ds", "--serve") == 0
    assert Path("started").read_text().split() == started


def test_a_server_that_refuses_everything_ends_it_before_the_next_stage(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [f"question {number}" for number in range(60)]
    add([{"prompt": each} for each in questions])
    (dataset / "staging").mkdir()
    with served(TargetServer(model="m", hidden=64, staging=str(dataset / "staging"))) as server:
        for each in questions:
            server.plan([{"role": "user", "content": each}], ["http_400"] * 9)
        urls = ("--url", server.url, "--extract-url", server.url)
        assert run("build", "ds", *urls) == 1
        said = capsys.readouterr().err
        assert re.search(
            r"(3[2-9]|[45]\d|60) samples in a row were bad, the last one: HTTP 400", said
        )
        assert states(dataset) == {"pending": 60}
        server.plans.clear()
        assert run("build", "ds", *urls) == 0
    assert states(dataset) == {"extracted": 60}
