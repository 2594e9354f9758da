"""Draft models: made after their target, saved for vLLM, loaded with every weight accounted for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.attention import create_float_mask
from speculators.models.eagle3.attention import create_combined_mask_mod

from draftmill.manifests.errors import ConfigError, DamagedError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.devices import Group
from draftmill.trainer.drafts.forms import read_draft
from draftmill.trainer.drafts.model import (
    DraftModel,
    _dense_mask,
    create_draft,
    forward,
    load_draft,
    save_draft,
    trained_state,
)
from draftmill.trainer.drafts.shape import decoder_config
from draftmill.trainer.drafts.vocab import VocabMapping, build_mapping
from draftmill.trainer.engine import Engine
from draftmill.trainer.loading.data import Cursor, Row
from draftmill.trainer.loading.rows import load_row
from draftmill.trainer.settings import TrainSettings
from tests.trainer import tiny

SETTINGS = TrainSettings(draft_vocab_size=128, max_seq_len=128)


@pytest.fixture(scope="module")
def vocab() -> VocabMapping:
    counts = np.random.default_rng(0).integers(0, 9, tiny.VOCAB)
    return build_mapping(counts, np.zeros_like(counts), 128, "f")


def make(
    target: TargetModel, vocab: VocabMapping, settings: TrainSettings = SETTINGS
) -> DraftModel:
    return create_draft(target, tiny.LAYER_IDS, vocab, settings)


def test_the_saved_draft_carries_what_vllm_needs_and_no_local_path(
    target: TargetModel, vocab: VocabMapping, tmp_path: Path
) -> None:
    save_draft(make(target, vocab), tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert str(target.folder) not in text
    config = json.loads(text)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tests/tiny-llama"
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == list(tiny.LAYER_IDS)
    assert config["draft_vocab_size"] == 128
    # a draft that is told a shorter context than its target loses acceptance there (T7)
    assert config["transformer_layer_config"]["max_position_embeddings"] == tiny.CONTEXT
    weights = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith("verifier") for name in weights)
    assert (weights["d2t"].numpy() == vocab.d2t).all()
    assert (weights["t2d"].numpy() == vocab.t2d).all()
    floats = {str(t.dtype) for t in weights.values() if t.is_floating_point()}
    assert floats == {"torch.bfloat16"}
    wanted = torch.from_numpy(target.embed_tokens()).view(torch.bfloat16)
    assert torch.equal(weights["embed_tokens.weight"], wanted)


def test_vllm_reads_the_config(target: TargetModel, vocab: VocabMapping, tmp_path: Path) -> None:
    configs = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")
    save_draft(make(target, vocab), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found = configs.SpeculatorsConfig.extract_vllm_speculative_config(config)
    assert found == {"method": "eagle3", "num_speculative_tokens": 3}
    layer = configs.SpeculatorsConfig.extract_transformers_pre_trained_config(config)
    assert layer["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert layer["norm_before_fc"] is SETTINGS.norm_before_fc
    assert layer["norm_before_residual"] is SETTINGS.norm_before_residual
    assert layer["eagle_aux_hidden_state_layer_ids"] == list(tiny.LAYER_IDS)


def test_initial_weights_follow_the_seed_and_leave_the_global_one_alone(
    target: TargetModel, vocab: VocabMapping
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make(target, vocab)
    assert torch.equal(torch.get_rng_state(), before)
    again, other = make(target, vocab), make(target, vocab, replace(SETTINGS, seed=1))
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    wanted = torch.from_numpy(target.lm_head(vocab.target_ids)).view(torch.bfloat16).float()
    assert torch.equal(first.lm_head.weight, wanted)
    assert torch.equal(first.verifier_lm_head.weight, wanted)


def test_what_is_trained(target: TargetModel, vocab: VocabMapping) -> None:
    with_head = trained_state(make(target, vocab))
    without = trained_state(make(target, vocab, replace(SETTINGS, train_lm_head=False)))
    assert set(with_head) - set(without) == {"lm_head.weight"}
    assert "embed_tokens.weight" not in with_head
    assert not any(name.startswith("verifier") for name in with_head)


def test_four_auxiliary_layers_are_refused(target: TargetModel, vocab: VocabMapping) -> None:
    with pytest.raises(ConfigError, match="exactly 3"):
        create_draft(target, (1, 2, 3, 5), vocab, SETTINGS)


def test_the_targets_own_choice_is_rebuilt_from_its_last_layer(
    target: TargetModel, vocab: VocabMapping
) -> None:
    """The loss is against lm_head(norm(last layer)): it must be what the target really said."""
    sample = next(tiny.answers(target.folder, 1))
    model = make(target, vocab)
    last = torch.from_numpy(sample.states[:, -1].copy()).view(torch.bfloat16).float()
    head = torch.from_numpy(target.lm_head()).view(torch.bfloat16).float()
    chosen = (model.verifier_norm(last) @ head.T).argmax(-1).numpy()
    ids = np.concatenate([sample.prompt, sample.completion])
    # the states are rounded to bfloat16, so a near tie may fall the other way
    assert (chosen[3:-1] == ids[4:]).mean() > 0.9


def test_a_norm_that_adds_one_is_understood(target: TargetModel, vocab: VocabMapping) -> None:
    plain = make(target, vocab).verifier_norm.weight
    gemma = make(replace(target, model_type="gemma2"), vocab).verifier_norm.weight
    assert torch.equal(gemma, plain + 1)


def test_forward_gives_target_token_ids_and_a_loss_that_can_be_minimised(
    target: TargetModel, vocab: VocabMapping
) -> None:
    samples = list(tiny.answers(target.folder, 3))
    batch = load_row(
        tiny.MemoryReader(samples),
        tiny.columns(samples),
        Row(members=(0, 1, 2), cursor=Cursor()),
        tiny.SHAPE,
    )
    model = make(target, vocab)
    tensors = {n: t.float() if "hidden" in n else t for n, t in batch.tensors.items()}
    result = forward(model, tensors, SETTINGS)
    assert result.drafted.shape == (3, sum(batch.lengths))
    assert set(result.drafted.unique().tolist()) <= set(vocab.target_ids.tolist())
    result.loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert {"loss_sum", "full_acc_0_sum", "cond_acc_2_total"} <= set(result.sums)


def test_the_quick_attention_mask_is_speculators_own() -> None:
    documents = torch.tensor([0, 0, 0, 1, 1, -1])
    rule = create_combined_mask_mod(documents, 6)
    sizes = {"B": None, "H": None, "Q_LEN": 6, "KV_LEN": 6, "device": torch.device("cpu")}
    wanted = create_float_mask(rule, dtype=torch.float32, **sizes)
    assert torch.equal(_dense_mask(rule, **sizes), wanted)


def test_a_full_vocabulary_needs_no_mapping(target: TargetModel, tmp_path: Path) -> None:
    counts = np.ones(tiny.VOCAB, np.int64)
    whole = build_mapping(counts, counts, tiny.VOCAB, "f")
    save_draft(create_draft(target, tiny.LAYER_IDS, whole, SETTINGS), tmp_path)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    assert load_draft(read_draft(tmp_path), target, SETTINGS).lm_head.weight.shape[0] == tiny.VOCAB


def test_a_draft_comes_back_whole(target: TargetModel, vocab: VocabMapping, tmp_path: Path) -> None:
    model = make(target, vocab)
    save_draft(model, tmp_path)
    again = load_draft(read_draft(tmp_path), target, SETTINGS)
    for name, tensor in model.state_dict().items():
        found = again.state_dict()[name]
        if name.startswith("verifier"):
            assert torch.equal(found, tensor), name
        elif tensor.is_floating_point():
            assert torch.equal(found.bfloat16(), tensor.bfloat16()), name
        else:
            assert torch.equal(found, tensor), name


def test_every_weight_is_accounted_for(
    target: TargetModel, vocab: VocabMapping, tmp_path: Path
) -> None:
    save_draft(make(target, vocab), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["norm.weight"]
    weights["stray.weight"] = torch.zeros(2)
    weights["fc.weight"] = torch.zeros(64, 256)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_draft(read_draft(tmp_path), target, SETTINGS)
    message = str(caught.value)
    assert "norm.weight is missing" in message
    assert "stray.weight is not known" in message
    assert "fc.weight has shape [64, 256], expected [64, 192]" in message
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(DamagedError, match="cannot be read as weights"):
        load_draft(read_draft(tmp_path), target, SETTINGS)


def test_state_of_another_model_is_refused(target: TargetModel, vocab: VocabMapping) -> None:
    engine = Engine(make(target, vocab), SETTINGS, Group())
    state = engine.state()
    state["weights"] = {name: tensor.clone() for name, tensor in state["weights"].items()}
    with torch.no_grad():
        engine.model.fc.weight.zero_()
    engine.check(state)
    engine.restore(state)
    assert torch.equal(engine.model.fc.weight, state["weights"]["fc.weight"])
    del state["weights"]["fc.weight"]
    with pytest.raises(DamagedError, match=r"fc\.weight"):
        engine.check(state)


def shape_of(config: dict, tmp_path: Path, **facts: int):
    """The decoder that a target with this (foreign) config gets."""
    fake = SimpleNamespace(
        folder=tmp_path,  # no config.json that transformers knows: the raw one counts
        text_config=config,
        hidden_size=facts.get("hidden_size", 7168),
        vocab_size=1000,
        max_position_embeddings=262144,
    )
    return decoder_config(fake, 1)  # type: ignore[arg-type]


def test_latent_attention_gets_plain_heads_and_a_rotary_embedding_that_vllm_shares(
    tmp_path: Path,
) -> None:
    """As in Kimi-K2.5: `head_dim` would be the rotary part, mscale is not computed alike."""
    found = shape_of(
        {
            "model_type": "kimi_k2_unknown",
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "kv_lora_rank": 512,
            "v_head_dim": 128,
            "head_dim": 64,
            "intermediate_size": 18432,
            "rope_theta": 50000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        tmp_path,
    )
    assert (found.head_dim, found.num_attention_heads, found.num_key_value_heads) == (128, 64, 64)
    assert found.max_position_embeddings == 262144
    assert found.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


def test_sparse_targets_get_a_dense_width(tmp_path: Path) -> None:
    config = {"num_attention_heads": 8, "moe_intermediate_size": 77}
    found = shape_of(config, tmp_path, hidden_size=64)
    assert (found.intermediate_size, found.head_dim) == (192, 8)
    assert found.rope_parameters["rope_theta"] == 10000.0
    with pytest.raises(ConfigError, match="num_attention_heads is None"):
        shape_of({}, tmp_path)
