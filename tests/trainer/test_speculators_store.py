"""speculators' own dataset, collate and model read a draftmill dataset as they read its files."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from draftmill.manifests.errors import DatasetError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import speculators_store as store
from draftmill.trainer.settings import TrainSettings
from tests.trainer import tiny

SETTINGS = TrainSettings(draft_vocab_size=256, max_seq_len=64, validation=0.2)


@pytest.fixture(scope="module")
def prepared(
    dataset: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> store.Prepared:
    folder = tmp_path_factory.mktemp("prepared") / "data"
    return store.prepare(dataset, SETTINGS, target=target, folder=folder)


@pytest.fixture(scope="module")
def exported(dataset: Path, prepared: store.Prepared) -> Path:
    """The same samples as one file each, which is what speculators writes itself."""
    transfer = store.DraftmillTransfer(dataset, prepared.folder)
    folder = prepared.folder / "hidden_states"
    folder.mkdir()
    for number in range(len(prepared.plan.train) + len(prepared.plan.validation)):
        found = transfer.get_cached(number)
        save_file(
            {n: t.contiguous() for n, t in found.items()}, folder / f"hs_{number}.safetensors"
        )
    return prepared.folder


def batches(folder: Path, ratio: float, split: str, **options) -> Iterator[dict]:
    return iter(
        store.file_loader(
            folder, room=64, hidden_size=tiny.HIDDEN, split=split, ratio=ratio, **options
        )
    )


@pytest.mark.parametrize("split", ["train", "val"])
def test_batches_equal_those_from_files(
    dataset: Path, prepared: store.Prepared, exported: Path, split: str
) -> None:
    transfer = store.DraftmillTransfer(dataset, prepared.folder)
    ratio = prepared.train_ratio
    ours = list(batches(prepared.folder, ratio, split, transfer=transfer))
    theirs = list(batches(exported, ratio, split))
    assert len(ours) == len(theirs) > 0
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.keys() == wanted.keys()
        assert mine["error_records"] == 0
        for name, tensor in wanted.items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(mine[name], tensor), name
    supervised = sum(int(batch["loss_mask"].sum()) for batch in ours)
    part = prepared.plan.train if split == "train" else prepared.plan.validation
    assert supervised == int((part.tokens - part.prompt_tokens).sum())


def test_the_split_is_draftmills_own(prepared: store.Prepared) -> None:
    """speculators cuts by position: conversations must not straddle the cut (T6)."""
    train, validation = prepared.plan.train, prepared.plan.validation
    total = len(train) + len(validation)
    assert int(total * prepared.train_ratio) == len(train)
    assert set(train.conversation.tolist()).isdisjoint(validation.conversation.tolist())


def test_a_step_of_its_model_is_the_same_from_both(
    dataset: Path, target: TargetModel, prepared: store.Prepared, exported: Path
) -> None:
    from draftmill.trainer.drafts.model import create_draft, forward
    from draftmill.trainer.drafts.vocab import make_vocab

    vocab = make_vocab(dataset, 256, target=target)
    model = create_draft(target, tiny.LAYER_IDS, vocab, SETTINGS)
    transfer = store.DraftmillTransfer(dataset, prepared.folder)
    gradients = []
    for options in ({"transfer": transfer}, {}):
        (batch,) = islice(batches(exported, prepared.train_ratio, "train", **options), 1)
        tensors = {n: t for n, t in batch.items() if isinstance(t, torch.Tensor)}
        tensors = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
        tensors["loss_mask"] = tensors["loss_mask"].bool()
        model.zero_grad()
        result = forward(model, tensors, SETTINGS)
        result.loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        gradients.append({"loss": result.loss.detach(), **found})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) > 5
    assert all(torch.equal(tensor, gradients[1][name]) for name, tensor in gradients[0].items())


def test_the_transfer_goes_to_workers(dataset: Path, prepared: store.Prepared) -> None:
    transfer = store.DraftmillTransfer(dataset, prepared.folder)
    here = transfer.get_cached(3)
    there = pickle.loads(pickle.dumps(transfer)).get_cached(3)
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())


@pytest.mark.slow
def test_spawned_workers_read_the_same(dataset: Path, prepared: store.Prepared) -> None:
    transfer = store.DraftmillTransfer(dataset, prepared.folder)
    plain = list(batches(prepared.folder, 1.0, "train", transfer=transfer))
    spawned = list(batches(prepared.folder, 1.0, "train", transfer=transfer, workers=1))
    assert len(plain) == len(spawned)
    for one, other in zip(plain, spawned, strict=True):
        assert torch.equal(one["hidden_states"], other["hidden_states"])


def test_a_grown_dataset_keeps_the_samples_of_the_first_time(
    target: TargetModel, tmp_path: Path
) -> None:
    path = tiny.build_dataset(tmp_path / "d", tiny.random_samples(30)).path
    first = store.prepare(path, SETTINGS, target=target, folder=tmp_path / "f")
    tiny.build_dataset(path, tiny.random_samples(9, seed=1))
    again = store.prepare(path, SETTINGS, target=target, folder=tmp_path / "f")
    assert again.plan.train.id.tolist() == first.plan.train.id.tolist()
    assert again.train_ratio == first.train_ratio
    other = SETTINGS.draft_vocab_size + 7
    larger = replace(SETTINGS, draft_vocab_size=other)
    store.prepare(path, larger, target=target, folder=tmp_path / "f")
    assert len(np.load(tmp_path / "f" / f"d2t-{other}.npy")) == other


def test_without_validation_it_says_what_to_do(target: TargetModel, tmp_path: Path) -> None:
    path = tiny.build_dataset(tmp_path / "d", tiny.random_samples(3)).path
    with pytest.raises(DatasetError, match="Raise validation"):
        store.prepare(path, replace(SETTINGS, validation=0.0), target=target, folder=tmp_path / "f")


CONFIG = """
import sys
from draftmill.trainer import speculators_store as store
from speculators.train.config import TrainConfig
config = TrainConfig.resolve(sys.argv[1:])
from hs_connectors import HiddenStatesBackend
import argparse
flat = argparse.Namespace(**config.flatten())
transfer = HiddenStatesBackend.registry[flat.hidden_states_backend].from_train_args(
    flat, flat.data_path)
print(flat.total_seq_len, flat.target_layer_ids, flat.speculator_type, flat.on_missing)
print(tuple(transfer.get_cached(0)["hidden_states"].shape))
"""


@pytest.mark.slow
def test_its_command_line_takes_the_arguments(
    dataset: Path, target: TargetModel, prepared: store.Prepared, tmp_path: Path
) -> None:
    told = store.arguments(
        prepared,
        dataset=dataset,
        target=target,
        target_layer_ids=tiny.LAYER_IDS,
        settings=SETTINGS,
        output=tmp_path,
    )
    done = subprocess.run(
        [sys.executable, "-c", CONFIG, *told, "--speculator-type", "peagle"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shape = (int(prepared.plan.train.tokens[0]), 4, tiny.HIDDEN)
    assert done.stdout.splitlines()[-2:] == ["64 [1, 3, 5] peagle raise", str(shape)]
    assert np.load(prepared.folder / "d2t-256.npy").shape == (256,)
