"""Sizes of bytes as people write and read them. Decimal and binary units are kept apart."""

from __future__ import annotations

import re
from decimal import Decimal

# 8 EiB: file sizes are signed 64-bit numbers.
_MOST = 1 << 63
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", 1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_size(text: str) -> int:
    """Bytes of "500GB", "1.5 TiB" or "4096"; raises ValueError with what is allowed."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 500GB, 2TiB or 4096")
    size = int(Decimal(match.group(1)) * _UNITS[unit])
    if size >= _MOST:
        raise ValueError(f"{text!r} is more than any file system holds")
    return size


def format_size(size: float) -> str:
    """Bytes in the largest decimal unit that leaves at least 1: `1.21 GB`."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(size) < 999.5:  # what rounds to 1,000 is 1 of the next unit
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{three_digits(size)} PB"


def three_digits(value: float) -> str:
    """A number to three digits, never with an exponent: `2.35`, `1,240`."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
