"""Values of a record's header that are checked before they become a row: types and ranges.

A header's checksum says that it is as it was written, not who wrote it. What passes here fits the
columns of the manifest; what the values mean is `record`'s.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from draftmill.manifests.types import Attempt, Outcome

_INT32 = ("attempt", "http_status", "prompt_tokens", "completion_tokens", "reasoning_tokens")
_SECONDS = ("queue_s", "total_s", "deadline_s", "started_at")
_FIELDS = tuple(field.name for field in fields(Attempt))


def whole(value: Any, bits: int = 63) -> int:
    """A number from 0 that fits so many bits; ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise ValueError(f"{str(value)[:40]!r} is no number from 0 to 2 ** {bits}")
    return value


def text(value: Any) -> str:
    """A string that can be stored as UTF-8; ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is no text")
    value.encode()
    return value


def storable(value: Any) -> Any:
    """Text as UTF-8 can hold it: a server's words may have half a character, as `\\ud800`."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def attempt(values: Any) -> Attempt:
    """The attempt of a header; ValueError where a value does not fit its column."""
    found: dict[str, Any] = {}
    for name in _FIELDS:
        value = values.get(name)
        if value is None:
            continue
        if name == "id":
            found[name] = whole(value)
        elif name in _INT32:
            found[name] = whole(value, 31)
        elif name in _SECONDS:
            found[name] = float(value)
        else:
            found[name] = text(value)
    if found.get("outcome") not in get_args(Outcome):
        raise ValueError(f"outcome {found.get('outcome')!r}")
    return Attempt(**found)
