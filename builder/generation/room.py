"""How many tokens a request may ask for: what the server's context leaves beside the prompt.

A request that fits nowhere is rejected here with the arithmetic, before it can hang a server.
Also estimates prompt lengths from their bytes, as long as nothing better is known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from draftmill.builder.generation.gates import Rejection
from draftmill.manifests.types import Completion

# What a chat template may add to the texts of a conversation without being asked to.
TEMPLATE_TOKENS = 512
SMOOTHING = 0.05
# An id as int32 and the text of a token, before compression.
BYTES_PER_TOKEN = 12
RECORD_BYTES = 4096


class Tokenizer(Protocol):
    """The part of a target client that counts prompts."""

    async def tokenize(self, request: dict[str, object], /) -> Sequence[int] | None:
        """Ids of {"messages": …} as the server renders them; None if it cannot tell."""


class OverLength(Exception):
    """The prompt leaves no room; `rejection` has the arithmetic."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.reason)
        self.rejection = rejection


async def max_tokens_for(
    conversation: str,
    wanted: int,
    least: int,
    limit: int | None,
    tokenizer: Tokenizer,
    *,
    exact: bool = False,
) -> int:
    """The most tokens to ask for; raises OverLength when not even `least` fit under `limit`.

    A prompt has at most as many tokens as bytes, give or take its template: only when that does
    not settle it (or `exact`, after a server refused) is the server asked to count.
    """
    if limit is None:
        return wanted
    bound = len(conversation.encode()) + TEMPLATE_TOKENS
    if bound + wanted <= limit and not exact:
        return wanted
    request = {**json.loads(conversation), "add_generation_prompt": True}
    token_ids = await tokenizer.tokenize(request)
    if token_ids is None:
        return wanted
    room = limit - len(token_ids)
    if room < max(1, least):
        raise OverLength(
            Rejection(
                "over_length",
                f"prompt of {len(token_ids):,} tokens + at least {max(1, least):,} to generate "
                f"> {limit:,} that fit the server",
            )
        )
    return min(wanted, room)


def most_stored_bytes(conversation: str, max_tokens: int) -> int:
    """Bytes that the record of a completion may take at most, for the disk budget."""
    # by its bytes: tokenizers spell out in them what they do not know
    prompt_tokens = len(conversation.encode()) + TEMPLATE_TOKENS
    return 4 * prompt_tokens + BYTES_PER_TOKEN * max_tokens + RECORD_BYTES


class LengthEstimate:
    """Running averages of prompt and completion lengths, for the cap on tokens in flight."""

    def __init__(self, max_tokens: int) -> None:
        self._tokens_per_byte = 0.3
        self._completion = float(max_tokens)
        self._seen = 0

    def tokens(self, conversation: str) -> int:
        """Expected tokens of prompt and completion together."""
        return int(len(conversation) * self._tokens_per_byte + self._completion)

    def completed(self, conversation: str, completion: Completion) -> None:
        """Learns from one completion."""
        self._seen += 1
        weight = max(SMOOTHING, 1.0 / self._seen)
        ratio = len(completion.prompt_token_ids) / max(1, len(conversation))
        self._tokens_per_byte += weight * (ratio - self._tokens_per_byte)
        length = len(completion.completion_token_ids)
        self._completion += weight * (length - self._completion)
