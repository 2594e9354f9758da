"""One request to an extraction server that brings two things: its hidden states and its own
log-probabilities of the same tokens. What they say about each other is left to `canary`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftmill.builder.extraction.intake import Layers, check_claims
from draftmill.builder.extraction.staging import Staging
from draftmill.builder.extraction.validate import check_states
from draftmill.builder.requests.client import TargetClient
from draftmill.builder.requests.replies import hidden_states_path, prompt_log_probs
from draftmill.manifests.errors import PermanentError, ServerError, TimedOutError, TransientError
from draftmill.manifests.types import StatesTLH, TokenIds

# Enough to tell layers apart; a prefill that costs a server nothing.
PROBE_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a server itself says of a prompt of T tokens: [T - 1], for the tokens from 1 on."""

    log_probs_T: NDArray[np.float32]  # of the token that is there
    first_T: NDArray[np.int64]  # the most likely token, -1 where the server did not say
    first_log_probs_T: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """T token ids, their hidden states [T, L, H], and what the server says of the tokens."""

    token_ids: TokenIds
    states_TLH: StatesTLH
    said: Said


def probe_ids(token_ids: TokenIds, max_model_len: int | None) -> TokenIds:
    """PROBE_TOKENS ids made of a sample's; short samples are repeated."""
    room = PROBE_TOKENS if max_model_len is None else min(PROBE_TOKENS, max_model_len - 1)
    return np.resize(token_ids, max(2, room))


async def ask(
    client: TargetClient, token_ids: TokenIds, request_id: str, timeout_s: float
) -> tuple[str, Said]:
    """Sends the probe; (`hidden_states_path` as the server names it, what it says).

    Raises RequestError kinds, PermanentError when it sends no log-probabilities, ServerError when
    it sends no states.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reply = await client.complete(token_ids, request_id=request_id, prompt_logprobs=1)
    except TimeoutError:
        raise TimedOutError(f"{client.url}: no answer after {timeout_s:,.0f} s") from None
    path, listed = hidden_states_path(reply), prompt_log_probs(reply)
    if path is None:
        raise ServerError(
            f"{client.url} answers without hidden states: start it with "
            "`draftmill serve extract`, not as a generation server."
        )
    if listed is None or len(listed) != len(token_ids) - 1:
        raise PermanentError(f"{client.url} sends no prompt_logprobs")
    return path, said_of(token_ids, listed)


def said_of(token_ids: TokenIds, listed: list[dict[int, tuple[float, int]]]) -> Said:
    """`replies.prompt_log_probs` as arrays; PermanentError if a prompt's token is missing."""
    first = [
        next(((token, score) for token, (score, rank) in at.items() if rank == 1), (-1, 0.0))
        for at in listed
    ]
    try:
        own = [at[int(token)][0] for at, token in zip(listed, token_ids[1:], strict=True)]
    except KeyError as error:
        raise PermanentError(f"prompt_logprobs do not have the prompt's token {error}") from error
    return Said(
        log_probs_T=np.array(own, np.float32),
        first_T=np.array([token for token, _ in first], np.int64),
        first_log_probs_T=np.array([score for _, score in first], np.float32),
    )


def read(staging: Staging, name: str, token_ids: TokenIds, layers: Layers) -> StatesTLH:
    """The states of a probe, [T, L, H], with every check that a sample passes.

    Raises RejectedError and TransientError kinds, as taking in a sample does.
    """
    try:
        opened = staging.open(name)
    except FileNotFoundError:
        raise TransientError(f"{name} went away before it was read") from None
    with opened as staged:
        check_claims(staged, token_ids, layers)
        shape = (len(token_ids), len(layers.layer_ids), layers.hidden_size)
        states_TLH = np.empty(shape, np.uint16)
        staged.read_into(states_TLH, 0)
    check_states(token_ids, states_TLH, layers.layer_ids)
    return states_TLH
