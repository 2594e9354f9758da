"""What is left for samples: one account for those who reserve room and those who only say it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.builder.budget import Budget
from draftmill.manifests import summary
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import BudgetError
from draftmill.manifests.headroom import default_headroom, room_for_samples
from draftmill.tools.estimate.costs import Job, Rate, estimate

MB = 1 << 20
RATES: Any = {name: Rate(tokens_per_s=1, source="") for name in ("generate", "extract", "train")}


@pytest.mark.parametrize("limit", [20 * MB, 100 * MB, 700 * MB, None])
@pytest.mark.parametrize("used", [0, 3 * MB])
@pytest.mark.parametrize("outside", [0, 2 * MB])
def test_what_is_said_to_fit_is_what_the_budget_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, used: int, outside: int
) -> None:
    """To the byte: that much is reserved, and one more is refused."""
    free = 200 * MB
    dataset = Dataset.create(tmp_path / "d", "")
    staging = tmp_path / "staging"
    staging.mkdir()
    (dataset.path / "prompts" / "x").write_bytes(bytes(used))
    (staging / "left").write_bytes(bytes(outside))

    class Volume:
        f_bavail, f_frsize = free, 1

    monkeypatch.setattr("os.statvfs", lambda _: Volume)
    budget = Budget(limit_bytes=limit, dataset=dataset.path, staging=staging)
    room = room_for_samples(limit_bytes=limit, used_bytes=budget.used_bytes, free_bytes=free)

    async def reserve(size: int) -> None:
        (await budget.reserve("r", stored_bytes=size)).release()

    asyncio.run(reserve(room))
    with pytest.raises(BudgetError):
        asyncio.run(reserve(room + 1))


def test_status_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset.create(tmp_path / "d", "")
    with dataset.writer() as writer:
        rows = writer.manifest.rows

        def extracted(query: str, *more: Any) -> Any:
            if "y.raw_bytes" in query:
                return [(10, 2000, 1000, 0)]
            if "FROM state GROUP BY state" in query:
                return [("extracted", 10)]
            return rows(query, *more)

        monkeypatch.setattr(writer.manifest, "rows", extracted)
        found = summary.summarize(dataset.path, writer.manifest, budget_bytes=50 * MB)["disk"]
    room = 50 * MB - found["used_bytes"] - default_headroom(50 * MB)
    assert found["samples_that_still_fit"] == room // 100


@given(budget=st.integers(1, 10**13), other=st.integers(0, 10**10))
def test_estimate_keeps_the_databases_room_free(budget: int, other: int) -> None:
    job = Job(
        hidden_size=64, layers=4, samples=1000, tokens_per_sample=100.0, completion_tokens=50.0,
        rates=RATES, budget_bytes=budget, other_bytes=other,
    )  # fmt: skip
    found = estimate(job)
    room = max(0, budget - other - default_headroom(budget))
    assert found["room_bytes"] == room
    assert found["fits"] == (job.stored_bytes <= room)
    assert found["samples_that_fit"] == room // (job.stored_bytes / 1000)
