"""The key for servers: from the environment only, and never in anything that is said or stored."""

from __future__ import annotations

import os

# The first that is set counts. Servers that draftmill starts inherit VLLM_API_KEY and ask for it.
VARIABLES = ("DRAFTMILL_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
_SHORTEST = 4  # fewer characters than that could be part of any word


def api_key() -> str | None:
    """The key that requests carry, None if there is none."""
    return next((key for name in VARIABLES if (key := os.environ.get(name))), None)


def redacted(text: str) -> str:
    """`text` without any key: servers quote in their errors what they were sent."""
    for name in VARIABLES:
        key = os.environ.get(name, "")
        if len(key) >= _SHORTEST:
            text = text.replace(key, "***")
    return text
