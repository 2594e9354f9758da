"""A dataset made from another one's samples: shortened, or stored with another codec.

Hidden states are read from shards and written to new ones; no server is asked. Which samples and
what becomes of them is the experiments' business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from draftmill.manifests.codec import codec
from draftmill.manifests.dataset import Dataset, DatasetReader
from draftmill.manifests.errors import DatasetError
from draftmill.manifests.types import (
    Attempt,
    Completion,
    GeneratedSample,
    Location,
    PendingPrompt,
    Prompt,
    Result,
    StatesPayload,
)
from draftmill.manifests.writer import DatasetWriter

_PAGE = 64
_COLUMNS = frozenset(field.name for field in fields(Prompt))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One sample of the source by its id, and what it becomes.

    `supervised` cuts its completion to so many tokens (None: as it is). States of a causal model do
    not depend on what follows, so those of a shortened sample are a prefix of those that are there.
    """

    id: int
    codec: str
    supervised: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Where a wanted sample lies in the source."""

    wanted: Wanted
    completion: Location
    states: Location


def derive(
    source: Dataset,
    path: Path,
    wanted: Sequence[Wanted],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Dataset:
    """Make the dataset at `path` from extracted samples of `source`, in its order.

    Its settings are the source's. Can be killed at any moment and called again with the same
    arguments. Raises DatasetError when a wanted sample is not there, DamagedError when one cannot
    be read.
    """
    dataset = Dataset(path)
    if not dataset.config_path.exists():
        dataset = Dataset.create(path, source.config_path.read_text(encoding="utf-8"))
    with source.reader() as reader, ThreadPoolExecutor(_threads()) as pool:
        by_hash = _by_hash(reader, wanted)
        with dataset.writer() as writer:
            writer.add_prompts(_prompts(source, set(by_hash)))
            for stage in ("generate", "extract"):
                settings = reader.settings_of(stage)
                if settings:
                    writer.check_fingerprint(stage, settings)
            total = 2 * len(by_hash)
            done = total - 2 * writer.count("pending") - writer.count("generated")
            for results in _completions(writer, reader, by_hash):
                writer.commit(results)
                done += len(results)
                on_progress(done, total)
            for results in _states(writer, reader, by_hash, pool):
                writer.commit(results)
                done += len(results)
                on_progress(done, total)
    return dataset


def _threads() -> int:
    return min(8, os.cpu_count() or 1)


def _by_hash(reader: DatasetReader, wanted: Sequence[Wanted]) -> dict[str, _Source]:
    table = reader.extracted()
    rows = {row["id"]: row for row in table.to_pylist()}
    missing = [each.id for each in wanted if each.id not in rows]
    if missing:
        raise DatasetError(
            f"{reader.dataset.path}: {len(missing)} samples have no hidden states "
            f"(ids {', '.join(map(str, missing[:5]))}): extract them first"
        )

    def location(row: dict[str, Any], stage: str) -> Location:
        return Location(*(row[f"{stage}_{part}"] for part in ("shard", "offset", "length")))

    return {
        rows[each.id]["hash"]: _Source(
            wanted=each,
            completion=location(rows[each.id], "generate"),
            states=location(rows[each.id], "extract"),
        )
        for each in wanted
    }


def _prompts(source: Dataset, hashes: set[str]) -> Iterator[Prompt]:
    """The prompts with these hashes, as they were added to the source."""
    for path in source.prompt_files().values():
        for row in pq.read_table(path).to_pylist():
            if row["hash"] in hashes:
                yield Prompt(**{name: row[name] for name in _COLUMNS & row.keys()})


# -- completions -------------------------------------------------------------------------------


def _completions(
    writer: DatasetWriter, reader: DatasetReader, by_hash: dict[str, _Source]
) -> Iterator[list[Result]]:
    cursor = 0
    while page := writer.pending(cursor, _PAGE):
        cursor = page[-1].id
        yield [_generated(reader, prompt, by_hash[prompt.hash]) for prompt in page]


def _generated(reader: DatasetReader, prompt: PendingPrompt, source: _Source) -> Result:
    completion = _cut(reader.shards.completion(source.completion), source.wanted.supervised)
    return Result.taken_over(prompt, completion)


def _cut(completion: Completion, supervised: int | None) -> Completion:
    if supervised is None or supervised >= len(completion.completion_token_ids):
        return completion
    return replace(
        completion,
        completion_token_ids=completion.completion_token_ids[:supervised],
        # Text of a whole completion would be wrong beside ids of a part.
        content=None,
        reasoning=None,
        finish_reason="length",
    )


# -- hidden states -----------------------------------------------------------------------------


def _states(
    writer: DatasetWriter, reader: DatasetReader, by_hash: dict[str, _Source], pool: Executor
) -> Iterator[list[Result]]:
    cursor = 0
    while page := writer.generated(cursor, _PAGE):
        cursor = page[-1].id
        # A few at a time: each one is in memory raw and coded.
        step = 2 * _threads()
        for start in range(0, len(page), step):
            part = page[start : start + step]
            yield list(pool.map(lambda each: _extracted(reader, each, by_hash[each.hash]), part))


def _extracted(reader: DatasetReader, sample: GeneratedSample, source: _Source) -> Result:
    header = reader.shards.header("extract", source.states)
    tokens = min(header.tokens, len(sample.completion.token_ids))
    states = reader.shards.states(source.states, tokens=tokens)
    length, layers, hidden_size = states.shape
    payload = StatesPayload(
        codec=source.wanted.codec,
        shape=(length, layers, hidden_size),
        blocks=codec.encode_states(states, source.wanted.codec),
        digest=sample.digest,
        target_layer_ids=tuple(header.content.get("layer_ids") or ()),
    )
    attempt = Attempt(
        id=sample.id, stage="extract", attempt=sample.attempts + 1, outcome="extracted"
    )
    return Result(attempt=attempt, hash=sample.hash, states=payload)
