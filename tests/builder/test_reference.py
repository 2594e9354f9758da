"""Residual streams by transformers in another process: right, and also of a part of a model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from draftmill.builder.extraction.reference import (
    NoReferenceError,
    layers_that_fit,
    residual_streams,
)
from draftmill.manifests.target.target import TargetModel
from tests.tiny_kimi import LAYER_IDS, LAYERS, reference_states, save_tiny_kimi

pytestmark = pytest.mark.slow

IDS = (*LAYER_IDS, LAYERS)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_kimi(tmp_path_factory.mktemp("kimi") / "Kimi-K2.5")


def test_facts_of_a_nested_config(kimi: Path) -> None:
    target = TargetModel.from_folder(kimi)
    assert (target.model_type, target.num_layers, target.hidden_size) == ("kimi_k2", 6, 256)
    assert target.lm_head().shape == (512, 256)
    sizes = [target.weight_bytes(count) for count in range(7)]
    assert sizes == sorted(set(sizes))
    assert sizes[6] == pytest.approx(sum(p.stat().st_size for p in kimi.glob("*.saf*")), rel=0.05)


def test_only_as_many_layers_as_fit(kimi: Path) -> None:
    target = TargetModel.from_folder(kimi)
    whole = target.weight_bytes(6)
    assert layers_that_fit(target, IDS, 2 * whole) == (6, True)
    assert layers_that_fit(target, IDS, whole) == (6, False)
    assert layers_that_fit(target, IDS, whole - 1) == (5, False)
    assert layers_that_fit(target, IDS, target.weight_bytes(2)) == (2, False)
    assert layers_that_fit(target, IDS, target.weight_bytes(2) - 1) == (0, False)


@pytest.mark.parametrize("part", [False, True])
def test_streams_are_those_of_the_whole_model(kimi: Path, part: bool) -> None:
    target = TargetModel.from_folder(kimi)
    ids = np.arange(40, 80, dtype=np.int32)
    memory_bytes = target.weight_bytes(2) if part else 1 << 40
    found = asyncio.run(residual_streams(target, ids, IDS, memory_bytes))
    wanted = reference_states(kimi, ids.tolist())
    assert sorted(found) == ([0, 1, 2] if part else list(range(7)))
    for layer_id, stream in found.items():
        scale = np.abs(wanted[layer_id]).max()
        # The part is loaded as it is stored, in bf16.
        np.testing.assert_allclose(stream, wanted[layer_id], atol=scale * (0.03 if part else 1e-5))


def test_the_reason_is_given_when_there_is_none(kimi: Path, tmp_path: Path) -> None:
    target = TargetModel.from_folder(kimi)
    ids = np.arange(40, 60, dtype=np.int32)
    with pytest.raises(NoReferenceError, match=r"first 2 layers .* take .* may be used"):
        asyncio.run(residual_streams(target, ids, IDS, 1000))
    for path in kimi.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(
        (kimi / "config.json").read_text().replace('"kimi_k25"', '"kimi_k99"')
    )
    with pytest.raises(NoReferenceError, match=r"transformers could not run it.*kimi_k99"):
        asyncio.run(residual_streams(TargetModel.from_folder(tmp_path), ids, IDS, 1 << 40))
