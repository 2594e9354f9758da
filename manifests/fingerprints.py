"""Stage fingerprints: the settings that samples were made with, and the refusal of others.

Kept in `meta` of the manifest; which settings belong to a stage is left to the stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftmill.manifests import record
from draftmill.manifests.errors import SettingsMismatch
from draftmill.manifests.manifest import Manifest


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
    key = f"settings.{stage}"
    text = manifest.meta(key)
    new = json.loads(json.dumps(dict(values)))
    stored = new if text is None else json.loads(text)
    wrong = [
        f"{meaning.get(name, name)} is {stored.get(name)!r} in the dataset and "
        f"{new.get(name)!r} in this run"
        for name in sorted({*stored, *new})
        if stored.get(name) != new.get(name)
        and not (name in growable and stored.get(name, 0) <= new.get(name, 0))
    ]
    if wrong:
        raise SettingsMismatch(
            f"{dataset}: the {stage} stage was run with other settings: "
            + "; ".join(wrong)
            + ". Go back to the stored values, or start a new dataset."
        )
    tag = record.settings_tag(new)
    if text is None or stored != new:
        with manifest.transaction("fingerprint"):
            manifest.set_meta(key, json.dumps(new, sort_keys=True))
            manifest.set_meta(f"fingerprint.{stage}", tag)
    return tag
