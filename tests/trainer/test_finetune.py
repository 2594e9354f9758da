"""Finetuning: somebody's draft goes on where it stood, or is refused with both values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftmill.manifests.errors import ConfigError, SettingsMismatch
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.drafts.forms import read_draft
from draftmill.trainer.drafts.vocab_tables import canonical_vocab
from draftmill.trainer.finetune import open_checkpoint
from draftmill.trainer.runlog import read_log
from draftmill.trainer.settings import Finetune, TrainSettings
from draftmill.trainer.train import TrainReport, initial_draft, train
from tests.trainer import drafts, tiny

SETTINGS = TrainSettings(
    draft_vocab_size=256,
    max_seq_len=60,
    steps=6,
    lr=5e-3,
    validation=0.2,
    checkpoint_every=3,
    log_every=1,
    decode_workers=0,
    ttt_steps=2,
)
IDS = list(tiny.LAYER_IDS)
LAYERS = {"eagle_aux_hidden_state_layer_ids": IDS}


def run(
    dataset: Path, target: TargetModel, output: Path, finetune: Finetune, **changes: Any
) -> tuple[TrainReport, list[str]]:
    notes: list[str] = []
    report = train(
        dataset,
        replace(SETTINGS, **changes),
        target=target,
        target_layer_ids=tiny.LAYER_IDS,
        output=output,
        finetune=finetune,
        note=notes.append,
    )
    return report, notes


def foreign(target: TargetModel, folder: Path, how: str = "bin", **changes: Any) -> Path:
    """A flat draft of another trainer with a vocabulary of 96 tokens."""
    ids = drafts.some_ids(target, 96)
    config = drafts.flat_config(target, 96, **{**LAYERS, **changes})
    return drafts.write(folder, config, drafts.flat_weights(target, ids), how)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["speculators", "flat"])
def test_a_foreign_draft_keeps_its_vocabulary_and_shape(
    dataset: Path, target: TargetModel, tmp_path: Path, form: str
) -> None:
    checkpoint = foreign(target, tmp_path / "theirs")
    report, notes = run(
        dataset,
        target,
        tmp_path / "run",
        Finetune(checkpoint=checkpoint),
        checkpoint_format=form,
    )
    assert report.step == 6
    assert report.draft_vocab_size == 96
    assert 0 < report.coverage < 1
    assert any(f"layers {IDS}" in note for note in notes)
    theirs, ours = read_draft(checkpoint), read_draft(tmp_path / "run")
    assert ours.form == form
    assert torch.equal(theirs.weights["t2d"], ours.weights["t2d"])
    assert not torch.equal(theirs.weights["fc.weight"], ours.weights["fc.weight"])
    for switch in ("norm_before_residual", "norm_before_fc"):
        assert not ours.config[switch], "the checkpoint's shape wins over the settings'"
    assert ours.decoder["rope_parameters"]["rope_theta"] == 1000000.0
    bound = json.loads((tmp_path / "run" / "run.json").read_text())
    assert bound["draft_vocab_size"] == 96
    other = Finetune(checkpoint=foreign(target, tmp_path / "others", eos_token_id=7))
    with pytest.raises(SettingsMismatch, match=r"finetuned_from was '[0-9a-f]{32}' and is now"):
        run(dataset, target, tmp_path / "run", other, checkpoint_format=form)


@pytest.mark.slow
def test_finetuning_starts_where_the_checkpoint_stood(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    """The first loss of a finetuned run is the last one of the run before, form by form."""
    train(
        dataset,
        replace(SETTINGS, steps=24, checkpoint_format="flat"),
        target=target,
        target_layer_ids=tiny.LAYER_IDS,
        output=tmp_path / "first",
    )
    fresh = read_log(tmp_path / "first" / "log.jsonl")[1]["loss"]
    report, _ = run(
        dataset, target, tmp_path / "second", Finetune(checkpoint=tmp_path / "first"), steps=1
    )
    assert report.loss is not None
    assert report.loss < 0.7 * fresh
    # another vocabulary: what the rows say about their tokens goes along
    report, notes = run(
        dataset,
        target,
        tmp_path / "third",
        Finetune(checkpoint=tmp_path / "first", new_vocab=True),
        steps=1,
        draft_vocab_size=300,
    )
    assert report.draft_vocab_size == 300
    assert report.loss is not None
    assert report.loss < 0.8 * fresh
    assert any("256 rows of the head kept, 0 dropped, 44 new" in note for note in notes)


@pytest.mark.slow
def test_asked_for_another_vocabulary_rows_follow_their_tokens(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    """T2: the rows of the written head are those of its own tokens, under every size."""
    checkpoint = foreign(target, tmp_path / "theirs")
    theirs = read_draft(checkpoint)
    old = theirs.weights["t2d"].nonzero().flatten().tolist()
    for size in (40, 200, tiny.VOCAB):
        output = tmp_path / f"run{size}"
        report, _ = run(
            dataset,
            target,
            output,
            Finetune(checkpoint=checkpoint, new_vocab=True),
            draft_vocab_size=size,
            train_lm_head=False,
            steps=1,
        )
        assert report.draft_vocab_size == size
        found = load_file(output / "model.safetensors")
        new = (
            found["t2d"].nonzero().flatten().tolist() if "t2d" in found else list(range(tiny.VOCAB))
        )
        assert len(new) == size
        for row, token in enumerate(new):
            if token in old:
                wanted = theirs.weights["lm_head.weight"][old.index(token)]
                assert torch.equal(found["lm_head.weight"][row], wanted)


@pytest.mark.slow
def test_an_interrupted_finetuning_goes_on(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def die(progress: Any) -> None:
        if progress.step == 4:
            raise Killed

    finetune = Finetune(checkpoint=foreign(target, tmp_path / "theirs"), new_vocab=True)
    whole, _ = run(dataset, target, tmp_path / "whole", finetune)
    with pytest.raises(Killed):
        train(
            dataset,
            SETTINGS,
            target=target,
            target_layer_ids=tiny.LAYER_IDS,
            output=tmp_path / "run",
            finetune=finetune,
            on_progress=die,
        )
    again, _ = run(dataset, target, tmp_path / "run", finetune)
    assert (again.step, again.loss) == (whole.step, whole.loss)
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("whole", "run")]
    assert weights[0] == weights[1]


def opened(target: TargetModel, finetune: Finetune) -> list[str]:
    notes: list[str] = []
    open_checkpoint(
        finetune, SETTINGS, target=target, target_layer_ids=tiny.LAYER_IDS, note=notes.append
    )
    return notes


@pytest.mark.parametrize(
    ("said", "mine"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, [2, 4, 6]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}}, [2, 3, 5]),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, [2, 4, 5]),
        ({"eagle_config": {}, "target_layer_ids": [1, 2, 4]}, [2, 3, 5]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 5]}, [1, 2, 3, 5]),
    ],
)
def test_other_layers_than_the_datasets_are_refused_with_both_lists(
    target: TargetModel, tmp_path: Path, said: dict[str, Any], mine: list[int]
) -> None:
    ids = drafts.some_ids(target, 96)
    config = {**drafts.flat_config(target, 96), **said}
    folder = drafts.write(tmp_path, config, drafts.flat_weights(target, ids), "bin")
    with pytest.raises(ConfigError) as caught:
        opened(target, Finetune(checkpoint=folder))
    assert f"reads layers {mine}" in str(caught.value)
    assert "the dataset has [1, 3, 5]" in str(caught.value)
    assert "input of decoder layer k" in str(caught.value)
    assert opened(target, Finetune(checkpoint=folder, layer_ids=tiny.LAYER_IDS))


def test_a_config_without_layers_means_the_usual_ones(target: TargetModel, tmp_path: Path) -> None:
    folder = foreign(target, tmp_path, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    # 6 layers are so few that the usual ones would collide: (1, 3, 5)
    assert opened(target, Finetune(checkpoint=folder))


def test_the_layers_of_kimi_drafts_meet_those_of_a_dataset(target: TargetModel) -> None:
    """AQ-MedAI's [2, 30, 58] are the inputs that `init` chooses for Kimi's 61 layers."""
    from draftmill.manifests.target.target import default_target_layer_ids
    from draftmill.trainer.drafts.forms import _flat_layers

    assert _flat_layers({}, {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]})[0] == (2, 30, 58)
    assert default_target_layer_ids(61) == (2, 30, 58)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, that of the target tests/tiny-llama is 64"),
        ({"vocab_size": 600}, r"600|vocab_size is 600, that of the target .* is 512"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, the target's hidden size is 64"),
    ],
)
def test_a_draft_of_another_size_is_refused(
    target: TargetModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(target, Finetune(checkpoint=foreign(target, tmp_path, **changes)))


def test_a_draft_made_for_another_target_is_refused_unless_said(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    folder = initial_draft(
        dataset, SETTINGS, target=target, target_layer_ids=tiny.LAYER_IDS, output=tmp_path / "d"
    )
    other = replace(target, name="tests/another")
    with pytest.raises(ConfigError, match="made for tests/tiny-llama, the dataset is of tests/ano"):
        opened(other, Finetune(checkpoint=folder))
    assert opened(other, Finetune(checkpoint=folder, other_target=True))
    # a path in place of a name is the same model
    assert opened(replace(target, name="/models/Tiny-Llama/"), Finetune(checkpoint=folder))


def test_a_shorter_context_is_told(target: TargetModel, tmp_path: Path) -> None:
    """T7, for every length: lower is warned of, and what is written has the target's."""
    for context in (64, tiny.CONTEXT - 1, tiny.CONTEXT, 131072):
        folder = foreign(target, tmp_path / str(context), max_position_embeddings=context)
        notes = opened(target, Finetune(checkpoint=folder))
        told = [note for note in notes if f"max_position_embeddings is {context}" in note]
        assert bool(told) == (context < tiny.CONTEXT)


def test_mapped_rows_are_the_same_whatever_way_they_were_stored(target: TargetModel) -> None:
    ids = drafts.some_ids(target, 96)
    weights = drafts.flat_weights(target, ids)
    shuffled = np.random.default_rng(3).permutation(96)
    absolute = {
        **weights,
        "lm_head.weight": weights["lm_head.weight"][torch.from_numpy(shuffled)],
        "d2t": torch.from_numpy(ids[shuffled]),
    }
    one, two = (canonical_vocab(w, target.vocab_size, Path("d")) for w in (weights, absolute))
    assert all(torch.equal(one[name], two[name]) for name in one)
