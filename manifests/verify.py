"""Checks every stored byte against its checksum and every row against its bytes.

Reads shards front to back, several at a time; changes nothing. Repair is left to the caller, who
has the writer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.manifests import files, prompts
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.shards.record import Record
from draftmill.manifests.shards.shard import (
    KINDS,
    STAGE_OF_KIND,
    Damage,
    Kind,
    first_record,
    header_for,
    is_open,
    list_shards,
    scan,
)
from draftmill.manifests.types import Location, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Stored bytes that are not what they must be. `sample` is None for a shard's own header."""

    sample: int | None
    shard: str
    offset: int
    length: int
    reason: str
    stage: Stage


@dataclass(kw_only=True, slots=True)
class VerifyReport:
    """What was checked and what is wrong. `unused` is damage that no row refers to any more."""

    samples_checked: int = 0
    bytes_checked: int = 0
    damaged: list[Fault] = field(default_factory=list)
    unused: list[Fault] = field(default_factory=list)
    repaired: int = 0

    @property
    def ok(self) -> bool:
        return len(self.damaged) == self.repaired

    def document(self) -> dict[str, Any]:
        """The document of `verify --json`."""
        return {
            "ok": self.ok,
            "samples_checked": self.samples_checked,
            "bytes_checked": self.bytes_checked,
            "damaged": [asdict(fault) for fault in self.damaged],
            "unused_damage": [asdict(fault) for fault in self.unused],
            "repaired": self.repaired,
        }


@dataclass(frozen=True, slots=True)
class _Row:
    id: int
    hash: str
    attempt: int
    location: Location
    digest: str


def verify(
    folder: Path,
    manifest: Manifest,
    *,
    threads: int = 2,
    deep: bool = False,
    on_shard: Callable[[str, int], None] | None = None,
) -> VerifyReport:
    """Check the dataset in `folder`. `deep` also decodes every sample and looks for NaN and Inf.

    `on_shard` is called with each shard's name and size when it is done.
    """
    report = VerifyReport()
    jobs: list[tuple[Kind, int, Path | None, list[_Row]]] = []
    for kind in KINDS:
        rows = _rows(manifest, STAGE_OF_KIND[kind])
        on_disk = list_shards(folder / kind)
        for number in sorted({*rows, *on_disk}):
            jobs.append((kind, number, on_disk.get(number), rows.get(number, [])))
    _check_prompts(folder / "prompts", manifest, report)
    reader = ShardReader(folder) if deep else None

    def check(job: tuple[Kind, int, Path | None, list[_Row]]) -> VerifyReport:
        found = _check_shard(*job, reader)
        if on_shard is not None:
            on_shard(f"{job[0]}/{job[1]:06d}", found.bytes_checked)
        return found

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        for part in pool.map(check, jobs):
            report.samples_checked += part.samples_checked
            report.bytes_checked += part.bytes_checked
            report.damaged += part.damaged
            report.unused += part.unused
    if reader is not None:
        reader.close()
    return report


def _check_prompts(folder: Path, manifest: Manifest, report: VerifyReport) -> None:
    paths = files.numbered(folder, ".parquet")
    report.bytes_checked += sum(path.stat().st_size for path in paths.values())
    for name, reason in prompts.faults(manifest, paths):
        report.damaged.append(
            Fault(
                sample=None,
                shard=f"prompts/{name}",
                offset=0,
                length=(folder / name).stat().st_size if (folder / name).exists() else 0,
                reason=reason,
                stage="generate",
            )
        )


def _rows(manifest: Manifest, stage: Stage) -> dict[int, list[_Row]]:
    """Rows by the shard that their current payload of `stage` lies in, in file order."""
    found: dict[int, list[_Row]] = defaultdict(list)
    for row in manifest.rows(
        'SELECT p.id, p.hash, y.attempt, y.shard, y."offset", y.length, y.digest '
        "FROM prompts p JOIN state s USING (id) JOIN payloads y ON y.id = p.id AND y.stage = ? "
        f'AND y.attempt = s.{stage}_payload ORDER BY y.shard, y."offset"',
        [stage],
    ):
        found[row[3]].append(_Row(row[0], row[1], row[2], Location(*row[3:6]), row[6]))
    return found


def _check_shard(
    kind: Kind, number: int, path: Path | None, rows: list[_Row], reader: ShardReader | None
) -> VerifyReport:
    report = VerifyReport()
    stage = STAGE_OF_KIND[kind]
    name = f"{kind}/{number:06d}" if path is None else f"{kind}/{path.name}"

    def fault(row: _Row | None, offset: int, length: int, reason: str) -> Fault:
        sample = None if row is None else row.id
        return Fault(
            sample=sample, shard=name, offset=offset, length=length, reason=reason, stage=stage
        )

    if path is None:
        report.damaged += [fault(r, *r.location[1:], "the shard file is missing") for r in rows]
        return report
    found: list[Record | Damage] = []
    by_offset = {row.location.offset: row for row in rows}
    try:
        report.bytes_checked = path.stat().st_size
        start = first_record(path, number)
        for item in scan(path, number, start=start):
            found.append(item)
    except FileNotFoundError:
        # A writer sealed or evicted it meanwhile.
        now = list_shards(path.parent).get(number)
        return _check_shard(kind, number, None if now == path else now, rows, reader)
    except DamagedError as error:
        report.damaged += [
            fault(r, *r.location[1:], f"no record can be found: {error.reason}") for r in rows
        ]
        if not rows:
            report.unused.append(fault(None, 0, report.bytes_checked, error.reason))
        return report
    valid = {item.offset: item for item in found if isinstance(item, Record)}
    for item in found:
        if isinstance(item, Damage):
            hit = [r for r in rows if _overlap(r.location, item)]
            report.damaged += [fault(r, item.offset, item.length, item.reason) for r in hit]
            if not hit:
                report.unused.append(fault(None, item.offset, item.length, item.reason))
    named = {f.sample for f in report.damaged}
    for offset, row in by_offset.items():
        report.samples_checked += 1
        reason = _mismatch(row, valid.get(offset))
        if reason is None and reader is not None:
            reason = _decode(reader, stage, row)
        if reason is not None and row.id not in named:
            report.damaged.append(fault(row, offset, row.location.length, reason))
    reason = _header_fault(path, kind, number, start, found)
    if reason is not None:
        report.damaged.append(fault(None, 0, 8, reason))
    return report


def _overlap(location: Location, damage: Damage) -> bool:
    start, end = location.offset, location.offset + location.length
    return start < damage.offset + damage.length and damage.offset < end


def _mismatch(row: _Row, found: Record | None) -> str | None:
    """How a record differs from what the manifest says of it."""
    if found is None:
        return "no record starts where the manifest has one"
    wanted = (row.id, row.hash, row.attempt, row.location.length, row.digest)
    actual = (found.id, found.hash, found.attempt.attempt, found.length, found.digest)
    return None if wanted == actual else f"record {actual} where the manifest has {wanted}"


def _decode(reader: ShardReader, stage: Stage, row: _Row) -> str | None:
    try:
        if stage == "generate":
            reader.completion(row.location)
            return None
        states = reader.states(row.location)
    except DamagedError as error:
        return error.reason
    # All exponent bits set: Inf or NaN in bf16.
    for position, token in enumerate(states):
        bad = (token & 0x7F80) == 0x7F80
        if bad.any():
            layer = int(np.argwhere(bad)[0][0])
            return f"not finite in layer {layer}, position {position}"
    return None


def _header_fault(
    path: Path, kind: Kind, number: int, start: int, found: list[Record | Damage]
) -> str | None:
    """What is wrong with a header: its length, and in a sealed shard its JSON. The JSON of a shard
    with damage is not looked at: it named records that cannot be read any more."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            stored = file.read(start - 8)
    except FileNotFoundError:  # a writer sealed or evicted it meanwhile
        return None
    if length != start - 8:
        return "the header's length does not lead to the first record"
    if is_open(path) or any(isinstance(item, Damage) for item in found):
        return None
    if stored.rstrip(b" ") != header_for(kind, number, start, found):
        return "the safetensors header does not match the records"
    return None
