"""Shards: roll-over, sealing to valid safetensors, scanning past damage, hostile bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from draftmill.manifests.codec import codec
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.shards import record
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.shards.record import Draft, Record
from draftmill.manifests.shards.shard import Damage, is_open, list_shards, scan, seal
from draftmill.manifests.shards.shard_writer import ShardWriter
from draftmill.manifests.types import Attempt, Location, Result
from tests.manifests import workload


def make_draft(prompt_id: int, attempt: int = 1) -> Draft:
    row = Attempt(id=prompt_id, stage="generate", attempt=attempt, outcome="generated")
    found = workload.completion_of(prompt_id, attempt)
    return record.draft(Result(attempt=row, hash=f"{prompt_id:032x}", completion=found), "f")


def make_writer(
    folder: Path, shard_bytes: int = 1 << 20, resume: Path | None = None
) -> ShardWriter:
    number = max(list_shards(folder), default=-1) + 1
    return ShardWriter(folder, "completions", shard_bytes, next_number=number, resume=resume)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "completions"
    path.mkdir()
    return path


def test_sealed_shards_are_safetensors_and_roll_over(folder: Path, tmp_path: Path) -> None:
    writer = make_writer(folder, shard_bytes=24 << 10)
    locations = [writer.append(make_draft(n))[1] for n in range(1, 60)]
    writer.seal()
    paths = list_shards(folder)
    assert len(paths) > 3
    assert not any(is_open(path) for path in paths.values())
    names = set()
    for number, path in paths.items():
        assert path.stat().st_size <= 24 << 10
        with safe_open(path, "np") as tensors:
            keys = set(tensors.keys())
            metadata = tensors.metadata()
            assert metadata == {
                "format": "draftmill",
                "version": "1",
                "kind": "completions",
                "shard": str(number),
            }
            for key in keys:
                tensors.get_tensor(key)
        names |= keys
    assert {
        f"{n}.1/{part}" for n in range(1, 60) for part in ("record", "token_ids", "text")
    } == names
    reader = ShardReader(tmp_path)
    for number, location in enumerate(locations, 1):
        assert (
            reader.completion(location).token_ids == workload.completion_of(number, 1).token_ids
        ).all()


def test_sealing_can_be_repeated(folder: Path) -> None:
    writer = make_writer(folder)
    for n in range(1, 5):
        writer.append(make_draft(n))
    writer.close()
    path = next(iter(list_shards(folder).values()))
    sealed = seal(path, "completions", 0)
    first = sealed.read_bytes()
    sealed.rename(path)
    assert seal(path, "completions", 0).read_bytes() == first


def test_an_open_shard_is_continued(folder: Path) -> None:
    writer = make_writer(folder)
    writer.append(make_draft(1))
    writer.close()
    path = list_shards(folder)[0]
    writer = make_writer(folder, resume=path)
    writer.append(make_draft(2))
    writer.seal()
    assert [item.id for item in scan(list_shards(folder)[0], 0)] == [1, 2]


def test_a_record_larger_than_a_shard_gets_its_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "hidden_states").mkdir()
    states = np.random.default_rng(0).integers(0, 1 << 16, (4000, 4, 64), dtype=np.uint16)
    blocks = codec.encode_states(states, "em-zfast")
    attempt = Attempt(id=1, stage="extract", attempt=1, outcome="extracted")
    item = Draft(
        id=1,
        hash="0" * 32,
        stage="extract",
        attempt=attempt,
        digest="d",
        tokens=4000,
        raw_bytes=states.nbytes,
        content={
            "codec": "em-zfast",
            "shape": list(states.shape),
            "block_tokens": codec.BLOCK_TOKENS,
        },
        payloads=[(f"states.{i:04d}", b) for i, b in enumerate(blocks)],
    )
    writer = ShardWriter(
        tmp_path / "hidden_states", "hidden_states", 64 << 10, next_number=0, resume=None
    )
    places = [writer.append(item)[1] for _ in range(2)]
    writer.close()
    assert [place.shard for place in places] == [0, 1]
    reader = ShardReader(tmp_path)
    assert (reader.states(places[1]) == states).all()
    for tokens in (0, 1, 511, 512, 513, 3999, 4000, 9000):
        assert (reader.states(places[1], tokens=tokens) == states[:tokens]).all()
    out = np.empty((700, 4, 64), np.uint16)
    assert reader.states(places[1], tokens=700, out=out) is out
    assert (out == states[:700]).all()


@settings(max_examples=60)
@given(data=st.data())
def test_a_flipped_bit_never_goes_unseen(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("flip")
    (root / "completions").mkdir()
    writer = make_writer(root / "completions")
    places = [writer.append(make_draft(n))[1] for n in range(1, 7)]
    writer.close()
    path = list_shards(root / "completions")[0]
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(places[0].offset, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    hit = next(i for i, p in enumerate(places, 1) if p.offset <= position < p.offset + p.length)
    found = list(scan(path, 0))
    assert [item.id for item in found if isinstance(item, Record)] == [
        n for n in range(1, 7) if n != hit
    ]
    damage = [item for item in found if isinstance(item, Damage)]
    assert [(d.offset, d.length) for d in damage] == [tuple(places[hit - 1][1:])]
    reader = ShardReader(root)
    with pytest.raises(DamagedError, match=f"completions/000000 at byte {places[hit - 1].offset}"):
        reader.completion(places[hit - 1])
    reader.close()


def test_a_copy_of_a_record_inside_a_payload_is_not_a_record(folder: Path) -> None:
    _, head = record.pack(make_draft(1), 0, 8 + (16 << 10))
    evil = make_draft(2)
    evil.payloads.append(("evil", head + b"".join(data for _, data in make_draft(1).payloads)))
    writer = make_writer(folder)
    writer.append(evil)
    writer.close()
    path = list_shards(folder)[0]
    content = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    content[start] ^= 0xFF  # the outer record is damaged: the search for the next one begins
    path.write_bytes(content)
    assert [type(item) for item in scan(path, 0)] == [Damage]


@pytest.mark.parametrize(
    "change",
    [
        {"payloads": [["token_ids", 1 << 60, "0" * 16]]},
        {"payloads": [["token_ids", -5, "0" * 16], ["text", 5, "0" * 16]]},
        {"payloads": "x"},
        {"attempt": {}},
        {"version": 99},
        {"stage": "other"},
        {"id": "x"},
    ],
)
def test_hostile_headers_give_an_error(folder: Path, change: dict) -> None:
    _, head = record.pack(make_draft(1), 0, 100)
    body = {**json.loads(head[24:-8]), **change}
    text = json.dumps(body).encode()
    head = struct.pack("<8sIIQ", record.MAGIC, len(text), 2, 0) + text
    head += struct.pack("<Q", codec.checksum(head))
    with pytest.raises(DamagedError):
        record.parse(head, 0, 100)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_random_bytes_are_no_record(junk: bytes) -> None:
    for data in (junk, record.MAGIC + junk):
        with pytest.raises(DamagedError):
            record.parse(data, 0, 0)


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_shard_with_a_broken_start(folder: Path, size: int) -> None:
    path = folder / "000000.safetensors.open"
    path.write_bytes(b"\xff" * size)
    if size == 0:
        assert list(scan(path, 0)) == []
        return
    with pytest.raises(DamagedError):
        list(scan(path, 0))


def test_reading_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="missing"):
        ShardReader(tmp_path).completion(Location(3, 100, 100))
