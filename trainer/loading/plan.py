"""The frozen plan of a run: which samples, in which split, from which epoch on.

Owns plan.parquet in the run's folder. Order and packing follow from it by arithmetic (`data`);
where the samples lie is looked up anew at every start, because a dataset may grow or move.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from draftmill.manifests import files
from draftmill.manifests.errors import NOT_UNDERSTOOD, DamagedError, DatasetError
from draftmill.trainer.loading import data
from draftmill.trainer.loading.data import Cursor, Packing, Samples
from draftmill.trainer.settings import TrainSettings

_VERSION = 4
_Columns: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run trains on, and how long. `cut` and `nothing_supervised` count samples.

    `since` is the first epoch of each training sample: 0 but for those that `grow` took in, which
    stand at the end. `packing` is of the first epoch. `digests` are of the files that it was frozen
    in, before each growth and, last, now.
    """

    train: Samples
    since: NDArray[np.int32]
    validation: Samples
    steps: int
    packing: Packing
    cut: int
    nothing_supervised: int
    fingerprint: str
    digests: tuple[str, ...] = ()


def make_plan(table: pa.Table, settings: TrainSettings) -> Plan:
    """The plan of a new run over the samples of `table` (as `reader.trainable()` gives it).

    Raises DatasetError when nothing is left to train on, saying why.
    """
    selection = data.select(table, settings.max_seq_len)
    held_out = data.is_validation(selection.samples, settings.validation)
    train, validation = selection.samples.take(~held_out), selection.samples.take(held_out)
    if table.num_rows == 0:
        raise DatasetError(
            "Nothing to train on: no sample has hidden states yet. `draftmill status DATASET` says "
            "how far it is; `draftmill extract DATASET` or `build` goes on."
        )
    if len(train) == 0:
        raise DatasetError(
            f"Nothing to train on: {table.num_rows} samples with hidden states, of which "
            f"{selection.nothing_supervised} supervise nothing within {settings.max_seq_len} "
            f"tokens and {len(validation)} are kept for validation. Extract more, or raise "
            "max_seq_len."
        )
    packed = data.packing(train, seed=settings.seed, room=settings.max_seq_len)
    return Plan(
        train=train,
        since=np.zeros(len(train), np.int32),
        validation=validation,
        steps=settings.steps or _steps(packed.rows * settings.epochs, settings),
        packing=packed,
        cut=selection.cut,
        nothing_supervised=selection.nothing_supervised,
        fingerprint=data.fingerprint(selection.samples),
    )


def grow(plan: Plan, table: pa.Table, settings: TrainSettings, *, epoch: int, row: int) -> Plan:
    """The plan with all samples of `table` that it does not have, from `epoch` on.

    `row` is the first row of that epoch, so far as rows are known: what `epochs` leaves after it is
    counted anew, unless `steps` was given. Validation stays as it is, or its figures could not be
    compared; new samples that its split claims are left out. A plan with nothing to add is
    returned as it is.
    """
    selection = data.select(table, settings.max_seq_len)
    samples = selection.samples
    planned = np.concatenate([plan.train.id, plan.validation.id])
    fresh = ~np.isin(samples.id, planned) & ~data.is_validation(samples, settings.validation)
    if not fresh.any() or (not settings.steps and epoch >= settings.epochs):
        return plan
    train = _joined(plan.train, samples.take(fresh))
    since = np.full(len(train), epoch, np.int32)
    since[: len(plan.train)] = plan.since
    steps = plan.steps
    if not settings.steps:
        packed = data.packing(train, seed=settings.seed, room=settings.max_seq_len, epoch=epoch)
        steps = _steps(row + packed.rows * (settings.epochs - epoch), settings)
    return replace(
        plan,
        train=train,
        since=since,
        steps=steps,
        cut=selection.cut,
        nothing_supervised=selection.nothing_supervised,
    )


def next_epoch(plan: Plan, settings: TrainSettings, cursor: Cursor) -> tuple[int, int]:
    """The epoch after the one that `cursor` stands in, and its first row."""
    rows = data.training_rows(
        plan.train,
        seed=settings.seed,
        room=settings.max_seq_len,
        start=cursor,
        since=plan.since,
    )
    first = next(row.cursor for row in rows if row.cursor.epoch > cursor.epoch)
    return first.epoch, first.row


def _steps(rows: float, settings: TrainSettings) -> int:
    return max(1, math.ceil(rows / settings.rows_per_step))


def _joined(first: Samples, second: Samples) -> Samples:
    names = [item.name for item in fields(Samples)]
    return Samples(**{n: np.concatenate([getattr(first, n), getattr(second, n)]) for n in names})


def save_plan(plan: Plan, path: Path) -> Plan:
    """Freeze the plan at `path`, atomically; returns it with the digest of that."""
    parts = (plan.train, plan.validation)
    columns: _Columns = {
        name: np.ascontiguousarray(np.concatenate([getattr(part, name) for part in parts]))
        for name in ("id", "digest", "prompt_tokens", "tokens")
    }
    columns["since"] = np.concatenate([plan.since, np.zeros(len(plan.validation), np.int32)])
    columns["validation"] = np.repeat([False, True], [len(part) for part in parts])
    facts = {
        "version": _VERSION,
        "steps": plan.steps,
        "packing": asdict(plan.packing),
        "cut": plan.cut,
        "nothing_supervised": plan.nothing_supervised,
        "fingerprint": plan.fingerprint,
        "grown_from": plan.digests,
    }
    facts["xxh3"] = digest = _checksum(columns, facts)
    digests = columns["digest"]
    fixed = pa.Array.from_buffers(pa.binary(16), len(digests), [None, pa.py_buffer(digests)])
    table = pa.table({**columns, "digest": fixed}, metadata={"draftmill.plan": json.dumps(facts)})
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary, compression="zstd")
    files.publish(temporary, path, "plan")
    return replace(plan, digests=(*plan.digests, digest))


def load_plan(path: Path, table: pa.Table, max_seq_len: int) -> Plan:
    """The frozen plan, with the places where its samples lie now.

    Samples added since do not matter. Raises DatasetError when a planned sample is gone or is
    another one now, DamagedError when the file is no plan or not as it was written.
    """
    try:
        planned, facts = _frozen(path)
    except (OSError, pa.ArrowException, *NOT_UNDERSTOOD) as error:
        raise DamagedError(
            f"{path} is no plan of a run: {error}. Restore it from a copy, or name another output "
            "folder."
        ) from error
    samples = data.select(table, max_seq_len).samples
    rows_now = _rows_of(planned, samples)
    validation = planned["validation"]
    return Plan(
        train=samples.take(rows_now[~validation]),
        since=planned["since"][~validation],
        validation=samples.take(rows_now[validation]),
        steps=facts["steps"],
        packing=Packing(**facts["packing"]),
        cut=facts["cut"],
        nothing_supervised=facts["nothing_supervised"],
        fingerprint=facts["fingerprint"],
        digests=(*facts["grown_from"], facts["xxh3"]),
    )


def _frozen(path: Path) -> tuple[_Columns, dict[str, Any]]:
    """What `save_plan` wrote: columns and facts."""
    frozen = pq.read_table(path).combine_chunks()
    facts = json.loads((frozen.schema.metadata or {})[b"draftmill.plan"])
    if facts["version"] != _VERSION:
        raise ValueError(f"version {facts['version']}, known is {_VERSION}")
    planned: _Columns = {
        name: frozen.column(name).to_numpy() for name in frozen.column_names if name != "digest"
    }
    digests = frozen.column("digest").chunk(0)
    planned["digest"] = np.frombuffer(
        digests.buffers()[1], np.uint64, 2 * len(digests), 16 * digests.offset
    ).reshape(-1, 2)
    if _checksum(planned, facts) != facts["xxh3"]:
        raise ValueError("it is not what was written")
    return planned, facts


def _checksum(columns: _Columns, facts: dict[str, Any]) -> str:
    """32 hex digits of everything in a plan but these."""
    hasher = xxhash.xxh3_128()
    for name, column in sorted(columns.items()):
        hasher.update(f"{name} {column.dtype} {column.shape}".encode())
        hasher.update(np.ascontiguousarray(column).view(np.uint8).data)
    rest = {name: value for name, value in facts.items() if name != "xxh3"}
    hasher.update(json.dumps(rest, sort_keys=True).encode())
    return hasher.hexdigest()


def _rows_of(planned: dict[str, Any], samples: Samples) -> Any:
    """Where the planned samples stand among the present ones; all of them must be there."""
    wanted = planned["id"]
    if len(samples) == 0:
        raise _gone(wanted.tolist())
    rows = np.minimum(np.searchsorted(samples.id, wanted), len(samples) - 1)
    same = (
        (samples.id[rows] == wanted)
        & (samples.digest[rows] == planned["digest"]).all(axis=1)
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
