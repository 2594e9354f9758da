"""The figures of error are what their names say, and the fp8 baseline is real fp8."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from draftmill.manifests import codec_error
from draftmill.manifests.codec.numbers import to_floats, to_words
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import NOT_UNDERSTOOD
from draftmill.manifests.target.target import TargetModel


def normal_words(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint16]:
    floats = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return to_words(floats)


def tiny_target(folder: Path, *, vocab_size: int = 50, hidden_size: int = 16) -> TargetModel:
    rng = np.random.default_rng(1)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": 4,
        "vocab_size": vocab_size,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "dtype": "float32",
    }
    folder.joinpath("config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((vocab_size, hidden_size)),
        "model.norm.weight": rng.uniform(0.5, 2, hidden_size),
        "lm_head.weight": rng.standard_normal((vocab_size, hidden_size)),
    }
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return TargetModel.from_folder(folder, name="tiny")


def test_words_round_to_nearest_even() -> None:
    floats = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1.0 - 2**-8 - 2**-20], np.float32)
    assert to_words(floats).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF81]


def test_error_by_layer() -> None:
    exact = normal_words((50, 2, 8))
    decoded = exact.copy()
    decoded[:, 1, 3] = 0
    whole = codec_error.relative_error_by_layer(exact, decoded)
    floats = to_floats(exact[:, 1])
    assert whole[0] == 0
    assert whole[1] == pytest.approx(np.linalg.norm(floats[:, 3]) / np.linalg.norm(floats))
    # one channel of eight is lost: the median channel is not
    assert codec_error.channel_error_by_layer(exact, decoded) == [0, 0]


def test_channels_that_are_always_zero_do_not_count() -> None:
    exact = normal_words((50, 1, 3))
    exact[:, :, 1] = 0
    decoded = np.zeros_like(exact)
    assert codec_error.channel_error_by_layer(exact, decoded) == [1]


def test_fp8_is_the_e4m3_of_torch() -> None:
    torch = pytest.importorskip("torch")
    exact = normal_words((200, 2, 300), 2)
    exact[5, 0] = 0
    exact[6, 1, 7] = 0x46C3  # an outlier pushes the rest of its token into fp8's subnormals
    stored, decoded = codec_error.fp8_round_trip(exact)
    floats = to_floats(exact)
    scale = np.abs(floats).max(axis=2, keepdims=True) / np.float32(448)
    scale[scale == 0] = 1
    wanted = torch.from_numpy(floats / scale).to(torch.float8_e4m3fn)
    assert np.array_equal(stored, wanted.view(torch.uint8).numpy())
    back = (wanted.float() * torch.from_numpy(scale)).to(torch.bfloat16)
    assert np.array_equal(decoded, back.view(torch.uint16).numpy())


def test_kl_through_lm_head(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    exact, other = normal_words((130, 16), 3), normal_words((130, 16), 4)
    assert codec_error.kl_through_lm_head(target, exact, exact) == pytest.approx(0, abs=1e-6)

    def probabilities(words: NDArray[np.uint16]) -> NDArray[np.float64]:
        states = to_floats(words).astype(np.float64)
        normed = states / np.sqrt((states**2).mean(axis=1, keepdims=True) + 1e-5)
        logits = (normed * target.final_norm()) @ target.lm_head().T.astype(np.float64)
        weights = np.exp(logits)
        result: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return result

    p, q = probabilities(exact), probabilities(other)
    wanted = (p * np.log(p / q)).sum(axis=1).mean()
    assert codec_error.kl_through_lm_head(target, exact, other) == pytest.approx(wanted, rel=1e-4)


SOUND = {
    "samples": 2,
    "tokens": 9,
    "error_squares": {"2": 1.0},
    "state_squares": {"2": 4.0},
    "kl_sum": 0.1,
    "kl_tokens": 5,
}
ODD_SUMS = [
    *("", "null", "3", "[]", "{}", "[" * 5000, '"x"'),
    *[
        json.dumps({**SOUND, key: odd})
        for key in SOUND
        for odd in (None, "x", [1], {"2": "x"}, {"3": 1.0}, {"2": -1.0}, float("nan"), 1e999)
    ],
    *[json.dumps({**SOUND, key: -1}) for key in ("samples", "tokens", "kl_tokens")],
    *[json.dumps({k: v for k, v in SOUND.items() if k != key}) for key in SOUND],
]


def test_sums_are_read_as_they_were_written_or_not_at_all() -> None:
    sums = codec_error.ErrorSums.read(json.dumps(SOUND))
    assert sums.figures()["relative_error"] == {"2": 0.5}
    assert codec_error.ErrorSums.read(json.dumps(asdict(sums))) == sums
    for text in ODD_SUMS:
        with pytest.raises(NOT_UNDERSTOOD):
            codec_error.ErrorSums.read(text)


def test_odd_sums_of_a_dataset_count_as_not_measured(tmp_path: Path) -> None:
    dataset = Dataset.create(tmp_path / "d", "# test\n")
    with dataset.writer() as writer:
        writer.manifest.set_meta("codec_error.rot4", json.dumps(SOUND))
        for text in ODD_SUMS:
            writer.manifest.set_meta("codec_error.bitround-4", text)
            assert list(writer.summary()["codec_error"]) == ["rot4"]
