"""Arithmetic of acceptance: how many draft tokens a target model takes per step.

Everywhere in draftmill, accepted per step = accepted draft tokens / drafts; the bonus token that
the target adds to every step is not counted. Who asks a server for its counters is left to tools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PREFIX = "vllm:spec_decode_num_"
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Counts of drafts and of what became of their tokens; adds up over servers and prompts.

    `by_position[i]` counts drafts whose token i was accepted (and so all before it).
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    @property
    def accepted_per_step(self) -> float:
        """Accepted draft tokens per draft; 0 without drafts."""
        return self.accepted / self.drafts if self.drafts else 0.0

    @property
    def accepted_by_position(self) -> tuple[float, ...]:
        """Part of the drafts whose token at each position was accepted."""
        return tuple(count / self.drafts if self.drafts else 0.0 for count in self.by_position)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one step of the target yields: the accepted ones and its own."""
        return self.accepted_per_step + 1.0

    def __add__(self, other: Acceptance) -> Acceptance:
        return self._combine(other, 1)

    def __sub__(self, other: Acceptance) -> Acceptance:
        """The counts since `other` was read. Raises ValueError when a counter went back."""
        delta = self._combine(other, -1)
        if min(delta.drafts, delta.draft_tokens, delta.accepted, *delta.by_position, 0) < 0:
            raise ValueError("the server's counters went back: it was restarted in between")
        return delta

    def _combine(self, other: Acceptance, sign: int) -> Acceptance:
        width = max(len(self.by_position), len(other.by_position))
        mine = self.by_position + (0,) * (width - len(self.by_position))
        theirs = other.by_position + (0,) * (width - len(other.by_position))
        return Acceptance(
            drafts=self.drafts + sign * other.drafts,
            draft_tokens=self.draft_tokens + sign * other.draft_tokens,
            accepted=self.accepted + sign * other.accepted,
            by_position=tuple(a + sign * b for a, b in zip(mine, theirs, strict=True)),
        )

    def to_json(self) -> dict[str, Any]:
        """The keys of `eval --json`, and the counts they come from."""
        return {
            "accepted_per_step": round(self.accepted_per_step, 4),
            "accepted_by_position": [round(part, 4) for part in self.accepted_by_position],
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted,
        }


def from_metrics(text: str) -> Acceptance:
    """The counters in the text of a vLLM server's /metrics, summed over its engines.

    All zero when the server does not draft. A counter that a reader has to tell apart from "no
    drafts yet" is there from the first request on.
    """
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or not match["name"].startswith(_PREFIX):
            continue
        name = match["name"].removeprefix(_PREFIX).removesuffix("_total")
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        position = _POSITION.search(match["labels"] or "")
        if name == "accepted_tokens_per_pos" and position is not None:
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
        elif name in ("drafts", "draft_tokens", "accepted_tokens"):
            totals[name] = totals.get(name, 0.0) + value
    width = max(positions, default=-1) + 1
    return Acceptance(
        drafts=int(totals.get("drafts", 0)),
        draft_tokens=int(totals.get("draft_tokens", 0)),
        accepted=int(totals.get("accepted_tokens", 0)),
        by_position=tuple(int(positions.get(i, 0)) for i in range(width)),
    )


def walk(correct: NDArray[np.bool_], first: int) -> Acceptance:
    """What greedy speculative decoding would have accepted along one known completion.

    `correct` [K, T] says for each place i of a sample whether draft token k, drawn there, is the
    token that really follows (token i + 2 + k). `first` is the place of the first generated token.
    Walks as a server does: draft, take the run of correct tokens and the target's own next one,
    draft again; so easy stretches count for fewer drafts than hard ones, unlike in a plain mean.
    """
    width, places = correct.shape
    runs = np.cumprod(correct, axis=0).sum(axis=0)
    by_position = [0] * width
    drafts = 0
    place = first
    # The draft at the last place would follow the end of the completion: nobody draws it.
    while place < places - 1:
        run = int(runs[place])
        drafts += 1
        for position in range(run):
            by_position[position] += 1
        place += run + 1
    return Acceptance(
        drafts=drafts,
        draft_tokens=drafts * width,
        accepted=sum(by_position),
        by_position=tuple(by_position),
    )


def total(parts: Iterable[Acceptance]) -> Acceptance:
    """The sum of all counts."""
    result = Acceptance()
    for part in parts:
        result = result + part
    return result
