"""What the writer of a dataset last published in status.json. Opens no database, imports none."""

from __future__ import annotations

import json
from typing import Any

from draftmill.manifests import lock
from draftmill.manifests.layout import Layout

# What everybody who shows the document counts on.
_TABLES = ("prompts", "tokens", "off_policy", "sources", "rejected", "disk")
_COUNTS = {"total", "pending", "generated", "timed_out", "failed", "rejected", "extracted"}


def published(dataset: Layout) -> dict[str, Any] | None:
    """The document of `status --json` as the running writer keeps it; None when nobody writes."""
    if lock.holder(dataset.lock_path) is None:
        return None
    try:
        return read(dataset)
    except (OSError, ValueError):
        return None  # the first writer of all has not got that far


def read(dataset: Layout) -> dict[str, Any]:
    """The document itself, whoever wrote it; raises OSError, and ValueError for anything else."""
    found = json.loads(dataset.status_path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(found.get(k), dict) for k in _TABLES):
        raise ValueError("it is no status of a dataset")
    running = found.get("running")
    runs = running is None or (isinstance(running, dict) and "stage" in running)
    if not isinstance(found.get("pid"), int) or not runs or not found["prompts"].keys() >= _COUNTS:
        raise ValueError("it is a status of another draftmill")
    return found
