"""The disk budget: parsing, waiting for room, and never more on disk than allowed."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.budget import Budget, check_budget, parse_budget
from draftmill.manifests.errors import BudgetError
from draftmill.manifests.files import folder_bytes
from draftmill.manifests.headroom import default_headroom

MB = 1_000_000


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500GB", 500 * 1000**3),
        ("2TiB", 2 * 1024**4),
        (" 1.5 mb ", 1_500_000),
        ("64KiB", 65536),
        ("4096", 4096),
    ],
)
def test_sizes(text: str, size: int, tmp_path: Path) -> None:
    assert parse_budget(text, tmp_path) == size


def test_share_of_the_volume(tmp_path: Path) -> None:
    volume = os.statvfs(tmp_path)
    total = volume.f_blocks * volume.f_frsize
    assert parse_budget("80%", tmp_path / "not" / "there") == int(total * 80 / 100)
    assert parse_budget("12.5 %", tmp_path) == int(total * 12.5 / 100)


@pytest.mark.parametrize("text", ["", "lots", "5 apples", "-3GB", "0", "0%", "101%", "1e9"])
def test_what_is_no_size(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing at all|is not"):
        parse_budget(text, tmp_path)


def test_headroom_grows_with_the_budget_within_limits() -> None:
    assert default_headroom(20 * MB) == 8 << 20
    assert default_headroom(10**12) == 512 << 20
    assert default_headroom(1 << 30) == 64 << 20


@given(st.integers(1, 1 << 50))
def test_a_budget_that_leaves_no_room_is_refused_with_the_arithmetic(limit: int) -> None:
    if limit > default_headroom(limit):
        check_budget(limit)
        return
    with pytest.raises(ValueError, match=r"no room for samples: 8\.39 MB are kept"):
        check_budget(limit)


def folders(tmp_path: Path) -> tuple[Path, Path]:
    dataset, staging = tmp_path / "dataset", tmp_path / "staging"
    dataset.mkdir()
    staging.mkdir()
    return dataset, staging


def test_what_is_there_counts(tmp_path: Path) -> None:
    dataset, staging = folders(tmp_path)
    (dataset / "sub").mkdir()
    (dataset / "sub" / "a").write_bytes(b"x" * 700)
    (staging / "other").write_bytes(b"x" * 200)
    budget = Budget(limit_bytes=1000, dataset=dataset, staging=staging, headroom_bytes=0)
    assert budget.used_bytes == 900

    async def reserve() -> None:
        held = await budget.reserve("r1x", stored_bytes=60, staged_bytes=40)
        assert budget.reserved_bytes == 100
        # its file is what was promised: it does not count twice
        (staging / "cmpl-r1x-0.safetensors").write_bytes(b"x" * 40)
        budget.measure()
        held.stored(30)
        (staging / "cmpl-r1x-0.safetensors").unlink()
        held.release()
        held.release()
        assert budget.reserved_bytes == 0

    asyncio.run(reserve())


def test_a_staging_folder_in_the_dataset_counts_once(tmp_path: Path) -> None:
    dataset = tmp_path
    (dataset / "staging").mkdir()
    (dataset / "staging" / "file").write_bytes(b"x" * 500)
    budget = Budget(limit_bytes=600, dataset=dataset, staging=dataset / "staging")
    assert budget.used_bytes == 500


def test_nothing_in_flight_can_free_it(tmp_path: Path) -> None:
    dataset, staging = folders(tmp_path)
    budget = Budget(limit_bytes=1 * MB, dataset=dataset, staging=staging, headroom_bytes=1000)
    with pytest.raises(BudgetError, match=r"budget of 1 MB is used up.*needs up to 1 MB"):
        asyncio.run(budget.reserve("a", stored_bytes=1 * MB))
    budget.limit_bytes, budget.staging_limit_bytes = None, 5000
    with pytest.raises(BudgetError, match="are left for staging"):
        asyncio.run(budget.reserve("a", stored_bytes=1, staged_bytes=6000))
    lack = r"the disk has .* left, needed are up to 1,153 PB for the next sample \+ 1 KB for the"
    with pytest.raises(BudgetError, match=lack):
        asyncio.run(budget.reserve("a", stored_bytes=1 << 60))


def test_waits_until_something_is_given_back_in_order(tmp_path: Path) -> None:
    dataset, staging = folders(tmp_path)

    async def run() -> list[str]:
        budget = Budget(limit_bytes=100, dataset=dataset, staging=staging, headroom_bytes=0)
        first = await budget.reserve("first", stored_bytes=90)
        got: list[str] = []
        waits: list[str] = []

        async def take(name: str, size: int) -> None:
            held = await budget.reserve(name, stored_bytes=size, on_wait=lambda: waits.append(name))
            got.append(name)
            held.release()

        tasks = [asyncio.create_task(take("large", 80)), asyncio.create_task(take("small", 5))]
        for _ in range(20):
            await asyncio.sleep(0)
        assert waits == ["large"]
        assert got == []
        first.release()
        await asyncio.gather(*tasks)
        return got

    assert asyncio.run(run()) == ["large", "small"]


def test_who_waits_is_told_that_nothing_comes(tmp_path: Path) -> None:
    dataset, _ = folders(tmp_path)

    async def run() -> None:
        budget = Budget(limit_bytes=100, dataset=dataset, headroom_bytes=0)
        await budget.reserve("held", stored_bytes=90)
        tasks = [asyncio.create_task(budget.reserve(f"k{n}", stored_bytes=50)) for n in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        budget.refuse("the disk is full")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, BudgetError)
            assert str(result) == "the disk is full"

    asyncio.run(run())


def test_bytes_that_others_free_are_seen(tmp_path: Path) -> None:
    dataset, staging = folders(tmp_path)
    foreign = staging / "foreign"
    foreign.write_bytes(b"x" * 60)

    async def run() -> None:
        budget = Budget(limit_bytes=100, dataset=dataset, staging=staging, headroom_bytes=0)
        await budget.reserve("a", stored_bytes=30)
        await budget.reserve("b", stored_bytes=50, on_wait=lambda: foreign.unlink(missing_ok=True))

    asyncio.run(run())


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.integers(20_000, 200_000))
def test_never_more_on_disk_than_the_budget(
    tmp_path_factory: pytest.TempPathFactory, seed: int, limit: int
) -> None:
    """Random work that stages, stores, fails or is given up; the sizes are looked at throughout."""
    dataset, staging = folders(tmp_path_factory.mktemp("budget"))
    rng = random.Random(seed)

    async def run() -> None:
        budget = Budget(limit_bytes=limit, dataset=dataset, staging=staging, headroom_bytes=2_000)
        late: list[Path] = []

        def check() -> None:
            used = folder_bytes(dataset) + folder_bytes(staging)
            assert used <= limit
            assert used <= budget.used_bytes + budget.reserved_bytes

        async def work(number: int) -> None:
            key = f"k{number}x"
            raw = rng.randrange(1, 12_000)
            stored = rng.randrange(1, raw + 1)
            held = await budget.reserve(key, stored_bytes=raw, staged_bytes=raw)
            staged = staging / f"cmpl-{key}.safetensors"
            await asyncio.sleep(0)
            if rng.random() < 0.8:
                staged.write_bytes(b"x" * rng.choice([raw, raw // 2]))
            check()
            await asyncio.sleep(0)
            if rng.random() < 0.6:
                (dataset / key).write_bytes(b"x" * stored)
                check()
                held.stored(stored)
            staged.unlink(missing_ok=True)
            held.release()
            check()

        async def guarded(number: int) -> None:
            try:
                await work(number)
            except BudgetError:
                late.append(dataset)

        await asyncio.gather(*(guarded(number) for number in range(40)))
        assert budget.reserved_bytes == 0
        budget.measure()
        assert budget.used_bytes == folder_bytes(dataset)

    asyncio.run(run())
