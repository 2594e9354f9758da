"""How the figures of `estimate` are said to a person: each with its arithmetic. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftmill.manifests.sizes import format_size, three_digits
from draftmill.tools.estimate.costs import HARDWARE, STAGES
from draftmill.tools.render import duration


def both_units(size: float) -> str:
    """Bytes in decimal and binary units: `2.35 TB (2.14 TiB)`."""
    for letter, power in (("T", 4), ("G", 3), ("M", 2)):
        if size >= 1000**power / (10 if letter == "T" else 1):
            decimal, binary = (three_digits(size / base**power) for base in (1000, 1024))
            return f"{decimal} {letter}B ({binary} {letter}iB)"
    return format_size(size)


def explain(found: Mapping[str, Any], notes: tuple[str, ...] = ()) -> str:
    """The figures with the arithmetic that they come from."""
    samples, each = found["samples"], found["tokens_per_sample"]
    lines = [
        f"bytes a token     {found['layers']} layers x {found['hidden_size']:,} x 2 bytes = "
        f"{found['bytes_per_token']:,}",
        f"tokens            {samples:,} samples x {each:,.0f} = {found['tokens']:,}",
        f"raw hidden states {both_units(found['raw_bytes'])}",
    ]
    for name, size in found["stored_bytes"].items():
        if name != "raw":
            chosen = "  (chosen)" if name == found["codec"] else ""
            token = found["bytes_per_token"] * size / found["raw_bytes"]
            lines.append(f"  {name:<15} {both_units(size)}, {token:,.0f} a token{chosen}")
    work = {
        "generate": f"{samples:,} x {found['completion_tokens']:,.0f} tokens",
        "extract": f"{found['tokens']:,} tokens",
        "train": f"{found['epochs']:g} x {found['tokens']:,} tokens",
    }
    for stage in STAGES:
        rate = found["rates"][stage]
        lines.append(
            f"{stage:<17} {duration(3600 * found['hours'][stage])}: {work[stage]} at "
            f"{rate['tokens_per_s']:,.0f}/s ({rate['from']})"
        )
    used = {found["rates"][stage]["from"] for stage in STAGES}
    sources = [f"{name}: {table.source}" for name, table in HARDWARE.items() if name in used]
    if sources:
        sources.append(
            "other speeds: --hardware NAME, --rate STAGE=TOKENS_PER_S, or those of a dataset that "
            "has worked for five minutes"
        )
    lines += _money(found) + _budget(found)
    return "\n".join([*lines, *sources, *notes])


def _money(found: Mapping[str, Any]) -> list[str]:
    lines = []
    if cost := found["cost"]:
        hours = sum(found["hours"].values())
        lines.append(
            f"cost              {hours:,.1f} h x {cost['per_hour']:g} = {cost['total']:,.0f}"
        )
    if move := found["move"]:
        price = "" if move["idle_cost"] is None else f", which costs {move['idle_cost']:,.0f}"
        lines.append(
            f"move the states   {duration(3600 * move['transfer_hours'])} at "
            f"{move['link_gbps']:g} Gbit/s, beside {duration(3600 * found['hours']['extract'])} of "
            "extraction"
        )
        if move["idle_hours"]:
            lines.append(
                f"  the GPUs wait   {duration(3600 * move['idle_hours'])}{price}; none would wait "
                f"at {move['gbps_without_idling']:.3g} Gbit/s"
            )
        lines.append(
            f"  all in one place {duration(3600 * move['hours_all_here'])}, with the move "
            f"{duration(3600 * move['hours_with_move'])}"
        )
    return lines


def _budget(found: Mapping[str, Any]) -> list[str]:
    if found["budget_bytes"] is None:
        return []
    size = found["stored_bytes"][found["codec"]]
    lines = [
        f"disk budget       {both_units(found['budget_bytes'])}, for hidden states "
        f"{both_units(found['room_bytes'])}: "
        + ("fits" if found["fits"] else f"{both_units(size - found['room_bytes'])} too little")
        + f"; {found['samples_that_fit']:,} samples fit"
    ]
    for way in found["ways"]:
        mark = "  + " if way["works"] else "  - "
        if way["way"] == "fewer samples":
            text = f"{way['samples']:,} of {found['samples']:,}"
        elif way["way"] == "shorter samples":
            text = f"{way['tokens_per_sample']:,} tokens in the mean"
        elif "codec" in way:
            text = f"{way['codec']}, {both_units(way['stored_bytes'])}"
            text += "" if way["works"] else f": {way['samples']:,} samples fit"
        else:
            text = "more than one sample at a time does not fit"
            if way["works"]:
                text = (
                    f"{way['rounds']:,} rounds, {duration(3600 * way['extract_hours'])} of "
                    "extraction over all passes"
                )
        lines.append(f"{mark}{way['way']}: {text}")
    return lines
