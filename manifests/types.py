"""The values that rooms hand to each other. No behaviour beyond small derived properties.

Token ids are int32 numpy arrays; times are seconds (durations) or Unix seconds (instants).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Stage = Literal["generate", "extract"]
State = Literal["pending", "generated", "timed_out", "failed", "rejected", "extracted"]
Outcome = Literal[
    # what an attempt can end in; the first five are also the row's next state
    "generated",
    "extracted",
    "timed_out",
    "failed",
    "rejected",
    # history without a change of state by the attempt itself
    "transient",
    # written by maintenance, not by a request
    "retried",
    "evicted",
    "damaged",
    "missing",
]
STATES: tuple[State, ...] = (
    "pending",
    "generated",
    "timed_out",
    "failed",
    "rejected",
    "extracted",
)

# The finish_reason of an answer that came with its prompt (`off_policy`).
GIVEN = "given"

TokenIds = NDArray[np.int32]
StatesTLH = NDArray[np.uint16]  # bf16 bit patterns, [T tokens, L layers, H hidden size]


class Location(NamedTuple):
    """Where a record lies: shard number within its kind, byte offset and length in the file."""

    shard: int
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt as a source gave it, before it has an id in a dataset.

    `conversation` is JSON of an object with `messages` (OpenAI form, keys in the order given) and,
    where the source has them, `tools` and `chat_template_kwargs`; `hash` is 32 hex digits of its
    canonical form (docs/format.md). `conversation_id` groups the prompts of one conversation, so
    that a split keeps them together. `reference` is the answer the source had, if any (kept for
    comparisons, never trained on). If `off_policy` is true, the last message is an answer that the
    source had and that is kept as the completion: the target model is not asked for one.
    """

    hash: str
    conversation: str
    source: str
    row: int
    conversation_id: str
    reference: str | None = None
    off_policy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingPrompt:
    """A prompt that waits for its completion. `attempts` counts the attempts made so far.

    With `off_policy` the last message is the completion, and only its token ids are to be found.
    """

    id: int
    hash: str
    source: str
    conversation: str
    attempts: int
    off_policy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The target model's own output for one prompt, with the token ids the server used.

    `ids_rebuilt` is true when the server returned no ids and text was tokenised afterwards.
    `finish_reason` is the server's word, or GIVEN for an answer that nobody generated.
    """

    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    content: str | None
    reasoning: str | None
    finish_reason: str
    ids_rebuilt: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and completion token ids, int32 [T]."""
        return np.concatenate([self.prompt_token_ids, self.completion_token_ids])


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedSample:
    """A sample whose hidden states are still to be extracted."""

    id: int
    hash: str
    source: str
    completion: Completion
    digest: str
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesPayload:
    """Encoded hidden states of one sample: `blocks` as made by `codec.encode_states`.

    `token_ids` are the ids that the states belong to (after the cut at `max_seq_len`);
    `digest` is that of the completion they came from.
    """

    codec: str
    shape: tuple[int, int, int]
    blocks: Sequence[bytes | memoryview]
    digest: str
    target_layer_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try at one stage of one prompt, as it goes into the append-only history."""

    id: int
    stage: Stage
    attempt: int
    outcome: Outcome
    error_class: str | None = None
    error: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    queue_s: float | None = None
    total_s: float | None = None
    deadline_s: float | None = None
    endpoint: str | None = None
    started_at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one attempt brings to a commit: its history row and, when it succeeded, its payload."""

    attempt: Attempt
    hash: str
    completion: Completion | None = None
    states: StatesPayload | None = None

    @classmethod
    def taken_over(
        cls, prompt: PendingPrompt, completion: Completion, endpoint: str | None = None
    ) -> Result:
        """A completion that was made elsewhere, as the next attempt of its prompt."""
        attempt = Attempt(
            id=prompt.id,
            stage="generate",
            attempt=prompt.attempts + 1,
            outcome="generated",
            finish_reason=completion.finish_reason,
            prompt_tokens=len(completion.prompt_token_ids),
            completion_tokens=len(completion.completion_token_ids),
            endpoint=endpoint,
        )
        return cls(attempt=attempt, hash=prompt.hash, completion=completion)
