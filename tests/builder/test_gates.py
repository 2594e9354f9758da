"""Quality gates: what closes them, with which numbers, and what passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.builder.generation import gates
from draftmill.manifests.errors import ConfigError
from draftmill.manifests.types import Completion, PendingPrompt

ROW = PendingPrompt(id=7, hash="h", source="s", conversation="{}", attempts=0)


def completion(ids: Any = range(200), **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "prompt_token_ids": np.arange(3, dtype=np.int32),
        "completion_token_ids": np.asarray(ids, np.int32),
        "content": "text",
        "reasoning": None,
        "finish_reason": "stop",
    }
    return Completion(**values | changes)


def check(given: Completion, **changes: Any) -> gates.Rejection | None:
    options: dict[str, Any] = {
        "min_tokens": 1,
        "keep_truncated": True,
        "max_repetition": 0.9,
        "reasoning_required": False,
    }
    return gates.check(given, **options | changes)


def name(rejection: gates.Rejection | None) -> str | None:
    return None if rejection is None else rejection.gate


def test_ordinary_completions_pass() -> None:
    assert check(completion()) is None
    assert check(completion(content=None, reasoning="only thought")) is None
    calls = {"tool_calls": [{"id": "1"}]}
    assert check(completion(content=None, extra=calls)) is None


def test_empty_and_short_ones_do_not() -> None:
    assert name(check(completion([5], content=""))) == "empty"
    assert name(check(completion([], content=None, finish_reason="length"))) == "empty"
    rejection = check(completion(range(9)), min_tokens=10)
    assert name(rejection) == "too_short"
    assert rejection is not None
    assert "9 tokens, at least 10" in rejection.reason


def test_truncated_ones_are_kept_unless_told_otherwise() -> None:
    cut = completion(content=None, finish_reason="length")
    assert check(cut) is None
    assert name(check(cut, keep_truncated=False)) == "truncated"


def test_reasoning_may_be_required() -> None:
    assert name(check(completion(), reasoning_required=True)) == "no_reasoning"
    assert check(completion(reasoning="thought"), reasoning_required=True) is None


@given(
    st.lists(st.integers(0, 150_000), min_size=1, max_size=24, unique=True),
    st.integers(0, 2_000),
)
def test_any_loop_at_the_end_is_caught(loop: list[int], head: int) -> None:
    random = np.random.default_rng(head).integers(0, 150_000, head)
    ids = np.concatenate([random, np.tile(loop, 600 // len(loop) + 1)])
    assert name(check(completion(ids))) == "repetition"
    assert check(completion(ids), max_repetition=1.0) is None


@given(st.integers(0, 10_000), st.integers(20, 3_000))
def test_text_without_loops_passes(seed: int, length: int) -> None:
    ids = np.random.default_rng(seed).zipf(1.5, length) % 50_000
    assert check(completion(ids)) is None


def test_short_repetitions_are_not_judged() -> None:
    assert gates.repeated_share(np.zeros(100, np.int32)) == 0.0


def test_a_gate_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_gates_17.py").write_text(
        "def no_sevens(completion, prompt):\n"
        "    return 'has a 7' if 7 in completion.completion_token_ids else None\n"
        "def broken(completion, prompt):\n"
        "    return 1 / 0\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    gate = gates.load_gate("my_gates_17:no_sevens")
    assert gates.ask_gate(gate, completion(range(5)), ROW) is None
    assert gates.ask_gate(gate, completion(), ROW) == ("user", "has a 7")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError at sample 7"):
        gates.ask_gate(gates.load_gate("my_gates_17:broken"), completion(), ROW)
    odd: Any
    for odd in (True, False, 3, ["reason"]):
        with pytest.raises(ConfigError, match=r"returned .* at sample 7: a gate returns a text"):
            gates.ask_gate(lambda *_, given=odd: given, completion(), ROW)
    long = gates.ask_gate(lambda *_: "\ud83d\n" + "x" * 9999, completion(), ROW)
    assert long is not None
    assert long.reason.startswith("? x")
    assert len(long.reason) == gates.MOST_LETTERS
    (tmp_path / "my_gates_18.py").write_text("def gate(:")
    (tmp_path / "my_gates_19.py").write_text("1 / 0")
    for wrong, why in (("my_gates_18:gate", "SyntaxError"), ("my_gates_19:x", "ZeroDivision")):
        with pytest.raises(ConfigError, match=rf"cannot be loaded: {why}"):
            gates.load_gate(wrong)
    for wrong in ("my_gates_17:nothing", "no_such_module_17:x", "my_gates_17:number"):
        with pytest.raises(ConfigError, match=r"generate\.gate"):
            gates.load_gate(wrong)
