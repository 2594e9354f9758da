"""A real generation server: what the rest of draftmill relies on is really in its replies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from draftmill.builder.serving.launcher import Server
from draftmill.tools.demo.embedded import MODEL_NAME

END_OF_TURN = 2
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def chat(server: Server, **options: Any) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        body = {
            "model": MODEL_NAME,
            "messages": QUESTION,
            "temperature": 0,
            "return_token_ids": True,
            **options,
        }
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{server.url}/chat/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                return dict(await reply.json())

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def test_prompt_token_ids_are_the_chat_template_s(generate_server: Server, tokenizer: Any) -> None:
    reply = chat(generate_server, max_tokens=1)
    rendered = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert reply["prompt_token_ids"] == rendered["input_ids"]
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])


def test_a_whole_answer_ends_with_the_end_of_turn(generate_server: Server, tokenizer: Any) -> None:
    reply = chat(generate_server, max_tokens=200)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] == END_OF_TURN
    assert END_OF_TURN not in choice["token_ids"][:-1]
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert tokenizer.decode(choice["token_ids"][:-1]) == choice["message"]["content"]
    assert "Paris" in choice["message"]["content"]


def test_a_cut_answer_says_so(generate_server: Server) -> None:
    choice = chat(generate_server, max_tokens=5)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 5


def test_counters_that_tell_about_pressure(generate_server: Server) -> None:
    async def fetch() -> str:
        async with aiohttp.ClientSession() as session:
            url = generate_server.url.removesuffix("/v1") + "/metrics"
            async with session.get(url) as reply:
                return await reply.text()

    text = asyncio.run(fetch())
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "generation_tokens_total",
    ):
        assert f"vllm:{name}{{" in text
