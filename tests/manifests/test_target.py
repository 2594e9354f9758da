"""Facts of a target model, from folders as transformers and Hugging Face write them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.manifests.errors import ConfigError, DamagedError
from draftmill.manifests.target.target import (
    TargetModel,
    check_target_layer_ids,
    default_target_layer_ids,
    extraction_layer_ids,
    find_folder,
)

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4,
    "num_hidden_layers": 8,
    "vocab_size": 6,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}


def write_tensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file by hand, so that no library's help hides a wrong reading of the format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def model(folder: Path, config: dict[str, Any], prefix: str = "", tied: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        f"{prefix}model.embed_tokens.weight": ("BF16", bits(6, 4)),
        f"{prefix}model.layers.0.input_layernorm.weight": ("BF16", bits(4)),
        f"{prefix}model.norm.weight": ("BF16", bits(4, start=500)),
    }
    if not tied:
        tensors[f"{prefix}lm_head.weight"] = ("F32", floats(6, 4))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def bits(*shape: int, start: int = 0) -> np.ndarray:
    return (np.arange(np.prod(shape)) + start).astype("<u2").reshape(shape)


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).astype("<f4").reshape(shape)


def test_facts_and_weights_of_a_plain_model(tmp_path: Path) -> None:
    facts = TargetModel.from_folder(model(tmp_path / "M-1", PLAIN))
    assert (facts.name, facts.hidden_size, facts.num_layers) == ("M-1", 4, 8)
    assert (facts.vocab_size, facts.max_position_embeddings) == (6, 128)
    assert (facts.dtype, facts.tie_word_embeddings) == ("bfloat16", False)
    assert (facts.embed_tokens() == bits(6, 4)).all()
    assert facts.embed_tokens().dtype == np.uint16
    rows = np.array([5, 0])
    assert (facts.lm_head(rows) == floats(6, 4)[rows]).all()
    assert (facts.final_norm() == bits(4, start=500)).all()


def test_nested_config_and_prefixed_weights(tmp_path: Path) -> None:
    inner = {k: v for k, v in PLAIN.items() if k not in ("architectures", "torch_dtype")}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "text_config": {**inner, "model_type": "kimi_k2", "kv_lora_rank": 2},
        "vision_config": {"hidden_size": 99},
    }
    facts = TargetModel.from_folder(model(tmp_path / "k", config, "language_model."), "org/K2.5")
    assert (facts.name, facts.model_type, facts.hidden_size) == ("org/K2.5", "kimi_k2", 4)
    assert facts.architectures == ("KimiK25ForConditionalGeneration",)
    assert facts.dtype == "bfloat16"
    assert (facts.final_norm() == bits(4, start=500)).all()
    assert facts.lm_head().dtype == np.float32


def test_tied_head_is_the_embeddings(tmp_path: Path) -> None:
    config = {**PLAIN, "tie_word_embeddings": True}
    facts = TargetModel.from_folder(model(tmp_path / "t", config, tied=True))
    assert (facts.lm_head() == bits(6, 4)).all()
    # transformers leaves lm_head out of the file even where the config does not say tied
    silent = TargetModel.from_folder(model(tmp_path / "s", PLAIN, tied=True))
    assert (silent.lm_head(np.array([2])) == bits(6, 4)[2]).all()


def test_weights_spread_over_indexed_files(tmp_path: Path) -> None:
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLAIN))
    parts = {
        "model-00001.safetensors": {"model.embed_tokens.weight": ("BF16", bits(6, 4))},
        "model-00002.safetensors": {
            "model.norm.weight": ("BF16", bits(4)),
            "lm_head.weight": ("BF16", bits(6, 4, start=100)),
        },
    }
    index = {}
    for name, tensors in parts.items():
        write_tensors(folder / name, tensors)
        index.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    write_tensors(folder / "consolidated.safetensors", {"lm_head.weight": ("BF16", bits(1, 1))})
    facts = TargetModel.from_folder(folder)
    assert (facts.lm_head() == bits(6, 4, start=100)).all()


def test_fingerprints_stay_with_a_move_and_tell_models_apart(tmp_path: Path) -> None:
    one = TargetModel.from_folder(model(tmp_path / "a", PLAIN))
    moved = TargetModel.from_folder(model(tmp_path / "b" / "c", PLAIN), "a")
    assert one == moved
    assert one.fingerprint() == moved.fingerprint()
    assert one.weights_fingerprint() == moved.weights_fingerprint()
    other = TargetModel.from_folder(model(tmp_path / "d", {**PLAIN, "num_hidden_layers": 9}))
    assert other.fingerprint() != one.fingerprint()
    write_tensors(
        tmp_path / "a" / "model.safetensors", {"model.norm.weight": ("BF16", bits(4, start=501))}
    )
    finetuned = TargetModel.from_folder(tmp_path / "a")
    assert finetuned.fingerprint() == one.fingerprint()
    assert finetuned.weights_fingerprint() != moved.weights_fingerprint()
    (tmp_path / "a" / "model.safetensors").unlink()
    assert TargetModel.from_folder(tmp_path / "a").weights_fingerprint() is None


def test_the_vocabulary_can_follow_from_the_weights(tmp_path: Path) -> None:
    config = {k: v for k, v in PLAIN.items() if k != "vocab_size"}
    assert TargetModel.from_folder(model(tmp_path / "v", config)).vocab_size == 6


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, "8", True])
def test_a_missing_fact_is_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config.json: {key} is"):
        TargetModel.from_folder(model(tmp_path / "m", {**PLAIN, key: value}))


def test_what_is_no_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_folder(tmp_path)
    with pytest.raises(ConfigError, match="Download it first"):
        find_folder("org/absent")
    folder = model(tmp_path / "m", PLAIN)
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(DamagedError, match="no readable safetensors"):
        TargetModel.from_folder(folder).final_norm()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no safetensors weight"):
        TargetModel.from_folder(folder).lm_head()
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="object"):
        TargetModel.from_folder(folder)


def test_unusable_weights_are_named(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", PLAIN)
    write_tensors(folder / "model.safetensors", {"lm_head.weight": ("BF16", bits(6, 5))})
    with pytest.raises(ConfigError, match=r"lm_head has shape \[6, 5\], expected \[6, 4\]"):
        TargetModel.from_folder(folder).lm_head()
    quantised = bits(6, 4).astype(np.uint8)
    write_tensors(folder / "model.safetensors", {"lm_head.weight": ("F8_E4M3", quantised)})
    with pytest.raises(ConfigError, match="unquantised"):
        TargetModel.from_folder(folder).lm_head()


def test_a_padded_vocabulary_is_cut(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {**PLAIN, "vocab_size": 5})
    assert TargetModel.from_folder(folder).embed_tokens().shape == (5, 4)


def test_models_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--small-1"
    model(repository / "snapshots" / "abc", PLAIN)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc\n")
    assert TargetModel.from_folder("org/small-1").name == "org/small-1"


def test_default_layers() -> None:
    assert default_target_layer_ids(30) == (2, 15, 27)
    assert default_target_layer_ids(61) == (2, 30, 58)
    for layers in range(4, 40):
        ids = default_target_layer_ids(layers)
        check_target_layer_ids(ids, layers)
        assert 0 < ids[0] < ids[1] < ids[2] < layers
    with pytest.raises(ConfigError, match="at least 4"):
        default_target_layer_ids(3)
    assert extraction_layer_ids((2, 15, 27), 30) == (2, 15, 27, 30)


@pytest.mark.parametrize("ids", [(2, 15, 31), (15, 2, 27), (2, 2, 27), (-1, 2, 3), ()])
def test_impossible_layers_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="rising order"):
        check_target_layer_ids(ids, 30)


def test_four_auxiliary_layers_are_refused_for_eagle3() -> None:
    with pytest.raises(ConfigError, match="exactly 3 auxiliary layers, because vLLM"):
        check_target_layer_ids((2, 10, 15, 27), 30)
    check_target_layer_ids((2, 10, 15, 27), 30, algorithm="dflash")
