"""What the tests of the generate stage share: datasets of questions, runs, what came of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.generation.stage import generate
from draftmill.builder.progress import StageReport
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.types import Completion, Location, Prompt
from draftmill.manifests.writer import DatasetWriter
from tests.fakes import toy_model as toy
from tests.fakes.target_server import TargetServer

# fast clocks; nothing in them changes what a completion is
QUICK: dict[str, Any] = {
    "max_completion_tokens": 200,
    "concurrency": 16,
    "control_interval_s": 0.05,
    "retry_base_s": 0.01,
    "stop_grace_s": 0.0,
}


def messages(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"question {number}"}]


def prompt(number: int, content: Sequence[Any] | None = None) -> Prompt:
    text = json.dumps({"messages": content or messages(number)}, separators=(",", ":"))
    return Prompt(
        hash=hashlib.md5(text.encode()).hexdigest(),
        conversation=text,
        source="questions",
        row=number,
        conversation_id=str(number),
    )


def new_dataset(path: Path, prompts: int) -> Dataset:
    """A dataset whose prompt with id n + 1 is question n."""
    dataset = Dataset.create(path, "")
    with dataset.writer() as writer:
        writer.add_prompts(prompt(number) for number in range(prompts))
    return dataset


@contextmanager
def writer_of(path: Path, prompts: int) -> Iterator[DatasetWriter]:
    """The writer of a new dataset with these prompts."""
    with Dataset.create(path, "").writer() as writer:
        writer.add_prompts(prompt(number) for number in range(prompts))
        yield writer


async def generated(
    writer: DatasetWriter, *servers: TargetServer, limit_s: float = 120, **settings: Any
) -> StageReport:
    """One run of the stage against these servers."""
    run = generate(writer, GenerateSettings(**QUICK | settings), [server.url for server in servers])
    return await asyncio.wait_for(run, limit_s)


def states(writer: DatasetWriter) -> dict[str, int]:
    return {name: n for name, n in writer.summary()["prompts"].items() if n and name != "total"}


def history(writer: DatasetWriter) -> Counter[tuple[str, str | None]]:
    """(outcome, error class) of all attempts."""
    return Counter(writer.manifest.rows("SELECT outcome, error_class FROM attempts"))


def completions(path: Path, writer: DatasetWriter) -> dict[int, Completion]:
    """All current completions by prompt id, read from their shards."""
    rows = writer.manifest.rows(
        "SELECT id, generate_shard, generate_offset, generate_length FROM samples "
        "WHERE generate_shard IS NOT NULL ORDER BY id"
    )
    reader = ShardReader(path)
    try:
        return {row[0]: reader.completion(Location(*row[1:4])) for row in rows}
    finally:
        reader.close()


def check_served(path: Path, writer: DatasetWriter) -> int:
    """Every stored completion is what the fake model says to its prompt; returns how many."""
    found = completions(path, writer)
    for identity, completion in found.items():
        asked = messages(identity - 1)
        assert completion.prompt_token_ids.tolist() == toy.render(asked)
        start = int(toy.digest(asked)[:8], 16) % (len(toy.TEXT) // 2)
        said = (completion.reasoning or completion.content or "").encode()
        assert said == toy.TEXT[start : start + len(said)].encode()
        if completion.finish_reason == "stop":
            assert completion.completion_token_ids[-1] == toy.END
    return len(found)
