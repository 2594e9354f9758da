"""The account at the end of the budget: its numbers add up and it offers only what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.manifests.codec.codec import CODECS
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.sizes import format_size
from draftmill.tools.account import budget_account
from tests.manifests import workload


def summary(stored: int, pending: int, ratio: float | None) -> dict[str, Any]:
    return {
        "prompts": {"extracted": stored, "pending": pending},
        "disk": {"hidden_states_bytes": 3 * stored, "compression_ratio": ratio},
    }


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.floats(1.0, 5.0) | st.none(),
    st.sampled_from(CODECS),
)
def test_one_paragraph_that_offers_only_what_is_there(
    stored: int, left: int, pending: int, ratio: float | None, codec: str
) -> None:
    text = budget_account(
        summary(stored, pending, ratio if stored else None),
        left=left,
        left_tokens=left * 100,
        bytes_per_token=57_344,
        codec=codec,
    )
    assert "\n" not in text
    assert text.startswith(f"The budget: {stored:,} samples have hidden states")
    assert ("can be trained on" in text) == (stored > 0)
    assert (f"the other {left:,} need about" in text) == (left > 0)
    assert (f"{pending:,} prompts have no completion" in text) == (pending > 0)
    assert "-" not in re.sub(r"[a-z]+-\w+", "", text), "no negative savings"


def test_the_published_size_of_kimi() -> None:
    """10,000 samples of 4,096 tokens at 57,344 bytes a token."""
    text = budget_account(
        summary(0, 0, None),
        left=10_000,
        left_tokens=40_960_000,
        bytes_per_token=57_344,
        codec="em-zfast",
    )
    raw = 40_960_000 * 57_344
    assert f"need about {format_size(raw / 1.48)} more as em-zfast" in text
    assert f"bitround-4 (lossy) would save {format_size(raw / 1.48 - raw / 2.05)}" in text
    assert f"rot4 (lossy) would save {format_size(raw / 1.48 - raw / 4.07)}" in text


@pytest.mark.parametrize("cut", [10, 10_000])
def test_what_waits_for_extraction_is_counted(tmp_path: Path, cut: int) -> None:
    dataset = Dataset.create(tmp_path / "d", "")
    with dataset.writer() as writer:
        writer.add_prompts(workload.prompts(6))
        rows = writer.pending(0, 4)
        writer.commit([workload.generate_result(row) for row in rows])
        lengths = [len(workload.completion_of(row.id).token_ids) for row in rows]
        assert writer.to_extract(cut) == (4, sum(min(cut, each) for each in lengths))
        samples = writer.generated(0, 1)
        writer.commit([workload.extract_result(samples[0])])
        assert writer.to_extract(cut) == (3, sum(min(cut, each) for each in lengths[1:]))
