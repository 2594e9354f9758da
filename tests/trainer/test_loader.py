"""Packed rows: alignment, masks, order and what happens when a sample is not what it should be."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DamagedError, DraftmillError
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.types import Attempt, Outcome, Prompt, Result
from draftmill.trainer.loading import data, reading
from draftmill.trainer.loading.data import Cursor, Row
from draftmill.trainer.loading.groups import StatesShape
from draftmill.trainer.loading.loader import RowLoader
from draftmill.trainer.loading.processes import Slots, readers
from draftmill.trainer.loading.rows import Batch, load_row, merge_row
from tests.trainer import tiny

ROOM = 64


def loader(
    reader, samples, workers: int = 0, prefetch_bytes: int = 1 << 30, *, processes: bool = False
) -> RowLoader:
    return RowLoader(
        reader,
        samples,
        tiny.SHAPE,
        workers=workers,
        processes=processes,
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


def test_without_a_prompt_all_but_the_first_token_is_supervised() -> None:
    samples = [
        replace(
            sample, prompt=sample.prompt[:0], completion=np.r_[sample.prompt, sample.completion]
        )
        for sample in tiny.random_samples(3)
    ]
    row = Row(members=(0, 1, 2), cursor=Cursor())
    batch = load_row(tiny.MemoryReader(samples), tiny.columns(samples), row, tiny.SHAPE)
    assert bool(batch.tensors["loss_mask"].all())


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
    check_resume(tmp_path, [(0, False), (2, False), (1, False), (3, False), (0, False)])


@pytest.mark.slow
def test_interrupted_with_other_processes_and_a_grown_dataset_the_batches_are_the_same(
    tmp_path: Path,
) -> None:
    check_resume(tmp_path, [(0, False), (2, True), (1, True)])


def check_resume(tmp_path: Path, ways: list[tuple[int, bool]]) -> None:
    """Stop after a random number of batches, add samples, go on with other (workers, processes)."""
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
        for turn, (workers, processes) in enumerate(ways):
            found = loader(shards, columns, workers, processes=processes)
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
    source = loader(reader, columns, workers=2, prefetch_bytes=2 * one_row)
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


def test_only_samples_whose_states_are_there_are_planned(tmp_path: Path) -> None:
    """No placeholder for others, whatever became of them (T3)."""
    samples = tiny.random_samples(6)
    dataset = tiny.build_dataset(tmp_path / "d", samples)
    outcomes: tuple[Outcome, ...] = ("timed_out", "failed", "rejected", "generated")
    with dataset.writer() as writer:
        writer.add_prompts(
            Prompt(
                hash=f"{number:032x}",
                conversation='{"messages": []}',
                source="s",
                row=number,
                conversation_id=f"c{number}",
            )
            for number in range(100, 101 + len(outcomes))
        )
        for waiting, outcome in zip(writer.pending(0, 99)[1:], outcomes, strict=True):
            attempt = Attempt(id=waiting.id, stage="generate", attempt=1, outcome=outcome)
            completion = tiny.completion(samples[0]) if outcome == "generated" else None
            writer.commit([Result(attempt=attempt, hash=waiting.hash, completion=completion)])
    with dataset.reader() as reader:
        assert reader.summary()["prompts"]["total"] == 11
        columns = data.select(reader.trainable(), tiny.CONTEXT).samples
    assert len(columns) == 6
    # and one that vanishes under a run is an error that names it
    next((tmp_path / "d" / "hidden_states").iterdir()).unlink()
    with closing(ShardReader(tmp_path / "d")) as shards:
        with pytest.raises(DamagedError, match=rf"sample {columns.id[0]} cannot be read"):
            load_row(shards, columns, Row(members=(0,), cursor=Cursor()), tiny.SHAPE)


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


@pytest.mark.slow
def test_processes_hand_over_rows_that_outgrow_their_slots() -> None:
    """Memory is planned for rows of a usual kind; others take a slower way to the same bits."""
    samples = tiny.random_samples(12)
    columns = tiny.columns(samples)
    short = [Row(members=(number,), cursor=Cursor(row=number)) for number in range(4)]
    long = [Row(members=tuple(range(12)), cursor=Cursor(row=number)) for number in (4, 5)]
    items = [reading.item_of(row, columns) for row in (*short[:2], *long, *short[2:])]
    read = reading.ReadRow(reader=tiny.MemoryReader(samples), shape=tiny.SHAPE, pad_to=0)
    wanted = [read(item, lambda size: np.empty(size, np.uint8)) for item in items]
    sizes = sorted(row.num_bytes for row in wanted)
    with (
        closing(Slots(6, sizes[3], readers=2)) as slots,
        readers(read, 2, slots, together=3) as processes,
    ):
        assert sizes[3] <= slots.size < sizes[4]
        begun = [processes.submit(items[:3], 0), processes.submit(items[3:], 1)]
        got = [row for place, each in enumerate(begun) for row in processes.result(each, place)]
        assert [row.row for row in got] == [item[0] for item in items]
        for row, same in zip(got, wanted, strict=True):
            batches = [merge_row(found, torch.tensor(found.arena)) for found in (row, same)]
            assert batches[0].checksum() == batches[1].checksum()
            inside = np.shares_memory(row.arena, slots.memory)
            assert inside == (row.num_bytes <= slots.size)


@pytest.mark.slow
def test_what_a_process_finds_damaged_is_said_by_the_one_that_trains() -> None:
    samples = tiny.random_samples(4)
    reader = tiny.MemoryReader(samples)
    reader.broken.add(2)
    columns = tiny.columns(samples)
    rows = [Row(members=(number,), cursor=Cursor()) for number in (0, 1, 2, 3)]
    with closing(loader(reader, columns, 2, processes=True).batches(rows)) as batches:
        assert [next(batches).sample_ids for _ in range(2)] == [(100,), (101,)]
        with pytest.raises(DamagedError, match=r"sample 102 cannot be read .*flipped bit"):
            next(batches)
    assert active_children() == []


@pytest.mark.slow
@pytest.mark.parametrize("ways", [[(0, False), (2, False)], [(1, True)]])
def test_a_disk_that_fails_is_told_with_its_sample(ways: list[tuple[int, bool]]) -> None:
    """It is no damage: what cannot be read now may be there tomorrow, so nothing is taken out."""
    samples = tiny.random_samples(4)
    reader = tiny.MemoryReader(samples)
    reader.unanswered.add(1)
    columns = tiny.columns(samples)
    rows = [Row(members=(number,), cursor=Cursor()) for number in (0, 1)]
    for workers, processes in ways:
        source = loader(reader, columns, workers, processes=processes)
        with closing(source.batches(rows)) as batches:
            assert next(batches).sample_ids == (100,)
            with pytest.raises(DraftmillError, match=r"sample 101 .*Input/output error") as error:
                next(batches)
        assert "repair" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_stop_a_run_are_for_the_one_that_trains_to_hear(
    number: signal.Signals,
) -> None:
    samples = tiny.random_samples(60)
    columns = tiny.columns(samples)
    reader = tiny.MemoryReader(samples)
    wanted = [b.checksum() for b in islice(loader(reader, columns).batches(rows_of(columns)), 40)]
    source = loader(reader, columns, 2, processes=True)
    with closing(source.batches(rows_of(columns))) as batches:
        got = [next(batches).checksum()]
        for process in active_children():
            assert process.pid is not None
            os.kill(process.pid, number)
        got += [batch.checksum() for batch in islice(batches, 39)]
    assert got == wanted


@pytest.mark.slow
def test_a_process_that_hangs_does_not_keep_a_run_from_ending() -> None:
    samples = tiny.random_samples(60)
    columns = tiny.columns(samples)
    source = loader(tiny.MemoryReader(samples), columns, 2, processes=True)
    with closing(source.batches(rows_of(columns))) as batches:
        next(batches)
        for process in active_children():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
    assert active_children() == []


@pytest.mark.slow
def test_answers_of_processes_are_short_whatever_is_in_a_row() -> None:
    """A pipe holds 200 KB; were answers longer, both sides could wait for room in theirs."""
    samples = tiny.random_samples(4)
    columns = tiny.columns(samples)
    counts = [1, 1500]
    rows = [Row(members=(0, 1, 2, 3) * count, cursor=Cursor()) for count in counts]
    items = [reading.item_of(row, columns) for row in rows]
    read = reading.ReadRow(reader=tiny.MemoryReader(samples), shape=tiny.SHAPE, pad_to=0)
    largest = read(items[1], lambda size: np.empty(size, np.uint8)).num_bytes
    with (
        closing(Slots(2, largest, readers=1)) as slots,
        readers(read, 1, slots, together=1) as processes,
    ):
        begun = [processes.submit([item], place) for place, item in enumerate(items)]
        sizes = [len(connection.recv_bytes()) for connection, _ in begun]
    assert sizes[1] < sizes[0] + 100 < 4000


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_with_advice() -> None:
    samples = tiny.random_samples(60)
    columns = tiny.columns(samples)
    source = loader(tiny.MemoryReader(samples), columns, 2, processes=True)
    with closing(source.batches(rows_of(columns))) as batches:
        next(batches)
        for process in active_children():
            process.kill()
        with pytest.raises(DraftmillError, match=r"reads samples died.*decode_workers"):
            deque(islice(batches, 100), maxlen=0)
    assert active_children() == []


ORPHANS = """
import os, sys
from itertools import islice
from multiprocessing import active_children
from tests.trainer import test_loader, tiny

if __name__ == "__main__":
    samples = tiny.random_samples(60)
    columns = tiny.columns(samples)
    source = test_loader.loader(tiny.MemoryReader(samples), columns, 2, processes=True)
    batches = source.batches(test_loader.rows_of(columns))
    next(batches)
    print(*(process.pid for process in active_children()), flush=True)
    if sys.argv[1:]:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [["killed"], []])
def test_processes_do_not_outlive_the_one_that_trains(tmp_path: Path, how: list[str]) -> None:
    """Killed, or at its end with an iterator that nobody closed."""
    program = tmp_path / "program.py"
    program.write_text(ORPHANS)
    home = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(program), *how],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(home)},
        stdout=subprocess.PIPE,
        timeout=600,
    )
    assert done.returncode == (-signal.SIGKILL if how else 0)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    give_up = time.monotonic() + 120
    while any(map(lives, pids)):  # they notice when they next ask for work
        assert time.monotonic() < give_up
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Orphans that nobody on this machine buries are dead, too."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
