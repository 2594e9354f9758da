"""A nested target, Kimi-K2.5 in small: from its states to a draft, three weights read."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.manifests.errors import ConfigError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.drafts.forms import read_draft
from draftmill.trainer.drafts.shape import decoder_config
from draftmill.trainer.settings import Finetune, TrainSettings
from draftmill.trainer.train import train
from tests.trainer import drafts, tiny

HIDDEN, LAYERS, VOCAB, CONTEXT = 64, 7, 512, 4096
LAYER_IDS = (2, 3, 4)  # what `init` chooses for 7 layers
TEXT = {
    "model_type": "kimi_k2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "initializer_range": 0.1,
}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SETTINGS = TrainSettings(
    draft_vocab_size=128,
    max_seq_len=64,
    steps=8,
    lr=5e-3,
    validation=0.2,
    decode_workers=0,
    ttt_steps=2,
)
NEEDED = ("embed_tokens.weight", "lm_head.weight", "language_model.model.norm.weight")


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tiny.Sample]]:
    """The model as Hugging Face saves it, and samples with its own hidden states."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    torch.manual_seed(3)
    config = Kimi_K25Config(
        text_config=TEXT,
        vision_config={**VISION, "intermediate_size": 64},
        projection_hidden_size=32,
        tie_word_embeddings=False,
    )
    model = Kimi_K25ForConditionalGeneration(config).to(torch.bfloat16).eval()
    folder = tmp_path_factory.mktemp("kimi") / "Kimi-K2.5"
    model.save_pretrained(folder)
    return folder, _samples(model.float())


def _samples(model: Any, count: int = 24, length: int = 30) -> list[tiny.Sample]:
    text = model.model.language_model
    seen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(text.layers):
        layer.register_forward_pre_hook(lambda _, given, k=number: seen.__setitem__(k, given[0]))
    text.norm.register_forward_pre_hook(lambda _, given: seen.__setitem__(LAYERS, given[0]))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 24, (count, length)))
    with torch.no_grad():
        model(input_ids=ids)
    states = torch.stack([seen[k] for k in (*LAYER_IDS, LAYERS)], dim=2)
    bits = states.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return [
        tiny.Sample(row[:4].numpy().astype(np.int32), row[4:].numpy().astype(np.int32), b, f"c{n}")
        for n, (row, b) in enumerate(zip(ids, bits, strict=True))
    ]


@pytest.fixture(scope="module")
def hollow(kimi: tuple[Path, list[tiny.Sample]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without the bytes of any weight but three: headers only, as of 1 TB."""
    folder = tmp_path_factory.mktemp("hollow") / "Kimi-K2.5"
    folder.mkdir()
    (folder / "config.json").write_bytes((kimi[0] / "config.json").read_bytes())
    weights = load_file(kimi[0] / "model.safetensors")
    kept = 0
    index = {}
    for number, (name, tensor) in enumerate(weights.items()):
        path = folder / f"model-{number:05d}.safetensors"
        save_file({name: tensor}, path)
        index[name] = path.name
        if name.endswith(NEEDED):
            kept += 1
            continue
        (length,) = struct.unpack("<Q", path.read_bytes()[:8])
        with path.open("r+b") as file:
            file.truncate(8 + length)
    assert kept == len(NEEDED)
    assert len(weights) > 60
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.slow
def test_the_facts_are_those_of_the_language_model(kimi: tuple[Path, list[tiny.Sample]]) -> None:
    facts = TargetModel.from_folder(kimi[0], name="moonshotai/Kimi-K2.5")
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (HIDDEN, LAYERS, VOCAB)
    assert facts.max_position_embeddings == CONTEXT
    assert not facts.tie_word_embeddings
    weights = load_file(kimi[0] / "model.safetensors")
    own = {name: t for name, t in weights.items() if name.endswith(NEEDED)}
    for found, name in zip(
        (facts.embed_tokens(), facts.lm_head(), facts.final_norm()), NEEDED, strict=True
    ):
        stored = next(t for n, t in own.items() if n.endswith(name))
        assert torch.equal(torch.from_numpy(found).view(torch.bfloat16), stored), name


@pytest.mark.slow
@pytest.mark.parametrize("form", ["speculators", "flat"])
def test_from_hidden_states_to_a_draft_with_three_weights_read(
    kimi: tuple[Path, list[tiny.Sample]], hollow: Path, tmp_path: Path, form: Any
) -> None:
    """T10; whatever reads another weight of the target finds that its bytes are not there."""
    facts = TargetModel.from_folder(hollow, name="moonshotai/Kimi-K2.5")
    dataset = tiny.build_dataset(tmp_path / "d", kimi[1], layer_ids=(*LAYER_IDS, LAYERS)).path
    report = train(
        dataset,
        replace(SETTINGS, checkpoint_format=form),
        target=facts,
        target_layer_ids=LAYER_IDS,
        output=tmp_path / "draft",
    )
    assert report.step == 8
    draft = read_draft(tmp_path / "draft")
    assert draft.form == form
    assert draft.layer_ids == LAYER_IDS
    assert draft.target_name == "moonshotai/Kimi-K2.5"
    decoder = draft.decoder
    assert decoder["max_position_embeddings"] == CONTEXT
    rope = decoder["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 64.0, 50000.0)
    assert draft.weights["layers.0.self_attn.q_proj.weight"].shape == (4 * 16, 2 * HIDDEN)


@pytest.mark.slow
def test_a_kimi_draft_is_finetuned(
    kimi: tuple[Path, list[tiny.Sample]], hollow: Path, tmp_path: Path
) -> None:
    """A flat draft with AQ-MedAI's fields goes on with the dataset of the nested target."""
    facts = TargetModel.from_folder(hollow, name="moonshotai/Kimi-K2.5")
    config = drafts.flat_config(
        facts, 96, eagle_config={"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS)}
    )
    weights = drafts.flat_weights(facts, drafts.some_ids(facts, 96))
    checkpoint = drafts.write(tmp_path / "theirs", config, weights, "parts")
    dataset = tiny.build_dataset(tmp_path / "d", kimi[1], layer_ids=(*LAYER_IDS, LAYERS)).path
    report = train(
        dataset,
        SETTINGS,
        target=facts,
        target_layer_ids=LAYER_IDS,
        output=tmp_path / "draft",
        finetune=Finetune(checkpoint=checkpoint),
    )
    assert (report.step, report.draft_vocab_size) == (8, 96)


def test_kimis_real_sizes_give_the_shape_of_the_reference(tmp_path: Path) -> None:
    """AQ-MedAI's draft of Kimi: 64 plain heads of 128 over a width of 7168, dense 18432."""
    text = {
        **TEXT,
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    }
    config = {"model_type": "kimi_k25", "architectures": ["X"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = TargetModel.from_folder(tmp_path, name="moonshotai/Kimi-K2.5")
    shape = decoder_config(facts, 1)
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (7168, 18432, 163840)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (64, 64, 128)
    assert shape.max_position_embeddings == 262144
    assert (shape.num_hidden_layers, shape.model_type) == (1, "llama")
    with pytest.raises(ConfigError, match="no safetensors weight"):
        facts.final_norm()
