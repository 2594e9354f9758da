"""`convert`: the other form of a draft, whole or not at all, and nothing lost on the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftmill.manifests.errors import ConfigError, DatasetError
from draftmill.manifests.target.target import TargetModel
from draftmill.tools.cli import main
from draftmill.trainer.convert import convert_draft
from draftmill.trainer.drafts.model import create_draft, save_draft
from draftmill.trainer.drafts.vocab import build_mapping
from draftmill.trainer.settings import TrainSettings
from tests.trainer import drafts, tiny


@pytest.fixture
def ours(target: TargetModel, tmp_path: Path) -> Path:
    """A draft as training writes it, in speculators' form."""
    counts = np.random.default_rng(1).integers(0, 9, tiny.VOCAB)
    vocab = build_mapping(counts, np.zeros_like(counts), 48, "f")
    folder = tmp_path / "ours"
    folder.mkdir()
    save_draft(create_draft(target, (2, 3, 5), vocab, TrainSettings(draft_vocab_size=48)), folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("with_target", [True, False])
def test_there_and_back_is_the_same(
    ours: Path, target: TargetModel, tmp_path: Path, with_target: bool
) -> None:
    facts = target if with_target else None
    flat = convert_draft(ours, tmp_path / "flat", "flat", target=facts)
    # the embeddings are the target's own; only who sees the target can leave them out
    assert ("embed_tokens.weight" in load_file(flat / "model.safetensors")) != with_target
    back = convert_draft(flat, tmp_path / "back", "speculators", target=facts)
    assert contents(back) == contents(ours)


def test_the_config_says_the_type_that_the_weights_have(
    target: TargetModel, tmp_path: Path
) -> None:
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        weights = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in drafts.flat_weights(target, drafts.some_ids(target, 96)).items()
        }
        word = str(dtype).removeprefix("torch.")
        theirs = drafts.write(tmp_path / word, drafts.flat_config(target, 96), weights, "bin")
        for form in ("flat", "speculators"):
            out = convert_draft(theirs, tmp_path / f"{word}-{form}", form, target=target)  # type: ignore[arg-type]
            assert json.loads((out / "config.json").read_text())["dtype"] == word
            assert load_file(out / "model.safetensors")["fc.weight"].dtype == dtype


def test_a_foreign_draft_becomes_one_of_speculators(target: TargetModel, tmp_path: Path) -> None:
    ids = drafts.some_ids(target, 96)
    weights = drafts.flat_weights(target, ids)
    config = drafts.flat_config(target, 96, max_position_embeddings=100)
    theirs = drafts.write(tmp_path / "theirs", config, weights, "bin")
    with pytest.raises(ConfigError, match="which target model it is for: name it with --target"):
        convert_draft(theirs, tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()
    notes: list[str] = []
    out = convert_draft(theirs, tmp_path / "out", "speculators", target=target, note=notes.append)
    assert any("max_position_embeddings is 100, the target's is 256" in note for note in notes)
    written = json.loads((out / "config.json").read_text())
    assert written["transformer_layer_config"]["max_position_embeddings"] == tiny.CONTEXT
    found = load_file(out / "model.safetensors")
    for name, tensor in weights.items():
        assert torch.equal(found[name.replace("midlayer.", "layers.0.")], tensor), name
    # and back: the reference's own fields and tensors
    flat = convert_draft(out, tmp_path / "flat", "flat", target=target, note=notes.append)
    assert load_file(flat / "model.safetensors").keys() == weights.keys()


def test_what_sglang_reads_otherwise_is_said(ours: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    convert_draft(ours, tmp_path / "flat", "flat", note=notes.append)
    assert any("SGLang releases without norm_before_fc" in note for note in notes)


def test_a_draft_with_faults_is_not_converted(target: TargetModel, tmp_path: Path) -> None:
    weights = drafts.flat_weights(target, drafts.some_ids(target, 96))
    del weights["fc.weight"]
    theirs = drafts.write(tmp_path / "t", drafts.flat_config(target, 96), weights, "safetensors")
    for form in ("flat", "speculators"):
        with pytest.raises(ConfigError, match=r"fc\.weight is missing"):
            convert_draft(theirs, tmp_path / "out", form, target=target)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is there already"):
        convert_draft(ours, ours, "flat")


def test_the_command(
    ours: Path, target: TargetModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "flat"
    words = ["convert", str(ours), str(out), "--format", "flat", "--target", str(target.folder)]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0, capsys.readouterr()
    assert json.loads((out / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLMEagle3"
    ]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    assert "is there already" in capsys.readouterr().err
