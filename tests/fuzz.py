"""Hostile bytes for everything that is read from disk: records, shards, frames, headers, recovery.

    python -m tests.fuzz --seconds 60            new seeds each time; `make fuzz` runs this
    python -m tests.fuzz --target shard --seed 7 one case again

A case changes real bytes and may give headers and payloads their right checksums again, so that
what is behind the checksums is reached, too. It passes when what comes is an error of ours or the
truth, within the memory of a child process whose address space is limited.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.builder.extraction.staging import Staging
from draftmill.builder.requests.failures import GarbledReplyError
from draftmill.manifests.codec import codec
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DamagedError, DraftmillError
from draftmill.manifests.shards import record
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.shards.record import Record
from draftmill.manifests.shards.shard import Damage, list_shards, scan, seal
from draftmill.manifests.types import Location
from draftmill.manifests.verify import verify
from tests.fakes import toy_model as toy
from tests.manifests import workload

# Beside what the process has mapped when it begins.
ROOM_BYTES = 768 << 20
_NUMBERS = (-1, 0, 1, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64, 10**30)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    1e308,
    float("inf"),
    float("nan"),
    None,
    True,
    "",
    "x" * 1000,
    "\ud800",
    [],
    [0],
    {},
)


class Ground:
    """Real bytes to change, made once: a dataset with completions and hidden states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dataset = folder / "dataset"
        Dataset.create(self.dataset, "")
        workload.run(self.dataset, workload.Journal(folder / "journal"))
        self.shards = [
            (kind, number, path)
            for kind in ("completions", "hidden_states")
            for number, path in list_shards(self.dataset / kind).items()
        ]
        states = workload.states_of(3, 600)
        finite = states & np.uint16(0x3FFF)
        self.payloads = {
            name: [bytes(block) for block in codec.encode_states(finite, name)]
            for name in ("em-zfast", "bitround-3", "rot4", "raw")
        }
        self.shape = states.shape
        self.staged = toy.hidden_states_file(list(range(60)), 4, 32, None)


def changed(rng: random.Random, data: bytes, reach: int | None = None) -> bytes:
    """`data` with a few bits, bytes or pieces changed, the first `reach` bytes more often."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        limit = len(found) if reach is None or rng.random() < 0.3 else min(reach, len(found))
        at = rng.randrange(max(1, limit))
        kind = rng.randrange(5)
        if kind == 0 and found:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1]))
        elif kind == 2:
            found[at : at + 8] = struct.pack("<Q", rng.choice([0, 2**40, 2**63, 2**64 - 1]))
        elif kind == 3:
            del found[at : at + rng.randrange(1, 64)]
        else:
            found[at:at] = rng.randbytes(rng.randrange(1, 64))
    return bytes(found)


def changed_value(rng: random.Random, value: Any) -> Any:
    """JSON with one value in it replaced, taken away or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at:] * 2
        return [*value[:at], changed_value(rng, value[at]), *value[at + 1 :]]
    return rng.choice(_VALUES)


def hostile_record(rng: random.Random, head: bytes, payload: bytes) -> bytes:
    """A record whose header says something else, with a right checksum again."""
    body = json.loads(head[24:-8])
    if rng.random() < 0.5:
        payload = changed(rng, payload, 64)
        at = 0
        for entry in body["payloads"]:
            entry[2] = f"{codec.checksum(payload[at : at + entry[1]]):016x}"
            at += entry[1]
    for _ in range(rng.randrange(1, 3)):
        body = changed_value(rng, body)
    text = json.dumps(body).encode() if rng.random() < 0.95 else b"[" * 100_000
    count, total = struct.unpack_from("<IQ", head, 12)
    if rng.random() < 0.5 and isinstance(body, dict):
        try:
            count, total = len(body["payloads"]), sum(each[1] for each in body["payloads"])
            new = struct.pack("<8sIIQ", record.MAGIC, len(text), count, total) + text
        except (KeyError, TypeError, struct.error, IndexError):
            new = struct.pack("<8sIIQ", record.MAGIC, len(text), 1, 0) + text
    else:
        new = struct.pack("<8sIIQ", record.MAGIC, len(text), count, total) + text
    return new + struct.pack("<Q", codec.checksum(new)) + payload


def _pick(rng: random.Random, ground: Ground) -> tuple[str, int, Path, Record, bytes]:
    kind, number, path = rng.choice(ground.shards)
    found = [each for each in scan(path, number) if isinstance(each, Record)]
    return kind, number, path, rng.choice(found), path.read_bytes()


def fuzz_shard(rng: random.Random, ground: Ground, work: Path) -> None:
    """What is read from a changed shard is damage or what was written; sealing it is no harm."""
    kind, number, path = rng.choice(ground.shards)
    truth = {each.offset: each for each in scan(path, number) if isinstance(each, Record)}
    data = path.read_bytes()
    target = work / path.name
    target.write_bytes(changed(rng, data, 64 if rng.random() < 0.3 else None))
    try:
        for each in scan(target, number):
            assert isinstance(each, Damage) or each == truth.get(each.offset), each
        opened = target.rename(work / f"{number:06d}.safetensors.open")
        seal(opened, kind, number)  # type: ignore[arg-type]
    except DamagedError:
        pass


def fuzz_record(rng: random.Random, ground: Ground, work: Path) -> None:
    """A record that lies, with right checksums: reading it gives our error or some sample."""
    kind, number, _, found, data = _pick(rng, ground)
    head = data[found.offset : found.offset + found.header_length]
    lie = hostile_record(rng, head, data[found.offset + len(head) : found.offset + found.length])
    folder = work / kind
    folder.mkdir()
    path = folder / f"{number:06d}.safetensors.open"
    path.write_bytes(data[: found.offset] + lie)
    reader = ShardReader(work)
    location = Location(number, found.offset, len(lie))
    try:
        for _ in scan(path, number):
            pass
        stage = "generate" if kind == "completions" else "extract"
        reader.check(stage, location)  # type: ignore[arg-type]
        if kind == "completions":
            reader.completion(location)
        else:
            reader.states(location, tokens=rng.choice([None, 0, 7]))
    except DamagedError:
        pass
    finally:
        reader.close()


def fuzz_frame(rng: random.Random, ground: Ground, work: Path) -> None:
    """Payloads and frames that claim terabytes, or anything else."""
    name = rng.choice(list(ground.payloads))
    payloads = [
        changed(rng, each, 64) if rng.random() < 0.8 else each for each in ground.payloads[name]
    ]
    out = np.empty(ground.shape, np.uint16)
    try:
        codec.decode_states(name, payloads, out, threads=rng.choice([1, 2]))
    except DamagedError:
        pass
    blob = codec.compress(rng.randbytes(rng.randrange(200)) * rng.randrange(1, 50))
    try:
        assert len(codec.decompress(changed(rng, blob, 16), 1 << 62)) <= 128 << 20
    except DamagedError:
        pass


def fuzz_staged(rng: random.Random, ground: Ground, work: Path) -> None:
    """The header of a file that a server left in the staging folder."""
    staging = Staging(work, work / "dataset")
    (work / "file.safetensors").write_bytes(changed(rng, ground.staged, 300))
    try:
        with staging.open("file.safetensors") as staged:
            staged.token_ids()
            staged.read_into(np.empty(staged.shape, np.uint16), 0)
    except (DraftmillError, GarbledReplyError, MemoryError):
        # the stage compares the shape with what it asked for before it takes memory
        pass
    finally:
        staging.close()


def fuzz_recovery(rng: random.Random, ground: Ground, work: Path) -> None:
    """A dataset with lies in its shards, its snapshot or its manifest opens, or says why not."""
    folder = work / "dataset"
    shutil.copytree(ground.dataset, folder)
    kind, number, path, found, data = _pick(rng, ground)
    head = data[found.offset : found.offset + found.header_length]
    rest = data[found.offset + len(head) :]
    lie = hostile_record(rng, head, rest[: found.length - len(head)])
    target = folder / kind / path.name
    target.unlink()
    target.with_name(f"{number:06d}.safetensors.open").write_bytes(data[: found.offset] + lie)
    if rng.random() < 0.7:
        (folder / "manifest.duckdb").unlink()
    if rng.random() < 0.5:
        snapshot = folder / "manifest.parquet"
        snapshot.write_bytes(changed(rng, snapshot.read_bytes()))
    try:
        with Dataset.open(folder).writer() as writer:
            verify(folder, writer.manifest, threads=1, deep=True)
    except DraftmillError:
        pass


TARGETS: dict[str, tuple[Callable[[random.Random, Ground, Path], None], int]] = {
    "shard": (fuzz_shard, 30),
    "record": (fuzz_record, 30),
    "frame": (fuzz_frame, 30),
    "staged": (fuzz_staged, 20),
    "recovery": (fuzz_recovery, 1),
}


def run(seconds: float, targets: list[str], seed: int | None) -> int:
    """Cases for so many seconds, or the one of `seed`; returns how many there were."""
    with tempfile.TemporaryDirectory(prefix="draftmill-fuzz-") as name:
        ground = Ground(Path(name))
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        pool = [each for each in targets for _ in range(TARGETS[each][1])]
        start, count, first = time.monotonic(), 0, seed
        while count == 0 or (seed is None and time.monotonic() - start < seconds):
            case = int.from_bytes(os.urandom(4)) if first is None else first
            target = random.Random(case).choice(pool)
            work = Path(name) / "work"
            work.mkdir()
            try:
                TARGETS[target][0](random.Random(case), ground, work)
            except BaseException:
                sys.stderr.write(f"failed: python -m tests.fuzz --target {target} --seed {case}\n")
                raise
            shutil.rmtree(work)
            count += 1
        return count


def _child(seconds: float, targets: list[str], seed: int | None) -> None:
    sys.stdout.write(f"{run(seconds, targets, seed):,} cases\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    arguments = (options.seconds, options.target or list(TARGETS), options.seed)
    child = multiprocessing.get_context("spawn").Process(target=_child, args=arguments)
    child.start()
    child.join()
    return 1 if child.exitcode else 0


if __name__ == "__main__":
    sys.exit(main())
