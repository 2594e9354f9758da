"""Brings manifest and shards back into agreement at every start, from records and file names.

The promises are in docs/format.md, "Recovery". Nothing here needs to know why the last process
ended: a killed process, a power cut and a copied folder are handled the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from draftmill.manifests import files, queries, schema
from draftmill.manifests.errors import DamagedError, DatasetError
from draftmill.manifests.manifest import Manifest, QueryError
from draftmill.manifests.shards.record import Record
from draftmill.manifests.shards.shard import (
    KINDS,
    STAGE_OF_KIND,
    Damage,
    Kind,
    first_record,
    is_open,
    list_shards,
    scan,
    seal,
)
from draftmill.manifests.summary import note_codecs


@dataclass(kw_only=True, slots=True)
class RecoveryReport:
    """What recovery found and did; all zero after a clean stop."""

    adopted: int = 0
    adopted_prompts: int = 0
    cut_bytes: int = 0
    reverted: int = 0
    damaged: list[str] = field(default_factory=list)
    foreign: int = 0
    rebuilt: bool = False
    pending_after_rebuild: int = 0

    def lines(self) -> list[str]:
        """What a person should know, one line each."""
        found: list[str] = []
        if self.rebuilt:
            found.append(
                f"manifest rebuilt from prompts and shards; {self.pending_after_rebuild} rows are "
                "pending (timed-out, failed and rejected rows since the last snapshot among them)"
            )
        if self.adopted_prompts:
            found.append(f"{self.adopted_prompts} prompts adopted from an interrupted add")
        if self.adopted:
            found.append(f"{self.adopted} samples adopted that were stored but not committed")
        if self.cut_bytes:
            found.append(f"{self.cut_bytes} bytes of unfinished writes cut")
        if self.reverted:
            found.append(f"{self.reverted} rows put back because their stored bytes are missing")
        if self.foreign:
            found.append(
                f"{self.foreign} records ignored that belong to no prompt of this dataset; if a "
                "file of prompts/ is missing, put it back: the next command takes them in"
            )
        found.extend(f"damaged: {line}" for line in self.damaged)
        return found


def recover(folder: Path, manifest: Manifest, *, rebuilt: bool) -> RecoveryReport:
    """Reconcile the dataset in `folder` with its manifest; the caller holds the writer's lock."""
    report = RecoveryReport(rebuilt=rebuilt)
    _adopt_prompts(folder / "prompts", manifest, report)
    for kind in KINDS:
        _recover_kind(folder / kind, kind, manifest, report)
    if rebuilt:
        rows = manifest.rows("SELECT count(*) FROM state WHERE state = 'pending'")
        report.pending_after_rebuild = int(rows[0][0])
    return report


def _adopt_prompts(folder: Path, manifest: Manifest, report: RecoveryReport) -> None:
    for stray in folder.glob(".*.tmp"):
        files.unlink(stray, "prompts.stray")
    known = queries.prompt_files(manifest)
    for number, path in files.numbered(folder, ".parquet").items():
        if number not in known:
            try:
                report.adopted_prompts += manifest.insert_prompts(number, path)
            except QueryError as error:
                # Going on without it would make strangers of the records of its prompts.
                raise DatasetError(
                    f"{path} cannot be read as prompts ({str(error).splitlines()[0]}). Restore it "
                    "from a copy; or move it away, to go on without its prompts and their samples."
                ) from error
    if report.rebuilt:
        report.adopted_prompts = 0


def _recover_kind(folder: Path, kind: Kind, manifest: Manifest, report: RecoveryReport) -> None:
    stage = STAGE_OF_KIND[kind]
    ends = queries.known_ends(manifest, stage)
    states = queries.shard_states(manifest, kind)
    on_disk = list_shards(folder)
    last = max(on_disk, default=-1)
    sizes: dict[int, int] = {}
    for number, path in on_disk.items():
        found: list[Record] = []
        if states.get(number) != "sealed" or number not in ends:
            found = _scan_shard(path, kind, number, ends.get(number), report)
        if not path.exists():
            continue  # an open shard without a single record was removed
        _adopt(found, kind, manifest, report)
        if is_open(path) and number != last:
            path = seal(path, kind, number)
        if not is_open(path) and states.get(number) != "sealed":
            with manifest.transaction("shards"):
                manifest.set_shard(kind, number, "sealed")
        sizes[number] = path.stat().st_size
    _revert_missing(kind, manifest, ends, sizes, states, report)


def _scan_shard(
    path: Path, kind: Kind, number: int, known_end: int | None, report: RecoveryReport
) -> list[Record]:
    """Records of a shard beyond its last acknowledged byte; cuts what is torn behind them."""
    size = path.stat().st_size
    try:
        start = first_record(path, number)
    except DamagedError as error:
        if known_end is None and is_open(path):
            # The shard was being created: it holds nothing.
            report.cut_bytes += size
            files.unlink(path, f"{kind}.stray")
            files.sync_folder(path.parent, f"{kind}.stray")
        else:
            report.damaged.append(f"{kind}/{path.name}: {error.reason}")
        return []
    found: list[Record] = []
    pending_damage: list[Damage] = []
    first = max(start, known_end or 0)
    for item in scan(path, number, start=first):
        if isinstance(item, Damage):
            pending_damage.append(item)
            continue
        report.damaged.extend(_named(kind, path, damage) for damage in pending_damage)
        pending_damage = []
        found.append(item)
    if not pending_damage:
        return found
    if is_open(path):
        end = max(found[-1].offset + found[-1].length if found else first, known_end or 0)
        report.cut_bytes += size - end
        file = files.File(path, f"{kind}.recovery")
        try:
            file.truncate(end)
            file.sync()
        finally:
            file.close()
    else:
        report.damaged.extend(_named(kind, path, damage) for damage in pending_damage)
    return found


def _named(kind: Kind, path: Path, damage: Damage) -> str:
    whose = "" if damage.record is None else f" (sample {damage.record.id})"
    return f"{kind}/{path.name} bytes {damage.offset}..{damage.offset + damage.length}: " + (
        f"{damage.reason}{whose}"
    )


def _adopt(records: list[Record], kind: Kind, manifest: Manifest, report: RecoveryReport) -> None:
    """Take over records that no commit has acknowledged."""
    if not records:
        return
    stage = STAGE_OF_KIND[kind]
    ids = pa.table({"id": pa.array(sorted({item.id for item in records}), pa.int64())})
    with manifest.batch("found_ids", ids):
        known = dict(manifest.rows("SELECT id, hash FROM prompts SEMI JOIN found_ids USING (id)"))
        seen = set(
            manifest.rows(
                "SELECT id, attempt FROM payloads SEMI JOIN found_ids USING (id) WHERE stage = ?",
                [stage],
            )
        )
        tried = set(
            manifest.rows(
                "SELECT id, attempt FROM attempts SEMI JOIN found_ids USING (id) "
                "WHERE stage = ? AND outcome IN ('generated', 'extracted')",
                [stage],
            )
        )
        current = {
            row[0]: row[1:]
            for row in manifest.rows(
                "SELECT s.id, s.generate_payload, s.extract_payload, g.digest FROM state s "
                "SEMI JOIN found_ids USING (id) LEFT JOIN payloads g ON g.id = s.id "
                "AND g.stage = 'generate' AND g.attempt = s.generate_payload"
            )
        }
    new: list[Record] = []
    best: dict[int, Record] = {}
    for item in records:
        key = (item.id, item.attempt.attempt)
        if known.get(item.id) != item.hash:
            report.foreign += 1
            continue
        if key in seen:
            continue
        seen.add(key)
        new.append(item)
        if item.id not in best or best[item.id].attempt.attempt < item.attempt.attempt:
            best[item.id] = item
    if not new:
        return
    note_codecs(manifest, new)
    manifest.adopt(
        [item.attempt for item in new if (item.id, item.attempt.attempt) not in tried],
        payload_rows(new),
        [
            item.attempt
            if item is best[item.id] and _becomes_current(item, current[item.id])
            # Only counts the attempt: the row's state stays as it is.
            else replace(item.attempt, outcome="transient")
            for item in new
        ],
    )
    report.adopted += len(new)


def _becomes_current(item: Record, current: tuple[int | None, int | None, str | None]) -> bool:
    generate_payload, extract_payload, digest = current
    if item.stage == "generate":
        return generate_payload is None or item.attempt.attempt > generate_payload
    # Hidden states of an older completion must not stand beside a newer one.
    return item.digest == digest and (
        extract_payload is None or item.attempt.attempt > extract_payload
    )


def payload_rows(records: list[Record]) -> pa.Table:
    """Records as rows of the table `payloads`."""
    columns = (
        [item.id for item in records],
        [item.stage for item in records],
        [item.attempt.attempt for item in records],
        [item.shard for item in records],
        [item.offset for item in records],
        [item.length for item in records],
        [item.tokens for item in records],
        [item.raw_bytes for item in records],
        [item.digest for item in records],
    )
    return pa.Table.from_arrays(
        [pa.array(c, type=f.type) for c, f in zip(columns, schema.PAYLOAD_ROWS, strict=True)],
        schema=schema.PAYLOAD_ROWS,
    )


def _revert_missing(
    kind: Kind,
    manifest: Manifest,
    ends: dict[int, int],
    sizes: dict[int, int],
    states: dict[int, str],
    report: RecoveryReport,
) -> None:
    """Put rows back whose current payload lies in bytes that do not exist any more."""
    stage = STAGE_OF_KIND[kind]
    for number, end in ends.items():
        size = sizes.get(number, 0)
        if end <= size or states.get(number) == "evicted":
            continue
        rows = manifest.rows(
            "SELECT s.id FROM state s JOIN payloads y ON y.id = s.id AND y.stage = ? "
            f"AND y.attempt = s.{stage}_payload "
            'WHERE y.shard = ? AND y."offset" + y.length > ?',
            [stage, number, size],
        )
        with manifest.transaction("missing"):
            report.reverted += manifest.revert(
                [row[0] for row in rows],
                "missing",
                f"{kind}/{number:06d} ends at byte {size}",
                stage,
            )
            if number not in sizes:
                manifest.set_shard(kind, number, "evicted" if kind == "hidden_states" else "lost")
