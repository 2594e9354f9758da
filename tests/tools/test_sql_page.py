"""docs/sql.md: every query on the page runs, beside a writer too, and answers its question."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from draftmill.manifests.dataset import Dataset, DatasetReader
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.snapshot import load_snapshot
from tests.tools import story

PAGE = Path(__file__).parents[2] / "docs" / "sql.md"
TITLES = re.findall(r"^## (\d+)\. (.+)$", PAGE.read_text(), re.MULTILINE)
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return story.make(tmp_path_factory.mktemp("sql") / "night")


@pytest.fixture(scope="module")
def answers(dataset: Dataset) -> list[list[dict[str, Any]]]:
    with dataset.reader() as reader:
        return [reader.sql(query).to_pylist() for query in QUERIES]


def test_there_are_ten_questions_each_with_its_query() -> None:
    assert [int(number) for number, _ in TITLES] == list(range(1, 11))
    assert len(QUERIES) == 10


@pytest.mark.parametrize("number", range(1, 11))
def test_each_query_answers(answers: list[list[dict[str, Any]]], number: int) -> None:
    rows = answers[number - 1]
    assert rows
    for column in rows[0]:
        assert number == 10 or any(row[column] is not None for row in rows), column


def test_each_query_runs_on_a_snapshot(
    dataset: Dataset, answers: list[list[dict[str, Any]]]
) -> None:
    manifest = Manifest(None)
    load_snapshot(manifest, dataset.snapshot_path)
    for query, answer in zip(QUERIES, answers, strict=True):
        assert len(manifest.user_query(query).to_pylist()) == len(answer)
    manifest.close()


def test_the_answers_are_right(dataset: Dataset, answers: list[list[dict[str, Any]]]) -> None:
    with dataset.reader() as reader:
        states = reader.summary()["prompts"]
        columns = _columns(reader)
    assert sum(row["rows"] for row in answers[0]) == states["total"]
    retry = {row["retry_option"]: 0 for row in answers[1]}
    for row in answers[1]:
        retry[row["retry_option"]] += row["rows"]
    for state in ("timed_out", "failed", "rejected"):
        assert retry[f"--{state.replace('_', '-')}"] == states[state]
    seconds = [row["seconds"] for row in answers[3]]
    assert seconds == sorted(seconds, reverse=True)
    assert answers[5][0]["source"] == "math-proofs"
    assert sum(row["samples"] for row in answers[6]) == states["extracted"]
    named = re.findall(r"^\| `(\w+)` \| .*?\| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(named) == 5
    for table, text in named:
        assert set(re.findall(r"`(\w+)`", text)) <= columns[table], table


def _columns(reader: DatasetReader) -> dict[str, set[str]]:
    tables = ("samples", "attempts", "payloads", "shards", "control")
    return {
        table: set(reader.sql(f"SELECT * FROM {table} LIMIT 0").column_names) for table in tables
    }
