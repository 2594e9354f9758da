"""What the fake target server is, and the chat replies it gives: right ones, and each wrong kind.

HTTP, timing and extraction are left to `target_server`, `scheduler` and `staged_writer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.fakes import toy_model as toy
from tests.fakes.scheduler import Speed
from tests.fakes.tiny_target import TinyTarget

# decided anew for every request; the others stick to their prompt
TRANSIENT = ("http_500", "http_503", "http_429", "drop", "hang", "garbage")
CHAT_FAULTS = (*TRANSIENT, "http_400", "cut_in_reasoning", "no_token_ids", "empty", "loop")


@dataclass(kw_only=True)
class Options(Speed):
    """What the server is and does wrong. Every field may be changed while it runs."""

    model: str = "fake/target"
    max_model_len: int = 8192
    median_tokens: float = 60.0
    sigma: float = 0.6
    reasoning: str = "none"  # none | reasoning | reasoning_content: the field of the reply
    reasoning_share: float = 0.7
    token_ids: bool = True
    tokenize: bool = True
    metrics: bool = True
    refuse_over_length: bool = False  # 400 when prompt + max_tokens do not fit, as old servers do
    api_key: str | None = None
    retry_after_s: float = 0.05
    faults: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    template: str = ""  # part of every rendered prompt: changing it changes the probe ids
    tokenize_template: str = ""  # part of what /tokenize renders, and only there
    after_turn: str = ""  # what the template writes behind the end of each turn
    strip_reasoning: bool = False  # the template opens answers with THINK and later drops it
    staging: str | None = None
    layers: int = 4
    hidden: int = 32
    slow_write_s: float = 0.3
    target: TinyTarget | None = None  # whose states and log-probabilities to send, not the toy's
    outages: list[tuple[float, float]] = field(default_factory=list)


def chat_reply(
    options: Options, key: str, fault: str | None, prompt_ids: list[int], limit: int
) -> dict[str, Any]:
    """The body of a chat reply to the prompt with that key, at most `limit` tokens long."""
    share = options.reasoning_share if options.reasoning != "none" else 0.0
    full = toy.answer_tokens(key, options.median_tokens, options.sigma)
    reasoning, content = toy.answer(key, full, share)
    if fault == "loop":
        content = ("the same again and " * (full // 19 + 20))[: max(full, 380)]
    if fault == "empty":
        reasoning, content = None, ""
    text: str | None = content
    ids = [*content.encode(), toy.END]
    if reasoning is not None:
        ids = [toy.THINK, *reasoning.encode(), toy.THINK_END, *ids]
    if fault == "cut_in_reasoning":
        limit = min(limit, max(2, full // 3))
        ids = [toy.THINK, *toy.TEXT[: limit + 8].encode()]
        reasoning = ""
    finish_reason = "stop"
    if len(ids) > limit:
        finish_reason, ids = "length", ids[:limit]
        if reasoning is not None:
            end = ids.index(toy.THINK_END) if toy.THINK_END in ids else len(ids)
            reasoning = bytes(ids[1:end]).decode()
            text = bytes(ids[end + 1 :]).decode() if end < len(ids) else None
        else:
            text = bytes(ids).decode()
    message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": []}
    if options.reasoning != "none" or fault == "cut_in_reasoning":
        name = "reasoning" if options.reasoning == "none" else options.reasoning
        message[name] = reasoning
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish_reason}
    reply: dict[str, Any] = {"id": f"chatcmpl-{key[:12]}", "object": "chat.completion"}
    reply |= {"created": 1, "model": options.model, "choices": [choice]}
    prompt_tokens, completion_tokens = len(prompt_ids), len(ids)
    reply["usage"] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if options.token_ids and fault != "no_token_ids":
        choice["token_ids"] = ids
        reply["prompt_token_ids"] = prompt_ids
    return reply
