"""Given answers on real servers: their ids are the chat template's, cut where a server stops."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.generation.stage import generate
from draftmill.builder.requests.client import TargetClient
from draftmill.builder.requests.prefill import given_completion
from draftmill.builder.serving.launcher import Server
from draftmill.builder.sources.conversations import prompts_of
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.types import GIVEN, Location
from draftmill.tools.demo.embedded import MODEL_NAME
from tests.builder import extraction
from tests.e2e.conftest import LAYER_IDS
from tests.e2e.test_vllm_generate import END_OF_TURN

TALKS: list[list[dict[str, Any]]] = [
    [
        {"role": "system", "content": "Answer in one line."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Air scatters blue light the most."},
        {"role": "user", "content": "And at sunset?"},
        {"role": "assistant", "content": "Its way is longer: red is left.\n\nThat is all."},
    ],
    [
        {"role": "user", "content": "Então? 素数 \u2028 <x> <|im_end|"},
        {"role": "assistant", "content": "2, 3, 5 \U0001f600"},
    ],
    [
        {"role": "user", "content": "Print an indented line."},
        {"role": "assistant", "content": "```python\n    print(1)\n```\n"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], prompt: bool) -> list[int]:
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True)
    return [int(each) for each in found["input_ids"]]


def prefilled(path: Path, server: Server) -> Dataset:
    """A dataset of all answers in TALKS after the generate stage."""
    dataset = Dataset.create(path, "")
    with dataset.writer() as writer:
        for number, messages in enumerate(TALKS):
            row = {"messages": messages}
            writer.add_prompts(
                prompts_of(row, source="given", number=number, turns="all", mode="prefill")
            )
        report = asyncio.run(generate(writer, GenerateSettings(), [server.url]))
    assert report.outcomes == {"generated": 4}
    assert report.given == 4
    return dataset


def check_ids(dataset: Dataset, tokenizer: Any) -> int:
    """Compares every completion with transformers' own rendering; returns the tokens of all."""
    tokens = 0
    with dataset.reader() as reader:
        rows = reader.sql(
            "SELECT finish_reason, generate_shard, generate_offset, generate_length FROM samples "
            "ORDER BY id"
        ).to_pylist()
        found = [
            reader.shards.completion(
                Location(row["generate_shard"], row["generate_offset"], row["generate_length"])
            )
            for row in rows
        ]
    answers = [
        messages[: index + 1]
        for messages in TALKS
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    for messages, row, completion in zip(answers, rows, found, strict=True):
        prompt = rendered(tokenizer, messages[:-1], True)
        whole = rendered(tokenizer, messages, False)
        ids = completion.token_ids.tolist()
        assert completion.prompt_token_ids.tolist() == prompt
        assert ids == whole[: len(ids)]
        assert tokenizer.decode(whole[len(ids) :]) == "\n"
        assert ids[-1] == END_OF_TURN
        assert tokenizer.decode(ids[len(prompt) : -1]) == messages[-1]["content"]
        assert row["finish_reason"] == GIVEN
        tokens += len(ids)
    return tokens


def test_prefill_ids_are_the_chat_template_s(
    generate_server: Server, tokenizer: Any, tmp_path: Path
) -> None:
    check_ids(prefilled(tmp_path / "d", generate_server), tokenizer)


def test_an_answer_of_the_model_comes_back_as_it_was_served(generate_server: Server) -> None:
    async def body() -> None:
        question = [{"role": "user", "content": "Name the largest ocean."}]
        asked = json.dumps({"messages": question})
        async with TargetClient(generate_server.url, model=MODEL_NAME) as client:
            served = await client.chat(asked, sampling={"temperature": 0.0}, max_tokens=300)
            assert served.finish_reason == "stop"
            answer = {"role": "assistant", "content": served.content}
            talk = json.dumps({"messages": [*question, answer]})
            after = await client.tokenize({"prompt": "\n", "add_special_tokens": False})
            assert after is not None
            given = await given_completion(talk, client, after)
            assert given.token_ids.tolist() == served.token_ids.tolist()

    asyncio.run(body())


def test_given_answers_alone_need_only_the_extraction_server(
    extract_server: Server, tokenizer: Any, tmp_path: Path
) -> None:
    dataset = prefilled(tmp_path / "d", extract_server)
    tokens = check_ids(dataset, tokenizer)
    assert extract_server.spec.staging is not None
    report = asyncio.run(
        extraction.run(
            dataset,
            extract_server.url,
            extract_server.spec.staging,
            layers=extraction.Layers(layer_ids=LAYER_IDS, hidden_size=576),
            model=MODEL_NAME,
            lock_timeout_s=120.0,
        )
    )
    assert report.outcomes == {"extracted": 4}
    with dataset.reader() as reader:
        rows = reader.extracted().to_pylist()
    assert all(row["off_policy"] for row in rows)
    assert sum(row["tokens"] for row in rows) == tokens
