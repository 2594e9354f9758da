"""Sizes as people write them."""

from __future__ import annotations

import pytest

from draftmill.manifests.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("500GB", 500 * 10**9),
        ("2TiB", 2 * 2**40),
        (" 1.5 kib ", 1536),
        ("0", 0),
        ("3b", 3),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1e3", "5 GB GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_format_keeps_three_figures() -> None:
    sizes = [format_size(x) for x in (0, 999, 1000, 57_344, 2_350_000_000_000)]
    assert sizes == ["0 B", "999 B", "1 KB", "57.3 KB", "2.35 TB"]
