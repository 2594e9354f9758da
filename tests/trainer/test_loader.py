"""Packed rows: alignment, masks, order and what happens when a sample is not what it should be."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.reader import ShardReader
from draftmill.trainer import data
from draftmill.trainer.data import Cursor, Row
from draftmill.trainer.loader import RowLoader
from draftmill.trainer.rows import Batch, StatesShape, load_row
from tests.trainer import tiny

ROOM = 64


def loader(
    reader, samples, threads: int = 0, prefetch_bytes: int = 1 << 30, workers: int = 0
) -> RowLoader:
    return RowLoader(
        reader,
        samples,
        tiny.SHAPE,
        threads=threads,
        workers=workers,
        prefetch_bytes=prefetch_bytes,
    )


def rows_of(samples, start: Cursor | None = None) -> Iterator[Row]:
    return data.training_rows(samples, seed=0, room=ROOM, start=start or Cursor())


def test_rows_are_what_speculators_makes_of_the_same_samples() -> None:
    """Against `shift_batch` and `CollateFn`, which its own trainer uses."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    samples = tiny.random_samples(3)
    columns = tiny.columns(samples)
    items = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]).astype(np.int64))
        states = torch.from_numpy(sample.states.copy()).view(torch.bfloat16)
        loss_mask = torch.zeros(len(ids), dtype=torch.bool)
        loss_mask[len(sample.prompt) :] = True
        items.append(
            {
                "hidden_states": states[:, :-1].flatten(1),
                "input_ids": ids,
                "verifier_last_hidden_states": states[:, -1],
                "loss_mask": loss_mask,
                "lengths": torch.tensor([len(ids)]),
                "position_ids": torch.arange(len(ids)),
            }
        )
    collate = CollateFn(max_len=200, hidden_size=tiny.HIDDEN, preprocess=shift_batch)
    wanted = collate(items)
    row = Row(members=(0, 1, 2), cursor=Cursor())
    batch = load_row(tiny.MemoryReader(samples), columns, row, tiny.SHAPE, pad_to=200)
    assert set(batch.tensors) == set(wanted) - {"error_records"}
    for name, tensor in batch.tensors.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name
    assert batch.supervised == sum(len(sample.completion) for sample in samples)


def test_nothing_of_the_prompt_is_supervised() -> None:
    """An empty <think></think> that the template adds is prompt, so it is masked (G13)."""
    samples = tiny.random_samples(1)
    batch = load_row(
        tiny.MemoryReader(samples),
        tiny.columns(samples),
        Row(members=(0,), cursor=Cursor()),
        tiny.SHAPE,
    )
    mask = batch.tensors["loss_mask"][0]
    supervised = batch.tensors["input_ids"][0][mask].numpy()
    assert (supervised == samples[0].completion).all()


def test_a_cut_sample_loses_its_end() -> None:
    samples = tiny.random_samples(1, longest=200, seed=4)
    columns = tiny.columns(samples, max_seq_len=20)
    assert len(samples[0].states) > 20
    batch = load_row(
        tiny.MemoryReader(samples), columns, Row(members=(0,), cursor=Cursor()), tiny.SHAPE
    )
    ids = np.concatenate([samples[0].prompt, samples[0].completion])
    assert (batch.tensors["input_ids"][0].numpy() == ids[1:20]).all()
    assert batch.lengths == (19,)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("prefetch_bytes", [1, 1 << 30])
def test_batches_do_not_depend_on_threads_or_memory(threads: int, prefetch_bytes: int) -> None:
    samples = tiny.random_samples(60)
    columns = tiny.columns(samples)
    plain = loader(tiny.MemoryReader(samples), columns)
    wanted = [b.checksum() for b in islice(plain.batches(rows_of(columns)), 40)]
    threaded = loader(tiny.MemoryReader(samples), columns, threads, prefetch_bytes)
    with closing(threaded.batches(rows_of(columns))) as batches:
        assert [b.checksum() for b in islice(batches, 40)] == wanted


def test_interrupted_with_other_threads_and_a_grown_dataset_the_batches_are_the_same(
    tmp_path: Path,
) -> None:
    check_resume(tmp_path, [(0, 0), (2, 0), (1, 0), (3, 0), (0, 0)])


@pytest.mark.slow
def test_interrupted_with_other_workers_and_a_grown_dataset_the_batches_are_the_same(
    tmp_path: Path,
) -> None:
    check_resume(tmp_path, [(0, 0), (0, 2), (0, 1)])


def check_resume(tmp_path: Path, ways: list[tuple[int, int]]) -> None:
    """Stop after a random number of batches, add samples, go on with other (threads, workers)."""
    path = tiny.build_dataset(tmp_path / "d", tiny.random_samples(40)).path
    with Dataset.open(path).reader() as reader:
        columns = data.select(reader.trainable(), tiny.CONTEXT).samples
    assert len(columns) == 40
    with closing(ShardReader(path)) as shards:
        whole = loader(shards, columns).batches(rows_of(columns))
        wanted = [batch.checksum() for batch in islice(whole, 60)]
        got: list[str] = []
        cursor = Cursor()
        rng = np.random.default_rng(0)
        for turn, (threads, workers) in enumerate(ways):
            found = loader(shards, columns, threads, workers=workers)
            with closing(found.batches(rows_of(columns, cursor))) as batches:
                for batch in islice(batches, int(rng.integers(1, 9))):
                    got.append(batch.checksum())
                    cursor = batch.row.after
            tiny.build_dataset(path, tiny.random_samples(3, seed=turn))
    assert len(got) >= len(ways)
    assert got == wanted[: len(got)]
    with Dataset.open(path).reader() as reader:
        assert reader.trainable().num_rows == 40 + 3 * len(ways)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_devices_share_the_same_global_batches(size: int) -> None:
    samples = tiny.random_samples(60)
    columns = tiny.columns(samples)
    reader = tiny.MemoryReader(samples)
    alone = loader(reader, columns).batches(rows_of(columns))
    wanted = [batch.checksum() for batch in islice(alone, 30)]
    ranks = []
    for rank in range(size):
        steps = data.step_rows(rows_of(columns), 6)
        mine = (row for step in steps for row in data.share(step, rank, size))
        with closing(loader(reader, columns, 2).batches(mine)) as batches:
            ranks.append([batch.checksum() for batch in islice(batches, 30 // size)])
    each = 6 // size
    together = [
        checksum
        for step in range(5)
        for rank in ranks
        for checksum in rank[step * each : (step + 1) * each]
    ]
    assert together == wanted


def test_what_waits_is_bounded() -> None:
    samples = tiny.random_samples(60)
    columns = tiny.columns(samples)
    reader = tiny.MemoryReader(samples)
    one_row = ROOM * 2 * 4 * tiny.HIDDEN * 2
    source = loader(reader, columns, threads=2, prefetch_bytes=2 * one_row)
    with closing(source.batches(rows_of(columns))) as batches:
        consumed = 0
        for batch in islice(batches, 10):
            consumed += len(batch.lengths)
            # three rows of at most about ten samples each are read ahead at any time
            assert len(reader.read) <= consumed + 40


def test_an_endless_source_is_not_read_to_its_end() -> None:
    samples = tiny.random_samples(4)
    columns = tiny.columns(samples)
    with closing(loader(tiny.MemoryReader(samples), columns, 2).batches(rows_of(columns))) as it:
        first = next(it)
    assert isinstance(first, Batch)


def test_a_damaged_sample_is_named() -> None:
    samples = tiny.random_samples(4)
    reader = tiny.MemoryReader(samples)
    reader.broken.add(2)
    columns = tiny.columns(samples)
    row = Row(members=(2,), cursor=Cursor())
    with pytest.raises(DamagedError, match=r"sample 102 cannot be read .*flipped bit.*verify"):
        load_row(reader, columns, row, tiny.SHAPE)
    with closing(loader(reader, columns, 2).batches(iter([row]))) as batches:
        with pytest.raises(DamagedError, match="sample 102"):
            next(batches)


@pytest.mark.parametrize(
    "shape", [StatesShape(layers=3, hidden_size=64), StatesShape(layers=4, hidden_size=32)]
)
def test_states_of_another_shape_are_refused(shape: StatesShape) -> None:
    samples = tiny.random_samples(1)
    with pytest.raises(DamagedError, match="the plan and the target model ask for"):
        load_row(
            tiny.MemoryReader(samples),
            tiny.columns(samples),
            Row(members=(0,), cursor=Cursor()),
            shape,
        )


def test_a_shard_reader_can_be_sent_to_a_worker(dataset: Path) -> None:
    with Dataset.open(dataset).reader() as reader:
        columns = data.select(reader.trainable(), tiny.CONTEXT).samples
    with closing(ShardReader(dataset)) as shards:
        sent_reader, sent_columns, rows = pickle.loads(
            pickle.dumps((shards, columns, list(islice(rows_of(columns), 3))))
        )
        mine = [b.checksum() for b in loader(shards, columns).batches(rows)]
        theirs = [b.checksum() for b in loader(sent_reader, sent_columns).batches(rows)]
    sent_reader.close()
    assert mine == theirs
