"""How many completions a second the manifest takes: no server, no payload on any disk.

Rows finish nearly in the order in which they were asked, so ids are shuffled within windows; a
commit takes as many rows as the committer's own batches. Behind `draftmill bench manifest`.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.builder.commit import BATCH_ROWS
from draftmill.manifests import schema
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.snapshot import write_snapshot
from draftmill.manifests.types import Attempt
from draftmill.tools.bench.figures import Figure, figure
from draftmill.tools.bench.process import rss_mb


@dataclass(frozen=True, kw_only=True)
class ManifestBench:
    """What to commit. Ids are in order but for a shuffle within each `window` of them."""

    completions: int = 200_000
    window: int = 256
    batch_rows: int = BATCH_ROWS

    def __post_init__(self) -> None:
        for name in ("completions", "window", "batch_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1, not {getattr(self, name)}")


def bench_manifest(bench: ManifestBench) -> list[Figure]:
    """Completions a second, the snapshot's seconds, and memory, on a new manifest of that size."""
    with tempfile.TemporaryDirectory(prefix="draftmill-bench-") as folder:
        manifest = Manifest(Path(folder) / "manifest.duckdb")
        try:
            _add_prompts(manifest, Path(folder) / "prompts.parquet", bench.completions)
            batches = list(_batches(bench))
            start = time.perf_counter()
            for ids in batches:
                manifest.commit([_attempt(each) for each in ids], _payloads(ids), [])
            commit_s = time.perf_counter() - start
            before_mb = rss_mb()
            start = time.perf_counter()
            write_snapshot(manifest, Path(folder) / "manifest.parquet")
            snapshot_s = time.perf_counter() - start
            after_mb = rss_mb()
        finally:
            manifest.close()
    return [
        figure("manifest.completions_per_s", bench.completions / commit_s, "1/s"),
        figure("manifest.commit_ms", 1e3 * commit_s / len(batches), "ms"),
        figure("manifest.snapshot_s", snapshot_s, "s"),
        figure("manifest.rss_mb", before_mb, "MB"),
        figure("manifest.snapshot_rss_mb", after_mb - before_mb, "MB"),
    ]


def _add_prompts(manifest: Manifest, path: Path, count: int) -> None:
    ids = pa.array(range(1, count + 1), pa.int64())
    text = pa.array([f"{number:032x}" for number in range(1, count + 1)])
    same = pa.array(["bench"] * count)
    columns = {
        "id": ids,
        "hash": text,
        "source": same,
        "row": ids,
        "conversation_id": text,
        "off_policy": pa.array([False] * count),
        "reference": pa.nulls(count, pa.string()),
        "conversation": same,
    }
    pq.write_table(pa.table(columns, schema=schema.PROMPT_FILE), path)
    manifest.insert_prompts(0, path)


def _batches(bench: ManifestBench) -> Iterator[list[int]]:
    rng = random.Random(0)
    order: list[int] = []
    for first in range(1, bench.completions + 1, bench.window):
        window = list(range(first, min(first + bench.window, bench.completions + 1)))
        rng.shuffle(window)
        order += window
    for start in range(0, len(order), bench.batch_rows):
        yield order[start : start + bench.batch_rows]


def _attempt(identity: int) -> Attempt:
    return Attempt(
        id=identity,
        stage="generate",
        attempt=1,
        outcome="generated",
        finish_reason="stop",
        prompt_tokens=300,
        completion_tokens=400,
        queue_s=0.001,
        total_s=0.2,
        deadline_s=60.0,
        endpoint="http://127.0.0.1:8000/v1",
        started_at=1.7e9 + identity / 300,
    )


def _payloads(ids: Sequence[int]) -> pa.Table:
    columns = (
        ids,
        ["generate"] * len(ids),
        [1] * len(ids),
        [each // 50_000 for each in ids],
        [each % 50_000 * 1300 for each in ids],
        [1300] * len(ids),
        [700] * len(ids),
        [4000] * len(ids),
        [f"{each:032x}" for each in ids],
    )
    return pa.Table.from_arrays(
        [pa.array(c, type=f.type) for c, f in zip(columns, schema.PAYLOAD_ROWS, strict=True)],
        schema=schema.PAYLOAD_ROWS,
    )
