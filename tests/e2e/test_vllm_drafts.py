"""Both written forms of a draft in a real vLLM: the same tokens, and accepted alike."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from draftmill.builder.requests.client import TargetClient
from draftmill.builder.serving.launcher import Server
from draftmill.manifests.target.target import TargetModel, default_target_layer_ids
from draftmill.tools.demo.embedded import MODEL_NAME
from draftmill.trainer.acceptance import Acceptance, from_metrics
from draftmill.trainer.convert import convert_draft
from draftmill.trainer.drafts.model import create_draft, forward, save_draft
from draftmill.trainer.drafts.vocab import build_mapping
from draftmill.trainer.settings import TrainSettings
from tests.e2e.conftest import SETTINGS as SERVE
from tests.sources import CLONE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

QUESTIONS = ("Name three colours.", "What is a dictionary in Python?", "Tell me about the moon.")
ROW = 256


@dataclass(frozen=True)
class Decoded:
    token_ids: list[list[int]]
    acceptance: Acceptance


@pytest.fixture(scope="module")
def forms(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft that has learnt a little, in both forms: what is accepted tells loaded weights."""
    folder = tmp_path_factory.mktemp("drafts")
    written = folder / "speculators"
    written.mkdir()
    target = TargetModel.from_folder(model_folder, name=MODEL_NAME)
    _train_a_little(target, written)
    flat = convert_draft(written, folder / "flat", "flat", target=target)
    return {"speculators": written, "flat": flat}


def _train_a_little(target: TargetModel, output: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "\n".join(path.read_text() for path in sorted(CLONE.glob("docs/*.md")))
    ids = AutoTokenizer.from_pretrained(target.folder)(text)["input_ids"][: 12 * ROW]
    rows = torch.tensor(ids[: len(ids) // ROW * ROW]).view(-1, ROW)
    layers = default_target_layer_ids(target.num_layers)
    counts = np.bincount(ids, minlength=target.vocab_size)
    vocab = build_mapping(counts, np.zeros_like(counts), 4096, "f")
    settings = TrainSettings(draft_vocab_size=4096, ttt_steps=2)
    draft = create_draft(target, layers, vocab, settings)
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-3)
    for row in [*rows, *rows]:
        last.clear()
        with torch.no_grad():
            states = model(row[None], output_hidden_states=True).hidden_states
        tensors = {
            "hidden_states": torch.cat([states[k] for k in layers], dim=-1)[:, :-1],
            "verifier_last_hidden_states": last[0][:, :-1],
            "input_ids": row[None, 1:],
            "document_ids": torch.zeros(1, ROW - 1, dtype=torch.long),
            "position_ids": torch.arange(1, ROW)[None],
            "loss_mask": torch.ones(1, ROW - 1, dtype=torch.bool),
        }
        forward(draft, tensors, settings).loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    save_draft(draft, output)


def _decode(model_folder: Path, draft: Path | None, run_folder: Path) -> Decoded:
    async def work() -> Decoded:
        async with (
            Server.evaluation(
                str(model_folder), SERVE, name=MODEL_NAME, draft=draft, run_folder=run_folder
            ) as server,
            TargetClient(server.url, model=MODEL_NAME) as client,
        ):
            await client.connect()
            found = []
            for question in QUESTIONS:
                answer = await client.chat(
                    json.dumps({"messages": [{"role": "user", "content": question}]}),
                    sampling={"temperature": 0.0},
                    max_tokens=48,
                )
                found.append(answer.completion_token_ids.tolist())
            return Decoded(found, from_metrics(await client.metrics_text() or ""))

    return asyncio.run(work())


def test_both_forms_give_the_targets_own_text_and_are_accepted_alike(
    no_server: None, model_folder: Path, forms: dict[str, Path], tmp_path: Path
) -> None:
    plain = _decode(model_folder, None, tmp_path)
    assert plain.acceptance.drafts == 0
    found = {form: _decode(model_folder, folder, tmp_path) for form, folder in forms.items()}
    for form, decoded in found.items():
        assert decoded.token_ids == plain.token_ids, form
        assert decoded.acceptance.accepted > 0, form
    assert found["flat"].acceptance == found["speculators"].acceptance
