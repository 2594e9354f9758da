"""A dataset in the middle of a night: everything that a report has to show, made by the writer.

Three sources, two servers, four hours. Long answers time out more often, as they do in life; some
are asked again and arrive. `python -m tests.tools.story FOLDER` makes it by hand.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.manifests.codec import codec
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.types import (
    Attempt,
    Completion,
    PendingPrompt,
    Prompt,
    Result,
    StatesPayload,
)
from draftmill.manifests.writer import DatasetWriter
from draftmill.tools.init import create
from draftmill.tools.settings import TargetSettings

START = 1_750_000_000.0
HOURS = 4
SERVERS = ("http://gpu-a:8000", "http://gpu-b:8000")
SOURCES = {"perfectblend": (90, 5.6), "math-proofs": (60, 6.9), "tool-calls": (50, 4.8)}
MAX_TOKENS, DEADLINE_S, SPEED = 2048, 24.0, 40.0
LAYERS, HIDDEN = 4, 16
SIZES = {"shard_bytes": 2 << 20, "completion_shard_bytes": 256 << 10, "budget_bytes": 24_000_000}


def all_prompts() -> list[Prompt]:
    """Prompts of all sources, one after the other."""
    found: list[Prompt] = []
    rng = np.random.default_rng(1)
    for name, (count, _) in SOURCES.items():
        for row in range(count):
            text = "why " * int(rng.integers(4, 200))
            found.append(
                Prompt(
                    hash=f"{len(found):032x}",
                    conversation=f'{{"messages":[{{"content":"{text}","role":"user"}}]}}',
                    source=name,
                    row=row,
                    conversation_id=str(len(found)),
                    off_policy=name == "tool-calls" and row % 5 == 0,
                )
            )
    order = rng.permutation(len(found))
    return [found[number] for number in order]


def _completion(rng: np.random.Generator, wanted: int) -> Completion:
    return Completion(
        prompt_token_ids=rng.integers(0, 50_000, int(rng.integers(20, 400)), dtype=np.int32),
        completion_token_ids=rng.integers(0, 50_000, min(wanted, MAX_TOKENS), dtype=np.int32),
        content="an answer",
        reasoning="because",
        finish_reason="length" if wanted > MAX_TOKENS else "stop",
    )


def _tries(
    rng: np.random.Generator, row: PendingPrompt, when: float
) -> tuple[list[Attempt], Completion | None]:
    """The history of one prompt, and its completion if it came in the end."""
    wanted = max(8, int(rng.lognormal(SOURCES[row.source][1], 0.9)))
    found = _completion(rng, wanted)
    tokens = len(found.completion_token_ids)
    base = Attempt(
        id=row.id,
        stage="generate",
        attempt=1,
        outcome="generated",
        queue_s=float(rng.uniform(0, 2)),
        endpoint=SERVERS[row.id % 2],
        started_at=when,
    )
    late = replace(
        base,
        outcome="timed_out",
        error_class="TimedOutError",
        error=f"no answer within {DEADLINE_S:.0f} s",
        total_s=DEADLINE_S,
        deadline_s=DEADLINE_S,
    )
    tries: list[Attempt] = []
    luck = rng.random()
    if luck < 0.04:
        text = "HTTP 400: tool schema is not valid JSON"
        refused = replace(base, outcome="failed", error_class="PermanentError", error=text)
        return [replace(refused, http_status=400, total_s=0.2)], None
    if luck < 0.07:
        text = "one phrase makes up 61 % of the completion"
        looped = replace(base, outcome="rejected", error_class="repetition", error=text)
        return [replace(looped, total_s=tokens / SPEED)], None
    if 0.07 < luck < 0.14:
        text = "HTTP 503: engine is restarting"
        broken = replace(base, outcome="transient", error_class="TransientError", error=text)
        tries.append(replace(broken, http_status=503, total_s=1.0))
    if tokens / SPEED > DEADLINE_S:
        tries.append(replace(late, attempt=len(tries) + 1))
        if rng.random() < 0.35:
            return tries, None
    tries.append(
        replace(
            base,
            attempt=len(tries) + 1,
            finish_reason=found.finish_reason,
            prompt_tokens=len(found.prompt_token_ids),
            completion_tokens=tokens,
            total_s=tokens / SPEED,
            deadline_s=4 * DEADLINE_S,
            started_at=when + (DEADLINE_S if tries else 0.0),
        )
    )
    return tries, found


def _generate(writer: DatasetWriter, upto: int) -> None:
    rng = np.random.default_rng(2)
    rows = writer.pending(0, upto)
    results: list[Result] = []
    for number, row in enumerate(rows):
        when = START + 3600 * 0.6 * HOURS * number / len(rows)
        tries, found = _tries(rng, row, when)
        for attempt in tries:
            last = attempt is tries[-1]
            results.append(
                Result(attempt=attempt, hash=row.hash, completion=found if last else None)
            )
    _commit(writer, results)


def _commit(writer: DatasetWriter, results: list[Result]) -> None:
    for start in range(0, len(results), 32):
        writer.commit(results[start : start + 32])


def _extract(writer: DatasetWriter, upto: int) -> None:
    rng = np.random.default_rng(3)
    samples = writer.generated(0, upto)
    results: list[Result] = []
    for number, sample in enumerate(samples):
        ids = sample.completion.token_ids[:1500]
        attempt = Attempt(
            id=sample.id,
            stage="extract",
            attempt=sample.attempts + 1,
            outcome="extracted",
            total_s=len(ids) / 300,
            endpoint="http://gpu-a:8001",
            started_at=START + 3600 * HOURS * (0.62 + 0.38 * number / len(samples)),
        )
        if number % 29 == 28:
            text = "hidden states are not finite (layer 2, position 118)"
            attempt = replace(attempt, outcome="rejected", error_class="not_finite", error=text)
            results.append(Result(attempt=attempt, hash=sample.hash))
            continue
        values = rng.normal(0, 3, (len(ids), LAYERS, HIDDEN)).astype(np.float32)
        states = (values.view(np.uint32) >> 16).astype(np.uint16)
        payload = StatesPayload(
            codec="em-zfast",
            shape=(len(ids), LAYERS, HIDDEN),
            blocks=codec.encode_states(states, "em-zfast"),
            digest=sample.digest,
            target_layer_ids=(2, 15, 27, 30),
        )
        results.append(Result(attempt=attempt, hash=sample.hash, states=payload))
    _commit(writer, results)


def _control(writer: DatasetWriter) -> None:
    rows: list[dict[str, Any]] = []
    for server in SERVERS:
        limit = 8
        for step in range(40):
            running, waiting = min(limit, 58), max(0, limit - 58)
            wanted = 2 * limit if limit < 32 else limit + limit // 10
            decision = f"{22 * running:,} tokens/s at {limit} requests: trying more"
            if waiting > 3:
                wanted = 50 + step % 4
                decision = f"{waiting} requests wait in the server, {running} run"
            rows.append(
                {
                    "time": START + 3600 * 0.6 * HOURS * step / 40 + (server[-6] == "b") * 31,
                    "endpoint": server,
                    "limit": wanted,
                    "running": float(running),
                    "waiting": float(waiting),
                    "kv_usage": min(0.97, running / 60),
                    "tokens_per_s": float(22 * running),
                    "decision": f"limit {wanted}: {decision}",
                }
            )
            limit = wanted
    writer.control(rows)


def make(path: Path, *, prompts: int = 200, generate: int = 176, extract: int = 95) -> Dataset:
    """The dataset: of 200 prompts, 176 asked so far and 95 on their way to hidden states."""
    target = TargetSettings(
        model="moonshotai/Kimi-K2.5",
        hidden_size=HIDDEN,
        num_layers=30,
        vocab_size=50_000,
        target_layer_ids=(2, 15, 27),
    )
    dataset = create(path, target, disk_budget="24MB")
    with dataset.writer(**SIZES) as writer:
        writer.add_prompts(all_prompts()[:prompts])
        _generate(writer, generate)
        _extract(writer, extract)
        if generate:
            _control(writer)
    return dataset


def running() -> dict[str, Any]:
    """What a stage in progress says of itself in status.json."""
    return {
        "stage": "extract",
        "done": 92,
        "total": 150,
        "in_flight": 8,
        "tokens": 61_000,
        "tokens_per_s": 2912.0,
        "samples_per_s": 0.02,
        "timed_out": 0,
        "failed": 0,
        "rejected": 3,
        "used_bytes": 7_403_307,
        "budget_bytes": SIZES["budget_bytes"],
        "note": "http://gpu-a:8001: 8 requests at once",
    }


if __name__ == "__main__":
    make(Path(sys.argv[1]))
