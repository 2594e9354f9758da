"""The draft vocabulary: what is in it, how it is numbered, and that a stale one is never used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ConfigError, DamagedError, DatasetError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.drafts.vocab import (
    build_mapping,
    count_tokens,
    keep_vocab,
    load_mapping,
    make_vocab,
    save_mapping,
)
from tests.trainer import tiny


@given(st.lists(st.integers(0, 3), min_size=8, max_size=60), st.data())
def test_the_mapping_is_speculators_and_vllms(counts: list[int], draw: st.DataObject) -> None:
    supervised = np.array(counts, np.int64)
    size = draw.draw(st.integers(2, len(counts)))
    mapping = build_mapping(supervised, np.zeros_like(supervised), size, "f")
    # vLLM: target id = draft id + d2t[draft id]; speculators: rows of the head where t2d is set
    targets = mapping.target_ids
    assert (np.diff(targets) > 0).all()
    assert (np.flatnonzero(mapping.t2d) == targets).all()
    left_out = np.setdiff1d(np.arange(len(counts)), targets)
    if left_out.size:
        assert supervised[targets].min() >= supervised[left_out].max()
    assert mapping.size == size


def test_the_mapping_is_the_one_that_speculators_builds() -> None:
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    rng = np.random.default_rng(0)
    supervised = rng.integers(0, 20, 300)
    mapping = build_mapping(supervised, np.zeros(300, np.int64), 100, "f")
    counted = {n: int(c) for n, c in enumerate(supervised) if c}
    d2t, t2d = build_vocab_mappings_from_distribution(counted, 100, 300)
    assert (mapping.d2t == d2t.numpy()).all()
    assert (mapping.t2d == t2d.numpy()).all()


def test_left_over_places_go_to_tokens_of_prompts_then_to_low_ids() -> None:
    supervised = np.array([0, 0, 0, 0, 9, 0, 0, 4])
    prompts = np.array([0, 0, 0, 2, 0, 7, 1, 0])
    assert build_mapping(supervised, prompts, 4, "f").target_ids.tolist() == [3, 4, 5, 7]
    assert build_mapping(supervised, prompts, 6, "f").target_ids.tolist() == [0, 3, 4, 5, 6, 7]
    assert build_mapping(supervised, prompts, 2, "f").coverage == 1.0
    assert build_mapping(np.array([3, 1, 0]), np.zeros(3, int), 2, "f").coverage == 1.0
    assert build_mapping(np.array([6, 3, 1]), np.zeros(3, int), 2, "f").coverage == 0.9


@pytest.mark.parametrize("size", [0, 1, 9])
def test_a_size_that_does_not_fit_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="2 to 8 fit"):
        build_mapping(np.zeros(8, np.int64), np.zeros(8, np.int64), size, "f")


def test_only_supervised_tokens_within_the_cut_count() -> None:
    samples = tiny.random_samples(20)
    columns = tiny.columns(samples, max_seq_len=15)
    supervised, prompts = count_tokens(tiny.MemoryReader(samples), columns, tiny.VOCAB)
    wanted = np.zeros(tiny.VOCAB, np.int64)
    for sample in samples:
        np.add.at(wanted, sample.completion[: 15 - len(sample.prompt)], 1)
    assert (supervised == wanted).all()
    assert prompts.sum() == sum(len(sample.prompt) for sample in samples)


def test_tokens_of_another_model_are_refused() -> None:
    samples = tiny.random_samples(5)
    with pytest.raises(DamagedError, match="Is it the one that the completions came from"):
        count_tokens(tiny.MemoryReader(samples), tiny.columns(samples), 50)


def test_it_is_kept_and_used_again_until_the_data_changes(
    tmp_path: Path, target: TargetModel
) -> None:
    path = tiny.build_dataset(tmp_path / "d", tiny.random_samples(10)).path
    counted: list[int] = []

    def make(size: int = 64) -> np.ndarray:
        counted.clear()
        return make_vocab(
            path, size, target=target, on_progress=lambda done, of: counted.append(done)
        ).target_ids

    first = make()
    assert counted
    assert (make() == first).all()
    assert not counted
    make(65)
    assert counted
    stored = sorted((path / "vocab").iterdir())
    assert len(stored) == 2
    tiny.build_dataset(path, tiny.random_samples(10, seed=9))
    changed = make()
    assert counted
    assert not np.array_equal(changed, first)
    assert len(list((path / "vocab").iterdir())) == 3
    stored[0].write_bytes(stored[0].read_bytes()[:-1])
    assert load_mapping(stored[0], tiny.VOCAB) is None


def test_whatever_changes_in_the_data_changes_the_key(tmp_path: Path, target: TargetModel) -> None:
    """T1: more, fewer or other completions never meet a mapping that was counted before."""
    samples = tiny.random_samples(12)
    other = [*samples[:-1], tiny.random_samples(1, seed=7)[0]]
    shorter = [*samples[:-1], replace(samples[-1], completion=samples[-1].completion[:1],
        states=samples[-1].states[: len(samples[-1].prompt) + 1])]  # fmt: skip
    keys = {}
    for name, kept in (
        ("all", samples), ("fewer", samples[:-1]), ("other", other), ("shorter", shorter),
    ):  # fmt: skip
        path = tiny.build_dataset(tmp_path / name, kept).path
        keys[name] = make_vocab(path, 64, target=target).fingerprint
    assert len(set(keys.values())) == len(keys), keys
    again = tiny.build_dataset(tmp_path / "again", samples).path
    assert make_vocab(again, 64, target=target).fingerprint == keys["all"]


@pytest.mark.parametrize("what", ["fingerprint", "size", "target"])
def test_a_stale_mapping_under_the_right_name_is_counted_anew(
    tmp_path: Path, target: TargetModel, what: str
) -> None:
    path = tiny.build_dataset(tmp_path / "d", tiny.random_samples(10)).path
    right = make_vocab(path, 64, target=target)
    (stored,) = (path / "vocab").iterdir()
    size, total = {"size": (65, tiny.VOCAB), "target": (64, 500)}.get(what, (64, tiny.VOCAB))
    counts = np.random.default_rng(9).integers(0, 9, total)
    name = "another" if what == "fingerprint" else right.fingerprint
    save_mapping(build_mapping(counts, np.zeros_like(counts), size, name), stored)
    found = make_vocab(path, 64, target=target)
    assert (found.target_ids == right.target_ids).all()
    assert (found.counts == right.counts).all()


def test_a_drafts_own_vocabulary_gets_the_coverage_of_this_data(
    tmp_path: Path, target: TargetModel
) -> None:
    samples = tiny.random_samples(10)
    path = tiny.build_dataset(tmp_path / "d", samples).path
    seen = np.unique(np.concatenate([sample.completion for sample in samples])).astype(np.int64)
    for ids in (seen, np.setdiff1d(np.arange(tiny.VOCAB), seen), seen[::2]):
        kept = keep_vocab(path, ids, target=target)
        assert (kept.target_ids == ids).all()
        inside = sum(np.isin(sample.completion, ids).sum() for sample in samples)
        assert kept.coverage == pytest.approx(inside / sum(len(s.completion) for s in samples))
    assert not list((path / "vocab").iterdir()), "a foreign vocabulary is none of the dataset's"


def test_a_mapping_of_another_target_is_not_used(tmp_path: Path) -> None:
    mapping = build_mapping(np.arange(40), np.zeros(40, np.int64), 8, "f")
    save_mapping(mapping, tmp_path / "m")
    again = load_mapping(tmp_path / "m", 40)
    assert again is not None
    assert (again.d2t == mapping.d2t).all()
    assert (again.fingerprint, again.coverage) == ("f", mapping.coverage)
    assert load_mapping(tmp_path / "m", 41) is None
    assert load_mapping(tmp_path / "absent", 40) is None


def test_a_dataset_without_hidden_states_says_what_to_do(
    tmp_path: Path, target: TargetModel
) -> None:
    dataset = Dataset.create(tmp_path / "d", "")
    with dataset.writer():
        pass
    with pytest.raises(DatasetError, match="draftmill extract"):
        make_vocab(dataset.path, 64, target=target)
