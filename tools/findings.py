"""What `doctor` finds: one value for each check, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check. `ok` None is worth knowing but no fault; `fix` is what to type or to change."""

    ok: bool | None
    what: str
    why: str = ""
    fix: str = ""


def faults(findings: Sequence[Finding]) -> int:
    """How many of them stop a run."""
    return sum(finding.ok is False for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """The document of `doctor --json`."""
    found = {"faults": faults(findings), "findings": [asdict(each) for each in findings]}
    return json.dumps(found, indent=2)


def show(finding: Finding) -> None:
    """One finding, for a person."""
    mark = {True: "ok  ", False: "FAULT", None: "note"}[finding.ok]
    click.echo(f"{mark} {finding.what}")
    if finding.ok is not True:
        for name in ("why", "fix"):
            if text := getattr(finding, name):
                click.echo(f"     {name}: {text}")
