"""Datasets that are not of the target are refused before anything is trained, with both values."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ConfigError, DamagedError, DatasetError, UsageError
from draftmill.manifests.target.target import TargetModel
from draftmill.tools.init import create, target_settings
from draftmill.tools.settings import load
from draftmill.tools.train import target_facts
from draftmill.trainer.match import check_dataset
from draftmill.trainer.settings import TrainSettings
from draftmill.trainer.train import train
from tests.trainer import tiny


@pytest.fixture
def own(dataset: Path, tmp_path: Path) -> Path:
    """A dataset to change."""
    return Path(shutil.copytree(dataset, tmp_path / "d"))


def check(path: Path, target: TargetModel, ids: tuple[int, ...] = tiny.LAYER_IDS) -> None:
    with Dataset.open(path).reader() as reader:
        check_dataset(reader, reader.extracted(), target, ids)


def made_with(path: Path, stage: str, **settings: Any) -> None:
    with Dataset.open(path).writer() as writer:
        writer.check_fingerprint(stage, settings)


def save_tokenizer(folder: Path, letter: str) -> None:
    """A tokenizer whose tokens are words that begin with `letter`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"{letter}{number}": number for number in range(tiny.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"{letter}0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_a_dataset_of_the_target_passes(own: Path, target: TargetModel) -> None:
    check(own, target)
    made_with(own, "generate", model=target.name)
    made_with(
        own, "extract", model=target.name, hidden_size=tiny.HIDDEN, layer_ids=[1, 3, 5, tiny.LAYERS]
    )
    check(own, target)


@pytest.mark.parametrize("stage", ["generate", "extract"])
def test_another_model_is_refused(own: Path, target: TargetModel, stage: str) -> None:
    made_with(own, stage, model="org/another")
    with pytest.raises(DatasetError, match="are of org/another, the draft is to be for tests/tiny"):
        check(own, target)


def test_another_width_is_refused(own: Path, target: TargetModel) -> None:
    made_with(own, "extract", model=target.name, hidden_size=128)
    with pytest.raises(DatasetError, match=r"are 128 wide, tests/tiny-llama in .* has 64"):
        check(own, target)


def test_other_layers_are_refused_with_both_lists(own: Path, target: TargetModel) -> None:
    others = [(0, 3, 5), (1, 2, 5), (1, 3, 6), (2, 4, 6)]

    def refused() -> None:
        for ids in others:
            wanted = f"of layers [1, 3, 5, 6], the draft is to use {[*ids, 6]}"
            with pytest.raises(DatasetError, match=re.escape(wanted)):
                check(own, target, ids)

    refused()  # by what the records say
    made_with(own, "extract", model=target.name, layer_ids=[1, 3, 5, 6])
    refused()


def test_a_foreign_tokenizer_is_refused(own: Path, target: TargetModel, tmp_path: Path) -> None:
    """Every completion of the dataset came with the text `x`."""
    folders = {letter: tmp_path / letter for letter in "xy"}
    for letter, folder in folders.items():
        shutil.copytree(target.folder, folder)
        save_tokenizer(folder, letter)
    check(own, replace(target, folder=folders["x"]))
    with pytest.raises(DatasetError, match=r"reads the dataset's completions otherwise .*'y"):
        check(own, replace(target, folder=folders["y"]))
    # one that needs code of its own, as Kimi's, cannot be asked
    broken = {"tokenizer_class": "Unheard", "auto_map": {"AutoTokenizer": ["a.B", None]}}
    (folders["y"] / "tokenizer.json").unlink()
    (folders["y"] / "tokenizer_config.json").write_text(json.dumps(broken))
    check(own, replace(target, folder=folders["y"]))


def test_a_last_completion_without_text_hides_nothing(target: TargetModel, tmp_path: Path) -> None:
    """An answer may be all reasoning, or a call of a tool: the others still tell."""
    folder = Path(shutil.copytree(target.folder, tmp_path / "y"))
    save_tokenizer(folder, "y")
    samples = tiny.random_samples(5)
    for silent in range(5):
        path = tmp_path / f"d{silent}"
        some = [*samples]
        some[silent] = replace(some[silent], text=None)
        tiny.build_dataset(path, some)
        with pytest.raises(DatasetError, match="reads the dataset's completions otherwise"):
            check(path, replace(target, folder=folder))
    tiny.build_dataset(tmp_path / "d", [replace(each, text=None) for each in samples])
    check(tmp_path / "d", replace(target, folder=folder))


def test_a_tokenizer_that_cannot_be_read_is_not_asked(
    own: Path, target: TargetModel, tmp_path: Path
) -> None:
    for number, text in enumerate(("", "{", "[]", "{}", '{"model": 3}')):
        folder = Path(shutil.copytree(target.folder, tmp_path / str(number)))
        (folder / "tokenizer.json").write_text(text)
        check(own, replace(target, folder=folder))


def test_training_refuses_and_leaves_no_run(own: Path, target: TargetModel, tmp_path: Path) -> None:
    made_with(own, "generate", model="org/another")
    output = tmp_path / "run"
    with pytest.raises(DatasetError, match="org/another"):
        train(
            own,
            TrainSettings(max_seq_len=60),
            target=target,
            target_layer_ids=tiny.LAYER_IDS,
            output=output,
        )
    assert not (output / "run.json").exists()
    assert not (output / "plan.parquet").exists()


def test_checkpoints_without_their_plan_do_not_go_on(
    own: Path, target: TargetModel, tmp_path: Path
) -> None:
    """A new plan would have other samples, and the place in the old one would mean nothing."""
    output = tmp_path / "run"
    (output / "checkpoints" / "step-000003").mkdir(parents=True)
    with pytest.raises(DamagedError, match=r"plan\.parquet is gone"):
        train(
            own,
            TrainSettings(max_seq_len=60),
            target=target,
            target_layer_ids=tiny.LAYER_IDS,
            output=output,
        )
    assert not (output / "plan.parquet").exists()


@pytest.mark.parametrize("key", ["hidden_size", "num_layers", "vocab_size"])
def test_a_folder_of_another_model_is_refused(
    target: TargetModel, tmp_path: Path, key: str
) -> None:
    settings = target_settings(str(target.folder), name="m")
    create(tmp_path / "d", replace(settings, **{key: getattr(settings, key) * 2}))
    loaded = load(Dataset.open(tmp_path / "d"))
    with pytest.raises(ConfigError, match=f"not the target of this dataset: {key} is"):
        target_facts(loaded, None)
    nowhere = replace(loaded, target=replace(loaded.target, path=""))
    with pytest.raises(UsageError, match="--target DIR"):
        target_facts(nowhere, None)


def no_model(*_: object, **__: object) -> None:
    raise AssertionError("a model was made for a run that cannot be")


def test_rows_that_supervise_nothing_are_refused_before_a_model_is_made(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T4: prompts of 12 tokens, of which no shorter cut leaves an answer."""
    samples = [
        replace(
            sample,
            prompt=np.arange(12, dtype=np.int32),
            states=np.repeat(sample.states[:1], 12 + len(sample.completion), axis=0),
        )
        for sample in tiny.random_samples(6)
    ]
    path = tiny.build_dataset(tmp_path / "d", samples).path
    monkeypatch.setattr("draftmill.trainer.train.create_draft", no_model)
    for cut in range(8, 13):
        with pytest.raises(DatasetError, match=f"6 supervise nothing within {cut} tokens"):
            train(
                path,
                TrainSettings(max_seq_len=cut),
                target=target,
                target_layer_ids=tiny.LAYER_IDS,
                output=tmp_path / "run",
            )


@pytest.mark.parametrize("ids", [(), (3,), (1, 3), (1, 2, 3, 5), (0, 1, 2, 3, 5)])
def test_any_other_number_of_layers_than_three_is_refused_with_the_reason(
    own: Path, target: TargetModel, tmp_path: Path, ids: tuple[int, ...]
) -> None:
    """T11, at init and at training: vLLM would not load the draft."""
    settings = target_settings(str(target.folder), name="m")
    with pytest.raises(ValueError, match="vllm#54526"):
        replace(settings, target_layer_ids=ids)
    with pytest.raises(ConfigError, match=r"exactly 3 auxiliary|distinct ids"):
        train(
            own,
            TrainSettings(max_seq_len=60),
            target=target,
            target_layer_ids=ids,
            output=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
