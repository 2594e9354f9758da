"""The canary, by itself and in a running stage: wrong states of every kind stop the run."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.builder.extraction.canary import Canary
from draftmill.builder.extraction.probe import PROBE_TOKENS, Probe, said_of
from draftmill.builder.extraction.stage import ExtractSettings, Layers
from draftmill.builder.progress import StageReport
from draftmill.builder.requests.replies import prompt_log_probs
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ConfigError, WrongStatesError
from draftmill.manifests.target.target import TargetModel
from tests.builder.extraction import make_dataset, run
from tests.fakes.target_server import TargetServer
from tests.fakes.tiny_target import WRONG_STATES, TinyTarget
from tests.trainer.tiny import HIDDEN, LAYER_IDS, LAYERS, VOCAB, save_target

pytestmark = pytest.mark.slow

IDS = (*LAYER_IDS, LAYERS)
SHAPE = Layers(layer_ids=IDS, hidden_size=HIDDEN)
# What the message must name; the others are told by the numbers alone.
NAMED = {
    "off_by_one_up": "the server sends layer 2 where 1 is expected",
    "off_by_one_down": "the server sends layer 2 where 3 is expected",
    "last_is_one_before": "the server sends layer 5 where 6 is expected",
    "swapped": "the server sends layer 3 where 1 is expected",
    "last_first": "the last layer lies where layer 1 is expected",
    "normalised": "after its final norm",
    "late": "one position late",
}
# What the last layer does not show.
AUXILIARY = ("off_by_one_up", "off_by_one_down", "swapped")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return varied_norm(save_target(tmp_path_factory.mktemp("models") / "right"))


def varied_norm(folder: Path) -> Path:
    """Final norm weights that are not all 1: else normalising twice would change nothing."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    norm = weights["model.norm.weight"]
    weights["model.norm.weight"] = torch.linspace(0.5, 2.0, len(norm), dtype=norm.dtype)
    save_file(weights, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def tiny(folder: Path) -> TinyTarget:
    return TinyTarget(folder, IDS, other=save_target(folder.with_name("wrong"), seed=6))


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def extract_from(
    tiny: TinyTarget | None,
    dataset: Dataset,
    staging: Path,
    target: TargetModel | None,
    fault: str | None = None,
    fault_after: int = 0,
    **settings: Any,
) -> tuple[StageReport, list[str], int]:
    """One run; the report, what was said, and how many probes were asked for. The fault begins
    after so many requests."""
    said: list[str] = []

    async def go() -> tuple[StageReport, list[str], int]:
        options = {"staging": str(staging), "target": tiny, "hidden": HIDDEN}
        if tiny is not None:
            tiny.fault, tiny.right_for = fault, fault_after
        async with TargetServer(**options) as server:
            report = await run(
                dataset,
                server.url,
                staging,
                layers=SHAPE,
                target=target,
                say=said.append,
                **settings,
            )
            probes = sum("prompt_logprobs" in body for body in server.bodies)
            return report, said, probes

    return asyncio.run(go())


def test_a_right_server_is_said_to_be_right(
    tmp_path: Path, staging: Path, tiny: TinyTarget, folder: Path
) -> None:
    dataset = make_dataset(tmp_path / "d", [20 + n for n in range(12)])
    report, said, probes = extract_from(
        tiny, dataset, staging, TargetModel.from_folder(folder), canary_every=0
    )
    assert (report.outcomes["extracted"], report.stopped, probes) == (12, None, 1)
    assert "agrees with the target's weights" in said[0]
    assert re.search(r"layers 1 \(.*6 \(.*transformers'", said[1])
    assert not list(staging.iterdir())


@pytest.fixture(scope="module")
def canary(folder: Path) -> Canary:
    """One for many faults: its reference is computed once."""
    return Canary(TargetModel.from_folder(folder), SHAPE, ExtractSettings(), print)


def probe_of(tiny: TinyTarget, fault: str | None, seed: int = 1) -> Probe:
    tiny.fault = None
    tiny.answer(list(range(40, 100)))  # another request's states, for the fault "stale"
    tiny.fault = fault
    ids = np.random.default_rng(seed).integers(0, VOCAB, PROBE_TOKENS).astype(np.int32)
    states_TLH, log_probs = tiny.answer(ids.tolist())
    listed = prompt_log_probs({"choices": [{"prompt_logprobs": log_probs}]})
    assert listed is not None
    return Probe(token_ids=ids, states_TLH=states_TLH, said=said_of(ids, listed))


@pytest.mark.parametrize("fault", WRONG_STATES)
def test_every_fault_is_told_from_what_is_right(
    canary: Canary, tiny: TinyTarget, fault: str
) -> None:
    asyncio.run(canary.judge("http://server", probe_of(tiny, None), first=True))
    with pytest.raises(WrongStatesError) as failure:
        asyncio.run(canary.judge("http://server", probe_of(tiny, fault), first=True))
    message = str(failure.value)
    assert message.startswith(f"http://server: its hidden states are not those of {tiny.folder}")
    assert "nats in the mean" in message
    assert NAMED.get(fault, "").lower() in message.lower()


@pytest.mark.parametrize("fault", sorted(set(WRONG_STATES) - set(AUXILIARY)))
def test_the_last_layer_alone_shows_it(
    tmp_path: Path, staging: Path, tiny: TinyTarget, folder: Path, fault: str
) -> None:
    """As with a target that is too large for transformers here: nothing is stored."""
    dataset = make_dataset(tmp_path / "d", [20 + n for n in range(12)])
    report, _, _ = extract_from(
        tiny, dataset, staging, TargetModel.from_folder(folder), fault, canary_memory="0"
    )
    assert report.stopped is not None
    assert "nats in the mean" in report.stopped
    assert report.outcomes == {}
    assert not list(staging.iterdir())
    with dataset.writer() as writer:
        assert writer.count("generated") == 12


def test_a_server_that_turns_bad_stops_the_run(
    tmp_path: Path, staging: Path, tiny: TinyTarget, folder: Path
) -> None:
    dataset = make_dataset(tmp_path / "d", [40] * 80)
    report, _, probes = extract_from(
        tiny,
        dataset,
        staging,
        TargetModel.from_folder(folder),
        "last_is_one_before",
        fault_after=30,
        canary_every=10,
        canary_memory="0",
    )
    assert "are in doubt" in (report.stopped or "")
    assert report.outcomes["extracted"] < 80
    assert probes > 2


def test_what_cannot_be_compared_is_said(
    tmp_path: Path, staging: Path, tiny: TinyTarget, folder: Path
) -> None:
    target = TargetModel.from_folder(folder)
    lengths = [20, 30, 40]
    report, said, _ = extract_from(tiny, make_dataset(tmp_path / "a", lengths), staging, None)
    assert report.outcomes["extracted"] == 3
    assert len(said) == 1
    assert re.search("weights are not at hand.*--weights", said[0])
    _, said, _ = extract_from(
        tiny, make_dataset(tmp_path / "b", lengths), staging, target, canary_memory="1KB"
    )
    assert any("auxiliary layers 1, 3, 5 were not compared" in each for each in said)
    _, said, _ = extract_from(
        tiny, make_dataset(tmp_path / "c", lengths), staging, target, canary=False
    )
    assert said == ["canary: off (extract.canary), hidden states are not compared with anything"]


def test_a_server_without_log_probabilities_is_not_called_right(
    tmp_path: Path, staging: Path, folder: Path
) -> None:
    notes: list[str | None] = []
    report, said, _ = extract_from(
        None,
        make_dataset(tmp_path / "d", [20, 30]),
        staging,
        TargetModel.from_folder(folder),
        on_progress=lambda progress: notes.append(progress.note),
    )
    assert report.outcomes["extracted"] == 2
    assert not any("agrees" in each for each in said)
    assert any("not run" in each and "prompt_logprobs" in each for each in said)


def test_weights_of_another_size_are_refused(tmp_path: Path, staging: Path, folder: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [20])
    with pytest.raises(ConfigError, match="this is another model"):
        asyncio.run(
            run(
                dataset,
                "http://127.0.0.1:9",
                staging,
                layers=Layers(layer_ids=(1, 3, 5, 7), hidden_size=HIDDEN),
                target=TargetModel.from_folder(folder),
            )
        )


def test_a_fault_of_the_canary_itself_ends_the_run(
    tmp_path: Path, staging: Path, tiny: TinyTarget, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a later look, which nobody awaits: a night without a canary must not look checked."""
    judge = Canary.judge

    async def breaks(self: Canary, name: str, probe: Probe, *, first: bool) -> None:
        if not first:
            raise ValueError("a fault")
        await judge(self, name, probe, first=first)

    monkeypatch.setattr(Canary, "judge", breaks)
    dataset = make_dataset(tmp_path / "d", [40] * 80)
    with pytest.raises(ValueError, match="a fault"):
        extract_from(
            tiny,
            dataset,
            staging,
            TargetModel.from_folder(folder),
            canary_every=5,
            canary_memory="0",
        )
    assert not list(staging.iterdir())
