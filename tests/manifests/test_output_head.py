"""Log-probabilities rebuilt in numpy are those of torch, whatever a config does to logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from draftmill.manifests.errors import ConfigError
from draftmill.manifests.target import output_head
from draftmill.manifests.target.output_head import OutputHead
from draftmill.manifests.target.target import TargetModel

HIDDEN, VOCAB = 24, 700


def make(folder: Path, *, tied: bool = False, **config: Any) -> tuple[TargetModel, torch.Tensor]:
    """A folder with the weights that matter; also the lm_head's."""
    folder.mkdir()
    rng = torch.Generator().manual_seed(7)
    head = torch.randn(VOCAB, HIDDEN, generator=rng).to(torch.bfloat16)
    norm = torch.rand(HIDDEN, generator=rng).to(torch.bfloat16)
    weights = {"model.norm.weight": norm, "model.embed_tokens.weight": head.clone()}
    if not tied:
        weights["lm_head.weight"] = head
        weights["model.embed_tokens.weight"] = head * 3
    save_file(weights, folder / "model.safetensors")
    facts = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(facts | config))
    return TargetModel.from_folder(folder), head


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ({}, lambda x: x),
        ({"tied": True}, lambda x: x),
        ({"logits_scaling": 8.0}, lambda x: x / 8),
        ({"logit_scale": 0.0625}, lambda x: x * 0.0625),
        ({"dim_model_base": 6}, lambda x: x / (HIDDEN / 6)),
        ({"final_logit_softcapping": 5.0}, lambda x: 5 * torch.tanh(x / 5)),
        ({"model_type": "gemma2"}, lambda x: x),
    ],
)
def test_scores_are_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], change: Any
) -> None:
    # Slices that do not divide the vocabulary.
    monkeypatch.setattr(output_head, "_SLICE_BYTES", 4 * HIDDEN * 64)
    target, head = make(tmp_path / "m", **config)
    states = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)) * 3
    weight = torch.from_numpy(output_head.to_floats(target.final_norm()))
    weight = weight + 1 if config.get("model_type") == "gemma2" else weight
    normalised = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    wanted = change(normalised @ head.float().T).log_softmax(-1)
    tokens = np.stack([np.arange(9), np.arange(9) * 70 + 63], 1)
    found = OutputHead.of(target).scores(states.numpy(), tokens)
    np.testing.assert_allclose(
        found.wanted_TK, wanted.gather(1, torch.from_numpy(tokens)).numpy(), atol=2e-4
    )
    np.testing.assert_array_equal(found.first_T, wanted.argmax(-1).numpy())


def test_a_step_is_that_of_bf16(tmp_path: Path) -> None:
    target, head = make(tmp_path / "m")
    states = np.ones((3, HIDDEN), np.float32) * [[1], [10], [100]]
    scores = OutputHead.of(target).scores(states.astype(np.float32), np.zeros((3, 1), np.int64))
    largest = (torch.from_numpy(output_head.to_floats(target.final_norm())) @ head.float().T).abs()
    exact = largest.max().to(torch.bfloat16)
    step = (exact.view(torch.int16) + 1).view(torch.bfloat16).float() - exact.float()
    np.testing.assert_allclose(scores.step_T, step.item())


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"rms_norm_eps": None}, "only RMSNorm"), ({"lm_head_multiplier": 0.2}, "lm_head_multiplier")],
)
def test_what_is_not_known_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    target, _ = make(tmp_path / "m", **config)
    with pytest.raises(ConfigError, match=reason):
        OutputHead.of(target)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    target, _ = make(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no safetensors weight"):
        OutputHead.of(TargetModel.from_folder(target.folder))
