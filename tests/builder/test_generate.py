"""The generate stage on the fake server: what becomes of rows, and when the stage refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from draftmill.builder.generation.settings import GenerateSettings
from draftmill.manifests.errors import ConfigError, ServerError, SettingsMismatch, UsageError
from tests.builder.generation import (
    check_served,
    completions,
    generated,
    history,
    messages,
    prompt,
    states,
    writer_of,
)
from tests.fakes import toy_model as toy
from tests.fakes.target_server import TargetServer

FAULTS = {
    "http_500": 0.04,
    "http_503": 0.02,
    "http_429": 0.02,
    "drop": 0.02,
    "garbage": 0.02,
    "http_400": 0.05,
    "cut_in_reasoning": 0.05,
    "no_token_ids": 0.05,
    "empty": 0.05,
    "loop": 0.05,
}


def test_every_prompt_gets_the_served_answer_and_is_asked_once(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 150) as writer:
            async with TargetServer() as server:
                report = await generated(writer, server)
                assert report.outcomes == {"generated": 150}
                assert (report.stopped, report.interrupted) == (None, False)
                assert states(writer) == {"generated": 150}
                assert check_served(tmp_path / "d", writer) == 150
                assert all(server.count(messages(n)) == 1 for n in range(150))
                assert server.peak_in_flight <= 16
                asked = server.requests.total()
                again = await generated(writer, server)
                assert again.outcomes == {}
                assert server.requests.total() == asked + 1  # the probe

    asyncio.run(body())


def test_every_fault_ends_in_its_state_and_a_second_run_asks_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 200) as writer:
            async with TargetServer(faults=FAULTS, median_tokens=150) as server:
                report = await generated(writer, server, max_completion_tokens=400)
                found = history(writer)
                expected: dict[str, int] = {}
                for number in range(200):
                    fault = _sticky_fault(number)
                    expected[fault] = expected.get(fault, 0) + 1
                assert found["failed", "PermanentError"] == expected["http_400"]
                assert found["rejected", "empty"] == expected["empty"]
                assert found["rejected", "repetition"] == expected["loop"]
                assert report.truncated >= expected["cut_in_reasoning"]
                assert found["generated", None] == 200 - sum(
                    expected[name] for name in ("http_400", "empty", "loop")
                )
                assert {name for outcome, name in found if outcome == "transient"} == {
                    "ServerFailedError",
                    "OverloadedError",
                    "ConnectionCutError",
                    "GarbledReplyError",
                }
                kept = completions(tmp_path / "d", writer)
                rebuilt = [each for each in kept.values() if each.ids_rebuilt]
                assert len(rebuilt) == expected["no_token_ids"]
                cut = [each for each in kept.values() if each.content is None]
                assert cut
                assert all(each.finish_reason == "length" and each.reasoning for each in cut)
                asked = server.requests.total()
                await generated(writer, server, max_completion_tokens=400)
                assert server.requests.total() == asked + 1

    asyncio.run(body())


def _sticky_fault(number: int) -> str:
    """What the server does to this prompt for good, by its own draw."""
    key = toy.digest(messages(number))
    for name in ("http_400", "cut_in_reasoning", "no_token_ids", "empty", "loop"):
        if toy.unit(name, 0, key, "") < FAULTS[name]:
            return name
    return "ok"


def test_tries_are_counted_and_used_up(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 3) as writer:
            async with TargetServer() as server:
                server.plan(messages(0), ["http_500"] * 99)
                server.plan(messages(1), ["http_500", "drop"])
                await generated(writer, server, tries=4)
                assert server.count(messages(0)) == 4
                assert server.count(messages(1)) == 3
                rows = writer.manifest.rows(
                    "SELECT id, attempt, outcome, http_status FROM attempts ORDER BY id, attempt"
                )
                assert rows == [
                    (1, 1, "transient", 500),
                    (1, 2, "transient", 500),
                    (1, 3, "transient", 500),
                    (1, 4, "failed", 500),
                    (2, 1, "transient", 500),
                    (2, 2, "transient", None),
                    (2, 3, "generated", None),
                    (3, 1, "generated", None),
                ]
                assert states(writer) == {"generated": 2, "failed": 1}

    asyncio.run(body())


def test_attempts_say_where_when_and_how_long(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 1) as writer:
            async with TargetServer(reasoning="reasoning") as server:
                await generated(writer, server)
                columns = "endpoint, finish_reason, prompt_tokens, completion_tokens"
                (row,) = writer.manifest.rows(f"SELECT {columns} FROM attempts")
                (kept,) = completions(tmp_path / "d", writer).values()
                assert row == (
                    server.url,
                    kept.finish_reason,
                    len(kept.prompt_token_ids),
                    len(kept.completion_token_ids),
                )
                (times,) = writer.manifest.rows("SELECT total_s, queue_s, started_at FROM attempts")
                assert 0 <= times[1] <= times[0] < 60
                assert times[2] > 1.6e9

    asyncio.run(body())


def test_over_long_prompts_are_capped_or_rejected_with_the_sum(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 1) as writer:
            tight = [{"role": "user", "content": "x" * 950}]
            tool_long = [{"role": "user", "content": "y" * 2000}]
            writer.add_prompts([prompt(1, tight), prompt(2, tool_long)])
            async with TargetServer(
                max_model_len=1000, refuse_over_length=True, median_tokens=150, sigma=0.1
            ) as server:
                report = await generated(writer, server, max_completion_tokens=500)
                assert report.outcomes == {"generated": 2, "rejected": 1}
                kept = completions(tmp_path / "d", writer)
                prompt_tokens = len(toy.render(tight))
                assert len(kept[2].completion_token_ids) == 1000 - prompt_tokens
                assert kept[2].finish_reason == "length"
                ((name, words),) = writer.manifest.rows(
                    "SELECT error_class, error FROM attempts WHERE id = 3"
                )
                assert name == "over_length"
                assert f"prompt of {len(toy.render(tool_long)):,} tokens" in words
                assert "1,000" in words
                assert server.count(tool_long) == 0

    asyncio.run(body())


def test_kv_memory_smaller_than_the_context_is_a_limit_too(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 1) as writer:
            writer.add_prompts([prompt(1, [{"role": "user", "content": "x" * 1200}])])
            async with TargetServer(max_model_len=8192, kv_tokens=1600) as server:
                report = await generated(writer, server, max_completion_tokens=4000)
                assert report.outcomes == {"generated": 2}
                limits = [body["max_completion_tokens"] for body in server.bodies]
                assert max(limits) < 1600

    asyncio.run(body())


def test_without_a_tokenizer_page_the_servers_refusal_decides(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 1) as writer:
            writer.add_prompts([prompt(1, [{"role": "user", "content": "x" * 2000}])])
            async with TargetServer(max_model_len=1000, tokenize=False) as server:
                report = await generated(writer, server)
                assert report.outcomes == {"generated": 1, "rejected": 1}
                ((words,),) = writer.manifest.rows("SELECT error FROM attempts WHERE id = 2")
                assert "maximum context length is 1000" in words

    asyncio.run(body())


def test_changed_settings_are_refused_and_named(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 2) as writer:
            async with TargetServer() as server:
                await generated(writer, server, temperature=0.5)
                for change, field in (
                    ({"temperature": 0.7}, "temperature is 0.5 in the dataset and 0.7"),
                    ({"temperature": 0.5, "top_p": 0.9}, "top_p"),
                    ({"temperature": 0.5, "max_completion_tokens": 10}, "max_completion_tokens"),
                ):
                    with pytest.raises(SettingsMismatch, match=field):
                        await generated(writer, server, **change)
                server.options.template = "another"
                with pytest.raises(SettingsMismatch, match="chat template and tokenizer"):
                    await generated(writer, server, temperature=0.5)
                server.options.template = ""
                same = {"temperature": 0.5, "max_completion_tokens": 300}
                await generated(writer, server, concurrency=3, timeout_s=9.0, **same)
                server.options.model = "another/model"
                with pytest.raises(SettingsMismatch, match="model"):
                    await generated(writer, server, **same)

    asyncio.run(body())


def test_sampling_parameters_are_sent(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 1) as writer:
            async with TargetServer() as server:
                await generated(writer, server, temperature=0.25, top_k=-1, seed=3)
                sent = server.bodies[-1]
                assert (sent["temperature"], sent["top_k"], sent["seed"]) == (0.25, -1, 3)
                assert "top_p" not in sent

    asyncio.run(body())


def test_missing_reasoning_parser_stops_the_run_and_rejects_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 100) as writer:
            async with TargetServer() as server:
                with pytest.raises(ServerError, match="20 replies and no reasoning"):
                    await generated(writer, server, reasoning="required")
                assert states(writer) == {"pending": 100}
                server.options.reasoning = "reasoning_content"
                report = await generated(writer, server, reasoning="required")
                assert report.outcomes == {"generated": 100}

    asyncio.run(body())


def test_single_replies_without_reasoning_are_rejected(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 60) as writer:
            async with TargetServer(reasoning="reasoning", faults={"empty": 0.2}) as server:
                await generated(writer, server, reasoning="required")
                kinds = history(writer)
                assert kinds["rejected", "empty"] > 0
                assert kinds["generated", None] + kinds["rejected", "empty"] == 60

    asyncio.run(body())


def test_reasoning_text_may_be_dropped_but_its_ids_stay(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 3) as writer:
            async with TargetServer(reasoning="reasoning") as server:
                await generated(writer, server, reasoning="drop")
                for kept in completions(tmp_path / "d", writer).values():
                    assert kept.reasoning is None
                    assert kept.completion_token_ids[0] == toy.THINK

    asyncio.run(body())


def test_gates_reject_with_their_reason_and_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_gate_23.py").write_text(
        "def even(completion, prompt):\n    return None if prompt.id % 2 else 'even'\n"
        "def broken(completion, prompt):\n    raise OSError('oops')\n"
    )
    monkeypatch.chdir(tmp_path)

    async def body() -> None:
        with writer_of(tmp_path / "d", 20) as writer:
            async with TargetServer() as server:
                with pytest.raises(ConfigError, match=r"OSError at sample \d+: oops"):
                    await generated(writer, server, gate="my_gate_23:broken")
                asked = server.requests.total()
                await generated(writer, server, gate="my_gate_23:even")
                assert history(writer)["rejected", "user"] == 10
                assert states(writer) == {"generated": 10, "rejected": 10}
                assert server.requests.total() == asked + 21
                await generated(writer, server, gate="my_gate_23:even")
                assert server.requests.total() == asked + 22

    asyncio.run(body())


def test_without_servers_or_with_wrong_ones_nothing_is_touched(tmp_path: Path) -> None:
    async def body() -> None:
        with writer_of(tmp_path / "d", 2) as writer:
            with pytest.raises(UsageError, match="--url"):
                await generated(writer)
            async with TargetServer() as server, TargetServer(model="other") as other:
                with pytest.raises(ServerError, match="serves 'other', but"):
                    await generated(writer, server, other)
                with pytest.raises(ServerError, match="does not serve 'x'"):
                    await generated(writer, server, model="x")
                other.options.model, other.options.template = server.options.model, "differs"
                with pytest.raises(ServerError, match="other token ids"):
                    await generated(writer, server, other)
                server.options.faults = {"http_500": 1}
                with pytest.raises(ServerError, match="does not answer a request of one token"):
                    await generated(writer, server)
                await server.go_down()
                with pytest.raises(ServerError, match="no server answers"):
                    await generated(writer, server)
            assert states(writer) == {"pending": 2}
            assert history(writer) == {}

    asyncio.run(body())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_completion_tokens", 0),
        ("concurrency", 0),
        ("deadline_margin", 0.5),
        ("temperature", -1.0),
        ("top_p", 1.5),
        ("max_repetition", 2.0),
        ("timeout_s", 0.0),
        ("gate", "module"),
        ("tries", 0),
        ("stop_grace_s", -1.0),
    ],
)
def test_settings_out_of_range_name_their_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        GenerateSettings(**{key: value})
