"""What is done to a dataset between runs: retry, eviction, putting damaged rows back.

Every change goes through the dataset's writer, under its lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from draftmill.manifests import files
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.shards.shard import KINDS, is_open, list_shards, seal, shard_path
from draftmill.manifests.types import Stage
from draftmill.manifests.verify import VerifyReport
from draftmill.manifests.writer import DatasetWriter


def retry(writer: DatasetWriter, ids: Sequence[int]) -> int:
    """Ask these rows again, each at the stage where it stopped; history stays."""
    with writer.lock, writer.manifest.transaction("retry"):
        return writer.manifest.revert(ids, "retried", "asked for by retry", None)


def revert(
    writer: DatasetWriter, ids: Sequence[int], outcome: str, reason: str, stage: Stage
) -> int:
    """Forget the payload of `stage` of these rows, because it is damaged or evicted."""
    with writer.lock, writer.manifest.transaction("revert"):
        return writer.manifest.revert(ids, outcome, reason, stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFilter:
    """Which rows: those in one of `states` or (`truncated`) cut by their limit, and all the rest.

    Token ranges are (least, most), None where open. A row whose length is not known, because no
    server ever answered it, is outside every range.
    """

    states: Sequence[str] = ()
    truncated: bool = False
    stage: str | None = None
    source: str | None = None
    error_class: str | None = None
    prompt_tokens: tuple[int | None, int | None] = (None, None)
    completion_tokens: tuple[int | None, int | None] = (None, None)


class Match(NamedTuple):
    """A row that a filter chose, and why it is where it is."""

    id: int
    state: str
    stage: str | None
    error_class: str | None


def matching(manifest: Manifest, chosen: RowFilter) -> tuple[list[Match], int]:
    """The rows of a filter in id order, and how many it left out for want of a known length.

    Completions that were cut by their limit and rejected for it count as truncated.
    """
    lengths = (*chosen.prompt_tokens, *chosen.completion_tokens)
    rows = manifest.rows(
        "WITH last AS (SELECT id, "
        "  max_by(error_class, attempt) FILTER (error_class IS NOT NULL) AS error_class, "
        "  max_by(prompt_tokens, attempt) FILTER (known) AS prompt, "
        "  max_by(completion_tokens, attempt) FILTER (known) AS completion "
        "  FROM (SELECT *, stage = 'generate' AND prompt_tokens IS NOT NULL AS known "
        "        FROM attempts) GROUP BY id) "
        "SELECT s.id, state::VARCHAR, stage, error_class, "
        "  prompt BETWEEN coalesce($4, 0) AND coalesce($5, prompt) AND "
        "  completion BETWEEN coalesce($6, 0) AND coalesce($7, completion) AS fits "
        "FROM samples s LEFT JOIN last USING (id) WHERE ("
        "  list_contains($1, state::VARCHAR) OR ($2 AND ("
        "    finish_reason = 'length' AND state IN ('generated', 'extracted') OR "
        "    state = 'rejected' AND error_class = 'truncated'))) "
        # a completion that was cut is the generate stage's, wherever its row is by now
        "AND ($3 IS NULL OR $3 = if(state IN ('generated', 'extracted'), 'generate', stage)) "
        "AND ($8 IS NULL OR source = $8) "
        "AND ($9 IS NULL OR error_class = $9) ORDER BY s.id",
        [list(chosen.states), chosen.truncated, chosen.stage]
        + [*lengths, chosen.source, chosen.error_class],
    )
    if all(each is None for each in lengths):
        return [Match(*row[:4]) for row in rows], 0
    return [Match(*row[:4]) for row in rows if row[4]], sum(row[4] is None for row in rows)


def select(writer: DatasetWriter, chosen: RowFilter) -> list[int]:
    """Ids of the rows of a filter, in id order."""
    with writer.lock:
        return [match.id for match in matching(writer.manifest, chosen)[0]]


def mend_header(writer: DatasetWriter, name: str) -> bool:
    """Write the safetensors header of a shard again, from its records; an open one is sealed."""
    kind, _, file = name.partition("/")
    path = writer.dataset.path / kind / file
    if kind not in KINDS:
        return False
    with writer.lock:
        if is_open(path):
            writer.seal(kind)
            return not path.exists()
        number = int(path.name.partition(".")[0])
        opened = shard_path(path.parent, number, sealed=False)
        files.rename(path, opened, f"{kind}.mend")
        try:
            seal(opened, kind, number)
        except DamagedError:
            files.rename(opened, path, f"{kind}.mend")
            return False
    return True


def evict(
    writer: DatasetWriter, size: int | None, *, policy: str = "oldest", source: str | None = None
) -> tuple[int, int, int]:
    """Remove hidden-states shards until `size` bytes are free (None: all of them).

    Their rows go back to `generated`. Shards that no row refers to go first: they cost nothing;
    with `source` they stay. Returns (shards, rows, bytes freed).
    """
    order = "shard" if policy == "oldest" else "avg(y.tokens) DESC, shard"
    with writer.lock:
        writer.seal("hidden_states")
        on_disk = list_shards(writer.dataset.hidden_states_dir)
        rows = writer.manifest.rows(
            "SELECT y.shard, $1 IS NULL OR bool_or(p.source = $1) FROM payloads y "
            "JOIN state s ON s.id = y.id AND s.extract_payload = y.attempt "
            "JOIN prompts p ON p.id = y.id "
            f"WHERE y.stage = 'extract' GROUP BY y.shard ORDER BY {order}",
            [source],
        )
        chosen = [number for number, wanted in rows if wanted]
        if source is None:
            chosen = [*(on_disk.keys() - {number for number, _ in rows}), *chosen]
        freed = shards = changed = 0
        for number in chosen:
            if number not in on_disk or (size is not None and freed >= size):
                continue
            freed += on_disk[number].stat().st_size
            changed += _evict_shard(writer, number, on_disk[number])
            shards += 1
    return shards, changed, freed


def _evict_shard(writer: DatasetWriter, number: int, path: Path) -> int:
    files.unlink(path, "evict")
    files.sync_folder(path.parent, "evict")
    ids = writer.manifest.rows(
        "SELECT s.id FROM state s JOIN payloads y ON y.id = s.id AND y.stage = 'extract' "
        "AND y.attempt = s.extract_payload WHERE y.shard = ?",
        [number],
    )
    with writer.manifest.transaction("evict"):
        writer.manifest.set_shard("hidden_states", number, "sealed")
        writer.manifest.set_shard("hidden_states", number, "evicted")
        return writer.manifest.revert(
            [row[0] for row in ids], "evicted", "hidden states removed", "extract"
        )


def repair(writer: DatasetWriter, report: VerifyReport) -> int:
    """Put the rows of damaged samples back one state and mend shard headers; faults repaired."""
    stages: tuple[Stage, ...] = ("extract", "generate")
    for stage in stages:
        faults = [f for f in report.damaged if f.stage == stage and f.sample is not None]
        ids = sorted({fault.sample for fault in faults if fault.sample is not None})
        if ids:
            revert(writer, ids, "damaged", faults[0].reason, stage)
        report.repaired += len(faults)
    for fault in report.damaged:
        if fault.sample is None and mend_header(writer, fault.shard):
            report.repaired += 1
    return report.repaired
