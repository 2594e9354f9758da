"""Verify finds every flipped bit of a dataset's shards and names whose it is; deep finds more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests import maintenance
from draftmill.manifests.dataset import Dataset, DatasetReader
from draftmill.manifests.shards.record import Record
from draftmill.manifests.shards.shard import data_start, is_open, list_shards, scan
from draftmill.manifests.types import StatesTLH
from draftmill.manifests.verify import Fault, verify
from draftmill.manifests.writer import DatasetWriter
from tests.manifests import workload


@dataclass(frozen=True)
class Region:
    """Bytes of a shard; `sample` is None for its header."""

    path: Path
    start: int
    end: int
    sample: int | None


@dataclass(frozen=True)
class Ground:
    """A dataset with sealed and open shards, open for reading, and what lies where."""

    dataset: Dataset
    reader: DatasetReader
    regions: list[Region]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    root = tmp_path_factory.mktemp("verify")
    dataset = Dataset.create(root / "dataset", "")
    workload.run(dataset.path, workload.Journal(root / "journal"))
    with dataset.reader() as reader:
        rows = reader.sql("SELECT id FROM samples WHERE state <> 'pending'").to_pylist()
        ids = {row["id"] for row in rows}
        regions = []
        for kind in ("completions", "hidden_states"):
            for number, path in list_shards(dataset.path / kind).items():
                start = data_start(path.read_bytes()[:8], path.stat().st_size)
                regions.append(Region(path, 0, 8, None))
                if not is_open(path):
                    regions.append(Region(path, 8, start, None))
                for found in scan(path, number):
                    assert isinstance(found, Record)
                    assert found.id in ids
                    at = found.offset
                    parts = [found.header_length, *(each.length for each in found.payloads)]
                    for length in parts:
                        regions.append(Region(path, at, at + length, found.id))
                        at += length
        assert any(is_open(each.path) for each in regions)
        assert not verify(dataset.path, reader.manifest).damaged
        yield Ground(dataset, reader, regions)


def faults_of(ground: Ground, region: Region, at: int, bit: int) -> list[Fault]:
    with region.path.open("r+b") as file:
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 1 << bit]))
        file.flush()
        try:
            report = verify(ground.dataset.path, ground.reader.manifest, threads=2)
        finally:
            file.seek(at)
            file.write(bytes([old]))
    return [*report.damaged, *report.unused]


@settings(max_examples=150)
@given(st.data())
def test_every_flipped_bit_is_found_and_names_its_sample(
    ground: Ground, data: st.DataObject
) -> None:
    region = data.draw(st.sampled_from(ground.regions), label="region")
    at = data.draw(st.integers(region.start, region.end - 1), label="byte")
    bit = data.draw(st.integers(0, 7), label="bit")
    faults = faults_of(ground, region, at, bit)
    name = f"{region.path.parent.name}/{region.path.name}"
    assert faults
    assert {fault.shard for fault in faults} == {name}
    if region.sample is not None:
        named = [fault for fault in faults if fault.sample == region.sample]
        retired = [fault for fault in faults if fault.sample is None]
        hit = named or retired
        assert any(each.offset <= at < each.offset + each.length for each in hit)
        assert {fault.sample for fault in faults} <= {region.sample, None}


def _store_three(
    writer: DatasetWriter, change: Callable[[int, StatesTLH], None] = lambda sample_id, states: None
) -> None:
    """Three extracted samples; `change` may spoil their states before they are stored."""
    writer.add_prompts(workload.prompts(3))
    writer.commit([workload.generate_result(row) for row in writer.pending(0, 3)])
    results = []
    for sample in writer.generated(0, 3):
        states = workload.states_of(sample.id, len(sample.completion.token_ids))
        change(sample.id, states)
        results.append(workload.extract_result(sample, states))
    writer.commit(results)


@pytest.mark.parametrize("pattern", [0x7FC0, 0x7F80, 0xFF80, 0xFFFF])
def test_deep_finds_what_no_checksum_shows(tmp_path: Path, pattern: int) -> None:
    """A state that is not finite, stored with its right checksum."""

    def spoil(sample_id: int, states: StatesTLH) -> None:
        states &= np.uint16(0xBFFF)
        if sample_id == 2:
            states[5, 1, 7] = pattern

    dataset = Dataset.create(tmp_path / "d", "")
    with dataset.writer() as writer:
        _store_three(writer, spoil)
        assert verify(dataset.path, writer.manifest).ok
        report = verify(dataset.path, writer.manifest, deep=True)
    assert [(each.sample, each.reason) for each in report.damaged] == [
        (2, "not finite in layer 1, position 5")
    ]


def _damage_and_repair(tmp_path: Path, spoil: Callable[[Path], None], *, sealed: bool) -> list[str]:
    """What is left to report after one repair of a dataset with one spoiled shard of states."""
    dataset = Dataset.create(tmp_path / "d", "")
    with dataset.writer() as writer:
        _store_three(writer)
        if sealed:
            writer.seal("hidden_states")
        (path,) = list_shards(dataset.path / "hidden_states").values()
        spoil(path)
        report = verify(dataset.path, writer.manifest)
        assert report.damaged
        maintenance.repair(writer, report)
        assert report.ok, report
        again = verify(dataset.path, writer.manifest)
        assert again.ok
        return [fault.reason for fault in again.unused]


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("kept", [0, 7, 100, 16_392])
def test_a_shard_with_nothing_left_is_repaired_once(
    tmp_path: Path, kept: int, sealed: bool
) -> None:
    _damage_and_repair(tmp_path, lambda path: os.truncate(path, kept), sealed=sealed)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("byte", [0x00, 0x20, 0xFF])
def test_a_shard_that_was_written_over_is_repaired_once(
    tmp_path: Path, byte: int, sealed: bool
) -> None:
    def spoil(path: Path) -> None:
        path.write_bytes(bytes([byte]) * path.stat().st_size)

    assert _damage_and_repair(tmp_path, spoil, sealed=sealed)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("at", [0, 1, 2, 7])
def test_the_length_of_a_header_is_mended(tmp_path: Path, at: int, sealed: bool) -> None:
    def spoil(path: Path) -> None:
        with path.open("r+b") as file:
            old = file.read(8)
            file.seek(0)
            file.write(bytes(byte ^ 8 * (n == at) for n, byte in enumerate(old)))

    assert not _damage_and_repair(tmp_path, spoil, sealed=sealed)
