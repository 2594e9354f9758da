"""Which rows a retry takes: every filter against a plain reading of random histories."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests import maintenance
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.maintenance import RowFilter
from draftmill.manifests.types import Attempt, Completion, PendingPrompt, Prompt, Result

CLASSES = ("A", "B", "truncated")
STOPS = ("timed_out", "failed", "rejected")


@dataclass(frozen=True)
class Row:
    """How one row's history went: a completion or none, then a stop or none."""

    source: str
    transient: str | None
    completion: tuple[int, int, str] | None  # prompt tokens, completion tokens, finish_reason
    stop: tuple[str, str] | None  # state, error class

    @property
    def state(self) -> str:
        return self.stop[0] if self.stop else "generated" if self.completion else "pending"

    @property
    def stage(self) -> str | None:
        """Of a stopped row: it has a completion exactly when it got as far as extraction."""
        if self.stop is None:
            return "generate" if self.completion else None
        return "extract" if self.completion else "generate"

    @property
    def error_class(self) -> str | None:
        return self.stop[1] if self.stop else self.transient


def random_rows(count: int) -> list[Row]:
    rng = random.Random(3)
    tokens = range(1, 10)
    return [
        Row(
            rng.choice("xy"),
            rng.choice([None, *CLASSES]),
            rng.choice([None, (*rng.choices(tokens, k=2), rng.choice(["stop", "length"]))]),
            rng.choice([None, (rng.choice(STOPS), rng.choice(CLASSES))]),
        )
        for _ in range(count)
    ]


bound = st.none() | st.integers(0, 10)
filters = st.builds(
    RowFilter,
    states=st.lists(st.sampled_from(STOPS), unique=True),
    truncated=st.booleans(),
    stage=st.none() | st.sampled_from(["generate", "extract"]),
    source=st.none() | st.sampled_from("xyz"),
    error_class=st.none() | st.sampled_from(CLASSES),
    prompt_tokens=st.tuples(bound, bound),
    completion_tokens=st.tuples(bound, bound),
)


def make(dataset: Dataset, rows: Sequence[Row]) -> None:
    with dataset.writer() as writer:
        writer.add_prompts(
            Prompt(hash=f"{n:032x}", conversation="{}", source=r.source, row=n, conversation_id="c")
            for n, r in enumerate(rows)
        )
        results: list[Result] = []
        for row, prompt in zip(rows, writer.pending(0, len(rows)), strict=True):
            results += history(row, prompt)
        writer.commit(results)


def history(row: Row, prompt: PendingPrompt) -> list[Result]:
    def result(outcome: Any, stage: Any, number: int, **more: Any) -> Result:
        completion = more.pop("payload", None)
        attempt = Attempt(id=prompt.id, stage=stage, attempt=number, outcome=outcome, **more)
        return Result(attempt=attempt, hash=prompt.hash, completion=completion)

    found: list[Result] = []
    if row.transient is not None:
        found.append(result("transient", "generate", 1, error_class=row.transient))
    stage = "generate"
    if row.completion is not None:
        prompt_tokens, completion_tokens, finish_reason = row.completion
        lengths = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        payload = Completion(
            prompt_token_ids=np.ones(prompt_tokens, np.int32),
            completion_token_ids=np.ones(completion_tokens, np.int32),
            content="x",
            reasoning=None,
            finish_reason=finish_reason,
        )
        more = {"finish_reason": finish_reason, "payload": payload, **lengths}
        found.append(result("generated", "generate", 2, **more))
        stage = "extract"
    if row.stop is not None:
        state, error_class = row.stop
        found.append(result(state, stage, 3, error_class=error_class))
    return found


def plainly(rows: Sequence[Row], chosen: RowFilter) -> tuple[list[int], int]:
    def fits(length: int, span: tuple[int | None, int | None]) -> bool:
        low, high = span
        return (low is None or low <= length) and (high is None or length <= high)

    ids, unknown = [], 0
    ranged = any(each is not None for each in (*chosen.prompt_tokens, *chosen.completion_tokens))
    for number, row in enumerate(rows, 1):
        cut = row.completion is not None and row.completion[2] == "length"
        truncated = (cut and row.state == "generated") or row.stop == ("rejected", "truncated")
        if not (row.state in chosen.states or (chosen.truncated and truncated)):
            continue
        if chosen.stage not in (None, row.stage) or chosen.source not in (None, row.source):
            continue
        if chosen.error_class not in (None, row.error_class):
            continue
        if ranged and row.completion is None:
            unknown += 1
            continue
        if row.completion is not None and not (
            fits(row.completion[0], chosen.prompt_tokens)
            and fits(row.completion[1], chosen.completion_tokens)
        ):
            continue
        ids.append(number)
    return ids, unknown


def test_filters_choose_what_they_say(tmp_path: Path) -> None:
    rows = random_rows(300)
    dataset = Dataset.create(tmp_path / "d", "")
    make(dataset, rows)
    with dataset.reader() as reader:

        @given(filters)
        @settings(max_examples=150)
        def check(chosen: RowFilter) -> None:
            matches, unknown = maintenance.matching(reader.manifest, chosen)
            assert ([match.id for match in matches], unknown) == plainly(rows, chosen)
            for match in matches:
                row = rows[match.id - 1]
                assert match[1:] == (row.state, row.stage, row.error_class)

        check()
