"""The concurrency controller on arithmetic servers: where it settles, and what makes it yield."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftmill.builder.generation.controller import Controller, Reading
from draftmill.builder.requests.metrics import ServerLoad


def load(running: int, waiting: int = 0, kv: float = 0.1, preemptions: float = 0.0) -> ServerLoad:
    return ServerLoad(
        running=running,
        waiting=waiting,
        kv_usage=kv,
        preemptions=preemptions,
        generated_tokens=0.0,
        prompt_tokens=0.0,
        kv_tokens=None,
        kv_tokens_of_one=None,
    )


def settle(
    controller: Controller,
    rate: Callable[[int], float],
    see: Callable[[int], ServerLoad | None] = load,
    readings: int = 200,
) -> list[str]:
    """Runs the controller against a server of that throughput; returns its reasons."""
    reasons = []
    for _ in range(readings):
        limit = controller.limit
        decision = controller.read(
            Reading(
                in_flight=limit,
                tokens_per_s=rate(limit),
                completions=limit,
                overloads=0,
                load=see(limit),
            )
        )
        if decision is not None:
            reasons.append(decision.reason)
            assert decision.limit == controller.limit
    return reasons


def test_starts_small_and_a_fixed_limit_stays() -> None:
    assert Controller(maximum=1024).limit == 16
    assert Controller(maximum=4).limit == 4
    fixed = Controller(maximum=1024, fixed=200)
    assert settle(fixed, lambda n: 10.0 * n, lambda n: load(n, 50, 1.0, 1e6)) == []
    assert fixed.limit == 200
    assert fixed.restart() is None


@pytest.mark.parametrize("with_metrics", [True, False])
@pytest.mark.parametrize("level", [24, 100, 700])
def test_finds_the_level_of_a_server_that_saturates(level: int, with_metrics: bool) -> None:
    controller = Controller(maximum=4096)
    see = load if with_metrics else lambda n: None
    reasons = settle(controller, lambda n: 10.0 * min(n, level), see)
    assert 0.75 * level <= controller.limit <= 1.6 * level
    assert any("step taken back" in each for each in reasons)


def test_never_exceeds_the_maximum() -> None:
    controller = Controller(maximum=100)
    settle(controller, lambda n: 10.0 * n)
    assert controller.limit == 100


def test_goes_back_to_what_the_server_runs_when_requests_wait() -> None:
    controller = Controller(maximum=1024)
    slots = 64
    reasons = settle(
        controller, lambda n: 10.0 * n, lambda n: load(min(n, slots), max(0, n - slots))
    )
    assert slots <= controller.limit <= slots * 1.2
    assert any("wait in the server" in each for each in reasons)


def test_what_waits_at_one_instant_only_is_no_queue() -> None:
    controller = Controller(maximum=32)
    seen = iter([load(10, 20), load(30), load(10, 20), load(30)] * 50)
    assert not any("wait" in each for each in settle(controller, lambda n: n, lambda n: next(seen)))
    assert controller.limit == 32


def test_full_kv_memory_and_preemptions_take_a_fifth_each_time() -> None:
    controller = Controller(maximum=1024, fixed=None)
    controller.limit = 100
    first = controller.read(
        Reading(in_flight=100, tokens_per_s=1, completions=1, overloads=0, load=load(90, 10, 0.97))
    )
    assert first is not None
    assert first.limit == 80
    draining = Reading(
        in_flight=95, tokens_per_s=1, completions=1, overloads=0, load=load(90, 5, 0.97, 10)
    )
    assert controller.read(draining) is None
    again = controller.read(
        Reading(in_flight=80, tokens_per_s=1, completions=1, overloads=0, load=load(80, 0, 0.5, 30))
    )
    assert again is not None
    assert again.limit == 64
    assert "pre-emptions" in again.reason


def test_many_429_yield_and_a_stray_one_does_not() -> None:
    controller = Controller(maximum=1024)
    stray = Reading(in_flight=16, tokens_per_s=1, completions=40, overloads=1, load=None)
    assert controller.read(stray) is None
    many = Reading(in_flight=16, tokens_per_s=1, completions=10, overloads=5, load=None)
    decision = controller.read(many)
    assert decision is not None
    assert decision.limit == 12
    assert "429" in decision.reason


def test_what_is_refused_at_once_yields_by_what_was_refused() -> None:
    controller = Controller(maximum=1024)
    controller.limit = 64
    refused = Reading(in_flight=0, tokens_per_s=0, completions=0, overloads=40, load=None)
    decision = controller.read(refused)
    assert decision is not None
    assert decision.limit == 32


def test_a_limit_that_is_not_reached_is_not_raised() -> None:
    controller = Controller(maximum=1024)
    for _ in range(50):
        idle = Reading(in_flight=5, tokens_per_s=50, completions=5, overloads=0, load=load(5))
        assert controller.read(idle) is None


def test_grows_again_after_pressure() -> None:
    controller = Controller(maximum=1024)
    controller.limit = 100
    controller.read(
        Reading(in_flight=100, tokens_per_s=1, completions=1, overloads=0, load=load(90, 10, 0.97))
    )
    settle(controller, lambda n: 10.0 * n, readings=400)
    assert controller.limit > 200


def test_starts_lower_when_a_server_comes_back() -> None:
    controller = Controller(maximum=1024)
    controller.limit = 300
    decision = controller.restart()
    assert decision is not None
    assert controller.limit == 150
