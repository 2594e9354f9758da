"""The loader's bench at toy sizes: its samples are real, and every way reads all of them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.shards.reader import ShardReader
from draftmill.tools.bench import loader, loader_data
from draftmill.tools.bench.command import bench_command
from draftmill.trainer import speculators_store
from draftmill.trainer.loading import data

TINY = loader_data.Bench(
    raw_bytes=2 << 20,
    mean_tokens=60,
    room=256,
    hidden_size=64,
    vocab_size=512,
    num_layers=6,
    layer_ids=(1, 3, 5),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> loader_data.Made:
    return loader_data.make(TINY, tmp_path_factory.mktemp("bench"))


def test_the_samples_are_whole_and_of_that_size(made: loader_data.Made) -> None:
    with Dataset.open(made.dataset).reader() as reader:
        samples = data.select(reader.trainable(), TINY.room).samples
    assert len(samples) == made.samples > 20
    raw = int(samples.tokens.sum()) * TINY.layers * TINY.hidden_size * 2
    assert TINY.raw_bytes <= raw < 1.2 * TINY.raw_bytes
    transfer = speculators_store.DraftmillTransfer(made.dataset, made.files)
    first = transfer.get_cached(0)
    assert np.isfinite(first["hidden_states"].float().numpy()).all()
    assert len(list((made.files / "hidden_states").iterdir())) == len(samples)


def test_both_ways_read_the_same_tokens(made: loader_data.Made) -> None:
    options = loader.LoaderBench(bench=TINY, rounds=1, threads=1)
    with Dataset.open(made.dataset).reader() as reader:
        samples = data.select(reader.trainable(), TINY.room).samples
    with closing(ShardReader(made.dataset)) as shards:
        ours = sum(batch.supervised for batch in loader._ours(options, shards, samples)())
    theirs = sum(int(batch["loss_mask"].sum()) for batch in loader._theirs(options, made, 0))
    assert ours == theirs == int((samples.tokens - samples.prompt_tokens).sum())


def test_a_multiplied_dataset_leads_to_the_real_records(
    made: loader_data.Made, tmp_path: Path
) -> None:
    many = loader_data.multiply(made, tmp_path / "many", 1000)
    with Dataset.open(many).reader() as reader:
        samples = data.select(reader.trainable(), TINY.room).samples
    assert len(samples) == 1000
    with closing(ShardReader(made.dataset)) as shards:
        for row in (0, 1, made.samples, 999):
            states = shards.states(samples.states_location(row))
            assert len(states) == samples.tokens[row]


@pytest.mark.slow
def test_the_command_prints_the_agreed_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader_data, "Bench", lambda **given: TINY)
    monkeypatch.setattr(loader, "_PLANNED", 5000)
    done = CliRunner().invoke(
        bench_command,
        ["loader", "--json", "--rounds", "1", "--folder", str(tmp_path)],
        catch_exceptions=False,
    )
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)}
    for name in ("warm.tokens_per_s", "cold.tokens_per_s"):
        assert figures[name]["baseline"] == "speculators-files"
        assert figures[name]["ratio"] > 0
        assert figures[f"decode.{name}"]["value"] > 0
    for name in ("cold.disk_mb_s", "speculators-files.cold.disk_mb_s"):
        # A file system that is not counted has none; nothing is read twice.
        assert 0 <= figures.get(name, {"ratio": 0})["ratio"] < 1.5
    assert figures["first_batch_of_a_million.seconds"]["value"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_training_from_shards_is_set_beside_batches_that_are_held(made: loader_data.Made) -> None:
    """On the CPU: what a GPU is measured with runs here, too."""
    options = loader.LoaderBench(bench=TINY, rounds=1, threads=1, steps=3, warmup_steps=1)
    with Dataset.open(made.dataset).reader() as reader:
        samples = data.select(reader.trainable(), TINY.room).samples
    figures = {figure["name"]: figure for figure in loader._training(options, made, samples)}
    assert figures["train.steps_per_s"]["baseline"] == "batches held by the device"
    assert figures["train.steps_per_s"]["ratio"] > 0
