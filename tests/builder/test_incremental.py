"""Building in steps: what a changed setting is told, and which rows it makes eligible."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from draftmill.builder.generation.settings import SAMPLING
from draftmill.manifests import maintenance
from draftmill.manifests.errors import SettingsMismatch
from draftmill.manifests.maintenance import RowFilter
from tests.builder.generation import (
    completions,
    generated,
    history,
    messages,
    prompt,
    states,
    writer_of,
)
from tests.fakes.target_server import TargetServer

VALUES: dict[str, tuple[Any, Any]] = {
    "temperature": (0.5, 0.7),
    "top_p": (0.9, 0.8),
    "top_k": (20, -1),
    "min_p": (0.1, 0.2),
    "repetition_penalty": (1.1, 1.2),
    "seed": (1, 2),
}


def test_the_values_cover_every_sampling_field() -> None:
    assert set(VALUES) == set(SAMPLING)


@pytest.mark.parametrize("field", SAMPLING)
def test_a_changed_sampling_field_is_refused_in_words_and_costs_nothing(
    tmp_path: Path, field: str
) -> None:
    stored, new = VALUES[field]

    async def body() -> None:
        with writer_of(tmp_path / "d", 3) as writer:
            async with TargetServer() as server:
                await generated(writer, server, **{field: stored})
                writer.add_prompts([prompt(3)])
                for changed in (new, None):
                    with pytest.raises(SettingsMismatch) as refused:
                        await generated(writer, server, **{field: changed})
                    words = str(refused.value)
                    assert f"{field} is {stored!r} in the dataset and {changed!r}" in words
                    assert "Go back to the stored values, or start a new dataset" in words
                    assert words.count(" in the dataset and ") == 1
                assert states(writer) == {"generated": 3, "pending": 1}
                assert server.count(messages(3)) == 0
                report = await generated(writer, server, **{field: stored})
                assert report.outcomes == {"generated": 1}

    asyncio.run(body())


def test_every_field_that_differs_is_named(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 1) as writer:
            async with TargetServer() as server:
                await generated(writer, server, **{name: VALUES[name][0] for name in SAMPLING})
                with pytest.raises(SettingsMismatch) as refused:
                    await generated(
                        writer,
                        server,
                        max_completion_tokens=10,
                        **{name: VALUES[name][1] for name in SAMPLING},
                    )
                for name in (*SAMPLING, "max_completion_tokens"):
                    assert f"{name} is " in str(refused.value)

    asyncio.run(body())


@pytest.mark.parametrize("truncated", ["keep", "reject"])
def test_a_larger_limit_makes_exactly_the_cut_rows_eligible(tmp_path: Path, truncated: str) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 60) as writer:
            async with TargetServer(median_tokens=80) as server:
                same = {"truncated": truncated}
                await generated(writer, server, max_completion_tokens=80, **same)
                cut = maintenance.select(writer, RowFilter(truncated=True))
                full = maintenance.select(writer, RowFilter(states=["pending"]))
                assert (0 < len(cut) < 60, full) == (True, [])
                before = completions(tmp_path / "d", writer)
                with pytest.raises(SettingsMismatch, match="max_completion_tokens is 80"):
                    await generated(writer, server, max_completion_tokens=79, **same)
                # a larger limit alone asks nothing again
                asked = server.requests.total()
                await generated(writer, server, max_completion_tokens=4000, **same)
                assert server.requests.total() == asked + 1
                maintenance.retry(writer, cut)
                report = await generated(writer, server, max_completion_tokens=4000, **same)
                assert report.outcomes == {"generated": len(cut)}
                counts = {n + 1: server.count(messages(n)) for n in range(60)}
                assert counts == {n: 2 if n in cut else 1 for n in counts}
                after = completions(tmp_path / "d", writer)
                assert len(after) == 60
                assert all(each.finish_reason == "stop" for each in after.values())
                for n, old in before.items():
                    longer = after[n].completion_token_ids.tolist()
                    if n in cut:
                        assert len(longer) > len(old.completion_token_ids)
                    else:
                        assert longer == old.completion_token_ids.tolist()
                assert maintenance.select(writer, RowFilter(truncated=True)) == []
                with pytest.raises(SettingsMismatch, match="is 4000 in the dataset and 80"):
                    await generated(writer, server, max_completion_tokens=80, **same)

    asyncio.run(body())


def test_sources_added_between_runs_are_the_only_ones_asked(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 20) as writer:
            async with TargetServer() as server:
                for total in (20, 35, 35, 36):
                    added = writer.add_prompts(prompt(number) for number in range(total))
                    report = await generated(writer, server)
                    assert report.outcomes["generated"] == (20 if total == 20 else added.added)
                assert states(writer) == {"generated": 36}
                assert all(server.count(messages(n)) == 1 for n in range(36))

    asyncio.run(body())


def test_rejections_are_counted_by_gate_and_a_changed_gate_takes_them_back(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 120) as writer:
            async with TargetServer(
                median_tokens=100, faults={"empty": 0.1, "loop": 0.1}
            ) as server:
                strict = {"min_completion_tokens": 60, "truncated": "reject"}
                await generated(writer, server, max_completion_tokens=400, **strict)
                found = writer.summary()["rejected"]["generate"]
                assert set(found) == {"empty", "repetition", "too_short"}
                assert found == {
                    gate: count for (outcome, gate), count in history(writer).items()
                    if outcome == "rejected"
                }  # fmt: skip
                assert sum(found.values()) == states(writer)["rejected"]
                short = maintenance.select(
                    writer, RowFilter(states=["rejected"], error_class="too_short")
                )
                assert len(short) == found["too_short"]
                maintenance.retry(writer, short)
                assert "too_short" not in writer.summary()["rejected"]["generate"]
                report = await generated(writer, server, max_completion_tokens=400)
                assert report.outcomes == {"generated": len(short)}

    asyncio.run(body())
