"""What a chat reply must hold to become a Completion. Pure parsing; requests are `client`'s.

The served token ids are the truth. When a server returns none they are rebuilt through its own
/tokenize, checked against what it counted, and marked.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from draftmill.builder.requests.api_key import redacted
from draftmill.builder.requests.failures import GarbledReplyError, ServerFailedError
from draftmill.manifests.errors import PermanentError, RejectedError
from draftmill.manifests.types import Completion, TokenIds

# Never change it: every dataset has stored what its server made of it.
# No system message: some templates refuse one, and those that add their own show it all the better.
PROBE_CONVERSATION = json.dumps(
    {
        "messages": [
            {
                "role": "user",
                "content": "Name three prime numbers, então explique. 素数 \u2028 <x>",
            },
            {"role": "assistant", "content": "2, 3 and 5."},
            {"role": "user", "content": "Why?"},
        ]
    }
)
MOST_LETTERS = 64  # of a finish_reason
Tokenize = Callable[[Mapping[str, Any]], Awaitable[list[int] | None]]


def json_of(raw: bytes) -> Any:
    """The JSON value of a reply's body; GarbledReplyError if it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        start = redacted(raw.decode(errors="replace"))[:80]
        raise GarbledReplyError(f"the reply is not JSON: {start!r}") from error


def completion_of_reply(reply: Any) -> Completion | None:
    """The completion in a chat reply; None if the reply has no token ids."""
    choice, message, finish_reason = _choice(reply)
    token_ids, prompt_token_ids = choice.get("token_ids"), reply.get("prompt_token_ids")
    if token_ids is None or prompt_token_ids is None:
        return None
    prompt_ids = _ids(prompt_token_ids)
    completion_ids = _ids(token_ids)
    usage = _object(reply.get("usage"))
    for what, ids in (("prompt_tokens", prompt_ids), ("completion_tokens", completion_ids)):
        counted = usage.get(what)
        if counted is not None and counted != len(ids):
            raise GarbledReplyError(f"{len(ids)} token ids, but usage.{what} is {counted}")
    return Completion(
        prompt_token_ids=prompt_ids,
        completion_token_ids=completion_ids,
        content=message.get("content"),
        reasoning=reasoning_of(message),
        finish_reason=finish_reason,
        extra=_extra(reply, choice, message),
    )


async def rebuilt_completion(reply: Any, conversation: str, tokenize: Tokenize) -> Completion:
    """The completion of a reply without token ids, its ids from the server's own tokenizer."""
    choice, message, finish_reason = _choice(reply)
    asked = json.loads(conversation)
    prompt_ids = await tokenize({**asked, "add_generation_prompt": True})
    if prompt_ids is None:
        raise PermanentError(
            "the server returns no token ids and has no /tokenize to rebuild them with; "
            "serve the target model with vLLM 0.10.2 or newer"
        )
    usage = _object(reply.get("usage"))
    counted = usage.get("prompt_tokens")
    if counted is not None and counted != len(prompt_ids):
        raise RejectedError(
            f"rebuilt prompt has {len(prompt_ids)} tokens, the server counted {counted}: "
            "its /tokenize renders another template than its chat"
        )
    answer = {"role": "assistant", **{k: v for k, v in message.items() if v and k != "role"}}
    full = None
    if finish_reason == "stop":  # a cut answer has no end of turn, the template would add one
        messages = [*asked["messages"], answer]
        full = await tokenize({**asked, "messages": messages, "add_generation_prompt": False})
    if full is not None and full[: len(prompt_ids)] == prompt_ids and len(full) > len(prompt_ids):
        completion_ids = full[len(prompt_ids) :]
    else:
        text = f"{reasoning_of(message) or ''}{message.get('content') or ''}"
        completion_ids = await tokenize({"prompt": text, "add_special_tokens": False}) or []
    extra = _extra(reply, choice, message)
    if _is_count(counted := usage.get("completion_tokens")):
        extra["served_completion_tokens"] = counted
    return Completion(
        prompt_token_ids=_ids(prompt_ids),
        completion_token_ids=_ids(completion_ids),
        content=message.get("content"),
        reasoning=reasoning_of(message),
        finish_reason=finish_reason,
        ids_rebuilt=True,
        extra=extra,
    )


def ids_of_tokenizer(reply: Any) -> list[int]:
    """The ids in a reply of /tokenize."""
    try:
        ids: list[int] = _ids(reply["tokens"]).tolist()
    except (KeyError, TypeError) as error:
        raise GarbledReplyError("the reply of /tokenize has no ids") from error
    return ids


def text_of_tokenizer(reply: Any) -> str:
    """The text in a reply of /detokenize."""
    text = reply.get("prompt") if isinstance(reply, dict) else None
    if not isinstance(text, str):
        raise GarbledReplyError("the reply of /detokenize has no text")
    return text


def hidden_states_path(reply: Any) -> str | None:
    """Where an extraction server says that it writes; None if it does not say."""
    parameters = reply.get("kv_transfer_params") if isinstance(reply, dict) else None
    path = parameters.get("hidden_states_path") if isinstance(parameters, dict) else None
    return path if isinstance(path, str) else None


def prompt_log_probs(reply: Any) -> list[dict[int, tuple[float, int]]] | None:
    """{token id: (log-probability, rank from 1)} for every prompt token but the first.

    None if the server sent none. vLLM's form: `prompt_logprobs` of the only choice, null first.
    """
    try:
        listed = reply["choices"][0].get("prompt_logprobs")
        if listed is None:
            return None
        return [
            {int(token): (float(each["logprob"]), int(each["rank"])) for token, each in at.items()}
            for at in listed[1:]
        ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise GarbledReplyError(f"prompt_logprobs are not in vLLM's form: {error!r}") from error


def _choice(reply: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    try:
        choice = reply["choices"][0]
        message, finish_reason = choice["message"], choice["finish_reason"]
        content = message.get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise GarbledReplyError("the reply has no choice with a message") from error
    if finish_reason in (None, "abort", "error"):
        raise ServerFailedError(f"the server broke off its answer (finish_reason {finish_reason})")
    if not _is_word(finish_reason) or not (content is None or isinstance(content, str)):
        raise GarbledReplyError("the reply's content or finish_reason is not a text")
    return choice, message, finish_reason


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Reasoning of a message; until early 2026 vLLM called it `reasoning_content`."""
    for name in ("reasoning", "reasoning_content"):
        text = message.get(name)
        if isinstance(text, str):
            return text
    return None


def _extra(
    reply: Mapping[str, Any], choice: Mapping[str, Any], message: Mapping[str, Any]
) -> dict[str, Any]:
    details = _object(_object(reply.get("usage")).get("completion_tokens_details"))
    reasoning_tokens = details.get("reasoning_tokens")
    extra = {
        "tool_calls": message.get("tool_calls"),
        "stop_reason": choice.get("stop_reason"),
        "reasoning_tokens": reasoning_tokens if _is_count(reasoning_tokens) else None,
    }
    return {name: value for name, value in extra.items() if value}


def _object(value: Any) -> Mapping[str, Any]:
    """A part of a reply that tells nothing when it is no object."""
    return value if isinstance(value, dict) else {}


def _is_word(value: Any) -> bool:
    """Whether it is a word that the history of a row has room for, and is Unicode."""
    if not isinstance(value, str) or len(value) > MOST_LETTERS:
        return False
    return value == value.encode(errors="replace").decode()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _ids(values: Sequence[int]) -> TokenIds:
    try:
        ids = np.asarray(values)
        if ids.size == 0:
            return np.zeros(0, np.int32)
        if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= 1 << 31:
            raise ValueError("out of range")
    except (TypeError, ValueError, OverflowError) as error:
        raise GarbledReplyError("token ids are not a list of small whole numbers") from error
    return ids.astype(np.int32)
