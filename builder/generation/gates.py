"""Quality gates: why a completion is not worth training on. Pure checks; counting is the stage's.

A gate gives a name and a reason; the row becomes `rejected` with both and is not asked again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftmill.builder.requests.failures import one_line
from draftmill.manifests.errors import ConfigError
from draftmill.manifests.types import Completion, PendingPrompt, TokenIds

NGRAM = 8
MIN_REPETITION_TOKENS = 128
WINDOW_TOKENS = 512

MOST_LETTERS = 600  # of a reason
UserGate = Callable[[Completion, PendingPrompt], str | None]


class Rejection(NamedTuple):
    """Which gate closed, and the numbers."""

    gate: str
    reason: str


def repeated_share(token_ids: TokenIds, above: float = 0.0) -> float:
    """Share of the 8-grams in the last 512 ids that occurred before in them; 0 for short ids.

    A loop shows at the end of a completion; ordinary prose stays under 0.05, code under 0.4. May
    return 0 for a share that cannot be `above`: 8-grams are at least as many as their first ids.
    """
    if len(token_ids) < MIN_REPETITION_TOKENS:
        return 0.0
    window = token_ids[-WINDOW_TOKENS:]
    count = len(window) - NGRAM + 1
    if 1.0 - (len(set(window.tolist())) - NGRAM + 1) / count <= above:
        return 0.0
    ids = window.astype(np.uint64)
    hashes = ids[:count].copy()
    for offset in range(1, NGRAM):
        hashes *= np.uint64(0x9E3779B97F4A7C15)
        hashes += ids[offset : offset + count]
    hashes.sort()
    distinct = 1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))
    return 1.0 - distinct / count


def check(
    completion: Completion,
    *,
    min_tokens: int,
    keep_truncated: bool,
    max_repetition: float,
    reasoning_required: bool,
) -> Rejection | None:
    """The first built-in gate that closes, or None."""
    num_tokens = len(completion.completion_token_ids)
    truncated = completion.finish_reason == "length"
    if truncated and not keep_truncated:
        return Rejection("truncated", f"cut at {num_tokens} tokens")
    said = completion.content or completion.reasoning or completion.extra.get("tool_calls")
    if num_tokens == 0 or (not truncated and not said):
        return Rejection("empty", f"{num_tokens} tokens and no text")
    if num_tokens < min_tokens:
        return Rejection("too_short", f"{num_tokens} tokens, at least {min_tokens} are asked for")
    if reasoning_required and not completion.reasoning:
        return Rejection("no_reasoning", "the reply has no reasoning")
    if max_repetition < 1.0:
        share = repeated_share(completion.completion_token_ids, above=max_repetition)
        if share > max_repetition:
            return Rejection(
                "repetition",
                f"{share:.0%} of the last 8-grams are repeats, at most {max_repetition:.0%} pass",
            )
    return None


def load_gate(name: str) -> UserGate:
    """The function that "module:function" names; looked for in the current folder too."""
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # importing runs the module, which can fail in any way
        raise ConfigError(
            f"generate.gate: {name!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(f"generate.gate: {name!r} is not a function")
    return function  # type: ignore[no-any-return]


def ask_gate(gate: UserGate, completion: Completion, row: PendingPrompt) -> Rejection | None:
    """What the user's gate says; one that raises stops the run: it would reject at random."""
    try:
        reason = gate(completion, row)
    except Exception as error:
        raise ConfigError(
            f"generate.gate raised {type(error).__name__} at sample {row.id}: {error}"
        ) from error
    if reason is not None and not isinstance(reason, str):
        raise ConfigError(
            f"generate.gate returned {reason!r:.80} at sample {row.id}: a gate returns a text to "
            "reject, and None to let pass"
        )
    return None if reason is None else Rejection("user", one_line(reason)[:MOST_LETTERS])
