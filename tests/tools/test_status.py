"""`draftmill status` beside a writer: the writer's document, at the price of starting Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from draftmill.manifests.dataset import Dataset
from tests.builder.generation import prompt

HEAVY = {"duckdb", "pyarrow", "numpy", "pandas", "rich", "asyncio", "torch", "openai"}
STATUS = (
    "import sys; from draftmill.tools import cli; code = cli._run(sys.argv[1:], False); "
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
