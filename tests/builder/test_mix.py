"""Mixing sources: shares by weight, the same choice always, and more never takes anything away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.sources.mix import SourceReport, add_sources, shares
from draftmill.builder.sources.read import SourceError
from draftmill.builder.sources.settings import SourceSettings
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import SourceFileError

SIZES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60), st.floats(0.01, 100)), min_size=1, max_size=5
)


def write(path: Path, numbers: range, word: str | None = None) -> Path:
    path.write_text(
        "".join(
            json.dumps({"prompt": f"{word or path.stem} {n}", "answer": "x"}) + "\n"
            for n in numbers
        )
    )
    return path


def add(
    dataset: Dataset, sources: list[dict[str, Any]], total: int | None = None
) -> list[SourceReport]:
    errors: list[SourceError] = []
    chosen = [SourceSettings(**each) for each in sources]
    with dataset.writer() as writer:
        reports = add_sources(
            writer, chosen, folder=dataset.path.parent, total=total, on_error=errors.append
        )
    assert sum(report.skipped for report in reports) == len(errors)
    return reports


def rows(dataset: Dataset) -> set[tuple[str, str]]:
    """(source, hash) of every prompt, each hash once."""
    with dataset.reader() as reader:
        found = reader.sql("SELECT source, hash FROM prompts").to_pylist()
    assert len({row["hash"] for row in found}) == len(found)
    return {(row["source"], row["hash"]) for row in found}


@given(SIZES, st.integers(0, 400))
def test_shares_never_shrink_and_use_what_there_is(
    sizes: list[tuple[int, int, float]], total: int
) -> None:
    present = [have for have, _, _ in sizes]
    most = [have + more for have, more, _ in sizes]
    weights = [weight for _, _, weight in sizes]
    found = shares(total, present, most, weights)
    assert all(have <= n <= top for have, n, top in zip(present, found, most, strict=True))
    assert sum(found) == max(sum(present), min(total, sum(most)))
    more = shares(total + 1, present, most, weights)
    assert all(a <= b for a, b in zip(found, more, strict=True))
    # in steps or at once
    assert shares(total + 1, found, most, weights) == more


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 2000))
def test_shares_follow_the_weights(weights: list[float], total: int) -> None:
    found = shares(total, [0] * len(weights), [total] * len(weights), weights)
    for count, weight in zip(found, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) <= len(weights)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    write(tmp_path / "a.jsonl", range(60))
    write(tmp_path / "b.jsonl", range(40))
    return Dataset.create(tmp_path / "d", "")


A, B = {"path": "a.jsonl", "weight": 3.0}, {"path": "b.jsonl"}


def test_a_total_is_shared_by_weight_and_what_runs_out_is_filled_by_the_others(
    dataset: Dataset,
) -> None:
    reports = add(dataset, [A, B], 20)
    assert [(r.name, r.added, r.wanted, r.found) for r in reports] == [
        ("a", 15, 15, 60),
        ("b", 5, 5, 40),
    ]
    reports = add(dataset, [A, B], 90)
    assert [(r.added, r.known, r.wanted) for r in reports] == [(45, 15, 60), (25, 5, 30)]
    assert [r.added for r in add(dataset, [A, B], 90)] == [0, 0]
    assert [r.added for r in add(dataset, [A, B], 1)] == [0, 0]
    assert [r.added for r in add(dataset, [A, B])] == [0, 10]


@pytest.mark.slow
@given(st.integers(0, 110), st.integers(0, 110), st.floats(0.2, 5), st.none() | st.integers(1, 50))
@settings(max_examples=12)
def test_steps_lead_to_the_same_dataset_as_one(
    tmp_path_factory: pytest.TempPathFactory,
    first: int,
    then: int,
    weight: float,
    limit: int | None,
) -> None:
    tmp_path = tmp_path_factory.mktemp("mix")
    write(tmp_path / "a.jsonl", range(60))
    write(tmp_path / "b.jsonl", range(30, 70), "a")  # half of it is in a too
    sources = [{"path": "a.jsonl", "weight": weight, "limit": limit}, B]
    stepwise = Dataset.create(tmp_path / "steps", "")
    add(stepwise, sources, first)
    before = rows(stepwise)
    add(stepwise, sources, max(first, then))
    assert before <= rows(stepwise)
    at_once = Dataset.create(tmp_path / "once", "")
    add(at_once, sources, max(first, then))
    assert rows(at_once) == rows(stepwise)


def test_growth_adds_the_difference(dataset: Dataset) -> None:
    limited = A | {"limit": 30}
    assert [r.added for r in add(dataset, [limited, B])] == [30, 40]
    before = rows(dataset)
    write(dataset.path.parent / "a.jsonl", range(100))
    write(dataset.path.parent / "b.jsonl", range(50))
    assert [r.added for r in add(dataset, [limited, B])] == [0, 10]
    assert [r.added for r in add(dataset, [A | {"limit": 35}, B])] == [5, 0]
    assert before < rows(dataset)
    write(dataset.path.parent / "c.jsonl", range(5))
    assert [r.added for r in add(dataset, [limited, B, {"path": "c.jsonl"}])] == [0, 0, 5]


def test_a_prompt_of_two_sources_belongs_to_one(dataset: Dataset) -> None:
    write(dataset.path.parent / "b.jsonl", range(60), "a")
    reports = add(dataset, [A, B], 30)
    assert [(r.added, r.found) for r in reports] == [(30, 60), (0, 0)]
    other = Dataset.create(dataset.path.parent / "other", "")
    # what is taken whole goes first
    assert [r.added for r in add(other, [A | {"limit": 10}, B])] == [0, 60]


def test_both_modes_of_one_file_have_limits_of_their_own(dataset: Dataset) -> None:
    sources = [A | {"limit": 10}, A | {"limit": 10, "mode": "prefill"}]
    assert [r.added for r in add(dataset, sources)] == [10, 10]
    assert [r.added for r in add(dataset, sources)] == [0, 0]
    with dataset.reader() as reader:
        query = "SELECT off_policy, count(*) AS n FROM prompts GROUP BY ALL ORDER BY 1"
        assert [row["n"] for row in reader.sql(query).to_pylist()] == [10, 10]


def test_a_source_that_cannot_be_read_stops_before_anything_is_added(dataset: Dataset) -> None:
    with pytest.raises(SourceFileError, match="none"):
        add(dataset, [A, {"path": "none.jsonl"}], 10)
    assert rows(dataset) == set()


def test_bad_rows_are_told_once(dataset: Dataset) -> None:
    path = dataset.path.parent / "a.jsonl"
    path.write_text(path.read_text() + "nonsense\n" + '{"text": 1}\n')
    (report,) = add(dataset, [A | {"limit": 7}])
    assert (report.added, report.skipped) == (7, 2)


@pytest.mark.parametrize(
    ("key", "value"), [("path", ""), ("limit", 0), ("weight", 0.0), ("weight", float("inf"))]
)
def test_settings_out_of_range_name_their_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        SourceSettings(**{"path": "x", key: value})
