"""Tries are counted for each kind of failure, and the start of a run survives a bad moment."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.builder.generation import servers
from draftmill.builder.requests.failures import (
    ConnectionCutError,
    GarbledReplyError,
    OverloadedError,
    ServerFailedError,
)
from draftmill.builder.requests.replies import PROBE_CONVERSATION
from draftmill.builder.requests.retry_policy import RetryPolicy, retried
from draftmill.manifests.errors import TransientError
from tests.builder.generation import generated, writer_of
from tests.fakes.target_server import TargetServer

KINDS = (OverloadedError, GarbledReplyError, ServerFailedError, ConnectionCutError)
POLICY = RetryPolicy(
    tries=5, tries_by_kind={OverloadedError: 9, GarbledReplyError: 3}, base_s=0.0, max_s=0.0
)


@given(st.lists(st.sampled_from(KINDS), max_size=30))
def test_a_request_ends_when_one_kind_is_used_up(kinds: list[type[TransientError]]) -> None:
    left = iter(kinds)
    waits = 0

    async def call() -> str:
        for kind in left:
            raise kind("x")
        return "done"

    async def before_wait(tries: int, error: TransientError, wait_s: float) -> None:
        nonlocal waits
        waits += 1
        assert (tries, type(error)) == (waits, kinds[waits - 1])

    seen: Counter[type[TransientError]] = Counter()
    number, last = len(kinds), None
    for place, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] == POLICY.tries_for(kind("x")):
            number, last = place, kind
            break
    if last is None:
        assert asyncio.run(retried(call, POLICY, before_wait)) == "done"
    else:
        with pytest.raises(last):
            asyncio.run(retried(call, POLICY, before_wait))
    assert waits == number


@pytest.mark.slow
def test_a_bad_moment_at_the_start_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = RetryPolicy(tries=5, tries_by_kind=servers.PROBING.tries_by_kind, base_s=0.01)
    monkeypatch.setattr(servers, "PROBING", quick)

    async def body() -> None:
        with writer_of(tmp_path / "d", 10) as writer:
            async with TargetServer() as server:
                faults = ["drop", "http_503", "http_429", "garbage", "http_500", "ok"]
                server.plan(json.loads(PROBE_CONVERSATION)["messages"], faults)
                report = await generated(writer, server)
            assert report.outcomes == {"generated": 10}

    asyncio.run(body())
