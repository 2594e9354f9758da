"""A dataset with completions to extract from, and one run of the stage; also in its own process."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.builder.budget import Budget
from draftmill.builder.extraction.stage import ExtractSettings, Layers, extract
from draftmill.builder.progress import OnProgress, StageReport
from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.target.target import TargetModel
from draftmill.manifests.types import Attempt, Completion, Location, Prompt, Result
from tests.fakes import toy_model as toy

LAYERS = Layers(layer_ids=(2, 15, 27, 30), hidden_size=32)
SHARD_BYTES = 256 << 10

# token ids of every sample of the datasets that were made, by prompt id
IDS: dict[Path, dict[int, list[int]]] = {}


def token_ids(number: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Ids of sample `number`, different from those of any other."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, length).astype(np.int32)


def make_dataset(path: Path, lengths: Iterable[int], *, prompt_tokens: int = 10) -> Dataset:
    """A dataset whose samples have so many tokens and wait for their hidden states."""
    dataset = Dataset.create(path, "# a test\n")
    lengths = list(lengths)
    with dataset.writer() as writer:
        writer.add_prompts(
            Prompt(
                hash=f"{number:032x}",
                conversation=f'{{"messages":[{{"role":"user","content":"{number}"}}]}}',
                source="test",
                row=number,
                conversation_id=str(number),
            )
            for number in range(1, len(lengths) + 1)
        )
        results = []
        for row in writer.pending(0, len(lengths)):
            ids = token_ids(row.id, lengths[row.id - 1])
            completion = Completion(
                prompt_token_ids=ids[:prompt_tokens],
                completion_token_ids=ids[prompt_tokens:],
                content="text",
                reasoning=None,
                finish_reason="stop",
            )
            attempt = Attempt(id=row.id, stage="generate", attempt=1, outcome="generated")
            results.append(Result(attempt=attempt, hash=row.hash, completion=completion))
            IDS.setdefault(path, {})[row.id] = ids.tolist()
        writer.commit(results)
    return dataset


async def run(
    dataset: Dataset,
    urls: str | Sequence[str],
    staging: Path,
    *,
    limit_bytes: int | None = None,
    headroom_bytes: int | None = None,
    on_progress: OnProgress | None = None,
    layers: Layers = LAYERS,
    model: str | None = "fake/target",
    target: TargetModel | None = None,
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> StageReport:
    """Extract with settings that do not make a test wait."""
    quick: dict[str, Any] = {
        "retry_base_s": 0.01,
        "retry_max_s": 0.02,
        "lock_timeout_s": 5.0,
        "concurrency": 8,
        "stop_grace_s": 0.5,
    }
    with dataset.writer(shard_bytes=SHARD_BYTES) as writer:
        return await extract(
            writer,
            ExtractSettings(**(quick | settings)),
            [urls] if isinstance(urls, str) else urls,
            model=model,
            layers=layers,
            staging=staging,
            budget=Budget(
                limit_bytes=limit_bytes,
                dataset=dataset.path,
                staging=staging,
                headroom_bytes=headroom_bytes,
            ),
            on_progress=on_progress,
            target=target,
            say=say,
        )


def run_in_process(
    path: str, url: str, staging: str, environment: Mapping[str, str], settings: dict[str, Any]
) -> None:
    """The target of a process that a test kills."""
    os.environ.update(environment)
    # Its modules were imported before this process was split off.
    files.arm(
        environment.get("DRAFTMILL_FAILPOINT", ""), environment.get("DRAFTMILL_FAILPOINT_TRACE")
    )
    asyncio.run(run(Dataset.open(path), url, Path(staging), **settings))


@dataclass(kw_only=True)
class Seen:
    """What a run left in a dataset; every stored sample was compared with what it must be."""

    extracted: int
    states: Counter[str]
    attempts: dict[int, list[tuple[Any, ...]]]  # (outcome, error class, error), extract only


def look(dataset: Dataset, *, max_seq_len: int = 8192) -> Seen:
    """Decodes everything and reads states and history, opening the manifest once."""
    history: defaultdict[int, list[tuple[Any, ...]]] = defaultdict(list)
    with dataset.reader() as reader:
        table = reader.extracted().to_pylist()
        payloads = reader.sql("SELECT id FROM payloads WHERE stage = 'extract'").to_pylist()
        assert len({each["id"] for each in payloads}) == len(payloads), "stored twice"
        for row in table:
            completion = reader.shards.completion(
                Location(row["generate_shard"], row["generate_offset"], row["generate_length"])
            )
            ids = completion.token_ids[:max_seq_len]
            stored = reader.shards.states(
                Location(row["extract_shard"], row["extract_offset"], row["extract_length"])
            )
            np.testing.assert_array_equal(stored, toy.states_of(ids, 4, 32))
        query = "SELECT state::VARCHAR AS s, count(*) AS n FROM state GROUP BY 1"
        states = Counter({each["s"]: each["n"] for each in reader.sql(query).to_pylist()})
        query = (
            "SELECT id, outcome, error_class, error FROM attempts WHERE stage = 'extract' "
            "ORDER BY id, attempt"
        )
        for each in reader.sql(query).to_pylist():
            history[each["id"]].append((each["outcome"], each["error_class"], each["error"]))
    assert states["extracted"] == len(table)
    return Seen(extracted=len(table), states=states, attempts=history)
