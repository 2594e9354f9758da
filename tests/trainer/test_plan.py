"""The frozen plan: growth does not move it, and what is gone is refused."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from draftmill.manifests.errors import DamagedError, DatasetError
from draftmill.trainer.loading import data
from draftmill.trainer.loading.data import Cursor
from draftmill.trainer.loading.plan import grow, load_plan, make_plan, next_epoch, save_plan
from draftmill.trainer.settings import TrainSettings
from tests.trainer.test_data import table

ROWS = [(f"c{n}", 2, 5 + n % 20) for n in range(200)]
SETTINGS = TrainSettings(max_seq_len=64, validation=0.2, epochs=2)


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    plan = make_plan(table(ROWS), SETTINGS)
    save_plan(plan, tmp_path / "plan.parquet")
    again = load_plan(tmp_path / "plan.parquet", table(ROWS), 64)
    assert again.train.id.tolist() == plan.train.id.tolist()
    assert again.validation.id.tolist() == plan.validation.id.tolist()
    assert len(plan.validation) > 10
    assert (again.steps, again.packing, again.fingerprint) == (
        plan.steps,
        plan.packing,
        plan.fingerprint,
    )
    assert plan.steps == pytest.approx(2 * plan.packing.rows)
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.parquet"]


def test_steps_follow_from_epochs_unless_given() -> None:
    plan = make_plan(table(ROWS), TrainSettings(max_seq_len=64, epochs=1.5, rows_per_step=4))
    assert plan.steps == int(np.ceil(1.5 * plan.packing.rows / 4))
    assert make_plan(table(ROWS), TrainSettings(max_seq_len=64, steps=7)).steps == 7


def test_a_grown_or_moved_dataset_serves_the_old_plan(tmp_path: Path) -> None:
    plan = make_plan(table(ROWS), SETTINGS)
    save_plan(plan, tmp_path / "p")
    grown = table(ROWS + [("new", 2, 9)] * 50)
    moved = grown.set_column(
        grown.column_names.index("extract_offset"),
        "extract_offset",
        pa.array([7] * grown.num_rows),
    )
    again = load_plan(tmp_path / "p", moved, 64)
    assert again.train.id.tolist() == plan.train.id.tolist()
    assert again.train.states_location(0).offset == 7


@pytest.mark.parametrize("fault", ["gone", "regenerated", "shorter", "everything"])
def test_missing_samples_are_refused_by_name(tmp_path: Path, fault: str) -> None:
    save_plan(make_plan(table(ROWS), SETTINGS), tmp_path / "p")
    now = table(ROWS)
    if fault == "gone":
        now = now.filter(pa.compute.field("id") != 17)
    elif fault == "everything":
        now = now.slice(0, 0)
    else:
        column, value = ("digest", "f" * 32) if fault == "regenerated" else ("tokens", 4)
        values = now.column(column).to_pylist()
        values[17] = value
        now = now.set_column(now.column_names.index(column), column, pa.array(values))
    with pytest.raises(DatasetError, match="gone or have changed") as caught:
        load_plan(tmp_path / "p", now, 64)
    assert ("ids 17)" in str(caught.value)) == (fault != "everything")


MORE = [(f"new{n}", 2, 5 + n % 20) for n in range(90)]


def rows_of(plan, start: Cursor, count: int):
    rows = data.training_rows(plan.train, seed=0, room=64, start=start, since=plan.since)
    return list(islice(rows, count))


def test_growth_begins_with_an_epoch_and_changes_nothing_before_it(tmp_path: Path) -> None:
    plan = make_plan(table(ROWS), SETTINGS)
    whole = rows_of(plan, Cursor(), 3 * plan.packing.rows)
    for at in (1, plan.packing.rows // 2, plan.packing.rows + 3):
        cursor = whole[at - 1].after
        epoch, row = next_epoch(plan, SETTINGS, cursor)
        assert row == next(r.cursor.row for r in whole if r.cursor.epoch == epoch)
        grown = grow(plan, table(ROWS + MORE), replace(SETTINGS, epochs=4), epoch=epoch, row=row)
        save_plan(grown, tmp_path / "p")
        # a later start finds the same plan, wherever the samples lie and however many there are
        again = load_plan(tmp_path / "p", table(ROWS + MORE + [("x", 2, 9)] * 9), 64)
        assert again.since.tolist() == grown.since.tolist()
        assert again.train.id.tolist() == grown.train.id.tolist()
        assert again.validation.id.tolist() == plan.validation.id.tolist()
        rows = rows_of(again, Cursor(), row + 3 * plan.packing.rows)
        assert rows[:row] == whole[:row]
        after = [m for r in rows if r.cursor.epoch == epoch for m in r.members]
        assert sorted(after) == list(range(len(grown.train)))
        # and going on from within gives what comes anyway
        assert rows_of(again, cursor, 20) == rows[at : at + 20]
        assert grown.steps > plan.steps


def test_new_samples_of_the_validation_split_are_not_trained_on() -> None:
    """Turns of a conversation that is held out stay out, whenever they come (T6)."""
    plan = make_plan(table(ROWS), SETTINGS)
    turns = [(name, 2, 9) for name, _, _ in ROWS]
    grown = grow(plan, table(ROWS + turns), SETTINGS, epoch=1, row=plan.packing.rows)
    held_out = set(plan.validation.conversation.tolist())
    assert len(grown.train) == 2 * len(plan.train)
    assert held_out.isdisjoint(grown.train.conversation.tolist())


def test_growth_twice_and_growth_without_anything_new() -> None:
    plan = make_plan(table(ROWS), SETTINGS)
    assert grow(plan, table(ROWS), SETTINGS, epoch=1, row=9) is plan
    once = grow(plan, table(ROWS + MORE[:40]), SETTINGS, epoch=1, row=9)
    settings = replace(SETTINGS, epochs=5)
    twice = grow(once, table(ROWS + MORE), settings, epoch=3, row=99)
    fresh = len(twice.train) - len(once.train)
    assert fresh > 30
    assert (np.diff(twice.since) >= 0).all()
    assert twice.since[-fresh:].tolist() == [3] * fresh
    # past the last epoch nothing of it would be used
    assert grow(plan, table(ROWS + MORE), SETTINGS, epoch=2, row=99) is plan
    # a fixed number of steps stays fixed
    fixed = replace(SETTINGS, steps=1000)
    assert grow(make_plan(table(ROWS), fixed), table(ROWS + MORE), fixed, epoch=9, row=9).steps == (
        1000
    )


@pytest.mark.slow
def test_a_million_samples_are_planned_in_flat_memory() -> None:
    """No object a sample: the plan and its making stay far below what Python objects would take."""
    count = 1_000_000
    numbers = pa.array(np.arange(count))
    hexes = pa.array([f"{n:032x}" for n in range(1000)])
    names = pa.array([f"conversation {n}" for n in range(1000)])
    picks = pa.array(np.arange(count) % 1000)
    many = pa.table(
        {
            "id": numbers,
            "conversation": names.take(picks),
            "prompt_tokens": pa.array(np.full(count, 9)),
            "tokens": pa.array(20 + np.arange(count) % 900),
            "digest": hexes.take(picks),
            **{
                f"{stage}_{part}": numbers
                for stage in ("generate", "extract")
                for part in ("shard", "offset", "length")
            },
        }
    )
    tracemalloc.start()
    plan = make_plan(many, TrainSettings(max_seq_len=4096))
    first = rows_of_million(plan)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plan.train) + len(plan.validation) == count
    assert len(first.members) > 3
    # 92 bytes a sample in the plan, and as much again for what is selected from
    assert peak < 400 * count


def rows_of_million(plan):
    rows = data.training_rows(plan.train, seed=0, room=4096, start=Cursor(), since=plan.since)
    return next(rows)


def test_nothing_to_train_on_says_why() -> None:
    with pytest.raises(DatasetError, match="no sample has hidden states yet"):
        make_plan(table([]), SETTINGS)
    with pytest.raises(DatasetError, match="of which 3 supervise nothing within 64 tokens"):
        make_plan(table([("a", 70, 90)] * 3), SETTINGS)


def test_a_damaged_plan_is_named(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DamagedError, match="no plan of a run"):
        load_plan(tmp_path / "p", table(ROWS), 64)
