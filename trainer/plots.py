"""The door to matplotlib: what a run learnt and what a server accepted, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftmill.manifests import files

_DPI = 120


def plot_training(entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss and accuracy over steps, from the lines of a run's log (`runlog.read_log`)."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    trained = [entry for entry in entries if entry.get("kind") == "train"]
    validated = [entry for entry in entries if entry.get("kind") == "validation"]
    _line(loss, trained, "loss", label="training", alpha=0.6)
    _line(loss, validated, "loss", label="validation", marker="o")
    position = 0
    while any(f"full_acc_{position}" in entry for entry in (*trained, *validated)):
        name = f"full_acc_{position}"
        _line(accuracy, trained, name, color=f"C{position}", alpha=0.35)
        _line(accuracy, validated, name, label=f"{position + 1} right", color=f"C{position}")
        position += 1
    _line(accuracy, validated, "accepted_per_step", label="accepted per step", color="black")
    loss.set_title("loss")
    accuracy.set_title("validation (faint: training)")
    for axes in (loss, accuracy):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    _save(figure, path)


def plot_acceptance(document: Mapping[str, Any], path: Path) -> None:
    """Accepted share by draft position, of all prompts and of each source (`eval --json`)."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    groups = {"all": document, **document["by_source"]}
    if len(document["by_source"]) == 1:
        del groups["all"]
    width = 0.8 / len(groups)
    for number, (name, part) in enumerate(groups.items()):
        shares = part["accepted_by_position"]
        places = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(shares))]
        axes.bar(places, shares, width, label=f"{name}: {part['accepted_per_step']:.2f} per step")
    count = max((len(part["accepted_by_position"]) for part in groups.values()), default=0)
    axes.set_xticks(range(count), [str(place + 1) for place in range(count)])
    axes.set_xlabel("draft token")
    axes.set_ylabel("part of drafts in which it was accepted")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)
    _save(figure, path)


def _line(axes: Axes, entries: Sequence[Mapping[str, Any]], name: str, **style: Any) -> None:
    found = [(entry["step"], entry.get(name)) for entry in entries]
    points = [(step, value) for step, value in found if isinstance(value, (int, float))]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    # Without the date and version that matplotlib would add: the same run gives the same bytes.
    figure.savefig(temporary, format="png", dpi=_DPI, metadata={"Software": None})
    files.publish(temporary, path, "plot")
