"""The merge of planes in torch gives the bits that the codec gives, whatever was stored how."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests.codec import codec
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.shards.reader import ShardReader
from draftmill.trainer.loading import data, planes
from draftmill.trainer.loading.data import Cursor
from draftmill.trainer.loading.groups import GroupPlanes, StatesShape, placed_group
from draftmill.trainer.loading.reading import read_row
from draftmill.trainer.loading.rows import load_row, merge_row
from tests.manifests.test_codec_lossy import finite_states
from tests.trainer import tiny


@pytest.mark.parametrize("name", codec.CODECS)
@settings(max_examples=15)
@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 3), st.integers(1, 150)),
    seed=st.integers(0, 2**32 - 1),
    start=st.integers(0, 300),
    block_tokens=st.integers(1, 100),
)
def test_merged_bits_are_decoded_bits(
    name: str, shape: tuple[int, int, int], seed: int, start: int, block_tokens: int
) -> None:
    states = finite_states(shape, seed)
    if codec.is_lossless(name):
        states = np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16)
    payloads = codec.encode_states(states, name, block_tokens=block_tokens)
    wanted = np.empty(shape, np.uint16)
    codec.decode_states(name, payloads, wanted, block_tokens=block_tokens)
    lengths = codec.block_lengths(shape[0], block_tokens)
    sizes = StatesShape(layers=shape[1], hidden_size=shape[2])
    group, end = placed_group(name, lengths, sizes, start)
    arena = torch.empty(end, dtype=torch.uint8)
    target = GroupPlanes(group, sizes, arena.numpy())
    for length, payload in zip(lengths, payloads, strict=True):
        target.decode(payload, length)
    numbers = torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    got = planes.merge(group, sizes, arena, numbers).transpose(0, 1).contiguous().view(torch.int16)
    assert np.array_equal(got.numpy().view(np.uint16), wanted)


def samples_of_all_lengths() -> list[tiny.Sample]:
    """Short ones, ones at the edges of blocks, and ones of several blocks."""
    rng = np.random.default_rng(7)
    found = []
    for tokens in (2, 3, 511, 512, 513, 1024, 1025, 1300, 20, 40):
        prompt = rng.integers(0, tiny.VOCAB, 1, dtype=np.int32)
        completion = rng.integers(0, tiny.VOCAB, tokens - 1, dtype=np.int32)
        states = finite_states((tokens, 4, tiny.HIDDEN), tokens)
        found.append(tiny.Sample(prompt, completion, states, f"c{tokens}"))
    return found


@pytest.mark.parametrize("cut", [2000, 1025, 600, 512, 100])
def test_rows_of_mixed_codecs_are_the_same_both_ways(tmp_path: Path, cut: int) -> None:
    """A cut inside a block, at its edge, and none; samples of different codecs in one row."""
    codecs = ("em-zfast", "rot4", "raw", "bitround-3")
    path = tiny.build_dataset(tmp_path / "d", samples_of_all_lengths(), codecs=codecs).path
    with Dataset.open(path).reader() as reader:
        samples = data.select(reader.trainable(), cut).samples
    rows = list(islice(data.training_rows(samples, seed=0, room=cut, start=Cursor()), 12))
    assert any(len(row.members) > 1 for row in rows)
    with closing(ShardReader(path)) as shards:
        for row in rows:
            for pad_to in (0, cut + 7):
                whole = load_row(shards, samples, row, tiny.SHAPE, pad_to)
                found = read_row(shards, samples, row, tiny.SHAPE, pad_to)
                merged = merge_row(found, torch.from_numpy(found.arena))
                assert merged.checksum() == whole.checksum()
                assert (merged.row, merged.sample_ids, merged.lengths) == (
                    whole.row,
                    whole.sample_ids,
                    whole.lengths,
                )


def test_a_damaged_payload_is_refused_on_the_way_to_the_planes() -> None:
    states = finite_states((40, 2, 64), 1)
    for name in codec.CODECS:
        (payload,) = codec.encode_states(states, name)
        sizes = StatesShape(layers=2, hidden_size=64)
        group, end = placed_group(name, [40], sizes, 0)
        target = GroupPlanes(group, sizes, np.empty(end, np.uint8))
        with pytest.raises(DamagedError):
            target.decode(payload[:-1], 40)
