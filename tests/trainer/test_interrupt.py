"""Ctrl-C asks once; only a second one, later, does not wait."""

from __future__ import annotations

import os
import signal

import pytest

from draftmill.trainer import interrupt
from draftmill.trainer.interrupt import interruptible


def test_signals_of_one_moment_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends on what the terminal has sent already."""
    monkeypatch.setattr(interrupt, "_ONE_MOMENT_S", 3600.0)
    before = signal.getsignal(signal.SIGTERM)
    with interruptible() as stop:
        assert not stop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_later_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_ONE_MOMENT_S", -1.0)
    with interruptible() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
