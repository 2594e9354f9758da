"""Text on its way to a terminal: nothing that others wrote may move the cursor or change its state.

Servers, prompt files and datasets of others bring texts that hold escape codes or turn the order of
characters around. What is shown has them spelled out. Layout and progress are `render`'s.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import click

# Control characters but tab and line feed, those that change the direction of text, and the halves
# of characters that Python makes of names that are no UTF-8.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean(text: str) -> str:
    r"""`text` with every character that a terminal would obey spelled out: `\x1b`, `\u202e`."""
    return _CONTROL.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def echo(text: str, *, err: bool = False) -> None:
    """A line for a person."""
    click.echo(clean(text), err=err)


def echo_json(document: Any, *, indent: int | None = 2, **options: Any) -> None:
    """A document for a program. JSON has its own way of spelling control characters."""
    click.echo(json.dumps(document, indent=indent, **options).replace("\x7f", "\\u007f"))


def tell_warnings() -> None:
    """Have draftmill's own warnings told like everything else. Whoever warns imported logging."""
    logging = sys.modules.get("logging")
    if logging is None:
        return
    logger = logging.getLogger("draftmill")
    if not logger.handlers:
        handler = logging.StreamHandler(_Warnings())
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)


class _Warnings:
    """What a logging handler writes into."""

    def write(self, text: str) -> None:
        echo(text.rstrip("\n"), err=True)

    def flush(self) -> None:
        sys.stderr.flush()
