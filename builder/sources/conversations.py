"""One source row as OpenAI messages, and the prompts that are cut from it.

Owns the row formats, the checks of a conversation and the identity of a prompt. Files and their
formats are left to `sources`; ids within a dataset to the manifest.

A row is one of
  messages   {"messages": [{"role", "content", …}], "tools"?, "chat_template_kwargs"?}
  sharegpt   {"conversations": [{"from", "value", …}], "system"?}
  prompt     {"prompt": "…"} or {"question": "…"} or {"instruction": "…"}, "system"?, an answer?

Messages are kept as given, fields that nobody here knows included. The order of keys is kept too,
because chat templates print tool schemas in that order; only the hash is taken over sorted keys.
With mode "prefill" the answer that the source has is the last message, and stays as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args

from draftmill.manifests.types import Prompt

Format = Literal["auto", "messages", "sharegpt", "prompt"]
FORMATS: tuple[Format, ...] = get_args(Format)
Turns = Literal["first", "last", "all"]
TURNS: tuple[Turns, ...] = get_args(Turns)
Mode = Literal["regenerate", "prefill"]
MODES: tuple[Mode, ...] = get_args(Mode)

PROMPT_KEYS = ("prompt", "question", "instruction")
SHAREGPT_KEYS = ("conversations", "conversation")
CONTENT_KEYS = ("messages", *SHAREGPT_KEYS, *PROMPT_KEYS)
_SYSTEM_KEYS = ("system", "system_prompt")
_ID_KEYS = ("conversation_id", "id", "uuid")
_REFERENCE_KEYS = ("reference", "completion", "response", "answer", "output")
# What a reader of columns has to fetch.
ROW_KEYS = frozenset(
    (*CONTENT_KEYS, *_SYSTEM_KEYS, *_ID_KEYS, *_REFERENCE_KEYS)
    + ("input", "tools", "chat_template_kwargs")
)

_SYSTEM_ROLES = ("system", "developer")
_ROLES = frozenset((*_SYSTEM_ROLES, "user", "assistant", "tool", "function"))
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}

_COMPACT: dict[str, Any] = {
    "ensure_ascii": False,
    "separators": (",", ":"),
    "allow_nan": False,
    "check_circular": False,
}
_AS_GIVEN = json.JSONEncoder(**_COMPACT)
_CANONICAL = json.JSONEncoder(**_COMPACT, sort_keys=True)

_quote = json.encoder.encode_basestring  # a JSON string, not reduced to ASCII

Message = dict[str, Any]


class BadRow(Exception):
    """This row is no usable conversation; the message says why."""


def prompts_of(
    row: object,
    *,
    source: str,
    number: int,
    format: Format = "auto",
    turns: Turns = "last",
    mode: Mode = "regenerate",
) -> Iterator[Prompt]:
    """The prompts of one row, numbered `number` in its source; raises BadRow after the good ones.

    `turns` says which user turns the target model is to answer: the first, the last, or each (one
    prompt per turn, with the answers before it as given). What follows the last of a row's prompts
    is its reference answer, if the assistant speaks next. With mode "prefill" it says which
    assistant messages are kept as the answer, and each of these is the last message of its prompt.
    """
    if not isinstance(row, dict):
        raise BadRow(f"a {type(row).__name__}, not an object")
    prefill = mode == "prefill"
    messages, reference = _messages_of(row, format)
    if prefill and reference is not None:
        messages = [*messages, {"role": "assistant", "content": reference}]
    asked = _answer_points(messages)
    ends = _given_answers(messages) if prefill else asked
    wanted = ends if turns == "all" else ends[:1] if turns == "first" else ends[-1:]
    extras = _extras(row) if "tools" in row or "chat_template_kwargs" in row else {}
    # The same conversation answered anew and kept as it is are two samples.
    marks = {**extras, "mode": mode} if prefill else extras
    conversation_id = _own_id(row, source)
    given: list[str] = []
    canonical: list[str] = []
    for end in wanted:
        try:
            for index in range(len(given), end):
                _check_content(messages[index], index)
                _append_json(messages[index], given, canonical)
            digest = _digest(canonical[:end], marks)
            if conversation_id is None:
                first = asked[0] == end and not marks
                conversation_id = digest if first else _digest(canonical[: asked[0]], {})
            conversation = f'{{"messages":[{",".join(given)}]'
            for key, value in extras.items():
                conversation += f',"{key}":{_json(value, _AS_GIVEN)}'
        except UnicodeEncodeError:
            raise BadRow("text with half of a surrogate pair, which is not Unicode") from None
        yield Prompt(
            hash=digest,
            conversation=conversation + "}",
            source=source,
            row=number,
            conversation_id=conversation_id,
            reference=None if prefill else _unicode(_answer_after(messages, end) or reference),
            off_policy=prefill,
        )


def _given_answers(messages: list[Message]) -> list[int]:
    """How many messages there are up to and with each of the assistant's."""
    ends = [n for n, message in enumerate(messages, 1) if message["role"] == "assistant"]
    if not ends:
        raise BadRow("no answer of the assistant that could be kept (mode prefill)")
    return ends


def _extras(row: dict[str, Any]) -> dict[str, Any]:
    """What beside the messages decides what the server is asked."""
    return {
        key: value
        for key, kind in (("chat_template_kwargs", dict), ("tools", list))
        if (value := _optional(row, key, kind))
    }


def _own_id(row: dict[str, Any], source: str) -> str | None:
    """The source's own id of the conversation; sources count from 0, so the name is part of it."""
    for key in _ID_KEYS:
        if key in row and isinstance(row[key], str | int):
            return _unicode(f"{source}:{row[key]}")
    return None


def _unicode(text: str | None) -> str | None:
    """What is not part of a prompt, with half surrogate pairs replaced, which no file can hold."""
    return text if text is None else text.encode(errors="replace").decode()


def _append_json(message: Message, given: list[str], canonical: list[str]) -> None:
    """One message as JSON, once in its own order of keys and once sorted."""
    content = message.get("content")
    if len(message) == 2 and type(content) is str:
        # Nearly all messages; the encoder's set-up would cost more than all the rest.
        quoted, role = _quote(content), message["role"]
        sorted_json = f'{{"content":{quoted},"role":"{role}"}}'
        if next(iter(message)) == "role":
            given.append(f'{{"role":"{role}","content":{quoted}}}')
        else:
            given.append(sorted_json)
        canonical.append(sorted_json)
    else:
        given.append(_json(message, _AS_GIVEN))
        canonical.append(_json(message, _CANONICAL))


def _json(value: object, encoder: json.JSONEncoder) -> str:
    try:
        return encoder.encode(value)
    except (TypeError, ValueError) as error:
        raise BadRow(f"holds what JSON cannot: {error}") from None
    except RecursionError:
        raise BadRow("nested too deeply") from None


def _digest(canonical: list[str], extras: dict[str, Any]) -> str:
    """32 hex digits of the SHA-256 of canonical JSON: the messages and the extras there are."""
    messages = f"[{','.join(canonical)}]"
    if extras:
        parts = {"messages": messages} | {
            key: _json(value, _CANONICAL) for key, value in extras.items()
        }
        text = "{" + ",".join(f'"{key}":{parts[key]}' for key in sorted(parts)) + "}"
    else:
        text = f'{{"messages":{messages}}}'
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _messages_of(row: dict[str, Any], format: Format) -> tuple[list[Message], str | None]:
    """All messages of the row, and a reference answer if one stands beside them."""
    if format in ("auto", "messages") and row.get("messages") is not None:
        return _list_of_objects(row["messages"], "messages"), None
    if format in ("auto", "sharegpt"):
        for key in SHAREGPT_KEYS:
            if row.get(key) is not None:
                turns = _list_of_objects(row[key], key)
                return _with_system(row, [_from_sharegpt(turn) for turn in turns]), None
    if format in ("auto", "prompt"):
        present = [key for key in PROMPT_KEYS if row.get(key) is not None]
        if len(present) > 1:
            raise BadRow(f"has both `{present[0]}` and `{present[1]}`: which one is the prompt?")
        if present:
            return _from_prompt(row, present[0])
    wanted = {"auto": CONTENT_KEYS, "messages": ("messages",), "sharegpt": SHAREGPT_KEYS}
    names = "`, `".join(wanted.get(format, PROMPT_KEYS))
    found = ", ".join(sorted(map(str, row))[:8]) or "nothing"
    raise BadRow(f"none of `{names}` in it; it has: {found}")


def _from_prompt(row: dict[str, Any], key: str) -> tuple[list[Message], str | None]:
    value = row[key]
    answers = [row[k] for k in _REFERENCE_KEYS if isinstance(row.get(k), str) and row[k]]
    answer = answers[0] if len(answers) == 1 else None
    if isinstance(value, list):
        return _list_of_objects(value, key), answer
    if not isinstance(value, str):
        raise BadRow(f"`{key}` is a {type(value).__name__}, not text")
    if isinstance(row.get("input"), str) and row["input"].strip():
        raise BadRow(f"has `{key}` and `input`: join them into one prompt first")
    return _with_system(row, [{"role": "user", "content": value}]), answer


def _from_sharegpt(turn: Message) -> Message:
    if "role" in turn and "content" in turn:
        return turn
    speaker = turn.get("from")
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f"unknown speaker {speaker!r}")
    message: Message = {"role": role, "content": turn.get("value")}
    for key, value in turn.items():
        if key not in ("from", "value"):
            message[key] = value
    return message


def _with_system(row: dict[str, Any], messages: list[Message]) -> list[Message]:
    """The system text that stands beside a conversation becomes its first message."""
    if messages and messages[0].get("role") in _SYSTEM_ROLES:
        if messages[0].get("content") == "":
            return messages[1:]
        return messages
    for key in _SYSTEM_KEYS:
        text = row.get(key)
        if isinstance(text, str) and text.strip():
            return [{"role": "system", "content": text}, *messages]
    return messages


def _list_of_objects(value: object, key: str) -> list[Message]:
    if isinstance(value, str):
        value = _parsed(value, key)
    if not isinstance(value, list):
        raise BadRow(f"`{key}` is a {type(value).__name__}, not a list")
    if not value:
        raise BadRow(f"`{key}` is empty")
    for index, item in enumerate(value, 1):
        if not isinstance(item, dict):
            raise BadRow(f"message {index} is a {type(item).__name__}, not an object")
    return value


def _optional(row: dict[str, Any], key: str, kind: type) -> Any:
    """Tools or template arguments; tables often hold them as JSON text."""
    value = row.get(key)
    if isinstance(value, str) and value.strip():
        value = _parsed(value, key)
    if value and not isinstance(value, kind):
        raise BadRow(f"`{key}` is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _parsed(text: str, key: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(f"`{key}` is text that is not JSON") from None


def _answer_points(messages: list[Message]) -> list[int]:
    """How many messages stand before each answer that a user turn asks for.

    User messages in a row are one turn. A conversation that ends with a tool's result asks for an
    answer there too. Raises BadRow where the roles make no conversation.
    """
    ends: list[int] = []
    previous = "start"
    for index, message in enumerate(messages, 1):
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise BadRow(f"message {index} has the unknown role {role!r}")
        if role == "user":
            if previous == "user":
                ends[-1] = index
            else:
                ends.append(index)
        elif role == "assistant":
            if not ends:
                raise BadRow(f"wrong order: message {index} (assistant) comes before any user's")
        elif role not in _SYSTEM_ROLES and previous not in ("assistant", role):
            raise BadRow(f"wrong order: message {index} ({role}) does not follow an assistant's")
        previous = role
    if not ends:
        raise BadRow("no user message")
    if previous in ("tool", "function"):
        ends.append(len(messages))
    return ends


def _check_content(message: Message, index: int) -> None:
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        if content and not content.isspace():
            return
    elif isinstance(content, list):
        if content:
            return
    elif content is not None:
        raise BadRow(f"the content of message {index + 1} is a {type(content).__name__}, not text")
    # A tool may return nothing, a system text may be blank, and an assistant may only call tools.
    if message.get("tool_calls") if role == "assistant" else role != "user" and content == "":
        return
    raise BadRow(f"message {index + 1} ({role}) is empty")


def _answer_after(messages: list[Message], end: int) -> str | None:
    if end < len(messages) and messages[end]["role"] == "assistant":
        content = messages[end].get("content")
        if isinstance(content, str) and content.strip():
            return content
    return None
