"""What `train` says at its end, and settings that are refused before it begins."""

from __future__ import annotations

from typing import Any

import pytest

from draftmill.tools.train import _validation
from draftmill.trainer.settings import TrainSettings


@pytest.mark.parametrize("accepted", [{}, {"accepted_per_step": 0.0}])
def test_answers_too_short_for_a_draft_are_no_fault(accepted: dict[str, float]) -> None:
    """One generated token a sample leaves no place where a server would draw a draft."""
    figures = {"full_acc_0": 0.25, "full_acc_1": 0.125, "loss": 3.0, **accepted}
    said = _validation(figures, 7)
    for part in ("7 samples", "0.000 accepted per step", "0.250 / 0.125"):
        assert part in said


@pytest.mark.parametrize("key", ["decode_workers", "prefetch_mb"])
@pytest.mark.parametrize("value", [-1, -(2**70)])
def test_no_negative_readers_or_memory(key: str, value: int) -> None:
    given: dict[str, Any] = {key: value}
    with pytest.raises(ValueError, match=f"{key}: "):
        TrainSettings(**given)


def test_a_slip_of_a_digit_starts_no_thousand_processes() -> None:
    assert TrainSettings(decode_workers=256).decode_workers == 256
    with pytest.raises(ValueError, match="decode_workers: between 0 and 256, not 1000"):
        TrainSettings(decode_workers=1000)
