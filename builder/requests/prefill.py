"""Answers that came with their prompt, as token ids: what the server's own template makes of them.

Nothing is rendered here: the server tokenises the conversation up to the answer and with it, and
what the second adds to the first is the answer. Which rows have one is left to the stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from draftmill.builder.requests.failures import NoTokenizerError
from draftmill.builder.requests.replies import PROBE_CONVERSATION, reasoning_of
from draftmill.manifests.errors import RejectedError, ServerError
from draftmill.manifests.types import GIVEN, Completion

_ANSWER = {"role": "assistant", "content": "Because they have no other divisors."}
# No template writes more than a few line feeds behind a turn.
_MOST_WHITE = 8


class Tokenizer(Protocol):
    """The part of a target client that knows its tokenizer and template."""

    url: str

    async def tokenize(self, request: Mapping[str, Any], /) -> list[int] | None:
        """Ids of {"messages": …} as the server renders them; None if it cannot tell."""

    async def detokenize(self, token_ids: Sequence[int], /) -> str | None:
        """Their text; None if the server cannot tell."""


async def after_turn(tokenizer: Tokenizer, probe_ids: Sequence[int] | None) -> list[int]:
    """The ids of white space that the template writes behind the end of an answer.

    ChatML writes a line feed there. A model that is served stops at the end of its turn, so that
    these are no part of an answer. Raises ServerError when the server cannot tokenise
    conversations, or renders them otherwise than for its chat (`probe_ids`).
    """
    probe = json.loads(PROBE_CONVERSATION)
    prompt = await tokenizer.tokenize({**probe, "add_generation_prompt": True})
    messages = [*probe["messages"], _ANSWER]
    whole = await tokenizer.tokenize({"messages": messages, "add_generation_prompt": False})
    if prompt is None or whole is None:
        raise ServerError(
            f"{tokenizer.url} has no /tokenize, which answers of mode prefill need; serve the "
            "target model with vLLM"
        )
    if probe_ids is not None and prompt != list(probe_ids):
        raise ServerError(
            f"{tokenizer.url}/tokenize renders another template than its chat, so that answers of "
            "mode prefill would not look to the target model like its own"
        )
    white: list[int] = []
    for token in reversed(whole[-_MOST_WHITE:]):
        text = await tokenizer.detokenize([token])
        if text is None:
            raise ServerError(f"{tokenizer.url} has /tokenize and no /detokenize; serve with vLLM")
        if not text or text.strip():
            break
        white.insert(0, token)
    return white


async def given_completion(
    conversation: str, tokenizer: Tokenizer, after: Sequence[int]
) -> Completion:
    """The last message of a conversation as a completion, its end of turn included.

    `after` is what `after_turn` found. Raises RejectedError when the answer's tokens cannot be told
    from the prompt's: the template then writes the prompt in another way once it is answered.
    Raises NoTokenizerError when the server cannot tell at all.
    """
    asked = json.loads(conversation)
    *before, answer = asked["messages"]
    prompt = await tokenizer.tokenize({**asked, "messages": before, "add_generation_prompt": True})
    whole = await tokenizer.tokenize({**asked, "add_generation_prompt": False})
    if prompt is None or whole is None:
        raise NoTokenizerError(f"{tokenizer.url} has no /tokenize, which mode prefill needs")
    if whole[: len(prompt)] != prompt:
        same = next(
            (n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole)
        )
        raise RejectedError(
            f"the template renders this prompt in another way once it is answered: {same:,} of its "
            f"{len(prompt):,} tokens are the same (templates that move or drop reasoning do so, "
            "and white space that begins an answer)"
        )
    end = len(whole) - len(after)
    if whole[end:] != list(after):
        raise RejectedError(
            f"the answer ends in tokens {whole[-3:]}, but other answers of this template end in "
            f"{list(after)} after the end of the turn"
        )
    return Completion(
        prompt_token_ids=np.asarray(prompt, np.int32),
        completion_token_ids=np.asarray(whole[len(prompt) : end], np.int32),
        content=_text(answer.get("content")),
        reasoning=reasoning_of(answer),
        finish_reason=GIVEN,
        extra={"tool_calls": answer["tool_calls"]} if answer.get("tool_calls") else {},
    )


def _text(content: object) -> str | None:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else None
