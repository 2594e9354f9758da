"""What `doctor` finds: one value for each check, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftmill.tools.terminal import echo


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check. `ok` None is worth knowing but no fault.

    What is not ok says `why` it matters and its `fix`: what to type or to change.
    """

    ok: bool | None
    what: str
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.ok is True or (self.why and self.fix), f"no why or no fix: {self.what}"


def faults(findings: Sequence[Finding]) -> int:
    """How many of them stop a run."""
    return sum(finding.ok is False for finding in findings)


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """The document of `doctor --json`."""
    return {"faults": faults(findings), "findings": [asdict(each) for each in findings]}


def show(finding: Finding) -> None:
    """One finding, for a person."""
    mark = {True: "ok  ", False: "FAULT", None: "note"}[finding.ok]
    echo(f"{mark} {finding.what}")
    if finding.ok is not True:
        for name in ("why", "fix"):
            if text := getattr(finding, name):
                echo(f"     {name}: {text}")
