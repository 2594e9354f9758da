"""Datasets made from other datasets: the same samples, shortened or in another codec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests.codec import codec
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DatasetError
from draftmill.manifests.types import Location
from draftmill.manifests.verify import verify
from draftmill.tools.bench.experiments.derive import Wanted, derive
from draftmill.trainer.loading import data
from tests.trainer import tiny

COUNT = 70  # more than a page


@pytest.fixture(scope="module")
def samples() -> list[tiny.Sample]:
    return tiny.random_samples(COUNT)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, samples: list[tiny.Sample]) -> Dataset:
    return tiny.build_dataset(tmp_path_factory.mktemp("source") / "dataset", samples)


def stored(dataset: Dataset) -> Iterator[tuple[dict, np.ndarray, np.ndarray, str]]:
    """(row, token ids, states, codec) of every extracted sample."""
    with dataset.reader() as reader:
        for row in reader.extracted().to_pylist():
            at = {
                stage: Location(*(row[f"{stage}_{part}"] for part in ("shard", "offset", "length")))
                for stage in ("generate", "extract")
            }
            yield (
                row,
                reader.shards.completion(at["generate"]).token_ids,
                reader.shards.states(at["extract"]),
                reader.shards.header("extract", at["extract"]).content["codec"],
            )


def through(states: np.ndarray, name: str) -> np.ndarray:
    out = np.empty_like(states)
    codec.decode_states(name, codec.encode_states(states, name), out)
    return out


@pytest.mark.parametrize("name", ["em-zfast", "bitround-4", "rot4"])
def test_states_pass_through_the_codec_and_nothing_else(
    tmp_path: Path, source: Dataset, samples: list[tiny.Sample], name: str
) -> None:
    wanted = [
        Wanted(id=number, codec=name if number % 3 else "em-zfast")
        for number in range(1, COUNT + 1)
    ]
    made = derive(source, tmp_path / "made", wanted)
    found = list(stored(made))
    assert len(found) == COUNT
    for each, sample, (row, ids, states, used) in zip(wanted, samples, found, strict=True):
        assert used == each.codec
        assert np.array_equal(ids, [*sample.prompt, *sample.completion])
        assert np.array_equal(states, through(sample.states, each.codec))
        assert row["tokens"] == len(sample.states)
    with made.reader() as reader:
        assert verify(made.path, reader.manifest, deep=True).damaged == []


def test_the_trainer_sees_the_same_samples_in_the_same_order(
    tmp_path: Path, source: Dataset
) -> None:
    made = derive(
        source, tmp_path / "made", [Wanted(id=n, codec="rot4") for n in range(1, COUNT + 1)]
    )
    tables = []
    for dataset in (source, made):
        with dataset.reader() as reader:
            tables.append(data.select(reader.extracted(), 64).samples)
    before, after = tables
    assert data.fingerprint(before) == data.fingerprint(after)
    assert np.array_equal(data.is_validation(before, 0.2), data.is_validation(after, 0.2))


@pytest.mark.slow
@settings(max_examples=8)
@given(cuts=st.dictionaries(st.integers(1, COUNT), st.integers(1, 60), min_size=1, max_size=20))
def test_shortened_samples_are_prefixes(
    tmp_path_factory: pytest.TempPathFactory,
    source: Dataset,
    samples: list[tiny.Sample],
    cuts: dict[int, int],
) -> None:
    made = derive(
        source,
        tmp_path_factory.mktemp("made") / "dataset",
        [Wanted(id=n, codec="em-zfast", supervised=cut) for n, cut in sorted(cuts.items())],
    )
    found = list(stored(made))
    assert len(found) == len(cuts)
    for (number, cut), (row, ids, states, _) in zip(sorted(cuts.items()), found, strict=True):
        sample = samples[number - 1]
        left = min(cut, len(sample.completion))
        length = len(sample.prompt) + left
        assert row["completion_tokens"] == left
        assert np.array_equal(ids, [*sample.prompt, *sample.completion][:length])
        assert np.array_equal(states, sample.states[:length])
        assert row["finish_reason"] == ("length" if cut < len(sample.completion) else "stop")


class Stopped(Exception):
    """Stands for a kill."""


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_goes_on_where_it_was_stopped(tmp_path: Path, source: Dataset, after: int) -> None:
    calls = 0

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise Stopped

    wanted = [Wanted(id=number, codec="bitround-4") for number in range(1, COUNT + 1)]
    with pytest.raises(Stopped):
        derive(source, tmp_path / "made", wanted, on_progress=stop)
    seen: list[tuple[int, int]] = []
    made = derive(source, tmp_path / "made", wanted, on_progress=lambda *each: seen.append(each))
    assert seen[-1] == (2 * COUNT, 2 * COUNT)
    assert seen[0][0] > 0
    with made.reader() as reader:
        assert reader.extracted().num_rows == COUNT
        attempts = reader.sql("SELECT count(*) AS n FROM attempts").column("n")[0].as_py()
    assert attempts == 2 * COUNT
    derive(source, tmp_path / "made", wanted, on_progress=stop)  # nothing left to tell


def test_samples_that_are_not_there_are_told(tmp_path: Path, source: Dataset) -> None:
    with pytest.raises(DatasetError, match=f"1 samples have no hidden states.*{COUNT + 7}"):
        derive(source, tmp_path / "made", [Wanted(id=COUNT + 7, codec="raw")])
