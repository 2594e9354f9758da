"""The canary against a real server: it agrees with what is right and names what is not."""

from __future__ import annotations

import asyncio
import json
import pydoc
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftmill.builder.extraction.agreement import last_layer
from draftmill.builder.extraction.canary import Canary
from draftmill.builder.extraction.probe import Probe, ask, probe_ids, read
from draftmill.builder.extraction.settings import ExtractSettings
from draftmill.builder.extraction.stage import Layers
from draftmill.builder.extraction.staging import Staging
from draftmill.builder.requests.client import TargetClient
from draftmill.builder.serving.launcher import Server
from draftmill.manifests.codec.numbers import to_floats
from draftmill.manifests.errors import WrongStatesError
from draftmill.manifests.target.output_head import OutputHead
from draftmill.manifests.target.target import TargetModel
from draftmill.tools.demo.embedded import MODEL_NAME
from tests.builder.extraction import make_dataset, run
from tests.e2e.conftest import LAYER_IDS

SHAPE = Layers(layer_ids=LAYER_IDS, hidden_size=576)


def staging_of(server: Server) -> Path:
    assert server.spec.staging is not None
    return server.spec.staging


@pytest.fixture(scope="module")
def target(model_folder: Path) -> TargetModel:
    return TargetModel.from_folder(model_folder, MODEL_NAME)


@pytest.fixture
def probe(extract_server: Server, model_folder: Path, tmp_path: Path) -> Probe:
    """Real text, and what the server says of it."""
    from transformers import AutoTokenizer

    text = pydoc.plain(pydoc.render_doc(json))
    tokens = AutoTokenizer.from_pretrained(model_folder)(text)["input_ids"]

    async def go() -> Probe:
        ids = probe_ids(np.array(tokens, np.int32), 2048)
        async with TargetClient(extract_server.url, model=MODEL_NAME) as client:
            await client.connect()
            with closing(Staging(staging_of(extract_server), tmp_path)) as staging:
                path, said = await ask(client, ids, staging.request_id(0, 1), 600)
                name = staging.name_of(path)
                await staging.wait(name, 60, client.url)
                states_TLH = read(staging, name, ids, SHAPE)
                staging.remove(name)
        return Probe(token_ids=ids, states_TLH=states_TLH, said=said)

    return asyncio.run(go())


def test_a_run_is_checked_and_goes_on(
    extract_server: Server, target: TargetModel, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "d", [40, 60, 80])
    said: list[str] = []
    report = asyncio.run(
        run(
            dataset,
            extract_server.url,
            staging_of(extract_server),
            layers=SHAPE,
            model=MODEL_NAME,
            target=target,
            say=said.append,
            request_timeout_s=600,
        )
    )
    assert report.stopped is None
    assert report.outcomes["extracted"] == 3
    assert "agrees with the target's weights" in said[0]
    assert all(f"{each} (" in said[1] for each in LAYER_IDS)


def test_wrong_layers_of_a_real_model_are_named(target: TargetModel, probe: Probe) -> None:
    def judge(layer_ids: tuple[int, ...], states_TLH: np.ndarray) -> None:
        canary = Canary(
            target, Layers(layer_ids=layer_ids, hidden_size=576), ExtractSettings(), print
        )
        asyncio.run(canary.judge("server", replace(probe, states_TLH=states_TLH), first=True))

    states_TLH = probe.states_TLH
    judge(LAYER_IDS, states_TLH)
    # The server has other ids than the dataset says.
    with pytest.raises(WrongStatesError, match="sends layer 2 where 3 is expected"):
        judge((3, 15, 27, 30), states_TLH)
    with pytest.raises(WrongStatesError, match="sends layer 15 where 14 is expected"):
        judge((2, 14, 27, 30), states_TLH)
    # An earlier layer where the last one belongs.
    with pytest.raises(WrongStatesError, match="nats in the mean"):
        judge(LAYER_IDS, states_TLH[:, [0, 1, 2, 2]])
    with pytest.raises(WrongStatesError, match="one position late"):
        judge(LAYER_IDS, np.concatenate([states_TLH[:1], states_TLH[:-1]]))


def test_noise_that_leaves_most_choices_alone_is_seen(target: TargetModel, probe: Probe) -> None:
    head = OutputHead.of(target)
    assert last_layer(head, probe).ok
    last_TH = to_floats(probe.states_TLH[:, -1])
    noise_TH = np.random.default_rng(0).normal(size=last_TH.shape).astype(np.float32)
    sizes_T = np.linalg.norm(last_TH, axis=1) / np.linalg.norm(noise_TH, axis=1)
    noisy_TH = last_TH + 0.05 * sizes_T[:, None] * noise_TH
    states_TLH = probe.states_TLH.copy()
    states_TLH[:, -1] = noisy_TH.view(np.uint32) >> 16
    difference = last_layer(head, replace(probe, states_TLH=states_TLH))
    assert not difference.ok
    assert difference.first > 0.8
