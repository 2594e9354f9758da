"""Drafts that are rubbish in one place: one error that names it, or a draft that is sound."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftmill.manifests.errors import ConfigError, DamagedError, DatasetError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.convert import convert_draft
from draftmill.trainer.drafts.forms import read_draft
from draftmill.trainer.drafts.model import create_draft, load_draft, save_draft
from draftmill.trainer.drafts.vocab import build_mapping
from draftmill.trainer.finetune import open_checkpoint
from draftmill.trainer.settings import Finetune, TrainSettings
from tests.trainer import drafts, tiny

SETTINGS = TrainSettings(draft_vocab_size=96, max_seq_len=64)
FLAT = drafts.flat_config
ODD = st.sampled_from(
    [None, True, -1, 0, 3, 2.5, "x", "", [], [1], [2, "a", 5], [2.0, 3.0], {}, {"a": 1}, [[1]], "9"]
)


@pytest.fixture(scope="module")
def flat(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat")
    ids = drafts.some_ids(target, 96)
    weights = drafts.flat_weights(target, ids)
    return drafts.write(folder, FLAT(target, 96), weights, "safetensors")


@pytest.fixture(scope="module")
def ours(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import numpy as np

    counts = np.random.default_rng(1).integers(0, 9, tiny.VOCAB)
    vocab = build_mapping(counts, np.zeros_like(counts), 96, "f")
    folder = tmp_path_factory.mktemp("ours")
    save_draft(create_draft(target, (2, 3, 5), vocab, SETTINGS), folder)
    return folder


def use(folder: Path, target: TargetModel, out: Path) -> None:
    """Everything that is done with a foreign draft."""
    finetune = Finetune(checkpoint=folder, other_target=True)
    start = open_checkpoint(
        finetune, SETTINGS, target=target, target_layer_ids=(2, 3, 5), note=lambda _: None
    )
    load_draft(read_draft(folder), target, start.settings)
    convert_draft(folder, out, "flat")


@pytest.mark.parametrize("form", ["flat", "speculators"])
def test_a_config_with_any_value_anywhere(
    form: str, flat: Path, ours: Path, target: TargetModel, tmp_path: Path
) -> None:
    source = flat if form == "flat" else ours
    config = json.loads((source / "config.json").read_text())
    config["speculators_config"] = config.get("speculators_config", {})
    config["draftmill"] = {"speculators_config": config["speculators_config"]}
    inner = [
        ("transformer_layer_config", key) for key in config.get("transformer_layer_config", ())
    ]
    inner += [("eagle_config", key) for key in config.get("eagle_config", ())]
    inner += [("speculators_config", key) for key in config["speculators_config"]]
    places = [(key,) for key in config] + inner
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    number = iter(range(10_000))

    @given(st.sampled_from(places), ODD)
    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    def check(place: tuple[str, ...], value: Any) -> None:
        changed = json.loads(json.dumps(config))
        part = changed if len(place) == 1 else changed[place[0]]
        part[place[-1]] = value
        (tmp_path / "config.json").write_text(json.dumps(changed))
        try:
            use(tmp_path, target, tmp_path / f"out{next(number)}")
        except (ConfigError, DamagedError) as error:
            said = str(error)
        else:
            return
        assert "\n" not in said
        assert str(tmp_path) in said

    check()


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"architectures": 3}'])
def test_a_config_that_is_none(flat: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors").symlink_to(flat / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((ConfigError, DamagedError)):
        read_draft(tmp_path)


def nan(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = torch.nan
    return tensor


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "nan": (nan, "holds NaN or infinity"),
    "infinity": (lambda t: t / 0, "holds NaN or infinity"),
    "int8": (lambda t: t.to(torch.int8), "is stored as int8"),
    "fp8": (lambda t: t.to(torch.float8_e4m3fn), "is stored as float8_e4m3fn"),
    "one number": (lambda t: t.sum(), "has shape []"),
    "empty": (lambda t: t[:0], "has shape [0"),
    "one row less": (lambda t: t[1:], "has shape|the draft vocabulary has 96 tokens"),
}


@pytest.mark.parametrize("what", WRONG)
def test_every_wrong_weight_is_named_with_what_is_wrong(
    target: TargetModel, tmp_path: Path, what: str
) -> None:
    weights = drafts.flat_weights(target, drafts.some_ids(target, 96))
    change, words = WRONG[what]
    for name in weights:
        if name in ("d2t", "t2d"):
            continue
        folder = tmp_path / name
        wrong = {**weights, name: change(weights[name])}
        drafts.write(folder, FLAT(target, 96), wrong, "safetensors")
        with pytest.raises(ConfigError) as failure:
            use(folder, target, tmp_path / "out")
        said = str(failure.value)
        assert name.replace("midlayer.", "layers.0.") in said
        assert any(word in said for word in words.split("|")), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_place_without_a_name_is_refused(flat: Path, name: str) -> None:
    with pytest.raises(DatasetError, match="no name for a new folder"):
        convert_draft(flat, Path(name), "flat")
