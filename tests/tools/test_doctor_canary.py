"""`draftmill doctor` on an extraction server: what the canary finds, why it matters, the fix."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from draftmill.builder.requests.client import TargetClient
from draftmill.manifests.dataset import Dataset
from draftmill.tools.doctor import canary
from draftmill.tools.init import create, target_settings
from draftmill.tools.settings import load
from tests.fakes.target_server import TargetServer
from tests.fakes.tiny_target import TinyTarget
from tests.trainer.tiny import HIDDEN, LAYER_IDS, LAYERS, save_target

pytestmark = pytest.mark.slow

NAME = "fake/target"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    folder = save_target(tmp_path_factory.mktemp("models") / "tiny")
    return TinyTarget(folder, (*LAYER_IDS, LAYERS))


def findings(tmp_path: Path, tiny: TinyTarget, *, weights: bool = True) -> list[dict[str, Any]]:
    facts = target_settings(
        str(tiny.folder),
        name=NAME,
        model_config=None,
        hidden_size=None,
        num_layers=None,
        vocab_size=None,
        layer_ids=LAYER_IDS,
    )
    dataset = create(tmp_path / "d", facts, extract={"canary_memory": "0"})
    (dataset.path / "staging").mkdir()
    settings = load(dataset, target={} if weights else {"path": ""})

    async def go() -> list[dict[str, Any]]:
        options = {"staging": str(dataset.path / "staging"), "target": tiny, "hidden": HIDDEN}
        async with TargetServer(**options) as server, TargetClient(server.url) as client:
            await client.connect()
            return list(await canary.look(client, Dataset.open(dataset.path), settings))

    try:
        return asyncio.run(go())
    finally:
        assert not list((dataset.path / "staging").iterdir())


def test_a_right_server(tmp_path: Path, tiny: TinyTarget) -> None:
    tiny.fault = None
    first, second = findings(tmp_path, tiny)
    assert first["ok"] is True
    assert "agrees with the target's weights" in first["what"]
    assert second["ok"] is None
    assert "were not compared" in second["what"]


def test_a_wrong_server(tmp_path: Path, tiny: TinyTarget) -> None:
    tiny.fault = "last_is_one_before"
    (found,) = findings(tmp_path, tiny)
    assert found["ok"] is False
    assert "nats in the mean" in found["what"]
    assert "never accepted" in found["why"]
    assert found["fix"].startswith(f"draftmill serve extract {tiny.folder}")


def test_without_weights_it_says_how(tmp_path: Path, tiny: TinyTarget) -> None:
    (found,) = findings(tmp_path, tiny, weights=False)
    assert found["ok"] is None
    assert "not at hand" in found["what"]
    assert "--weights DIR" in found["fix"]
