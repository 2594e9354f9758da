"""`draftmill status` beside a writer: the writer's document, at the price of starting Python."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.maintenance import RowFilter, evict, retry, select
from tests.builder.extraction import IDS, make_dataset, run
from tests.builder.generation import prompt
from tests.fakes.target_server import TargetServer

HEAVY = {"duckdb", "pyarrow", "numpy", "pandas", "rich", "asyncio", "torch", "openai"}
STATUS = (
    "import sys; from draftmill.tools import cli; code = cli.run(sys.argv[1:]); "
    "print(*sys.modules, file=sys.stderr); sys.exit(code)"
)


def status(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", STATUS, "status", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_beside_a_writer_it_imports_nothing_heavy_and_opens_no_database(tmp_path: Path) -> None:
    dataset = Dataset.create(tmp_path / "d", "")
    with dataset.writer() as writer:
        writer.add_prompts(prompt(number) for number in range(5))
        writer.publish(snapshot=True, running={"stage": "generate", "done": 2})
        document = json.loads(dataset.status_path.read_text())
        away = dataset.manifest_path.rename(tmp_path / "away")
        try:
            ran = status(dataset.path, "--json")
        finally:
            away.rename(dataset.manifest_path)
        shown = status(dataset.path)
    assert json.loads(ran.stdout) == document
    assert document["prompts"]["pending"] == 5
    assert document["running"]["done"] == 2
    assert not HEAVY & set(ran.stderr.split())
    assert "generate runs in process" in shown.stdout


def test_what_a_dead_writer_published_is_not_taken_for_the_truth(tmp_path: Path) -> None:
    dataset = Dataset.create(tmp_path / "d", "")
    with dataset.writer() as writer:
        writer.add_prompts(prompt(number) for number in range(5))
    stale = json.loads(dataset.status_path.read_text())
    stale["prompts"]["pending"], stale["running"] = 99, {"stage": "generate"}
    dataset.status_path.write_text(json.dumps(stale))
    found = json.loads(status(dataset.path, "--json").stdout)
    assert found["prompts"]["pending"] == 5
    assert found.get("running") is None


def test_a_broken_document_of_a_writer_is_passed_over(tmp_path: Path) -> None:
    dataset = Dataset.create(tmp_path / "d", "")
    with dataset.writer() as writer:
        writer.add_prompts(prompt(number) for number in range(5))
        writer.publish(snapshot=True)
        dataset.status_path.write_text('{"prompts": ')
        found = json.loads(status(dataset.path, "--json").stdout)
    assert found["prompts"]["pending"] == 5


@pytest.mark.slow
def test_precision_of_what_is_stored_is_one_line(tmp_path: Path) -> None:
    dataset, staging = make_dataset(tmp_path / "d", [60] * 8), tmp_path / "staging"
    staging.mkdir()
    codecs = {"em-zfast": 4, "raw": 6, "rot4": 8}

    async def go(codec: str, ids: list[int]) -> None:
        async with TargetServer(staging=str(staging)) as server:
            for number in range(1, 9):
                if number not in ids:
                    server.plan(IDS[dataset.path][number], ["http_400"])
            await run(dataset, server.url, staging, codec=codec, stop_after_bad=0)
        with dataset.writer() as writer:
            retry(writer, select(writer, RowFilter(states=("failed",))))

    def line() -> str:
        shown = " ".join(status(dataset.path).stdout.split())
        return shown.partition("stored as ")[2].partition(" samples that")[0]

    assert line() == ""
    first = 1
    for codec, end in codecs.items():
        asyncio.run(go(codec, list(range(first, end + 1))))
        first = end + 1
    expected = r"em-zfast \(lossless\), raw \(lossless\), rot4 \(lossy, relative error 0\.\d+\)"
    assert re.fullmatch(expected, line())
    found = json.loads(status(dataset.path, "--json").stdout)
    assert found["codecs"] == {
        "em-zfast": {"lossless": True},
        "raw": {"lossless": True},
        "rot4": {"lossless": False},
    }
    for name in ("manifest.duckdb", "manifest.parquet"):
        (dataset.path / name).unlink()
    with dataset.writer():
        pass
    assert json.loads(status(dataset.path, "--json").stdout)["codecs"] == found["codecs"]
    with dataset.writer() as writer:
        evict(writer, None)
    assert line() == ""
