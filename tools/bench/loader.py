"""The loader beside speculators' own, and beside no loader at all. Behind `draftmill bench loader`.

Owns how it is measured; the samples are `loader_data`'s. Every round reads the same samples in
every way, so that the machine's other load meets all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.shards.reader import ShardReader
from draftmill.tools.bench import loader_data
from draftmill.tools.bench.figures import Figure
from draftmill.tools.bench.loader_data import Bench
from draftmill.tools.bench.reads import drop_from_cache, read_bytes
from draftmill.trainer import speculators_store
from draftmill.trainer.devices import joined
from draftmill.trainer.drafts.model import create_draft
from draftmill.trainer.drafts.vocab import make_vocab
from draftmill.trainer.engine import Engine
from draftmill.trainer.loading import data
from draftmill.trainer.loading.data import Cursor, Row, Samples
from draftmill.trainer.loading.loader import RowLoader
from draftmill.trainer.loading.plan import make_plan, save_plan
from draftmill.trainer.loading.rows import Batch
from draftmill.trainer.settings import TrainSettings

BASELINE = "speculators-files"
_PLANNED = 1_000_000


@dataclass(frozen=True, kw_only=True)
class LoaderBench:
    """What to measure: `rounds` readings of all samples in each way; the median counts.

    `threads` is what each way may use: decode threads here (processes beside a GPU), worker
    processes there (or none, where that is faster). `steps` are those of a training on a device.
    """

    bench: Bench
    rounds: int = 5
    threads: int = 2
    device: str = "cpu"
    part: str = "all"
    steps: int = 200
    warmup_steps: int = 20

    @property
    def settings(self) -> TrainSettings:
        """Settings of the runs that are measured."""
        return TrainSettings(
            max_seq_len=self.bench.room,
            draft_vocab_size=min(32000, self.bench.vocab_size),
            validation=0.0,
            decode_workers=self.threads,
            prefetch_mb=512,
            device="cpu" if self.device == "cpu" else "cuda",
        )


def run(options: LoaderBench, folder: Path) -> list[Figure]:
    """All figures, with everything that is needed made in `folder`."""
    made = loader_data.make(options.bench, folder)
    with Dataset.open(made.dataset).reader() as reader:
        samples = data.select(reader.trainable(), options.bench.room).samples
    figures = []
    if options.part in ("read", "all"):
        figures += _reading(options, made, samples)
    if options.part in ("first-batch", "all"):
        figures += _first_batch(options, made, folder)
    if options.part == "train" or (options.part == "all" and options.device != "cpu"):
        figures += _training(options, made, samples)
    return figures


def _figure(name: str, value: float, unit: str, base: float | None, against: str) -> Figure:
    return Figure(
        name=name,
        value=value,
        unit=unit,
        baseline=against if base else None,
        ratio=value / base if base else None,
    )


# -- reading, without a model ----------------------------------------------------------------------


def _reading(options: LoaderBench, made: loader_data.Made, samples: Samples) -> list[Figure]:
    """Tokens a second, from memory and from the disk, against one file a sample.

    Every way reads the same samples from the same file system. Before each cold reading the kernel
    is made to forget all of these files; how much then came from the disk is a figure of its own,
    because a RAM disk forgets nothing.
    """
    tokens = int(samples.tokens.sum())
    with ExitStack() as stack:
        shards = stack.enter_context(closing(ShardReader(made.dataset)))
        ours = _ours(options, shards, samples)
        theirs = [_theirs(options, made, workers) for workers in (0, options.threads)]
        ways: dict[str, Callable[[], None]] = {
            "ours": lambda: _exhaust(ours()),
            "decode": lambda: _decode_all(options, shards, samples),
            "theirs in line": lambda: _exhaust(theirs[0]),
            "theirs": lambda: _exhaust(theirs[1]),
        }
        for way in ways.values():
            way()  # opens files, starts workers

        def forget() -> None:
            drop_from_cache(made.folder.rglob("*.safetensors*"))

        warm = _rates(ways, options.rounds, tokens, before=lambda: None)
        cold = _rates(ways, options.rounds, tokens, before=forget)
        fetched = [
            _from_disk("cold", made.dataset / "hidden_states", ways["ours"], forget),
            _from_disk(f"{BASELINE}.cold", made.files, ways["theirs in line"], forget),
        ]
    figures = []
    for state, rates in (("warm", warm), ("cold", cold)):
        base = max(rates["theirs"], rates["theirs in line"])
        name = f"{state}.tokens_per_s"
        figures += [
            _figure(name, rates["ours"], "tokens/s", base, BASELINE),
            _figure(f"{BASELINE}.{name}", base, "tokens/s", None, ""),
            _figure(f"decode.{name}", rates["decode"], "tokens/s", None, ""),
            _figure(
                f"{state}.of_the_smaller",
                rates["ours"],
                "tokens/s",
                min(rates["decode"], base),
                "smaller of both",
            ),
        ]
    return figures + [figure for figure in fetched if figure is not None]


def _from_disk(
    name: str, folder: Path, way: Callable[[], None], forget: Callable[[], None]
) -> Figure | None:
    """What a cold reading fetched from the disk, as a part of the files in `folder`; None where the
    kernel does not count."""
    forget()
    before = read_bytes()
    start = time.perf_counter()
    way()
    seconds = time.perf_counter() - start
    after = read_bytes()
    if before is None or after is None:
        return None
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors*"))
    return Figure(
        name=f"{name}.disk_mb_s",
        value=(after - before) / seconds / 1e6,
        unit="MB/s",
        baseline="all bytes from the disk",
        ratio=(after - before) / size,
    )


def _ours(
    options: LoaderBench, shards: ShardReader, samples: Samples
) -> Callable[[], Iterator[Batch]]:
    rows = list(_epoch(samples, options.bench.room))
    loader = RowLoader(
        shards,
        samples,
        options.bench.states,
        workers=options.threads,
        prefetch_bytes=512 << 20,
        pad_to=options.bench.room,
    )
    return lambda: loader.batches(rows)


def _epoch(samples: Samples, room: int) -> Iterator[Row]:
    for row in data.training_rows(samples, seed=0, room=room, start=Cursor()):
        if row.cursor.epoch:
            return
        yield row


def _theirs(options: LoaderBench, made: loader_data.Made, workers: int) -> Iterable[Any]:
    return speculators_store.file_loader(
        made.files, room=options.bench.room, hidden_size=options.bench.hidden_size, workers=workers
    )


def _decode_all(options: LoaderBench, shards: ShardReader, samples: Samples) -> None:
    """Every sample to its words on the same threads, and nothing made of it."""
    with ThreadPoolExecutor(options.threads) as pool:
        read = pool.map(
            lambda row: shards.states(samples.states_location(row)), range(len(samples))
        )
        for _ in read:
            pass


def _exhaust(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def _rates(
    ways: dict[str, Callable[[], None]], rounds: int, tokens: int, before: Callable[[], None]
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            before()
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {name: tokens / median(found) for name, found in seconds.items()}


def _first_batch(options: LoaderBench, made: loader_data.Made, folder: Path) -> list[Figure]:
    """Seconds from nothing to the first batch of a run over a million samples."""
    many = loader_data.multiply(made, folder / "million", _PLANNED)
    settings = options.settings
    start = time.perf_counter()
    with Dataset.open(many).reader() as reader:
        table = reader.trainable()
    plan = make_plan(table, settings)
    save_plan(plan, folder / "plan.parquet")
    planned = time.perf_counter() - start
    rows = data.training_rows(plan.train, seed=0, room=settings.max_seq_len, start=Cursor())
    with closing(ShardReader(made.dataset)) as shards:
        loader = RowLoader(
            shards,
            plan.train,
            options.bench.states,
            workers=options.threads,
            prefetch_bytes=64 << 20,
        )
        with closing(loader.batches(rows)) as batches:
            next(batches)
            seconds = time.perf_counter() - start
    return [
        _figure("first_batch_of_a_million.seconds", seconds, "s", None, ""),
        _figure("plan_of_a_million.seconds", planned, "s", None, ""),
    ]


# -- training on a device --------------------------------------------------------------------------


def _training(options: LoaderBench, made: loader_data.Made, samples: Samples) -> list[Figure]:
    """Steps a second from shards, against steps over the same batches held by the device."""
    settings = options.settings
    with joined(settings) as group, closing(ShardReader(made.dataset)) as shards:
        target = made.target
        vocab = make_vocab(made.dataset, settings.draft_vocab_size, target=target)
        model = create_draft(target, options.bench.layer_ids, vocab, settings, device=group.device)
        engine = Engine(model, settings, group)
        loader = RowLoader(
            shards,
            samples,
            options.bench.states,
            workers=options.threads,
            processes=group.on_gpu,
            prefetch_bytes=settings.prefetch_mb << 20,
            pad_to=settings.max_seq_len,
            device=group.device,
        )
        rows = list(islice(_epoch(samples, settings.max_seq_len), options.steps))
        start = time.perf_counter()
        with closing(loader.batches(islice(rows, 32))) as batches:
            held = [next(batches)]
            first = time.perf_counter() - start
            held += batches
        start = time.perf_counter()
        _steps(engine, islice(cycle(held), options.warmup_steps))
        compiled = time.perf_counter() - start
        rates: dict[str, list[float]] = {"shards": [], "held": []}
        for _ in range(options.rounds):
            with closing(loader.batches(cycle(rows))) as batches:
                rates["shards"].append(_rate(engine, batches, options))
            rates["held"].append(_rate(engine, cycle(held), options))
    ours, base = median(rates["shards"]), median(rates["held"])
    size = options.bench.room * options.bench.states.layers * options.bench.hidden_size * 2
    return [
        _figure("train.steps_per_s", ours, "steps/s", base, "batches held by the device"),
        _figure("held.steps_per_s", base, "steps/s", None, ""),
        _figure("train.states_mb_s", ours * size / 1e6, "MB/s", None, ""),
        _figure("train.first_batch.seconds", first, "s", None, ""),
        _figure("compile.seconds", compiled, "s", None, ""),
    ]


def _rate(engine: Engine, batches: Iterator[Batch], options: LoaderBench) -> float:
    """Steps a second once they are under way: a run starts its readers once."""
    _steps(engine, islice(batches, options.warmup_steps))
    return options.steps / _steps(engine, islice(batches, options.steps))


def _steps(engine: Engine, batches: Iterable[Batch]) -> float:
    """Seconds of one step a batch, looked at as the training loop does: every tenth is awaited."""
    start = time.perf_counter()
    for number, batch in enumerate(batches, 1):
        results, _ = engine.step([batch], 1e-4)
        if number % engine.settings.log_every == 0:
            float(results[-1].loss.detach())
    if engine.group.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start
