"""One HTML file for a report: nothing outside it is needed, no script runs in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from draftmill.tools.report.plots import chart, titles
from draftmill.tools.report.sections import sections, snapshot_note
from draftmill.tools.report.words import Grid, Section, clock

_STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --muted: #6a7480; --grid: #d5dae0; --accent: #c2410c;
  --deep: #2f3b4a; --band: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171b; --ink: #e7eaee; --muted: #98a3af; --grid: #3a424c; --accent: #fb923c;
  --deep: #c9d3de; --band: #1b2026; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 3rem 0 .5rem; padding-top: 1rem;
  border-top: 1px solid var(--grid); }
p { max-width: 52rem; margin: .4rem 0 1rem; }
.when { color: var(--muted); }
.note { border-left: 3px solid var(--accent); padding: .3rem .8rem; background: var(--band); }
code { background: var(--band); padding: 0 .25em; }
nav a { color: inherit; margin-right: 1rem; }
.pair { display: grid; gap: 1rem 2rem; align-items: start; margin-bottom: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
figure { margin: 0; max-width: 38rem; }
figcaption, caption { text-align: left; font-weight: 600; padding: .2rem 0 .4rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; margin-bottom: 1.2rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { color: var(--muted); font-weight: 500; white-space: nowrap; }
.word { text-align: left; }
td:not(.word) { white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; }
@media print { nav { display: none; } h2 { break-after: avoid; } .pair { break-inside: avoid; } }
"""


def page(found: Mapping[str, Any]) -> str:
    """The whole file. Everything that came from a dataset or a server is escaped."""
    parts = sections(found)
    note = snapshot_note(found)
    links = " ".join(f'<a href="#{part.key}">{escape(part.title)}</a>' for part in parts)
    title = escape(str(found["dataset"]))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}: draftmill report</title>",
            f"<style>{_STYLE}</style></head><body>",
            f"<header><h1>{title}</h1>",
            f'<p class="when">draftmill report of {clock(found["time"], year=True)}</p>',
            *([f'<p class="note">{escape(note)}</p>'] if note else []),
            f"<nav>{links}</nav></header><main>",
            *(_section(part, found) for part in parts),
            "</main></body></html>",
            "",
        ]
    )


def _section(part: Section, found: Mapping[str, Any]) -> str:
    lines = [f'<section id="{part.key}"><h2>{escape(part.title)}</h2>']
    text = re.sub("`([^`]+)`", r"<code>\1</code>", escape(part.text))
    lines.append(f"<p>{text}</p>")
    charts = [_figure(name, found) for name in part.charts]
    grids = [_table(grid) for grid in part.grids if grid.rows]
    narrow = [grid for grid in part.grids if grid.rows and len(grid.columns) <= 4]
    if charts or narrow:
        beside = [_table(grid) for grid in narrow]
        lines.append(f'<div class="pair">{"".join(charts + beside)}</div>')
        grids = [_table(grid) for grid in part.grids if grid.rows and grid not in narrow]
    return "\n".join([*lines, *grids, "</section>"])


def _figure(name: str, found: Mapping[str, Any]) -> str:
    caption = escape(titles()[name])
    return f"<figure><figcaption>{caption}</figcaption>{chart(name, found)}</figure>"


def _table(grid: Grid) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        words = [' class="word"' if place < grid.words else "" for place in range(len(cells))]
        inside = (
            f"<{tag}{word}>{escape(cell)}</{tag}>" for word, cell in zip(words, cells, strict=True)
        )
        return f"<tr>{''.join(inside)}</tr>"

    body = "".join(row("td", cells) for cells in grid.rows)
    return (
        f'<div class="scroll"><table><caption>{escape(grid.title)}</caption>'
        f"<thead>{row('th', grid.columns)}</thead><tbody>{body}</tbody></table></div>"
    )
