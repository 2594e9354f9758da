"""Replies that no server should send: each is one failure of one request, and never the run's."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.requests.client import TargetClient
from draftmill.builder.requests.failures import retry_after_s
from draftmill.builder.requests.metrics import parse_metrics
from draftmill.builder.requests.replies import completion_of_reply, ids_of_tokenizer, json_of
from draftmill.manifests.errors import RequestError
from draftmill.manifests.schema import attempt_rows
from draftmill.manifests.shards.record import draft, pack, parse
from draftmill.manifests.types import Attempt, Result
from tests.builder.generation import check_served, generated, history, messages, states, writer_of
from tests.fakes.target_server import TargetServer

GOOD: dict[str, Any] = {
    "choices": [
        {
            "message": {"role": "assistant", "content": "two", "tool_calls": []},
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [5, 6],
        }
    ],
    "prompt_token_ids": [1, 2, 3],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
}
HALF = "\ud83d"
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.sampled_from([HALF, "x" * 3_000_000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    parts = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        parts = enumerate(value)
    for key, part in parts:
        yield from places(part, (*path, key))


def changed(path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    reply = copy.deepcopy(GOOD)
    inner: Any = reply
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return reply


@given(st.sampled_from(sorted(places(GOOD), key=str)), anything)
@settings(max_examples=400)
def test_any_value_anywhere_is_a_completion_that_can_be_stored_or_a_failed_request(
    path: tuple[Any, ...], value: Any
) -> None:
    reply = json_of(json.dumps(changed(path, value)).encode())
    try:
        completion = completion_of_reply(reply)
    except RequestError:
        return
    if completion is None:
        return
    attempt = Attempt(
        id=1,
        stage="generate",
        attempt=1,
        outcome="generated",
        finish_reason=completion.finish_reason,
        reasoning_tokens=completion.extra.get("reasoning_tokens"),
    )
    attempt_rows([attempt])
    stored = draft(Result(attempt=attempt, hash="0" * 32, completion=completion), "f")
    record, head = pack(stored, 0, 4096)
    assert parse(head, 0, 4096) == record


@pytest.mark.parametrize("raw", [b"", b"[" * 200_000, b"\xff\xfe", b'{"a": 1} x', b"null\x00"])
def test_bytes_that_are_no_json_are_a_garbled_reply(raw: bytes) -> None:
    with pytest.raises(RequestError, match="not JSON"):
        json_of(raw)


@given(anything)
def test_ids_of_a_tokenizer_are_ids_or_garbled(tokens: Any) -> None:
    try:
        ids = ids_of_tokenizer({"tokens": tokens})
    except RequestError:
        return
    assert all(type(each) is int and 0 <= each < 1 << 31 for each in ids)


@given(st.sampled_from(["NaN", "+Inf", "-Inf", "nan", "1e999", "1e5", "0", "x"]), st.integers(0, 3))
def test_metrics_with_any_number_are_read_or_none(number: str, place: int) -> None:
    names = ("num_requests_running", "num_requests_waiting", "generation_tokens_total")
    names += ("kv_cache_usage_perc",)
    lines = [f"vllm:{name} {number if n == place else 1}" for n, name in enumerate(names)]
    load = parse_metrics("\n".join(lines))
    assert load is None or load.requests < 1 << 20


def test_retry_after_is_seconds_or_a_date() -> None:
    def date(seconds: float) -> str:
        return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)

    assert 500 <= (retry_after_s(date(600)) or 0) <= 600
    assert retry_after_s(date(-60)) == 0
    assert retry_after_s(date(1e6)) == 3600
    assert retry_after_s("2.5") == 2.5
    assert retry_after_s("1e99") == 3600
    assert retry_after_s("-1") == 0
    for nonsense in ("", "nan", "soon", "Mon, 99 Foo 2026", "Wed, 21 Oct 99999999999 07:28:00 GMT"):
        assert retry_after_s(nonsense) is None


def test_words_of_a_server_are_kept_as_unicode(tmp_path: Path) -> None:
    """A message that was cut inside an emoji reaches the history as text."""

    async def body() -> None:
        class Odd(TargetServer):
            async def _chat(self, request: web.Request) -> web.Response:
                asked = json.loads(await request.read())["messages"]
                if asked == messages(3):
                    text = '{"error": {"message": "no \\ud83d\\nfor you"}}'
                    return web.Response(text=text, status=400, content_type="application/json")
                return await super()._chat(request)

        with writer_of(tmp_path / "d", 8) as writer:
            async with Odd() as server:
                report = await generated(writer, server)
            assert report.outcomes == {"generated": 7, "failed": 1}
            rows = writer.manifest.rows("SELECT error FROM attempts WHERE outcome = 'failed'")
            assert rows == [("HTTP 400: no ? for you",)]

    asyncio.run(body())


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        {"usage": [1]},
        {"usage": {"completion_tokens_details": "many"}},
        {"usage": {"completion_tokens_details": {"reasoning_tokens": "many"}}},
    ],
)
def test_a_reply_with_an_odd_part_is_taken(tmp_path: Path, part: dict[str, Any]) -> None:
    async def body() -> None:
        class Odd(TargetServer):
            async def _chat(self, request: web.Request) -> web.Response:
                reply = await super()._chat(request)
                assert isinstance(reply.body, bytes)
                return web.json_response({**json.loads(reply.body), **part})

        with writer_of(tmp_path / "d", 20) as writer:
            async with Odd() as server:
                await generated(writer, server)
            assert history(writer) == {("generated", None): 20}
            assert check_served(tmp_path / "d", writer) == 20

    asyncio.run(body())


@pytest.mark.slow
def test_metrics_that_break_end_the_run_or_are_passed_over(tmp_path: Path) -> None:
    async def body() -> None:
        class Odd(TargetServer):
            async def _metrics(self, _: web.Request) -> web.Response:
                return web.Response(
                    text="vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n"
                    "vllm:generation_tokens_total NaN\n"
                )

        with writer_of(tmp_path / "d", 40) as writer:
            async with Odd(tokens_per_s=4000.0) as server:
                report = await generated(writer, server)
            assert report.outcomes == {"generated": 40}
            assert states(writer) == {"generated": 40}

    asyncio.run(body())


def test_a_model_list_with_an_odd_length_says_nothing_about_it() -> None:
    async def body() -> None:
        async with TargetServer() as server, TargetClient(server.url) as client:
            for odd in ("8k", -1, 0, 2.5, [], True, None):
                server.options.max_model_len = odd  # type: ignore[assignment]
                assert (await client.models())[0].max_model_len is None

    asyncio.run(body())
