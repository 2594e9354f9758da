"""The single writer of a dataset.

Owns the order of things: payloads written and synced, then one manifest transaction. The lock that
makes it the only writer is left to `dataset`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from draftmill.manifests import files, fingerprints, queries
from draftmill.manifests.codec_error import ErrorSums
from draftmill.manifests.errors import BudgetError, DatasetError
from draftmill.manifests.layout import Layout
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.prompts import add_batch
from draftmill.manifests.recovery import RecoveryReport, payload_rows
from draftmill.manifests.shards import record
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.shards.shard import (
    KIND_OF_STAGE,
    KINDS,
    STAGE_OF_KIND,
    Kind,
    is_open,
    list_shards,
)
from draftmill.manifests.shards.shard_writer import ShardWriter
from draftmill.manifests.snapshot import write_snapshot
from draftmill.manifests.summary import add_codec_error, note_codecs, summarize
from draftmill.manifests.types import (
    GeneratedSample,
    Location,
    PendingPrompt,
    Prompt,
    Result,
    State,
)

_ADD_BATCH = 20_000
_STATUS_EVERY_S = 2.0
_SNAPSHOT_EVERY_S = 60.0
DEFAULT_SHARD_BYTES = 1 << 30
COMPLETION_SHARD_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AddReport:
    """How many prompts were new, and how many the dataset (or the same source) had already."""

    added: int = 0
    known: int = 0


class DatasetWriter:
    """Everything that changes a dataset. Thread-safe by one lock; `commit` from one thread."""

    def __init__(
        self,
        dataset: Layout,
        manifest: Manifest,
        recovery: RecoveryReport,
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        completion_shard_bytes: int = COMPLETION_SHARD_BYTES,
        budget_bytes: int | None = None,
        staging: Path | None = None,
    ) -> None:
        self.dataset = dataset
        self.budget_bytes = budget_bytes
        self.staging = staging
        self.lock = threading.RLock()
        self.manifest = manifest
        self.recovery = recovery
        self.shards = ShardReader(dataset.path)
        sizes = {"completions": completion_shard_bytes, "hidden_states": shard_bytes}
        self._writers: dict[Kind, ShardWriter] = {
            kind: self._shard_writer(kind, sizes[kind]) for kind in KINDS
        }
        self._tags: dict[str, str] = {}
        self._status_at = 0.0
        self._snapshot_at = time.monotonic()
        self._snapshot_took = 0.0

    def _shard_writer(self, kind: Kind, shard_bytes: int) -> ShardWriter:
        folder = self.dataset.path / kind
        on_disk = list_shards(folder)
        known = queries.known_ends(self.manifest, STAGE_OF_KIND[kind])
        last = max([*on_disk, *known, -1])
        resume = on_disk.get(last)
        return ShardWriter(
            folder,
            kind,
            shard_bytes,
            next_number=last + 1,
            resume=resume if resume is not None and is_open(resume) else None,
        )

    def close(self) -> None:
        """Publish a last snapshot and close; everything committed is durable already."""
        with self.lock:
            try:
                self.publish(snapshot=True)
            except (OSError, DatasetError, BudgetError):
                # A full disk must not hide why the run ended; the last snapshot stays.
                pass
            for writer in self._writers.values():
                with suppress(OSError):  # what is committed was synced then
                    writer.close()
            self.shards.close()

    # -- prompts -----------------------------------------------------------------------------

    def add_prompts(self, prompts: Iterable[Prompt]) -> AddReport:
        """Insert the prompts whose hash is new, as pending rows, in the order given."""
        rows, added, known = iter(prompts), 0, 0
        while batch := list(islice(rows, _ADD_BATCH)):
            with self.lock:
                new = add_batch(self.dataset, self.manifest, batch)
            added, known = added + new, known + len(batch) - new
        return AddReport(added=added, known=known)

    # -- what is to do -----------------------------------------------------------------------

    def pending(self, after_id: int, limit: int) -> list[PendingPrompt]:
        """Pending prompts with ids above `after_id`, in id order, with their conversations."""
        with self.lock:
            rows = queries.todo(self.manifest, "pending", after_id, limit)
            paths = [
                self.dataset.prompt_file(number) for number in sorted({row[3] for row in rows})
            ]
            texts = queries.conversations(self.manifest, paths, [row[0] for row in rows])
        return [
            PendingPrompt(
                id=row[0],
                hash=row[1],
                source=row[2],
                conversation=texts[row[0]],
                attempts=row[4],
                off_policy=bool(row[9]),
            )
            for row in rows
        ]

    def generated(self, after_id: int, limit: int) -> list[GeneratedSample]:
        """Samples without hidden states, with ids above `after_id`, in id order."""
        with self.lock:
            rows = queries.todo(self.manifest, "generated", after_id, limit)
        return [
            GeneratedSample(
                id=row[0],
                hash=row[1],
                source=row[2],
                completion=self.shards.completion(Location(*row[5:8]), text=False),
                digest=row[8],
                attempts=row[4],
            )
            for row in rows
        ]

    def seal(self, kind: Kind) -> None:
        """Seal the open shard of a kind now; the next record opens a new one."""
        with self.lock:
            self._writers[kind].seal()

    # -- commits -----------------------------------------------------------------------------

    def commit(self, results: Sequence[Result]) -> None:
        """Make results durable: payloads written and synced, then one manifest transaction.

        When the disk is full, what fitted is committed and BudgetError is raised for the rest,
        whose rows stay as they were.
        """
        with self.lock:
            full: BudgetError | None = None
            attempts, records = [], []
            # A disk that is full at a sync ends the commit: nobody knows what of it is durable.
            with files.disk_full_is_budget(self.dataset.path):
                for result in results:
                    stage = result.attempt.stage
                    if result.completion is not None or result.states is not None:
                        item = record.draft(result, self._tag(stage))
                        try:
                            stored, _ = self._writers[KIND_OF_STAGE[stage]].append(item)
                        except BudgetError as error:
                            full = error
                            continue
                        records.append(stored)
                    attempts.append(result.attempt)
                for writer in self._writers.values():
                    writer.sync()
            sealed = [(w.kind, n) for w in self._writers.values() for n in w.sealed]
            note_codecs(self.manifest, records)
            self.manifest.commit(attempts, payload_rows(records), sealed)
            for writer in self._writers.values():
                writer.sealed.clear()
            if full is not None:
                raise full

    def _tag(self, stage: str) -> str:
        if stage not in self._tags:
            self._tags[stage] = self.manifest.meta(f"fingerprint.{stage}") or ""
        return self._tags[stage]

    def control(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append decisions of the generation controller."""
        with self.lock:
            self.manifest.add_control(rows)

    def set_license(self, source: str, text: str) -> None:
        """Note the licence of a source as its owner gave it; model cards show it."""
        with self.lock, self.manifest.transaction("license"):
            self.manifest.set_meta(f"license.{source}", text)

    def settings_of(self, stage: str) -> dict[str, Any]:
        """The settings that the dataset's samples of a stage were made with; {} before any."""
        with self.lock:
            return fingerprints.stored(self.manifest, stage)

    def check_fingerprint(
        self,
        stage: str,
        values: Mapping[str, Any],
        *,
        growable: Sequence[str] = (),
        meaning: Mapping[str, str] | None = None,
    ) -> None:
        """Refuse a run whose settings would mix two kinds of samples; stores them at first use.

        Fields in `growable` may become larger (for example the completion limit), never smaller.
        `meaning` says what a field is, where its name is not that of a setting.
        """
        with self.lock:
            tag = fingerprints.check(
                self.manifest,
                self.dataset.path,
                stage,
                values,
                growable=growable,
                meaning=meaning or {},
            )
            self._tags[stage] = tag

    def add_codec_error(self, codec: str, found: ErrorSums) -> None:
        """Add what a lossy codec was measured to cost to what the dataset has of it."""
        with self.lock:
            add_codec_error(self.manifest, codec, found)

    # -- what others see ---------------------------------------------------------------------

    def count(self, state: State, *, off_policy: bool = False) -> int:
        """Number of rows in `state`; with `off_policy` only of those whose answer was given."""
        given = " AND id IN (SELECT id FROM prompts WHERE off_policy)" if off_policy else ""
        with self.lock:
            rows = self.manifest.rows(f"SELECT count(*) FROM state WHERE state = ?{given}", [state])
        return int(rows[0][0])

    def to_extract(self, max_seq_len: int) -> tuple[int, int]:
        """How many samples wait for hidden states, and their tokens, cut at `max_seq_len`."""
        with self.lock:
            count, tokens = self.manifest.rows(
                "SELECT count(*), coalesce(sum(least(y.tokens, ?)), 0)::BIGINT FROM state s "
                "JOIN payloads y ON y.id = s.id AND y.stage = 'generate' "
                "AND y.attempt = s.generate_payload WHERE s.state = 'generated'",
                [max_seq_len],
            )[0]
        return int(count), int(tokens)

    def summary(self) -> dict[str, Any]:
        """The document of `status --json`, measured now."""
        with self.lock:
            return summarize(
                self.dataset.path,
                self.manifest,
                budget_bytes=self.budget_bytes,
                staging=self.staging,
            )

    def publish(self, *, running: Mapping[str, Any] | None = None, snapshot: bool = False) -> None:
        """Rewrite status.json and manifest.parquet when they are due (`snapshot`: now).

        `running` says what this process does, for `status` in other processes.
        """
        with self.lock:
            now = time.monotonic()
            if snapshot or now - self._status_at >= _STATUS_EVERY_S:
                document = {**self.summary(), "time": time.time(), "pid": os.getpid()}
                document["running"] = dict(running) if running is not None else None
                files.write_atomic(self.dataset.status_path, json.dumps(document), "status")
                self._status_at = time.monotonic()
            # A large manifest takes seconds to copy: never more than a twentieth of the time.
            due = max(_SNAPSHOT_EVERY_S, 20 * self._snapshot_took)
            if snapshot or now - self._snapshot_at >= due:
                temporary = self.dataset.path / ".manifest.parquet.tmp"
                write_snapshot(self.manifest, temporary)
                files.publish(temporary, self.dataset.snapshot_path, "snapshot")
                self._snapshot_at = time.monotonic()
                self._snapshot_took = self._snapshot_at - now

    def used_bytes(self) -> int:
        """Bytes of all files in the dataset folder now."""
        return files.folder_bytes(self.dataset.path)
