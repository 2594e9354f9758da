"""Drafts of other trainers: read whole or refused, and the same on the way there and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from draftmill.manifests.errors import ConfigError, DamagedError
from draftmill.manifests.target.target import TargetModel, default_target_layer_ids
from draftmill.trainer.drafts.forms import flat_limits, read_draft
from draftmill.trainer.drafts.model import create_draft, load_draft, save_draft
from draftmill.trainer.drafts.vocab import build_mapping
from draftmill.trainer.drafts.vocab_tables import canonical_vocab, remap_vocab
from draftmill.trainer.settings import TrainSettings
from tests.trainer import drafts, tiny

SETTINGS = TrainSettings(draft_vocab_size=48, max_seq_len=64)
SIZE = 48


@pytest.fixture
def ids(target: TargetModel) -> np.ndarray:
    return drafts.some_ids(target, SIZE)


@pytest.mark.parametrize("how", ["safetensors", "bin", "parts"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_flat_draft_is_read_into_speculators_names(
    target: TargetModel, ids: np.ndarray, tmp_path: Path, how: str, prefix: str
) -> None:
    weights = drafts.flat_weights(target, ids)
    stored = {n if n in ("d2t", "t2d") else prefix + n: t for n, t in weights.items()}
    stored["midlayer.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    folder = drafts.write(tmp_path, drafts.flat_config(target, SIZE), stored, how)
    files = read_draft(folder)
    assert (files.form, files.layer_ids, files.target_name) == ("flat", (2, 3, 5), None)
    model = load_draft(files, target, SETTINGS)
    state = model.state_dict()
    for name, tensor in weights.items():
        found = state[name.replace("midlayer.", "layers.0.")]
        assert torch.equal(found, tensor.float() if tensor.is_floating_point() else tensor), name
    config = model.config
    # its own decoder, but the target's context (T7)
    assert config.transformer_layer_config.rope_parameters["rope_theta"] == 1000000.0
    assert config.transformer_layer_config.intermediate_size == drafts.INTERMEDIATE
    assert config.transformer_layer_config.max_position_embeddings == tiny.CONTEXT
    assert not config.norm_before_residual
    assert not config.norm_before_fc
    assert config.speculators_config.verifier.name_or_path == target.name
    own = torch.from_numpy(target.embed_tokens()).view(torch.bfloat16).float()
    assert torch.equal(state["embed_tokens.weight"], own)


CONVENTIONS: list[tuple[dict[str, Any], tuple[int, ...] | None]] = [
    # what the config says, and the inputs of layers that are meant
    ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "eagle_config": None}, (1, 3, 5)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}, (2, 30, 58)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}, (2, 30, 58)),
    (
        {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        },
        (1, 3, 5),
    ),
    ({"eagle_config": {}, "target_layer_ids": [1, 29, 57]}, (2, 30, 58)),
    ({"eagle_config": {"use_aux_hidden_state": True}}, None),
]


@pytest.mark.parametrize(("said", "meant"), CONVENTIONS)
def test_every_way_of_counting_layers_becomes_ours(
    target: TargetModel,
    ids: np.ndarray,
    tmp_path: Path,
    said: dict[str, Any],
    meant: tuple[int, ...] | None,
) -> None:
    config = drafts.flat_config(target, SIZE, **said)
    folder = drafts.write(tmp_path, config, drafts.flat_weights(target, ids), "safetensors")
    files = read_draft(folder)
    assert files.layer_ids == meant
    assert files.layer_ids_of(61) == (meant or default_target_layer_ids(61))
    if meant is None:
        # SpecForge falls back to outputs (1, n // 2 - 1, n - 4), which are these inputs
        for layers in range(8, 100):
            outputs = (1, layers // 2 - 1, layers - 4)
            assert files.layer_ids_of(layers) == tuple(k + 1 for k in outputs)


@given(st.data())
@settings(max_examples=60)
def test_d2t_is_understood_as_offsets_and_as_ids_in_any_order(draw: st.DataObject) -> None:
    vocab = draw.draw(st.integers(6, 40), "vocabulary")
    ids = draw.draw(st.lists(st.integers(0, vocab - 1), min_size=2, max_size=vocab, unique=True))
    rows = torch.tensor(ids)
    head = rows[:, None].float().repeat(1, 3)  # every row carries its token's id
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[rows] = True
    d2t = draw.draw(st.sampled_from([rows - torch.arange(len(ids)), rows, None]))
    weights = {"lm_head.weight": head, "t2d": mask.to(draw.draw(st.sampled_from(
        [torch.bool, torch.int64, torch.uint8])))}  # fmt: skip
    if d2t is None:
        # only the mask: rows are in its order
        weights["lm_head.weight"] = head[torch.argsort(rows)]
    else:
        weights["d2t"] = d2t
    found = canonical_vocab(weights, vocab, Path("d"))
    assert found["lm_head.weight"][:, 0].tolist() == sorted(ids)
    if len(ids) == vocab:
        assert set(found) == {"lm_head.weight"}
    else:
        assert found["t2d"].nonzero().flatten().tolist() == sorted(ids)
        assert (found["d2t"] + torch.arange(len(ids))).tolist() == sorted(ids)


def test_offsets_without_a_mask_are_enough(target: TargetModel, ids: np.ndarray) -> None:
    weights = drafts.flat_weights(target, ids)
    mask = weights.pop("t2d")
    assert torch.equal(canonical_vocab(weights, target.vocab_size, Path("d"))["t2d"], mask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": torch.arange(SIZE) + 600}, "neither offsets nor ids of 48 different tokens"),
        ({"d2t": torch.zeros(SIZE, dtype=torch.long)}, "that are those of t2d"),
        ({"d2t": torch.zeros(9, dtype=torch.long)}, "has 9 tokens, lm_head.weight has 48 rows"),
        ({"t2d": torch.ones(9, dtype=torch.bool)}, r"t2d has shape \[9\], expected \[512\]"),
    ],
)
def test_a_mapping_that_means_nothing_is_refused(
    target: TargetModel, ids: np.ndarray, changes: dict[str, torch.Tensor], message: str
) -> None:
    weights = {**drafts.flat_weights(target, ids), **changes}
    with pytest.raises(ConfigError, match=message):
        canonical_vocab(weights, target.vocab_size, Path("d"))


def test_every_tensor_is_accounted_for(
    target: TargetModel, ids: np.ndarray, tmp_path: Path
) -> None:
    weights = drafts.flat_weights(target, ids)
    del weights["midlayer.mlp.up_proj.weight"], weights["norm.weight"]
    weights["midlayer.self_attn.q_norm.weight"] = torch.ones(16)
    weights["fc.weight"] = torch.zeros(target.hidden_size, 4 * target.hidden_size)
    weights["midlayer.self_attn.k_proj.weight"] = torch.zeros(32, 2 * target.hidden_size)
    folder = drafts.write(tmp_path, drafts.flat_config(target, SIZE), weights, "safetensors")
    with pytest.raises(ConfigError) as caught:
        load_draft(read_draft(folder), target, SETTINGS)
    for fault in (
        "layers.0.mlp.up_proj.weight is missing",
        "norm.weight is missing",
        "layers.0.self_attn.q_norm.weight is not known",
        "fc.weight has shape [64, 256], expected [64, 192]",
        "layers.0.self_attn.k_proj.weight has shape [32, 128], expected [64, 128]",
    ):
        assert fault in str(caught.value)


def test_what_is_no_such_draft_is_refused(
    target: TargetModel, ids: np.ndarray, tmp_path: Path
) -> None:
    weights = drafts.flat_weights(target, ids)

    def refused(folder: Path, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            read_draft(folder)

    refused(tmp_path, ConfigError, "has no config.json")
    refused(target.folder, ConfigError, "architectures are .*LlamaForCausalLM")
    config = drafts.flat_config(target, SIZE, architectures=["Eagle3DeepseekV2ForCausalLM"])
    refused(drafts.write(tmp_path / "mla", config, weights, "bin"), ConfigError, "Llama decoder")
    config = drafts.flat_config(target, SIZE, model_type="qwen3")
    refused(drafts.write(tmp_path / "q", config, weights, "bin"), ConfigError, "'qwen3'")
    config = drafts.flat_config(target, SIZE)
    twice = {**weights, "layers.0.hidden_norm.weight": weights["midlayer.hidden_norm.weight"]}
    refused(drafts.write(tmp_path / "twice", config, twice, "bin"), DamagedError, "there twice")
    folder = drafts.write(tmp_path / "empty", config, weights, "bin")
    (folder / "pytorch_model.bin").write_bytes(b"no")
    refused(folder, DamagedError, "cannot be read as weights")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, ConfigError, "has no weights")
    folder = drafts.write(tmp_path / "parts", config, weights, "parts")
    index = {"weight_map": {"fc.weight": "../parts/a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, DamagedError, "outside of its folder")
    (folder / "config.json").write_text("[]")
    refused(folder, DamagedError, "object")


@pytest.mark.parametrize("size", [SIZE, tiny.VOCAB])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_fc": False, "norm_before_residual": False},
        {"norm_output": True, "num_layers": 2, "ttt_steps": 5},
    ],
)
def test_speculators_to_flat_and_back_changes_nothing(
    target: TargetModel, tmp_path: Path, size: int, changes: dict[str, Any]
) -> None:
    chosen = replace(SETTINGS, **changes)
    counts = np.random.default_rng(1).integers(0, 9, tiny.VOCAB)
    vocab = build_mapping(counts, np.zeros_like(counts), size, "f")
    model = create_draft(target, (2, 3, 5), vocab, chosen)
    folders = [tmp_path / name for name in ("first", "flat", "back")]
    for folder in folders:
        folder.mkdir()
    save_draft(model, folders[0])
    save_draft(load_draft(read_draft(folders[0]), target, chosen), folders[1], "flat")
    flat = load_file(folders[1] / "model.safetensors")
    assert "midlayer.self_attn.q_proj.weight" in flat
    assert "embed_tokens.weight" not in flat, "they are the target's own, which servers share"
    save_draft(load_draft(read_draft(folders[1]), target, chosen), folders[2])
    for name in ("config.json", "model.safetensors"):
        assert (folders[2] / name).read_bytes() == (folders[0] / name).read_bytes(), name


def test_the_flat_config_is_as_the_reference_has_it(
    target: TargetModel, ids: np.ndarray, tmp_path: Path
) -> None:
    reference = drafts.flat_config(target, SIZE)
    files = read_draft(
        drafts.write(tmp_path / "a", reference, drafts.flat_weights(target, ids), "bin")
    )
    out = tmp_path / "b"
    out.mkdir()
    save_draft(load_draft(files, target, SETTINGS), out, "flat")
    config = json.loads((out / "config.json").read_text())
    fixed = {"max_window_layers", "sliding_window", "transformers_version", "use_sliding_window"}
    wanted = {**reference, "max_position_embeddings": tiny.CONTEXT}
    assert {k: config.get(k) for k in wanted if k not in fixed} == {
        k: v for k, v in wanted.items() if k not in fixed
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert str(tmp_path) not in json.dumps(config)


def test_own_embeddings_of_a_draft_are_kept(
    target: TargetModel, ids: np.ndarray, tmp_path: Path
) -> None:
    weights = drafts.flat_weights(target, ids)
    weights["embed_tokens.weight"] = torch.zeros(tiny.VOCAB, tiny.HIDDEN, dtype=torch.bfloat16)
    folder = drafts.write(tmp_path / "a", drafts.flat_config(target, SIZE), weights, "bin")
    out = tmp_path / "b"
    out.mkdir()
    save_draft(load_draft(read_draft(folder), target, SETTINGS), out, "flat")
    assert not load_file(out / "model.safetensors")["embed_tokens.weight"].any()


def test_what_sglang_would_read_otherwise_is_told() -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
    assert flat_limits(layers) == []
    assert "norm_before_fc" in flat_limits({**layers, "norm_before_fc": True})[0]
    ambiguous = flat_limits({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]})
    assert "begin with 1" in ambiguous[0]


@given(st.data())
@settings(max_examples=25)
def test_rows_follow_their_token_into_another_vocabulary(
    target: TargetModel, draw: st.DataObject
) -> None:
    old = drafts.some_ids(target, draw.draw(st.integers(2, 300)), draw.draw(st.integers(0, 99)))
    new = drafts.some_ids(target, draw.draw(st.integers(2, 512)), draw.draw(st.integers(0, 99)))
    weights = canonical_vocab(drafts.flat_weights(target, old), target.vocab_size, Path("d"))
    moved, counts = remap_vocab(weights, new, target)
    head = moved["lm_head.weight"]
    assert head.shape == (len(new), tiny.HIDDEN)
    assert head.isfinite().all()
    row_of = {int(token): row for row, token in enumerate(old)}
    for row, token in enumerate(new.tolist()):
        if token in row_of:
            assert torch.equal(head[row], weights["lm_head.weight"][row_of[token]])
    common = len(np.intersect1d(old, new))
    assert (counts.kept, counts.dropped, counts.new) == (
        common,
        len(old) - common,
        len(new) - common,
    )
    if len(new) < tiny.VOCAB:
        assert moved["t2d"].nonzero().flatten().tolist() == new.tolist()
        assert (moved["d2t"].numpy() + np.arange(len(new)) == new).all()
    untouched = weights.keys() - {"lm_head.weight", "d2t", "t2d"}
    assert all(torch.equal(moved[name], weights[name]) for name in untouched)


def test_new_rows_are_what_the_draft_would_call_such_a_token(target: TargetModel) -> None:
    """Where the head is a linear image of the target's, new rows are that image too."""
    old, new = drafts.some_ids(target, 300), drafts.some_ids(target, 300, seed=1)
    weights = canonical_vocab(drafts.flat_weights(target, old), target.vocab_size, Path("d"))
    whole = torch.from_numpy(target.lm_head()).view(torch.bfloat16).float()
    missing = torch.from_numpy(~np.isin(new, old))
    turn = torch.linalg.qr(torch.randn(tiny.HIDDEN, tiny.HIDDEN)).Q
    for image in (whole, whole @ turn):
        weights["lm_head.weight"] = image[torch.from_numpy(old)]
        moved, _ = remap_vocab(weights, new, target)
        wanted = image[torch.from_numpy(new)][missing]
        error = (moved["lm_head.weight"][missing] - wanted).norm() / wanted.norm()
        assert error < 0.02
