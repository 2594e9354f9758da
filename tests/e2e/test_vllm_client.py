"""The client against a real generation server: ids, rebuilt ids, limits and counters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from draftmill.builder.generation.room import OverLength, max_tokens_for
from draftmill.builder.requests.client import TargetClient
from draftmill.builder.requests.replies import rebuilt_completion
from draftmill.builder.serving.launcher import Server
from draftmill.manifests.errors import ServerError
from draftmill.tools.demo.embedded import MODEL_NAME

GREEDY = {"temperature": 0.0}
QUESTION = json.dumps({"messages": [{"role": "user", "content": "Name the largest ocean."}]})


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 600))


def test_start_checks_and_counters(generate_server: Server) -> None:
    async def body() -> None:
        async with TargetClient(generate_server.url) as client:
            served = await client.connect()
            assert served.id == MODEL_NAME
            assert served.max_model_len
            ids = await client.probe_token_ids()
            assert ids == await client.probe_token_ids()
            load = await client.metrics()
            assert load is not None
            assert load.generated_tokens >= 2
            assert load.kv_tokens is not None
            assert load.kv_tokens >= served.max_model_len
            assert await client.healthy()
        async with TargetClient(generate_server.url, model="something/else") as client:
            with pytest.raises(ServerError, match="does not serve 'something/else'"):
                await client.connect()

    run(body())


@pytest.mark.parametrize("max_tokens", [4, 200])
def test_rebuilt_ids_are_the_served_ones(generate_server: Server, max_tokens: int) -> None:
    async def body() -> None:
        async with TargetClient(generate_server.url, model=MODEL_NAME) as client:
            served = await client.chat(QUESTION, sampling=GREEDY, max_tokens=max_tokens)
            assert served.finish_reason == ("length" if max_tokens == 4 else "stop")
            assert not served.ids_rebuilt
            usage = {
                "prompt_tokens": len(served.prompt_token_ids),
                "completion_tokens": len(served.completion_token_ids),
            }
            message = {"role": "assistant", "content": served.content}
            choice = {"message": message, "finish_reason": served.finish_reason}
            reply = {"choices": [choice], "usage": usage}
            rebuilt = await rebuilt_completion(reply, QUESTION, client.tokenize)
            assert rebuilt.ids_rebuilt
            np.testing.assert_array_equal(rebuilt.prompt_token_ids, served.prompt_token_ids)
            # a template may put text after the end of the turn; what was served comes first
            count = len(served.completion_token_ids)
            np.testing.assert_array_equal(
                rebuilt.completion_token_ids[:count], served.completion_token_ids
            )

    run(body())


def test_prompts_are_counted_by_the_server_when_it_gets_tight(generate_server: Server) -> None:
    async def body() -> None:
        async with TargetClient(generate_server.url) as client:
            served = await client.connect()
            limit = served.max_model_len
            assert limit is not None
            words = {"messages": [{"role": "user", "content": "word " * (limit - 200)}]}
            text = json.dumps(words)
            room = await max_tokens_for(text, limit, 1, limit, client)
            assert 0 < room < 200
            completion = await client.chat(text, sampling=GREEDY, max_tokens=room)
            assert len(completion.prompt_token_ids) + room == limit
            words["messages"][0]["content"] *= 2
            with pytest.raises(OverLength, match="that fit the server"):
                await max_tokens_for(json.dumps(words), limit, 1, limit, client)

    run(body())
