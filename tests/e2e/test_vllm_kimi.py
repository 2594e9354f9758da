"""A tiny random Kimi-K2.5 the whole way to stored states, on vLLM's CPU engine: MLA and experts
behind a multimodal wrapper, and nothing faked.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from draftmill.builder.budget import Budget
from draftmill.builder.exchange import folder as form
from draftmill.builder.exchange.imports import import_folder
from draftmill.builder.extraction.intake import Layers
from draftmill.builder.extraction.settings import ExtractSettings
from draftmill.builder.extraction.stage import extract
from draftmill.builder.progress import StageReport
from draftmill.builder.serving.launcher import Server, ServeSettings
from draftmill.manifests.codec.numbers import to_floats
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.target.target import TargetModel
from draftmill.manifests.types import Location
from draftmill.tools.init import create, target_settings
from tests.tiny_kimi import HIDDEN, LAYER_IDS, LAYERS, reference_states, save_tiny_kimi

NAME = "tiny/Kimi-K2.5"
SHAPE = Layers(layer_ids=(*LAYER_IDS, LAYERS), hidden_size=HIDDEN)
TEXTS = [
    b"Why is the sky blue? Because air scatters short waves more than long ones.",
    b"Name three primes. 2, 3 and 5; and then there are some more of them, without an end.",
    b"short. yes",
]
# bf16 states of a float32 or bf16 engine; the nearest other layer is at 0.5.
MAX_ERROR = 0.03


def make_dataset(kimi: Path, tmp_path: Path) -> Dataset:
    """`init` for the model, and completions that came from elsewhere."""
    facts = target_settings(
        str(kimi),
        name=NAME,
        model_config=None,
        hidden_size=None,
        num_layers=None,
        vocab_size=None,
        layer_ids=LAYER_IDS,
    )
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (HIDDEN, LAYERS, 512)
    dataset = create(tmp_path / "dataset", facts)
    given = tmp_path / "given"
    given.mkdir()
    rows = [
        form.Row(token_ids=list(text), loss_mask=[0] * 6 + [1] * (len(text) - 6), note={})
        for text in TEXTS
    ]
    form.write_rows(given, rows)
    with dataset.writer() as writer:
        report = import_folder(
            writer, given, source="texts", layers=SHAPE, codec="em-zfast", max_seq_len=512
        )
    assert (report.completions, report.without_states) == (len(TEXTS), len(TEXTS))
    return dataset


@pytest.mark.usefixtures("no_server")
def test_states_of_kimi_are_those_of_transformers(tmp_path: Path) -> None:
    kimi = save_tiny_kimi(tmp_path / "Kimi-K2.5")
    dataset = make_dataset(kimi, tmp_path)
    staging = tmp_path / "staging"
    staging.mkdir()
    said: list[str] = []
    server = Server.extraction(
        str(kimi),
        ServeSettings(max_model_len=512, kv_cache_gib=1, args=("--language-model-only",)),
        name=NAME,
        layer_ids=SHAPE.layer_ids,
        staging=staging,
        run_folder=tmp_path,
        on_wait=print,
    )

    async def go() -> StageReport:
        async with server:
            with dataset.writer() as writer:
                return await extract(
                    writer,
                    ExtractSettings(request_timeout_s=600),
                    [server.url],
                    model=NAME,
                    layers=SHAPE,
                    staging=staging,
                    budget=Budget(limit_bytes=None, dataset=dataset.path, staging=staging),
                    target=TargetModel.from_folder(kimi, NAME),
                    say=said.append,
                )

    report = asyncio.run(go())
    assert report.stopped is None, report.stopped
    assert report.outcomes["extracted"] == len(TEXTS)
    assert "agrees with the target's weights" in said[0]
    assert all(f"{each} (" in said[1] for each in SHAPE.layer_ids)
    with dataset.reader() as reader:
        for row in reader.extracted().to_pylist():
            at = [row[f"extract_{part}"] for part in ("shard", "offset", "length")]
            states_TLH = to_floats(reader.shards.states(Location(*at)))
            wanted = reference_states(kimi, list(TEXTS[row["id"] - 1]))
            for place, layer_id in enumerate(SHAPE.layer_ids):
                errors = [relative_error(states_TLH[:, place], other) for other in wanted]
                assert errors[layer_id] < MAX_ERROR, (row["id"], layer_id, errors)
                assert sorted(errors)[1] > 3 * errors[layer_id]


def relative_error(found_TH: np.ndarray, wanted_TH: np.ndarray) -> float:
    size_T = np.linalg.norm(wanted_TH, axis=1)
    return float(np.median(np.linalg.norm(found_TH - wanted_TH, axis=1) / size_T))
