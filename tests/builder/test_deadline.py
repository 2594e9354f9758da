"""Deadlines and their clocks, by numbers."""

from __future__ import annotations

import pytest

from draftmill.builder.generation.deadline import (
    ActiveClock,
    Deadline,
    DeadlineRule,
    PaceClock,
    timeout_arithmetic,
)
from draftmill.builder.requests.metrics import ServerLoad


def load(generated: float, running: int, waiting: int = 0) -> ServerLoad:
    return ServerLoad(
        running=running,
        waiting=waiting,
        kv_usage=0.0,
        preemptions=0.0,
        generated_tokens=generated,
        prompt_tokens=0.0,
        kv_tokens=None,
        kv_tokens_of_one=None,
    )


def paced(running: int, tokens_per_s: float, readings: int = 30) -> PaceClock:
    clock = PaceClock()
    for second in range(readings + 1):
        clock.read(load(second * tokens_per_s, running), 1.0, gap=False)
    return clock


def test_the_clock_counts_each_requests_share_of_the_tokens() -> None:
    clock = paced(200, 1600.0, 10)
    assert clock.tokens == pytest.approx(10 * 1600 / 200)
    assert clock.seconds_per_token == pytest.approx(200 / 1600)
    assert clock.tokens_per_s == pytest.approx(1600)


def test_requests_that_wait_count_as_much_as_those_that_run() -> None:
    clock = PaceClock()
    clock.read(load(0, 50, 150), 1.0, gap=False)
    clock.read(load(1000, 50, 150), 1.0, gap=False)
    assert clock.tokens == 5.0


def test_a_server_that_stands_still_moves_no_clock() -> None:
    clock = paced(10, 100.0)
    before = clock.tokens
    for _ in range(100):
        clock.read(load(3000.0, 10), 1.0, gap=False)
        clock.elapse(1.0)
    assert clock.tokens == before


def test_counters_that_start_again_and_gaps_are_no_progress() -> None:
    clock = paced(10, 100.0)
    before = clock.tokens
    clock.read(load(5.0, 10), 1.0, gap=False)  # restarted
    clock.read(load(90_000.0, 10), 1.0, gap=True)  # nothing was read for a while
    assert clock.tokens == before
    clock.read(load(90_100.0, 10), 1.0, gap=False)
    assert clock.tokens == before + 10


def test_without_metrics_the_slow_completions_set_the_pace() -> None:
    clock = PaceClock()
    clock.elapse(100.0)
    assert clock.tokens == 0.0
    assert not clock.calibrated
    for number in range(100):
        clock.completed(100, 10.0 if number % 5 else 50.0)
    assert clock.seconds_per_token == pytest.approx(0.5)
    clock.elapse(10.0)
    assert clock.tokens == pytest.approx(20.0)
    clock.completed(0, 5.0)  # an empty answer says nothing about speed
    assert clock.seconds_per_token == pytest.approx(0.5)


def test_a_deadline_follows_the_speed() -> None:
    rule = DeadlineRule(margin=1.5, floor_s=30.0)
    clock = paced(200, 1600.0)
    deadline = Deadline(
        started_s=0.0,
        started_tokens=clock.tokens,
        tokens=rule.tokens(8192, load(0, 200)),
        floor_s=rule.floor_s,
    )
    assert deadline.seconds(clock) == pytest.approx(1.5 * 8192 * 200 / 1600)
    now = 0.0
    generated = 30 * 1600.0
    for _ in range(100):  # the server slows down to a tenth: nobody is late after 1,900 s
        now += 20.0
        generated += 160.0 * 20
        clock.read(load(generated, 200), 20.0, gap=False)
        assert not deadline.passed(clock, now, rule)
    while not deadline.passed(clock, now, rule):
        now += 20.0
        generated += 1600.0 * 20
        clock.read(load(generated, 200), 20.0, gap=False)
    assert clock.tokens - deadline.started_tokens == pytest.approx(1.5 * 8192, rel=0.05)


def test_a_queue_gets_its_time() -> None:
    rule = DeadlineRule(margin=1.0)
    assert rule.tokens(1000, None) == 1000
    assert rule.tokens(1000, load(0, 64)) == 1000
    assert rule.tokens(1000, load(0, 50, 150)) == 1250
    assert rule.tokens(1000, load(0, 0, 10)) == 1000


def test_no_deadline_before_its_floor_or_before_a_measurement() -> None:
    rule = DeadlineRule(margin=1.0, floor_s=30.0, uncalibrated_s=100.0)
    fast = paced(1, 1e6)
    deadline = Deadline(started_s=0.0, started_tokens=0.0, tokens=10.0, floor_s=30.0)
    assert not deadline.passed(fast, 29.0, rule)
    assert deadline.passed(fast, 30.0, rule)
    unknown = PaceClock()
    assert deadline.seconds(unknown) is None
    assert not deadline.passed(unknown, 99.0, rule)
    assert deadline.passed(unknown, 100.0, rule)


def test_a_fixed_timeout_never_cuts_what_arithmetic_allows() -> None:
    rule = DeadlineRule(margin=1.5, floor_s=0.0, timeout_s=60.0)
    clock = paced(10, 100.0)
    deadline = Deadline(
        started_s=0.0, started_tokens=clock.tokens, tokens=rule.tokens(1000, None), floor_s=0.0
    )
    assert not deadline.passed(clock, 3600.0, rule)  # 60 s are over, 1,500 tokens are not
    clock.tokens += 1500.0
    assert deadline.passed(clock, 60.0, rule)
    assert not deadline.passed(clock, 59.0, rule)


def test_the_arithmetic_of_a_timeout_is_shown_when_it_does_not_fit() -> None:
    clock = paced(200, 800.0)
    assert timeout_arithmetic(1800.0, 200, 4096, clock, 1.5) is None
    text = timeout_arithmetic(1800.0, 200, 8192, clock, 1.5)
    assert text is not None
    assert "200 requests of up to 8,192 tokens at 0.25 s a token each need 2,048 s" in text
    assert "3,072 s" in text
    assert timeout_arithmetic(1.0, 1, 1, PaceClock(), 1.5) is None


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    clock = ActiveClock(100.0)
    assert clock.tick(100.5) == 0.5
    assert clock.tick(4000.0) == ActiveClock.MAX_STEP_S
    assert clock.gaps == 1
    assert clock.seconds == 0.5 + ActiveClock.MAX_STEP_S
