"""Mode prefill: given answers become completions whose ids are what the server's template makes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.requests.client import TargetClient
from draftmill.builder.requests.prefill import after_turn, given_completion
from draftmill.builder.sources.conversations import prompts_of
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import RejectedError, ServerError
from draftmill.manifests.types import GIVEN, Prompt
from draftmill.manifests.writer import DatasetWriter
from tests.builder.generation import completions, generated, history, states
from tests.fakes import toy_model as toy
from tests.fakes.target_server import TargetServer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Rayleigh scattering."},
    {"role": "user", "content": "And at sunset?"},
    {"role": "assistant", "content": "The path is longer."},
]


def talk(number: int, answer: str | None = None) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": answer or f"answer number {number}"},
    ]


def prompts(*talks: list[dict[str, Any]], **options: Any) -> list[Prompt]:
    options = {"mode": "prefill"} | options
    return [
        prompt
        for number, messages in enumerate(talks, 1)
        for prompt in prompts_of({"messages": messages}, source="s", number=number, **options)
    ]


def add(writer: DatasetWriter, *talks: list[dict[str, Any]], **options: Any) -> None:
    writer.add_prompts(prompts(*talks, **options))


def new(path: Path) -> Any:
    return Dataset.create(path, "").writer()


messages_of_any_chat = st.lists(
    st.tuples(st.text(min_size=1).filter(str.strip), st.text(min_size=1).filter(str.strip)),
    min_size=1,
    max_size=3,
)


@given(messages_of_any_chat, st.sampled_from(["", "\n", " \n\n"]))
@settings(max_examples=25)
def test_the_answer_is_what_it_adds_to_its_prompt(turns: list[tuple[str, str]], white: str) -> None:
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]

    async def body() -> None:
        async with TargetServer(after_turn=white) as server, TargetClient(server.url) as client:
            await client.connect()
            after = await after_turn(client, None)
            assert toy.text_of(after) == white
            found = await given_completion(json.dumps({"messages": messages}), client, after)
            prompt = toy.render(messages[:-1], after_turn=white)
            assert found.prompt_token_ids.tolist() == prompt
            said = [*messages[-1]["content"].encode(), toy.END]
            assert found.completion_token_ids.tolist() == said
            assert (found.content, found.finish_reason) == (messages[-1]["content"], GIVEN)

    asyncio.run(body())


def test_given_answers_are_stored_and_nothing_is_generated(tmp_path: Path) -> None:
    async def body() -> None:
        with new(tmp_path / "d") as writer:
            add(writer, *map(talk, range(80)))
            async with TargetServer(
                after_turn="\n", faults={"tokenize_500": 0.1}, tokens_per_s=1000
            ) as server:
                report = await generated(writer, server)
                assert report.outcomes["generated"] == report.given == 80
                assert report.tokens == 0
                assert server.answered.total() == 1  # the probe
                assert history(writer)["transient", "ServerFailedError"] > 0
                kept = completions(tmp_path / "d", writer)
                for number in range(80):
                    asked = talk(number)
                    ids = toy.render(asked, add_generation_prompt=False, after_turn="\n")
                    assert kept[number + 1].token_ids.tolist() == ids[:-1]
                    assert kept[number + 1].content == asked[1]["content"]
                asked_before = server.tokenized.total()
                await generated(writer, server)
                assert server.tokenized.total() == asked_before

    asyncio.run(body())


def test_both_modes_in_one_dataset_are_counted_apart(tmp_path: Path) -> None:
    async def body() -> None:
        with new(tmp_path / "d") as writer:
            add(writer, *map(talk, range(30)))
            add(writer, *map(talk, range(50)), mode="regenerate")
            async with TargetServer(reasoning="reasoning", median_tokens=40) as server:
                report = await generated(writer, server, reasoning="required")
                assert report.outcomes == {"generated": 80}
                assert report.given == 30
                assert server.answered.total() == 51
                found = writer.manifest.rows(
                    "SELECT off_policy, finish_reason = 'given', count(*) FROM samples "
                    "GROUP BY ALL ORDER BY 1"
                )
                assert found == [(False, False, 50), (True, True, 30)]
                served = sum(
                    len(each.completion_token_ids)
                    for each in completions(tmp_path / "d", writer).values()
                    if each.finish_reason != GIVEN
                )
                assert report.tokens == served

    asyncio.run(body())


def test_an_outage_costs_no_row_and_teaches_the_controller_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        with new(tmp_path / "d") as writer:
            add(writer, *map(talk, range(120)))
            async with TargetServer() as server:
                run = asyncio.create_task(generated(writer, server, concurrency="auto"))
                while server.tokenized.total() < 80:  # noqa: ASYNC110 - it happens in the server
                    await asyncio.sleep(0.005)
                await server.go_down()
                await asyncio.sleep(0.1)
                await server.come_up()
                report = await run
                assert report.outcomes["generated"] == report.given == 120
                assert {outcome for outcome, _ in history(writer)} <= {"generated", "transient"}
                decisions = writer.manifest.rows("SELECT decision FROM control")
                assert not [words for (words,) in decisions if "trying more" in words]

    asyncio.run(body())


def test_a_template_that_drops_reasoning_rejects_with_the_reason(tmp_path: Path) -> None:
    async def body() -> None:
        with new(tmp_path / "d") as writer:
            add(writer, talk(0), talk(1))
            async with TargetServer(strip_reasoning=True) as server:
                report = await generated(writer, server)
                assert report.outcomes == {"rejected": 2}
                (kind, words), _ = writer.manifest.rows("SELECT error_class, error FROM attempts")
                assert kind == "template"
                length = len(toy.render(talk(0)[:1], strip_reasoning=True))
                assert f"{length - 1} of its {length} tokens are the same" in words

    asyncio.run(body())


def test_gates_that_make_sense_hold_for_given_answers_too(tmp_path: Path) -> None:
    async def body() -> None:
        with new(tmp_path / "d") as writer:
            add(writer, talk(0, "a"), talk(1, "again and " * 60), talk(2), talk(3, "x" * 9000))
            async with TargetServer() as server:
                await generated(
                    writer,
                    server,
                    min_completion_tokens=5,
                    truncated="reject",
                    reasoning="required",
                    max_repetition=0.5,
                )
                assert dict(history(writer)) == {
                    ("rejected", "too_short"): 1,
                    ("rejected", "repetition"): 2,
                    ("generated", None): 1,
                }
                assert states(writer) == {"rejected": 3, "generated": 1}

    asyncio.run(body())


def test_a_server_that_cannot_tokenise_alike_stops_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        with new(tmp_path / "d") as writer:
            add(writer, talk(0))
            async with TargetServer(tokenize=False) as server:
                with pytest.raises(ServerError, match="has no /tokenize"):
                    await generated(writer, server)
            async with TargetServer(tokenize_template="differs") as server:
                with pytest.raises(ServerError, match="another template than its chat"):
                    await generated(writer, server)
            assert states(writer) == {"pending": 1}

    asyncio.run(body())


def test_an_unusual_end_of_an_answer_is_rejected() -> None:
    async def body() -> None:
        async with TargetServer(after_turn="") as server, TargetClient(server.url) as client:
            await client.connect()
            with pytest.raises(RejectedError, match="after the end of the turn"):
                await given_completion(json.dumps({"messages": talk(0)}), client, [10])

    asyncio.run(body())


def test_every_answer_can_be_a_row_and_groups_with_its_conversation() -> None:
    first, last, every = (prompts(TALK, turns=turns) for turns in ("first", "last", "all"))
    assert [json.loads(p.conversation)["messages"] for p in every] == [TALK[:3], TALK]
    assert [p.hash for p in every] == [first[0].hash, last[0].hash]
    anew = prompts(TALK, turns="all", mode="regenerate")
    assert {p.conversation_id for p in [*every, *anew]} == {anew[0].conversation_id}
    assert len({p.hash for p in [*every, *anew]}) == 4
    assert all(p.off_policy and p.reference is None for p in every)
    assert not any(p.off_policy for p in anew)


def test_an_answer_beside_the_prompt_is_kept_as_well() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Why?", "answer": "Because."},
        {"prompt": [{"role": "user", "content": "Why?"}], "completion": "Because."},
        {
            "conversations": [
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "Because."},
            ]
        },
    ]
    found = [
        prompt for row in rows for prompt in prompts_of(row, source="s", number=1, mode="prefill")
    ]
    assert len({prompt.hash for prompt in found}) == 1
    assert json.loads(found[0].conversation)["messages"][-1]["content"] == "Because."


@pytest.mark.slow
def test_a_tokenizer_that_goes_away_fails_no_row(tmp_path: Path) -> None:
    """A gateway answers 404 for a while: the server is waited for, as with any outage."""

    async def body() -> None:
        with new(tmp_path / "d") as writer:
            add(writer, *(talk(number) for number in range(300)))
            async with TargetServer() as server:
                run = asyncio.create_task(generated(writer, server, concurrency=4))
                while server.tokenized.total() < 40:  # noqa: ASYNC110 - it is the server's
                    await asyncio.sleep(0.001)
                server.options.tokenize = False
                await asyncio.sleep(6)
                server.options.tokenize = True
                report = await run
            assert report.outcomes == {"generated": 300}
            assert history(writer) == {("generated", None): 300}

    asyncio.run(body())


@pytest.mark.slow
def test_a_server_without_tokenizer_that_comes_late_is_not_used_for_them(tmp_path: Path) -> None:
    async def body() -> None:
        with new(tmp_path / "d") as writer:
            add(writer, *(talk(number) for number in range(600)))
            async with TargetServer() as server, TargetServer(tokenize=False) as late:
                await late.go_down()
                run = asyncio.create_task(generated(writer, server, late, concurrency=2))
                while server.tokenized.total() < 40:  # noqa: ASYNC110 - it is the server's
                    await asyncio.sleep(0.001)
                await server.go_down()
                await late.come_up()
                while not late.statuses[404]:  # noqa: ASYNC110 - it is the server's
                    await asyncio.sleep(0.001)
                await server.come_up()
                report = await run
            assert report.outcomes == {"generated": 600}
            assert states(writer) == {"generated": 600}

    asyncio.run(body())
