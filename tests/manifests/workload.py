"""A small dataset job that logs what it asked for and what was acknowledged, for crash tests.

As a program it is a zygote: it imports everything once, then forks one child per line of standard
input, because starting Python for each of hundreds of kills would take minutes. A line is
`FOLDER [FAILPOINT]`; the answer is the child's exit status (negative: the signal that ended it).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import pandas  # noqa: F401  DuckDB imports it at the first insert: once here, not in every child

from draftmill.manifests import files
from draftmill.manifests.codec import codec
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.shards.record import Record
from draftmill.manifests.shards.shard import STAGE_OF_KIND, list_shards, scan
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

PROMPTS = 14
SIZES = {"shard_bytes": 64 << 10, "completion_shard_bytes": 20 << 10}
LAYERS, HIDDEN = 3, 64


def prompts(count: int = PROMPTS) -> list[Prompt]:
    return [
        Prompt(
            hash=f"{n:032x}",
            conversation=f'{{"messages":[{{"content":"question {n}","role":"user"}}]}}',
            source="test",
            row=n,
            conversation_id=str(n // 2),
        )
        for n in range(count)
    ]


def completion_of(prompt_id: int, attempt: int = 0) -> Completion:
    """What the model answers to prompt `prompt_id`: the same bytes in every process."""
    rng = np.random.default_rng([prompt_id, attempt])
    return Completion(
        prompt_token_ids=rng.integers(0, 50_000, 3 + prompt_id % 5, dtype=np.int32),
        completion_token_ids=rng.integers(0, 50_000, 20 + 3 * prompt_id, dtype=np.int32),
        content=f"answer {prompt_id} \u00e4\U0001f600",
        reasoning=None if prompt_id % 3 else "because",
        finish_reason="length" if prompt_id % 4 == 0 else "stop",
        extra={"tool_calls": []},
    )


def states_of(prompt_id: int, tokens: int) -> np.ndarray:
    rng = np.random.default_rng([prompt_id, 7])
    return rng.integers(0, 1 << 16, (tokens, LAYERS, HIDDEN), dtype=np.uint16)


def generate_result(prompt: PendingPrompt, outcome: str = "generated") -> Result:
    attempt = Attempt(
        id=prompt.id,
        stage="generate",
        attempt=prompt.attempts + 1,
        outcome=outcome,
        error_class=None if outcome == "generated" else "Test",
        finish_reason=completion_of(prompt.id).finish_reason,
        prompt_tokens=len(completion_of(prompt.id).prompt_token_ids),
        completion_tokens=len(completion_of(prompt.id).completion_token_ids),
        started_at=1.0,
    )
    found = completion_of(prompt.id) if outcome == "generated" else None
    return Result(attempt=attempt, hash=prompt.hash, completion=found)


def extract_result(sample: GeneratedSample, states: np.ndarray | None = None) -> Result:
    if states is None:
        states = states_of(sample.id, len(sample.completion.token_ids))
    payload = StatesPayload(
        codec="em-zfast",
        shape=states.shape,
        blocks=codec.encode_states(states, "em-zfast"),
        digest=sample.digest,
        target_layer_ids=(1, 2, 3),
    )
    attempt = Attempt(
        id=sample.id, stage="extract", attempt=sample.attempts + 1, outcome="extracted"
    )
    return Result(attempt=attempt, hash=sample.hash, states=payload)


class Journal:
    """Lines that survive SIGKILL of this process: `asked`, `acked`."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *lines: str) -> None:
        os.write(self.fd, "".join(f"{line}\n" for line in lines).encode())


def run(folder: Path, journal: Journal) -> None:
    """Add, generate, extract what is still to do; prompts 5 and 9 end as timed out and rejected."""
    dataset = Dataset(folder)
    if not dataset.config_path.exists():
        folder.mkdir(exist_ok=True)
        dataset.config_path.write_text("")
    with dataset.writer(**SIZES) as writer:
        writer.check_fingerprint("generate", {"model": "m"})
        writer.add_prompts(prompts(PROMPTS // 2))
        writer.add_prompts(prompts())
        generate(writer, journal)
        writer.publish(snapshot=True)
        extract(writer, journal)


def generate(writer: DatasetWriter, journal: Journal, size: int = 3) -> None:
    while batch := writer.pending(0, size):
        outcomes = {5: "timed_out", 9: "rejected"}
        journal.write(*(f"asked generate {p.id}" for p in batch))
        writer.commit([generate_result(p, outcomes.get(p.id, "generated")) for p in batch])
        journal.write(*(f"acked generate {p.id}" for p in batch))


def extract(writer: DatasetWriter, journal: Journal, size: int = 2) -> None:
    while batch := writer.generated(0, size):
        journal.write(*(f"asked extract {s.id}" for s in batch))
        writer.commit([extract_result(s) for s in batch])
        journal.write(*(f"acked extract {s.id}" for s in batch))


def check(folder: Path, lines: list[str], *, complete: bool) -> None:
    """Every promise of recovery, against the journal of what was acknowledged."""
    acked = [line.removeprefix("acked ") for line in lines if line.startswith("acked ")]
    assert len(acked) == len(set(acked)), "something was acknowledged twice"
    asked = Counter(line.removeprefix("asked ") for line in lines if line.startswith("asked "))
    first_ack = {entry: lines.index(f"acked {entry}") for entry in acked}
    for number, line in enumerate(lines):
        entry = line.removeprefix("asked ")
        if line.startswith("asked ") and entry in first_ack:
            assert number < first_ack[entry], f"{entry} was asked again after it was acknowledged"
    with Dataset(folder).reader() as reader:
        rows = {row["id"]: row for row in reader.sql("SELECT * FROM samples").to_pylist()}
        twice = reader.sql(
            "SELECT id, stage, attempt FROM payloads GROUP BY ALL HAVING count(*) > 1"
        )
        assert twice.num_rows == 0, f"stored twice: {twice.to_pylist()}"
        for entry in acked:
            stage, number = entry.split()
            _check_row(reader, rows[int(number)], stage)
        for row in rows.values():
            if row["generate_payload"] is not None:
                _check_row(reader, row, "generate")
            if row["extract_payload"] is not None:
                _check_row(reader, row, "extract")
    if complete:
        assert len(rows) == PROMPTS
        states = Counter(row["state"] for row in rows.values())
        assert states == {"extracted": PROMPTS - 2, "timed_out": 1, "rejected": 1}
        # A record may be stored again only if the process died between writing and committing
        # AND recovery could not read it; within one crash that is a handful at most.
        assert max(asked.values()) <= 3


def _check_row(reader, row: dict, stage: str) -> None:
    if row["id"] in (5, 9):
        assert row["state"] in ("timed_out", "rejected")
        return
    assert row["state"] in ("generated", "extracted"), row
    location = Location(row["generate_shard"], row["generate_offset"], row["generate_length"])
    found, wanted = reader.shards.completion(location), completion_of(row["id"])
    assert (found.token_ids == wanted.token_ids).all()
    assert (found.content, found.reasoning) == (wanted.content, wanted.reasoning)
    assert len(found.prompt_token_ids) == len(wanted.prompt_token_ids)
    if stage == "extract":
        assert row["state"] == "extracted", row
        location = Location(row["extract_shard"], row["extract_offset"], row["extract_length"])
        states = reader.shards.states(location)
        assert (states == states_of(row["id"], len(wanted.token_ids))).all()


def records_on_disk(folder: Path) -> list[tuple[str, int, int]]:
    """(stage, id, attempt) of every valid record in every shard, in file order."""
    found = []
    for kind, stage in STAGE_OF_KIND.items():
        for number, path in list_shards(folder / kind).items():
            for item in scan(path, number):
                assert isinstance(item, Record), item
                found.append((stage, item.id, item.attempt.attempt))
    return found


def _child(folder: str, failpoint: str) -> None:
    files.arm(failpoint)
    try:
        run(Path(folder), Journal(Path(folder + ".journal")))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    for line in sys.stdin:
        folder, _, failpoint = line.strip().partition(" ")
        pid = os.fork()
        if pid == 0:
            _child(folder, failpoint)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
