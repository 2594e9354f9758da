"""A real extraction server with draftmill's connector: the hidden states are transformers' own.

Shapes: T tokens, L layers (2, 15, 27 and the last), H hidden size.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import pydoc
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors import safe_open

from draftmill.builder.serving.launcher import Server
from draftmill.tools.demo.embedded import MODEL_NAME
from tests.e2e.conftest import LAYER_IDS

NUM_LAYERS = 30
# Blocks of the KV cache hold 128 tokens: lengths on both sides of their borders.
LENGTHS = (1, 2, 127, 128, 129, 300, 700)
MANY = 8  # tokens from which layers can be told apart
# bf16 against float32, median over tokens; measured .004 to .009.
MAX_ERROR = 0.02


class Reference:
    """SmolLM2 in float32 by transformers: the input of every decoder layer, and the last output."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._seen: list[torch.Tensor] = []
        layers = self.model.model.layers
        for layer in layers:
            layer.register_forward_pre_hook(lambda _, inputs: self._seen.append(inputs[0]))
        layers[-1].register_forward_hook(
            lambda _, inputs, output: self._seen.append(
                output[0] if isinstance(output, tuple) else output
            )
        )

    @torch.no_grad()
    def run(self, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual streams [n + 1, T, H] and the model's own choice of the next token [T]."""
        self._seen.clear()
        logits = self.model(torch.tensor([token_ids]), use_cache=False).logits
        return torch.stack(self._seen)[:, 0], logits[0].argmax(-1)

    @torch.no_grad()
    def choose(self, last_TH: torch.Tensor) -> torch.Tensor:
        """The next tokens [T] that states before the final norm lead to."""
        return self.model.lm_head(self.model.model.norm(last_TH)).argmax(-1)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Reference:
    return Reference(model_folder)


@pytest.fixture(scope="module")
def token_ids(reference: Reference) -> list[int]:
    """Real text: a page of Python's own documentation."""
    ids = reference.tokenizer(pydoc.plain(pydoc.render_doc(json)))["input_ids"]
    assert len(ids) >= max(LENGTHS)
    return list(ids)


async def prefill(server: Server, token_ids: list[int], request_id: str = "") -> Path:
    """Asks for the hidden states of these tokens; the file that will hold them."""
    body = {"model": MODEL_NAME, "prompt": token_ids, "max_tokens": 1}
    headers = {"X-Request-Id": request_id} if request_id else {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        url = f"{server.url}/completions"
        async with session.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            return Path((await reply.json())["kv_transfer_params"]["hidden_states_path"])


def read(path: Path) -> tuple[torch.Tensor, list[int], dict[str, str]]:
    """States [T, L, H], token ids and metadata, once the server lets go of the lock."""
    with Path(f"{path}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    with safe_open(str(path), "pt") as file:
        states_TLH = file.get_tensor("hidden_states")
        return states_TLH, file.get_tensor("token_ids").tolist(), file.metadata()


def staging(server: Server) -> Path:
    assert server.spec.staging is not None
    return server.spec.staging


def sweep(server: Server) -> None:
    for path in staging(server).iterdir():
        path.unlink()


def relative_error(found_TH: torch.Tensor, wanted_TH: torch.Tensor) -> float:
    """Median over tokens of |found - wanted| / |wanted|: a few huge activations decide nothing."""
    error_T = (found_TH.float() - wanted_TH).norm(dim=-1) / wanted_TH.norm(dim=-1)
    return float(error_T.median())


def test_states_are_those_of_transformers(
    extract_server: Server, reference: Reference, token_ids: list[int]
) -> None:
    # the first tokens differ, so that no request could get away with another one's states
    samples = [token_ids[index : index + length] for index, length in enumerate(LENGTHS)]

    async def ask() -> list[Path]:
        return await asyncio.gather(*(prefill(extract_server, each) for each in samples))

    agreed = tokens = 0
    for sample, path in zip(samples, asyncio.run(ask()), strict=True):
        states_TLH, ids, metadata = read(path)
        assert ids == sample
        assert states_TLH.shape == (len(sample), len(LAYER_IDS), 576)
        assert states_TLH.dtype == torch.bfloat16
        assert json.loads(metadata["target_layer_ids"]) == list(LAYER_IDS)
        residual, choices = reference.run(sample)
        for place, layer_id in enumerate(LAYER_IDS):
            errors = [relative_error(states_TLH[:, place], wanted_TH) for wanted_TH in residual]
            assert errors[layer_id] < MAX_ERROR, (len(sample), layer_id)
            if len(sample) < MANY:
                continue  # the first token's few huge activations are the same in most layers
            # and it is this layer, not a neighbour
            assert errors[layer_id] == min(errors)
            assert sorted(errors)[1] > 3 * errors[layer_id]
        agreed += int((reference.choose(states_TLH[:, -1].float()) == choices).sum())
        tokens += len(sample)
    assert agreed / tokens > 0.95
    sweep(extract_server)


def test_request_id_is_in_the_file_name_and_leads_nowhere(extract_server: Server) -> None:
    path = asyncio.run(prefill(extract_server, [5, 6, 7], "draftmill-0a-12-1x"))
    assert path.parent == staging(extract_server)
    assert path.name.startswith("cmpl-draftmill-0a-12-1x-")
    assert read(path)[1] == [5, 6, 7]
    path = asyncio.run(prefill(extract_server, [5, 6], "../../elsewhere"))
    assert path.parent == staging(extract_server)
    assert read(path)[1] == [5, 6]
    sweep(extract_server)


def test_a_client_that_leaves_leaves_nothing_unfinished(
    extract_server: Server, token_ids: list[int]
) -> None:
    async def give_up() -> None:
        asked = asyncio.create_task(prefill(extract_server, token_ids[:700], "given-up"))
        while not any("given-up" in path.name for path in staging(extract_server).iterdir()):
            assert not asked.done()
            await asyncio.sleep(0.01)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        # the next one is answered, so the server has dealt with the first
        await prefill(extract_server, [7, 8, 9], "next")
        await prefill(extract_server, [7, 8, 9], "next")

    asyncio.run(give_up())
    # The request was given up before its only step ended, or just after: then its file is whole,
    # its lock is free, and it is for the sweep.
    left = [path for path in staging(extract_server).iterdir() if "given" in path.name]
    for path in left:
        if path.suffix == ".safetensors":
            assert read(path)[1] == token_ids[:700]
    assert not [path.name for path in left if path.name.endswith((".part", ".error"))]
    sweep(extract_server)


def test_a_folder_that_cannot_be_written_costs_samples_and_not_the_server(
    extract_server: Server,
) -> None:
    folder = staging(extract_server)
    away = folder.rename(folder.with_name("staging-away"))
    folder.write_text("no folder")
    try:
        path = asyncio.run(prefill(extract_server, [5, 6, 7]))
        assert not path.exists()
    finally:
        folder.unlink()
        away.rename(folder)
    path = asyncio.run(prefill(extract_server, [5, 6, 7, 8]))
    assert read(path)[1] == [5, 6, 7, 8]
    sweep(extract_server)
