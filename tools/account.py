"""The account that a run gives when the disk budget stops it: what is in, and what the rest needs.

Pure arithmetic over the figures of `status`; when it is shown is left to the stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftmill.manifests.sizes import format_size
from draftmill.tools.estimate.costs import STORED_SHARE

SMALLER = ("bitround-4", "rot4")


def budget_account(
    summary: Mapping[str, Any], *, left: int, left_tokens: int, bytes_per_token: int, codec: str
) -> str:
    """One paragraph: samples stored, what the `left` other samples need, what codecs would save.

    `left_tokens` are those of the samples whose hidden states are missing, `bytes_per_token` is raw
    bf16. What was stored so far says how well the codec in use does; the others' shares are those
    of `draftmill estimate`.
    """
    stored = summary["prompts"]["extracted"]
    disk = summary["disk"]
    raw = left_tokens * bytes_per_token
    share = STORED_SHARE.get(codec, 1.0)
    if disk["compression_ratio"]:
        share = 1 / disk["compression_ratio"]
    parts = [
        f"{stored:,} samples have hidden states ({format_size(disk['hidden_states_bytes'])})"
        + (" and can be trained on as they are" if stored else ""),
    ]
    if left:
        parts.append(f"the other {left:,} need about {format_size(raw * share)} more as {codec}")
        for name in SMALLER:
            saved = raw * (share - STORED_SHARE[name])
            if name != codec and saved > 0:
                parts.append(f"{name} (lossy) would save {format_size(saved)} of that")
    waiting = summary["prompts"]["pending"]
    if waiting:
        parts.append(f"{waiting:,} prompts have no completion yet and are not counted in it")
    return "The budget: " + "; ".join(parts) + "."
