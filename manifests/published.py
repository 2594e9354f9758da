"""What the writer of a dataset last published in status.json. Opens no database, imports none."""

from __future__ import annotations

import json
from typing import Any

from draftmill.manifests import lock
from draftmill.manifests.layout import Layout


def published(dataset: Layout) -> dict[str, Any] | None:
    """The document of `status --json` as the running writer keeps it; None when nobody writes."""
    if lock.holder(dataset.lock_path) is None:
        return None
    try:
        found: dict[str, Any] = json.loads(dataset.status_path.read_text())
    except (OSError, ValueError):
        return None  # the first writer of all has not got that far
    return found
