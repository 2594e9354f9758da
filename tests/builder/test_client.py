"""The client against the fake server: what it asks, what it takes, and how it names what fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from draftmill.builder.requests.client import PROBE_ID, TargetClient
from draftmill.builder.requests.failures import (
    ConnectionCutError,
    GarbledReplyError,
    OverloadedError,
    ServerFailedError,
)
from draftmill.builder.requests.metrics import parse_metrics
from draftmill.builder.requests.replies import completion_of_reply
from draftmill.builder.requests.retry_policy import RetryBudget, RetryPolicy, retried
from draftmill.builder.requests.urls import split_url
from draftmill.manifests.errors import (
    PermanentError,
    RejectedError,
    ServerError,
    TimedOutError,
    TransientError,
    UnreachableError,
)
from draftmill.manifests.types import Completion
from tests.fakes import toy_model as toy
from tests.fakes.target_server import TargetServer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? ü"}]
CONVERSATION = json.dumps({"messages": MESSAGES})
QUICK = RetryPolicy(base_s=0.0, max_s=0.0)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def ask(server: TargetServer, max_tokens: int = 100, **sampling: Any) -> Completion:
    async with TargetClient(server.url, model=server.options.model) as client:
        return await client.chat(CONVERSATION, sampling=sampling, max_tokens=max_tokens)


def test_takes_the_only_served_model_and_its_limits() -> None:
    async def body() -> None:
        async with TargetServer(model="m", max_model_len=77) as server:
            async with TargetClient(server.url.removesuffix("/v1")) as client:
                served = await client.connect()
                assert (served.id, client.model, client.max_model_len) == ("m", "m", 77)

    run(body())


def test_start_with_a_wrong_server_is_one_clear_line() -> None:
    async def body() -> None:
        async with TargetServer(model="m", api_key="k") as server:
            async with TargetClient(server.url, model="other") as client:
                with pytest.raises(ServerError, match=r"401.*DRAFTMILL_API_KEY"):
                    await client.connect()
            server.options.api_key = None
            async with TargetClient(server.url, model="other") as client:
                with pytest.raises(ServerError, match=r"does not serve 'other'; it serves: m"):
                    await client.connect()
            async with TargetClient(f"{server.url}/nowhere") as client:
                with pytest.raises(ServerError, match="404"):
                    await client.connect()
            await server.go_down()
            async with TargetClient(server.url) as client:
                with pytest.raises(ServerError, match="no server answers at") as failure:
                    await client.connect()
        assert "\n" not in str(failure.value)

    run(body())


@pytest.mark.parametrize("url", ["", "ftp://x/v1", "http://", "http://x:0/v1", "http://x:abc"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ServerError, match="not a server URL"):
        split_url(url)


def test_urls_are_completed() -> None:
    assert split_url("host:8000") == ("http://host:8000/v1", "http://host:8000")
    assert split_url("https://h/api/v1/") == ("https://h/api/v1", "https://h/api")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reply_gives_the_served_ids_reasoning_and_content(field: str) -> None:
    async def body() -> None:
        async with TargetServer(reasoning=field, median_tokens=50, sigma=0.1) as server:
            completion = await ask(server)
            assert completion.prompt_token_ids.tolist() == toy.render(MESSAGES)
            ids = completion.completion_token_ids
            assert ids.dtype == np.int32
            assert ids[0] == toy.THINK
            assert ids[-1] == toy.END
            middle = ids.tolist().index(toy.THINK_END)
            assert bytes(ids[1:middle].tolist()).decode() == completion.reasoning
            assert bytes(ids[middle + 1 : -1].tolist()).decode() == completion.content
            assert (completion.finish_reason, completion.ids_rebuilt) == ("stop", False)

    run(body())


def test_request_says_what_it_must() -> None:
    async def body() -> None:
        async with TargetServer() as server:
            asked = {"messages": MESSAGES, "tools": [], "chat_template_kwargs": {"thinking": True}}
            async with TargetClient(server.url, model=server.options.model) as client:
                await client.chat(json.dumps(asked), sampling={"top_k": 5}, max_tokens=7)
            body = server.bodies[0]
            assert {name: body[name] for name in asked} == asked
            assert body["return_token_ids"] is True
            assert body["max_completion_tokens"] == 7
            assert body["top_k"] == 5
            assert not body.get("stream")

    run(body())


def test_cut_in_the_reasoning_is_kept() -> None:
    async def body() -> None:
        async with TargetServer(reasoning="reasoning", faults={"cut_in_reasoning": 1}) as server:
            completion = await ask(server)
            assert completion.content is None
            assert completion.finish_reason == "length"
            assert completion.reasoning
            assert len(completion.completion_token_ids) > 0

    run(body())


@pytest.mark.parametrize(
    ("fault", "kind", "status", "words"),
    [
        ("http_400", PermanentError, 400, "planned fault http_400"),
        ("http_422", PermanentError, 422, "planned fault"),
        ("http_501", PermanentError, 501, "planned fault"),
        ("http_404", ServerError, None, "404"),
        ("http_500", ServerFailedError, 500, "planned fault http_500"),
        ("http_408", ServerFailedError, 408, "planned fault"),
        ("http_503", OverloadedError, 503, "planned fault"),
        ("http_429", OverloadedError, 429, "too many requests"),
        ("drop", ConnectionCutError, None, "cut"),
        ("garbage", GarbledReplyError, None, "not JSON"),
    ],
)
def test_failures_have_their_kind_and_the_servers_words(
    fault: str, kind: type[Exception], status: int | None, words: str
) -> None:
    async def body() -> None:
        async with TargetServer(retry_after_s=7) as server:
            server.plan(MESSAGES, [fault])
            with pytest.raises(kind, match=words) as failure:
                await ask(server)
            assert type(failure.value) is kind
            assert getattr(failure.value, "http_status", None) == status
            if fault == "http_429":
                assert failure.value.retry_after_s == 7  # type: ignore[attr-defined]
            assert server.count(MESSAGES) == 1  # the openai client retries nothing

    run(body())


def test_refused_connection_is_unreachable() -> None:
    async def body() -> None:
        async with TargetServer() as server:
            await server.go_down()
            with pytest.raises(UnreachableError):
                await ask(server)

    run(body())


def test_ids_that_are_missing_are_rebuilt_checked_and_marked() -> None:
    async def body() -> None:
        async with TargetServer(reasoning="reasoning", median_tokens=30, sigma=0.1) as server:
            served = await ask(server, 500)
            server.options.token_ids = False
            rebuilt = await ask(server, 500)
            assert rebuilt.ids_rebuilt
            assert rebuilt.prompt_token_ids.tolist() == served.prompt_token_ids.tolist()
            assert rebuilt.completion_token_ids.tolist() == served.completion_token_ids.tolist()
            assert rebuilt.content == served.content

            cut = await ask(server, 10)
            assert cut.finish_reason == "length"
            assert toy.END not in cut.completion_token_ids.tolist()

    run(body())


def test_rebuilt_ids_that_cannot_be_right_are_refused() -> None:
    async def body() -> None:
        async with TargetServer(token_ids=False, tokenize=False) as server:
            with pytest.raises(PermanentError, match="no token ids and has no /tokenize"):
                await ask(server)
        async with TargetServer(token_ids=False, tokenize_template="differs") as server:
            with pytest.raises(RejectedError, match="the server counted"):
                await ask(server)

    run(body())


def _reply(**changes: Any) -> dict[str, Any]:
    choice = {"message": {"content": "a"}, "finish_reason": "stop", "token_ids": [1, 2]}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    return {"choices": [choice | changes], "prompt_token_ids": [5], "usage": usage}


@pytest.mark.parametrize(
    "reply",
    [
        {},
        [],
        None,
        {"choices": []},
        _reply(message=None),
        _reply(message={"content": ["a"]}),
        _reply(token_ids=[1]),  # not as many as were counted
        _reply(token_ids=[1, -1]),
        _reply(token_ids=[1, 2**31]),
        _reply(token_ids=[1, 2**70]),
        _reply(token_ids=[1, "2"]),
        _reply(token_ids=[1, 2.5]),
        _reply(token_ids={"1": 2}),
    ],
)
def test_replies_against_the_protocol_are_garbled(reply: Any) -> None:
    with pytest.raises(GarbledReplyError):
        completion_of_reply(reply)


@pytest.mark.parametrize("finish_reason", [None, "abort", "error"])
def test_answers_that_the_server_broke_off_are_tried_again(finish_reason: str | None) -> None:
    with pytest.raises(ServerFailedError, match="broke off"):
        completion_of_reply(_reply(finish_reason=finish_reason))


def test_tool_calls_and_reasoning_tokens_are_kept() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    reply = _reply(message={"content": None, "tool_calls": calls}, finish_reason="tool_calls")
    reply["usage"]["completion_tokens_details"] = {"reasoning_tokens": 9}
    completion = completion_of_reply(reply)
    assert completion is not None
    assert completion.extra == {"tool_calls": calls, "reasoning_tokens": 9}


def test_api_key_comes_from_the_environment_and_is_never_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")

    async def body() -> None:
        async with TargetServer(api_key="s3cret-key") as server:
            monkeypatch.setenv("DRAFTMILL_API_KEY", "s3cret-key")
            monkeypatch.setenv("OPENAI_API_KEY", "another-s3cret-key")
            await ask(server)
            server.plan(MESSAGES, ["http_400"])
            with pytest.raises(PermanentError) as failure:
                await ask(server)
            monkeypatch.delenv("DRAFTMILL_API_KEY")
            with pytest.raises(ServerError, match="401") as refused:
                await ask(server)
            assert server.headers[-1]["Authorization"] == "Bearer another-s3cret-key"
            assert "s3cret-key" not in f"{failure.value} {refused.value} {caplog.text}"

    run(body())


def test_retries_are_ours_alone_and_counted() -> None:
    async def body() -> None:
        waits: list[tuple[int, str, float]] = []

        async def before_wait(tries: int, error: TransientError, wait_s: float) -> None:
            waits.append((tries, type(error).__name__, wait_s))

        async with TargetServer() as server:
            server.plan(MESSAGES, ["http_500", "drop", "ok"])
            completion = await retried(lambda: ask(server), QUICK, before_wait)
            assert completion.content
            assert server.count(MESSAGES) == 3
            assert [each[:2] for each in waits] == [
                (1, "ServerFailedError"),
                (2, "ConnectionCutError"),
            ]
            server.plan(MESSAGES, ["http_400"])
            with pytest.raises(PermanentError):
                await retried(lambda: ask(server), QUICK, before_wait)
            assert server.count(MESSAGES) == 4
            server.plan(MESSAGES, ["http_500"] * 20)
            with pytest.raises(ServerFailedError):
                await retried(lambda: ask(server), QUICK, before_wait)
            assert server.count(MESSAGES) == 4 + QUICK.tries

    run(body())


def test_policy_waits_longer_each_time_and_as_long_as_it_was_asked() -> None:
    policy = RetryPolicy(base_s=1.0, max_s=8.0)
    failed = ServerFailedError("x")
    assert all(0 <= policy.wait_s(n, failed) <= min(8.0, 2.0**n) for n in range(1, 200))
    asked = OverloadedError("x", retry_after_s=30.0)
    assert all(30.0 <= policy.wait_s(1, asked) <= 31.0 for _ in range(50))
    assert policy.tries_for(asked) > policy.tries_for(failed) > policy.tries_for(TimedOutError("x"))
    assert policy.tries_for(PermanentError("x")) == policy.tries_for(KeyError()) == 1


def test_retry_budget_lets_a_share_of_the_successes_through() -> None:
    async def body() -> None:
        budget = RetryBudget(share=0.5, per_s=1e-9, most=2)
        for _ in range(2):
            await budget.spend()
        third = asyncio.create_task(budget.spend())
        await asyncio.sleep(0.01)
        assert not third.done()
        third.cancel()
        for _ in range(10):
            budget.succeeded()
        await asyncio.wait_for(budget.spend(), 5)

    run(body())


def test_prefill_names_the_file_of_the_request(tmp_path: Any) -> None:
    async def body() -> None:
        async with TargetServer(staging=str(tmp_path)) as server:
            async with TargetClient(server.url, model=server.options.model) as client:
                ids = np.array([3, 1, 2], np.int32)
                path = await client.prefill(ids, request_id="row7")
                assert path is not None
                assert path.startswith(f"{tmp_path}/cmpl-row7-0-")
                assert server.bodies[-1]["prompt"] == [3, 1, 2]
                assert server.bodies[-1]["max_tokens"] == 1
                server.plan([3, 1, 2], ["no_path"])
                assert await client.prefill([3, 1, 2]) is None

    run(body())


def test_probe_ids_change_with_the_template() -> None:
    async def body() -> None:
        async with TargetServer() as server:
            async with TargetClient(server.url, model=server.options.model) as client:
                first = await client.probe_token_ids()
                assert first == await client.probe_token_ids()
                assert any(each.get("X-Request-Id") == PROBE_ID for each in server.headers)
                server.options.template = "new"
                assert first != await client.probe_token_ids()
                server.options.faults = {"hang": 1}
                with pytest.raises(TimedOutError, match="within 0 s"):
                    await client.probe_token_ids(0.01)

    run(body())


def test_metrics_are_read_and_their_absence_is_no_error() -> None:
    async def body() -> None:
        async with TargetServer(kv_tokens=1600) as server:
            async with TargetClient(server.url, model=server.options.model) as client:
                await client.probe_token_ids()
                load = await client.metrics()
                assert load is not None
                assert (load.requests, load.generated_tokens, load.kv_tokens) == (0, 1, 1600)
                server.options.metrics = False
                assert await client.metrics() is None
                assert await client.healthy()
                await server.go_down()
                assert not await client.healthy()
                with pytest.raises(UnreachableError):
                    await client.metrics()

    run(body())


def test_metrics_of_two_engines_and_of_an_older_release() -> None:
    text = "\n".join(
        f'vllm:{name}{{engine="{engine}",model_name="m"}} {value}'
        for engine in (0, 1)
        for name, value in (
            ("num_requests_running", 3),
            ("num_requests_waiting", 1),
            ("gpu_cache_usage_perc", 0.25 * (engine + 1)),
            ("generation_tokens_total", "1.5e+03"),
        )
    )
    text += '\nvllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1.0'
    text += '\nvllm:cache_config_info{block_size="16",num_gpu_blocks="8"} 1.0'
    load = parse_metrics(text)
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage) == (6, 2, 0.5)
    assert load.generated_tokens == 3000
    assert (load.kv_tokens, load.kv_tokens_of_one) == (288, 128)
    assert parse_metrics("") is None
    assert parse_metrics("# HELP other\nother_total 3") is None
    assert parse_metrics('vllm:num_requests_running{engine="0"} nonsense') is None
