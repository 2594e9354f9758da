"""What the experiments say about their drafts: arithmetic, table, plot and words."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.tools.bench.experiments import report
from draftmill.tools.bench.experiments.report import Arm, Measured, Spread

values = st.floats(0, 3, allow_nan=False)
by_seed = st.dictionaries(st.integers(1, 6), values, min_size=1, max_size=6)


def arm(name: str, accepted: dict[int, float], validation: float | None = None) -> Arm:
    parts = None if validation is None else {"full_acc_0": validation, "full_acc_1": 0.5}
    return Arm(
        name=name,
        drafts={
            seed: Measured(accepted_per_step=value, drafts=10, validation=parts)
            for seed, value in accepted.items()
        },
    )


@given(found=st.lists(values, min_size=2, max_size=9))
def test_spread(found: list[float]) -> None:
    spread = Spread(values=tuple(found))
    assert spread.mean == pytest.approx(statistics.fmean(found))
    assert spread.sd == pytest.approx(statistics.stdev(found), abs=1e-9)
    assert str(spread) == f"{spread.mean:.3f} ± {spread.sd:.3f}"


def test_a_single_value_has_no_deviation() -> None:
    assert Spread(values=(1.5,)).sd is None
    assert str(Spread(values=(1.5,))) == "1.500"


@given(one=by_seed, shift=st.floats(-1, 1))
def test_what_a_seed_does_to_both_cancels(one: dict[int, float], shift: float) -> None:
    other = {seed: value + shift for seed, value in one.items()}
    difference = report.differences(arm("b", other), arm("a", one))
    assert difference is not None
    assert difference.mean == pytest.approx(shift, abs=1e-9)
    assert (difference.sd or 0.0) == pytest.approx(0.0, abs=1e-9)


def test_only_shared_seeds_are_compared() -> None:
    base = arm("a", {1: 1.0, 2: 5.0})
    assert report.differences(arm("b", {1: 1.5, 3: 9.0}), base) == Spread(values=(0.5,))
    assert report.differences(arm("b", {3: 1.0}), base) is None


@given(first=by_seed, second=by_seed)
def test_figures_have_every_draft(first: dict[int, float], second: dict[int, float]) -> None:
    arms = [arm("a", first, validation=0.25), arm("b", second)]
    figures = {row["name"]: row for row in report.figures(arms, arms[0])}
    for each, accepted in (("a", first), ("b", second)):
        whole = figures[f"{each}.accepted_per_step"]
        assert whole["value"] == pytest.approx(statistics.fmean(accepted.values()))
        assert whole["baseline"] == "a"
        base = statistics.fmean(first.values())
        if base:
            assert whole["ratio"] == pytest.approx(whole["value"] / base)
        for seed, value in accepted.items():
            assert figures[f"{each}.accepted_per_step.seed_{seed}"]["value"] == value
        assert (f"{each}.accepted_per_step.sd" in figures) == (len(accepted) > 1)
    assert figures["a.validation_accepted"]["value"] == 0.75
    assert not any(name.startswith("b.validation") for name in figures)


@given(first=by_seed, second=by_seed, validation=st.none() | values)
def test_table_and_plot_keep_their_shape(
    first: dict[int, float], second: dict[int, float], validation: float | None
) -> None:
    arms = [arm("exact", first, validation), arm("b", second, validation)]
    lines = report.table(arms, arms[0], first="states", extra={"bytes": {"b": "7"}})
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert ("validation" in lines[0]) == (validation is not None)
    assert all(f"seed {seed}" in lines[0] for seed in first.keys() | second.keys())
    rows = report.plot(arms)
    assert len(rows) == 3
    for row, each in zip(rows, arms, strict=False):
        drawn = row.split(maxsplit=1)[1]
        assert set(drawn) <= set("·|o")
        assert 1 <= drawn.count("o") <= len(each.drafts)
        assert len(drawn) == len(rows[0].split(maxsplit=1)[1])


def test_words_say_no_more_than_the_figures() -> None:
    base = arm("a", {1: 1.0, 2: 1.1, 3: 0.9})
    noise = report.verdict(arm("b", {1: 1.1, 2: 1.0, 3: 0.95}), base)
    assert "3 seeds do not tell it from none" in noise
    better = report.verdict(arm("b", {1: 1.3, 2: 1.41, 3: 1.19}), base)
    assert better.startswith("b: +0.300")
    assert "more than 3 seeds give by chance" in better
    assert "(+30.0 %)" in better
    assert "one seed says nothing" in report.verdict(arm("b", {1: 2.0}), base)
    assert "not measured with the seeds of a" in report.verdict(arm("b", {7: 2.0}), base)


def test_the_environment_names_versions() -> None:
    assert "torch " in report.environment()
    assert "draftmill " in report.environment()
