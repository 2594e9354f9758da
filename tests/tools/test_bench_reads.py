"""Random reads of large samples take from the disk what they need and next to nothing more."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import numpy as np
import pytest

from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.shards.shard import list_shards
from draftmill.manifests.types import Location
from draftmill.tools.bench.reads import (
    bench_reads,
    drop_from_cache,
    read_amplification,
    read_bytes,
    write_samples,
)
from tests.manifests.test_codec_error import normal_words

SAMPLES = 200
PAGE = mmap.PAGESIZE


def write(root: Path, count: int) -> list[Location]:
    """Samples of 1 MiB and more, as they are, in shards of 16 MiB."""
    rng = np.random.default_rng(0)
    samples = (
        rng.integers(0, 1 << 16, (520 + number % 40, 4, 256), dtype=np.uint16)
        for number in range(count)
    )
    return write_samples(root, samples, "raw", shard_bytes=16 << 20)


@pytest.mark.slow
def test_random_reads_take_little_more_than_the_samples(tmp_path: Path) -> None:
    locations = write(tmp_path, SAMPLES)
    paths = list(list_shards(tmp_path / "hidden_states").values())
    probe = read_bytes()
    drop_from_cache(paths)
    paths[0].read_bytes()
    if probe is None or (read_bytes() or 0) - probe < PAGE:
        pytest.skip("this file system's reads are not counted in /proc/self/io")
    random.Random(1).shuffle(locations)
    assert min(location.length for location in locations) >= 1 << 20
    drop_from_cache(paths)
    reader = ShardReader(tmp_path)
    amplification = read_amplification(reader, locations)
    reader.close()
    assert amplification is not None
    assert 0.9 < amplification <= 1.10


def test_a_prefix_reads_only_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (location,) = write(tmp_path, 1)
    calls: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        found = pread(fd, length, offset)
        calls.append(len(found))
        return found

    monkeypatch.setattr(os, "pread", counted)
    ShardReader(tmp_path).states(location, tokens=100)
    block = 512 * 4 * 256 * 2
    assert sum(calls) <= block + (16 << 10)


def test_the_figure_is_there_where_reads_are_counted(tmp_path: Path) -> None:
    figures = bench_reads(normal_words((600, 2, 64)), tmp_path, samples=5, min_bytes=10_000)
    if read_bytes() is None:
        assert figures == []
        return
    assert [figure["name"] for figure in figures] == ["random_reads.disk_bytes"]
    assert os.listdir(tmp_path) == []
