"""The frozen plan: growth does not move it, and what is gone is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from draftmill.manifests.errors import DamagedError, DatasetError
from draftmill.trainer.plan import load_plan, make_plan, save_plan
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


def test_nothing_to_train_on_says_why() -> None:
    with pytest.raises(DatasetError, match="0 samples with hidden states"):
        make_plan(table([]), SETTINGS)
    with pytest.raises(DatasetError, match="of which 3 supervise nothing within 64 tokens"):
        make_plan(table([("a", 70, 90)] * 3), SETTINGS)


def test_a_damaged_plan_is_named(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DamagedError, match="no plan of a run"):
        load_plan(tmp_path / "p", table(ROWS), 64)
