"""The frozen plan of a run: which samples, in which split. A run goes on by its plan.

Owns plan.parquet in the run's folder. Order and packing follow from it by arithmetic (`data`);
where the samples lie is looked up anew at every start, because a dataset may grow or move.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.manifests import files
from draftmill.manifests.errors import DamagedError, DatasetError
from draftmill.trainer import data
from draftmill.trainer.data import Packing, Samples
from draftmill.trainer.settings import TrainSettings

_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run trains on, and how long. `cut` and `nothing_supervised` count samples."""

    train: Samples
    validation: Samples
    steps: int
    packing: Packing
    cut: int
    nothing_supervised: int
    fingerprint: str


def make_plan(table: pa.Table, settings: TrainSettings) -> Plan:
    """The plan of a new run over the samples of `table` (as `reader.extracted()` gives it).

    Raises DatasetError when nothing is left to train on, saying why.
    """
    selection = data.select(table, settings.max_seq_len)
    held_out = data.is_validation(selection.samples, settings.validation)
    train, validation = selection.samples.take(~held_out), selection.samples.take(held_out)
    if len(train) == 0:
        raise DatasetError(
            f"Nothing to train on: {table.num_rows} samples with hidden states, of which "
            f"{selection.nothing_supervised} supervise nothing within {settings.max_seq_len} "
            f"tokens and {len(validation)} are kept for validation. Extract more, or raise "
            "max_seq_len."
        )
    packed = data.packing(train, seed=settings.seed, room=settings.max_seq_len)
    per_epoch = packed.rows / settings.rows_per_step
    return Plan(
        train=train,
        validation=validation,
        steps=settings.steps or max(1, math.ceil(settings.epochs * per_epoch)),
        packing=packed,
        cut=selection.cut,
        nothing_supervised=selection.nothing_supervised,
        fingerprint=data.fingerprint(selection.samples),
    )


def save_plan(plan: Plan, path: Path) -> None:
    """Freeze the plan at `path`, atomically."""
    parts = (plan.train, plan.validation)
    table = pa.table(
        {
            "id": np.concatenate([part.id for part in parts]),
            "digest": pa.array(np.concatenate([part.digest for part in parts]).tolist()),
            "prompt_tokens": np.concatenate([part.prompt_tokens for part in parts]),
            "tokens": np.concatenate([part.tokens for part in parts]),
            "validation": np.repeat([False, True], [len(part) for part in parts]),
        },
        metadata={
            "draftmill.plan": json.dumps(
                {
                    "version": _VERSION,
                    "steps": plan.steps,
                    "packing": asdict(plan.packing),
                    "cut": plan.cut,
                    "nothing_supervised": plan.nothing_supervised,
                    "fingerprint": plan.fingerprint,
                }
            )
        },
    )
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary, compression="zstd")
    files.publish(temporary, path, "plan")


def load_plan(path: Path, table: pa.Table, max_seq_len: int) -> Plan:
    """The frozen plan, with the places where its samples lie now.

    Samples added since do not matter. Raises DatasetError when a planned sample is gone or is
    another one now, DamagedError when the file is no plan.
    """
    try:
        frozen = pq.read_table(path)
        facts = json.loads(frozen.schema.metadata[b"draftmill.plan"])
        if facts["version"] != _VERSION:
            raise ValueError(f"version {facts['version']}, known is {_VERSION}")
        facts["packing"] = Packing(**facts["packing"])
        planned = {name: _column(frozen, name) for name in frozen.column_names}
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} is no plan of a run: {error}") from error
    samples = data.select(table, max_seq_len).samples
    rows_now = _rows_of(planned, samples)
    validation = planned["validation"].astype(bool)
    return Plan(
        train=samples.take(rows_now[~validation]),
        validation=samples.take(rows_now[validation]),
        steps=int(facts["steps"]),
        packing=facts["packing"],
        cut=int(facts["cut"]),
        nothing_supervised=int(facts["nothing_supervised"]),
        fingerprint=str(facts["fingerprint"]),
    )


def _column(table: pa.Table, name: str) -> Any:
    return table.column(name).to_numpy(zero_copy_only=False)


def _rows_of(planned: dict[str, Any], samples: Samples) -> Any:
    """Where the planned samples stand among the present ones; all of them must be there."""
    wanted = planned["id"]
    if len(samples) == 0:
        raise _gone(wanted.tolist())
    rows = np.minimum(np.searchsorted(samples.id, wanted), len(samples) - 1)
    same = (
        (samples.id[rows] == wanted)
        & (samples.digest[rows] == planned["digest"].astype(np.str_))
        & (samples.tokens[rows] == planned["tokens"])
        & (samples.prompt_tokens[rows] == planned["prompt_tokens"])
    )
    if not same.all():
        raise _gone(wanted[~same].tolist())
    return rows


def _gone(ids: list[int]) -> DatasetError:
    shown = ", ".join(map(str, ids[:5])) + (", …" if len(ids) > 5 else "")
    return DatasetError(
        f"{len(ids)} samples that this run was planned with are gone or have changed "
        f"(ids {shown}). Extract them again, or start a new run in another output folder."
    )
