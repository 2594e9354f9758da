"""Stage fingerprints: the settings that samples were made with, and the refusal of others.

Kept in `meta` of the manifest; which settings belong to a stage is left to the stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftmill.manifests.errors import SettingsMismatch
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.shards import record


def stored(manifest: Manifest, stage: str) -> dict[str, Any]:
    """The settings that the samples of a stage were made with; {} before any."""
    found: dict[str, Any] = json.loads(manifest.meta(f"settings.{stage}") or "{}")
    return found


def check(
    manifest: Manifest,
    dataset: Path,
    stage: str,
    values: Mapping[str, Any],
    *,
    growable: Sequence[str],
    meaning: Mapping[str, str],
) -> str:
    """Store the settings of a stage at first use, later compare; returns the tag of its records.

    Raises SettingsMismatch with each field that differs, the stored value and the new one.
    """
    new = json.loads(json.dumps(dict(values)))
    old = stored(manifest, stage) or new
    wrong = [
        f"{meaning.get(name, name)} is {old.get(name)!r} in the dataset and "
        f"{new.get(name)!r} in this run"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
        and not (name in growable and old.get(name, 0) <= new.get(name, 0))
    ]
    if wrong:
        raise SettingsMismatch(
            f"{dataset}: the {stage} stage was run with other settings: "
            + "; ".join(wrong)
            + ". Go back to the stored values, or start a new dataset."
        )
    tag = record.settings_tag(new)
    if stored(manifest, stage) != new:
        with manifest.transaction("fingerprint"):
            manifest.set_meta(f"settings.{stage}", json.dumps(new, sort_keys=True))
            manifest.set_meta(f"fingerprint.{stage}", tag)
    return tag
