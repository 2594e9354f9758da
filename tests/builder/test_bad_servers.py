"""Extraction servers that send nothing right: given up one by one, and no row pays for it."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftmill.builder.progress import StageReport
from draftmill.manifests.dataset import Dataset
from tests.builder.extraction import look, make_dataset, run
from tests.fakes.target_server import TargetServer

pytestmark = pytest.mark.slow

# rejected; refused; failed after retries; no answer in time
HOPELESS = ("zeros", "http_400", "no_file", "hang")


def extract_from(
    dataset: Dataset, staging: Path, faults: list[dict[str, float]], **options: Any
) -> tuple[StageReport, list[str], list[TargetServer]]:
    """One run against as many servers, each with its faults; with what was said."""
    staging.mkdir(exist_ok=True)
    said: list[str] = []

    async def go() -> tuple[StageReport, list[str], list[TargetServer]]:
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(
                    TargetServer(staging=str(staging), latency_s=0.01, faults=each, seed=number)
                )
                for number, each in enumerate(faults)
            ]
            urls = [each.url for each in servers]
            return await run(dataset, urls, staging, say=said.append, **options), said, servers

    return asyncio.run(go())


@pytest.mark.parametrize("fault", HOPELESS)
def test_one_bad_server_of_three_is_taken_out_and_its_rows_go_to_the_others(
    tmp_path: Path, fault: str
) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 150)
    report, said, servers = extract_from(
        dataset,
        tmp_path / "staging",
        [{}, {fault: 1.0}, {}],
        stop_after_bad=5,
        concurrency=4,
        tries=2,
        request_timeout_s=3.0,  # more than a busy machine makes a good server need
        lock_timeout_s=0.2,
    )
    assert report.stopped is None
    given_up = [each for each in said if "given up" in each]
    states = look(dataset).states
    if fault in ("no_file", "hang"):  # may pass, so other servers are asked before five are bad
        assert states["extracted"] >= 146
        assert states["generated"] == 0
    else:
        assert states == {"extracted": 150}
        assert given_up
        assert sum(servers[1].requests.values()) <= 5 + 4
    for line in given_up:
        assert line.startswith(servers[1].url)
        assert "5 samples in a row were bad, the last one" in line
    assert os.listdir(tmp_path / "staging") == []


@pytest.mark.parametrize("fault", HOPELESS)
def test_when_all_are_bad_the_run_stops_and_changes_no_row(tmp_path: Path, fault: str) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 60)
    report, said, servers = extract_from(
        dataset,
        tmp_path / "staging",
        [{fault: 1.0}] * 3,
        stop_after_bad=4,
        concurrency=4,
        tries=2,
        request_timeout_s=0.3,
        lock_timeout_s=0.2,
    )
    assert report.stopped is not None
    for each in servers:
        assert re.search(f"{each.url}: 4 samples in a row were bad, the last one: ", report.stopped)
    assert "extract.stop_after_bad" in report.stopped
    assert sum("given up" in each for each in said) == 3
    assert look(dataset).states == {"generated": 60}
    assert os.listdir(tmp_path / "staging") == []
    report, _, _ = extract_from(dataset, tmp_path / "staging", [{}])
    assert report.outcomes["extracted"] == 60


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rates=st.lists(st.sampled_from([0.0, 0.3, 0.9, 1.0]), min_size=1, max_size=3),
    limit=st.integers(0, 9),
    concurrency=st.integers(1, 6),
)
def test_no_row_is_lost_or_judged_twice(
    tmp_path_factory: pytest.TempPathFactory, rates: list[float], limit: int, concurrency: int
) -> None:
    folder = tmp_path_factory.mktemp("bad")
    dataset = make_dataset(folder / "d", [60] * 40)
    report, _, _ = extract_from(
        dataset,
        folder / "staging",
        [{"nan": rate} for rate in rates],
        stop_after_bad=limit,
        concurrency=concurrency,
    )
    seen = look(dataset)
    assert sum(seen.states.values()) == 40
    assert set(seen.states) <= {"extracted", "rejected", "generated"}
    assert (seen.states["generated"] > 0) == (report.stopped is not None)
    if not limit:
        assert report.stopped is None
    if 0.0 in rates:
        assert seen.states["generated"] == 0
    # each row has been judged once at most
    assert all(len(attempts) == 1 for attempts in seen.attempts.values())
    assert os.listdir(folder / "staging") == []
