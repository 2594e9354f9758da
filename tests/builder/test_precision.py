"""The error of a lossy codec is measured now and then, kept with the dataset and added up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.builder.extraction import precision as precision_module
from draftmill.builder.extraction.precision import Precision
from draftmill.manifests.codec import codec
from draftmill.manifests.codec.numbers import to_words
from draftmill.manifests.codec_error import (
    ErrorSums,
    error_sums,
    kl_through_lm_head,
    relative_error_by_layer,
)
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.types import StatesTLH
from tests.builder.extraction import LAYERS, make_dataset, run
from tests.fakes.target_server import TargetServer
from tests.manifests.test_codec_error import tiny_target


def states_of(seed: int, tokens: int = 40) -> StatesTLH:
    values = np.random.default_rng(seed).standard_normal((tokens, 4, 32)).astype(np.float32)
    words: StatesTLH = to_words(values)
    return words


def decoded(name: str, states: StatesTLH) -> StatesTLH:
    out = np.empty_like(states)
    codec.decode_states(name, codec.encode_states(states, name), out)
    return out


@pytest.mark.parametrize("name", [each for each in codec.CODECS if not codec.is_lossless(each)])
def test_sums_are_the_figures_of_all_samples(tmp_path: Path, name: str) -> None:
    target = tiny_target(tmp_path, hidden_size=32)
    ids = LAYERS.layer_ids
    parts = [states_of(seed, 40 + seed) for seed in range(3)]
    total = ErrorSums()
    for part in parts:
        total += error_sums(part, decoded(name, part), ids, target=target, kl_tokens=1000)
    whole = np.concatenate(parts)
    back = np.concatenate([decoded(name, part) for part in parts])
    found = total.figures()
    assert (found["samples"], found["tokens"]) == (3, len(whole))
    wanted = dict(zip(map(str, ids), relative_error_by_layer(whole, back), strict=True))
    assert found["relative_error"] == pytest.approx(wanted)
    kl = kl_through_lm_head(target, whole[:, -1], back[:, -1])
    assert found["kl_nats"] == pytest.approx(kl, rel=1e-4)
    assert ErrorSums(**json.loads(json.dumps(json.loads(_as_json(total))))) == total


def _as_json(sums: ErrorSums) -> str:
    return json.dumps({name: getattr(sums, name) for name in ErrorSums.__dataclass_fields__})


def test_one_sample_of_so_many_and_none_of_a_lossless_codec() -> None:
    lossy, exact = Precision("rot4", (1,)), Precision("em-zfast", (1,))
    every = precision_module.EVERY_SAMPLES
    assert [lossy.is_wanted() for _ in range(2 * every + 1)].count(True) == 3
    assert not any(exact.is_wanted() for _ in range(every))


def test_weights_that_cannot_be_used_leave_the_error_by_layer(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, hidden_size=32)
    (tmp_path / "model.safetensors").unlink()
    probe = Precision("bitround-2", LAYERS.layer_ids, target)
    states = states_of(1)
    probe.measure(states, codec.encode_states(states, "bitround-2")[0])
    found = probe.take()
    assert found is not None
    assert found.figures()["kl_nats"] is None
    assert found.figures()["relative_error"]["30"] > 0.01
    assert probe.take() is None


@pytest.mark.slow
def test_a_run_keeps_it_and_the_next_run_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_module, "EVERY_SAMPLES", 2)
    staging, model = tmp_path / "staging", tmp_path / "model"
    staging.mkdir()
    model.mkdir()
    target = tiny_target(model, hidden_size=32)
    dataset = make_dataset(tmp_path / "d", [60] * 8)

    async def go(**settings: Any) -> None:
        async with TargetServer(staging=str(staging)) as server:
            await run(dataset, server.url, staging, target=target, canary=False, **settings)

    def measured() -> dict[str, Any]:
        with Dataset.open(dataset.path).reader() as reader:
            found: dict[str, Any] = reader.summary()["codec_error"]
        return found

    asyncio.run(go(codec="rot4"))
    first = measured()["rot4"]
    assert (first["samples"], first["tokens"]) == (4, 240)
    assert set(first["relative_error"]) == {"2", "15", "27", "30"}
    assert all(0.01 < each < 0.3 for each in first["relative_error"].values())
    assert first["kl_nats"] > 0
    with dataset.writer() as writer:
        writer.publish(snapshot=True)
    (dataset.path / "manifest.duckdb").unlink()
    with dataset.writer():
        pass
    assert measured() == {"rot4": first}, "the snapshot has it, too"
