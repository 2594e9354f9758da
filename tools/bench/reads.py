"""How many bytes random reads of samples take from the disk. Part of `draftmill bench shards`.

Owns dropping files from the page cache and the kernel's count of what this process read.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from draftmill.manifests.codec import codec
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.shards.record import Draft
from draftmill.manifests.shards.shard import list_shards
from draftmill.manifests.shards.shard_writer import ShardWriter
from draftmill.manifests.types import Attempt, Location, StatesTLH
from draftmill.tools.bench.figures import Figure


def bench_reads(
    states_TLH: StatesTLH, folder: Path, *, samples: int = 200, min_bytes: int = 1_100_000
) -> list[Figure]:
    """Bytes that random reads of samples take from the disk of `folder`, over what they need.

    Samples are as many tokens as raw bf16 of twice `min_bytes` has. No figure where reads are not
    counted (no /proc, or a RAM disk).
    """
    tokens = -(-2 * min_bytes // states_TLH[0].nbytes)
    starts = range(0, max(1, len(states_TLH) - tokens), max(1, len(states_TLH) // samples))
    with tempfile.TemporaryDirectory(prefix="draftmill-bench-", dir=folder) as work:
        pieces = (states_TLH[at : at + tokens] for at in list(starts)[:samples])
        locations = write_samples(Path(work), pieces, "em-zfast", shard_bytes=64 << 20)
        random.Random(0).shuffle(locations)
        drop_from_cache(list_shards(Path(work) / "hidden_states").values())
        reader = ShardReader(Path(work))
        found = read_amplification(reader, locations)
        reader.close()
    if not found:
        return []
    name = "random_reads.disk_bytes"
    return [Figure(name=name, value=found, unit="x", baseline="payload pages", ratio=found)]


def write_samples(
    root: Path, samples: Iterable[StatesTLH], name: str, *, shard_bytes: int
) -> list[Location]:
    """These states as samples 1, 2, … in sealed shards below `root`."""
    folder = root / "hidden_states"
    folder.mkdir()
    writer = ShardWriter(folder, "hidden_states", shard_bytes, next_number=0, resume=None)
    locations = []
    for number, states in enumerate(samples, 1):
        item = Draft(
            id=number,
            hash=f"{number:032x}",
            stage="extract",
            attempt=Attempt(id=number, stage="extract", attempt=1, outcome="extracted"),
            digest="",
            tokens=len(states),
            raw_bytes=states.nbytes,
            content={
                "codec": name,
                "shape": list(states.shape),
                "block_tokens": codec.BLOCK_TOKENS,
            },
            payloads=[
                (f"states.{i:04d}", block)
                for i, block in enumerate(codec.encode_states(states, name))
            ],
        )
        locations.append(writer.append(item)[1])
    writer.seal()
    return locations


def read_bytes() -> int | None:
    """Bytes that this process had fetched from storage; None where the kernel does not say."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields["read_bytes"])


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Have the kernel forget what it holds of these files; what was not written yet is written."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_amplification(reader: ShardReader, locations: Sequence[Location]) -> float | None:
    """Bytes fetched from storage to decode these samples, over their records in whole pages.

    The files must not be in the page cache. None where the kernel does not count.
    """
    before = read_bytes()
    if before is None:
        return None
    for location in locations:
        reader.states(location)
    fetched = (read_bytes() or 0) - before
    page = mmap.PAGESIZE
    needed = 0
    for location in locations:
        first = location.offset // page
        last = -(-(location.offset + location.length) // page)
        needed += (last - first) * page
    return fetched / needed
