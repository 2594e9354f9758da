"""A fault of draftmill is told as one: it makes no bad row, no bad sample and no missing canary."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from draftmill.builder.sources import conversations
from draftmill.builder.sources.conversations import BadRow, prompts_of
from draftmill.manifests.codec import codec
from tests.builder.extraction import look, make_dataset, run
from tests.fakes.target_server import TargetServer

FAULTS = (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError)
ROW = {
    "messages": [
        {"role": "user", "content": "what?", "name": "n"},
        {"role": "assistant", "content": "that"},
    ],
    "tools": [{"type": "function"}],
    "id": "7",
}
# everything that a row passes through on its way to a prompt
STEPS = (
    "_messages_of", "_list_of_objects", "_answer_points", "_extras", "_optional", "_own_id",
    "_unicode", "_check_content", "_append_json", "_digest", "_answer_after",
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", STEPS)
def test_a_fault_in_reading_a_row_is_no_bad_row(
    monkeypatch: pytest.MonkeyPatch, step: str, fault: type[Exception]
) -> None:
    def breaks(*_: Any, **__: Any) -> Any:
        raise fault("a fault")

    assert list(prompts_of(ROW, source="s", number=1))
    monkeypatch.setattr(conversations, step, breaks)
    with pytest.raises(fault, match="a fault"):
        list(prompts_of(ROW, source="s", number=1))


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("-inf"),
        {1, 2},
        b"bytes",
        object(),
        {("a",): 1},
        json.loads("[" * 900 + "]" * 900),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("place", ["message", "tools"])
def test_what_json_cannot_hold_is_a_bad_row(value: Any, place: str) -> None:
    row = json.loads(json.dumps(ROW))
    if place == "message":
        row["messages"][0]["extra"] = value
    else:
        row["tools"] = [value]
    if isinstance(value, list):  # deep, and no fault of anybody
        assert list(prompts_of(row, source="s", number=1))
        for _ in range(100_000):
            value = [value]
        row["tools"] = value
    with pytest.raises(BadRow, match=r"holds what JSON cannot|nested too deeply"):
        list(prompts_of(row, source="s", number=1))


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["em-zfast", "rot4"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_encoding_is_no_bad_sample(
    tmp_path: Path,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: type[Exception],
) -> None:
    def breaks(*_: Any, **__: Any) -> Any:
        raise fault("a fault")

    dataset = make_dataset(tmp_path / "d", [60] * 6)
    monkeypatch.setattr(codec, "_encode_block", breaks)

    async def go() -> None:
        async with TargetServer(staging=str(staging)) as server:
            await run(dataset, server.url, staging, codec=name)

    with pytest.raises(fault, match="a fault"):
        asyncio.run(go())
    assert look(dataset).states == {"generated": 6}
    assert not list(staging.iterdir())


@pytest.mark.slow
def test_a_value_that_a_codec_cannot_hold_is_a_bad_sample(tmp_path: Path, staging: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [60] * 6)

    async def go() -> None:
        async with TargetServer(staging=str(staging), faults={"huge": 1.0}) as server:
            await run(dataset, server.url, staging, codec="rot4", stop_after_bad=0)

    asyncio.run(go())
    seen = look(dataset)
    assert seen.states == {"rejected": 6}
    assert all("rot4 cannot hold these states" in each[0][2] for each in seen.attempts.values())
