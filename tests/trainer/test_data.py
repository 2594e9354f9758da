"""Selection, split, order and packing: arithmetic that every resume and every rank relies on."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.trainer.loading import data
from draftmill.trainer.loading.data import Cursor, Samples


def table(rows: list[tuple[str, int, int]]) -> pa.Table:
    """An `extracted()` table of (conversation, prompt tokens, tokens with states)."""
    count = len(rows)
    numbers = {
        f"{stage}_{part}": list(range(count))
        for stage in ("generate", "extract")
        for part in ("shard", "offset", "length")
    }
    return pa.table(
        {
            "id": list(range(count)),
            "conversation": [row[0] for row in rows],
            "prompt_tokens": [row[1] for row in rows],
            "tokens": [row[2] for row in rows],
            "digest": [f"{n:032x}" for n in range(count)],
            **numbers,
        }
    )


def of_lengths(tokens: list[int]) -> Samples:
    rows = [(f"c{n}", 1, length) for n, length in enumerate(tokens)]
    return data.select(table(rows), max(tokens, default=2)).samples


def test_only_samples_that_supervise_something_are_taken() -> None:
    selection = data.select(
        table([("a", 3, 10), ("b", 10, 10), ("c", 3, 50), ("d", 30, 50), ("e", 12, 13)]), 12
    )
    # b generated nothing that has a state, d and e lose all of it to the cut at 12
    assert selection.samples.id.tolist() == [0, 2]
    assert selection.samples.tokens.tolist() == [10, 12]
    assert (selection.cut, selection.nothing_supervised) == (1, 3)
    assert selection.samples.states_location(1) == (2, 2, 2)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=60),
    st.integers(2, 80),
)
def test_over_long_samples_are_cut_and_left_out_only_when_nothing_is_left(
    sizes: list[tuple[int, int]], room: int
) -> None:
    """Whatever the lengths (T4, T5): all that can teach something is kept, and all is counted."""
    rows = [(f"c{n}", prompt, prompt + generated) for n, (prompt, generated) in enumerate(sizes)]
    selection = data.select(table(rows), room)
    kept = {
        n: min(tokens, room)
        for n, (_, prompt, tokens) in enumerate(rows)
        if min(tokens, room) > prompt and min(tokens, room) >= 2
    }
    assert dict(zip(selection.samples.id, selection.samples.tokens, strict=True)) == kept
    assert selection.nothing_supervised == len(rows) - len(kept)
    assert selection.cut == sum(rows[n][2] > room for n in kept)


@given(
    st.lists(st.text(max_size=8), min_size=1, max_size=80),
    st.lists(st.text(max_size=8), max_size=40),
    st.floats(0, 0.5),
)
def test_a_conversation_is_on_one_side_forever(
    before: list[str], more: list[str], fraction: float
) -> None:
    """All turns of it, whatever else there is and whatever is added (T6)."""
    few = data.select(table([(name, 1, 9) for name in before]), 99).samples
    many = data.select(table([(name, 1, 9) for name in more + before]), 99).samples
    sides: dict[str, bool] = {}
    for names, samples in ((before, few), (more + before, many)):
        for name, side in zip(names, data.is_validation(samples, fraction), strict=True):
            assert sides.setdefault(name, bool(side)) == side


def test_an_empty_table_selects_nothing() -> None:
    assert len(data.select(table([]), 12).samples) == 0


def test_the_split_follows_conversations_and_stays_when_data_is_added() -> None:
    rows = [(f"conversation {n // 3}", 1, 9) for n in range(3000)]
    before = data.select(table(rows), 99).samples
    held_out = data.is_validation(before, 0.1)
    assert 0.07 < held_out.mean() < 0.13
    for first in range(0, 3000, 3):
        assert len(set(held_out[first : first + 3])) == 1
    after = data.select(table(rows + [(f"new {n}", 1, 9) for n in range(500)]), 99).samples
    assert (data.is_validation(after, 0.1)[:3000] == held_out).all()
    # a larger part keeps what the smaller one had
    assert (data.is_validation(before, 0.2) | ~held_out).all()
    assert not data.is_validation(before, 0.0).any()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(50, 90))
def test_packing_loses_nothing_and_cuts_nothing(lengths: list[int], room: int) -> None:
    sizes = np.array(lengths, np.int64)
    rows = data.pack(sizes, np.arange(len(sizes)), room)
    assert sorted(member for row in rows for member in row) == list(range(len(sizes)))
    assert all(sizes[row].sum() <= room for row in rows)
    # best fit: no two rows could have been one, but for at most the last
    fills = sorted(int(sizes[row].sum()) for row in rows)
    assert len(fills) < 2 or fills[0] + fills[1] > room


def test_packing_is_the_same_everywhere() -> None:
    # Pinned: a plan made by one version is read by the next one.
    sizes = np.array([7, 3, 5, 2, 8, 1, 4, 6], np.int64)
    assert data.pack(sizes, np.arange(8), 9) == [[0, 3], [1, 7], [2, 6], [4, 5]]


def test_an_epoch_is_a_permutation_of_everything() -> None:
    samples = of_lengths([2 + n % 30 for n in range(5000)])
    rows = data.training_rows(samples, seed=3, room=64, start=Cursor())
    seen: dict[int, list[int]] = {}
    for row in rows:
        if row.cursor.epoch == 2:
            break
        seen.setdefault(row.cursor.epoch, []).extend(row.members)
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(5000))
    assert seen[0] != seen[1]
    other = data.training_rows(samples, seed=4, room=64, start=Cursor())
    assert [row.members for row in islice(other, 9)] != [
        row.members
        for row in islice(data.training_rows(samples, seed=3, room=64, start=Cursor()), 9)
    ]


def test_going_on_anywhere_gives_the_rows_that_would_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data, "SEGMENT", 16)
    samples = of_lengths([2 + (n * 7) % 60 for n in range(70)])
    whole = list(islice(data.training_rows(samples, seed=1, room=100, start=Cursor()), 100))
    assert {row.cursor.epoch for row in whole} >= {0, 1, 2, 3}
    for at in range(1, 95):
        again = data.training_rows(samples, seed=1, room=100, start=whole[at - 1].after)
        assert list(islice(again, 5)) == whole[at : at + 5]


def test_rows_go_on_across_the_end_of_an_epoch() -> None:
    samples = of_lengths([5] * 7)
    whole = list(islice(data.training_rows(samples, seed=0, room=8, start=Cursor()), 20))
    assert [row.cursor.epoch for row in whole[3:5]] == [0, 1]
    for at in (3, 4, 5, 8):
        rest = data.training_rows(samples, seed=0, room=8, start=whole[at - 1].after)
        assert list(islice(rest, 20 - at)) == whole[at:]


def test_validation_rows_are_few_and_fixed() -> None:
    samples = of_lengths([9] * 40)
    rows = data.validation_rows(samples, room=16, limit=5)
    assert len(rows) == 5
    assert rows == data.validation_rows(samples, room=16, limit=5)
    everything = data.validation_rows(samples, room=16, limit=999)
    assert sorted(m for row in everything for m in row.members) == list(range(40))
    assert data.validation_rows(of_lengths([]), room=16, limit=5) == []


def test_waste_is_reported() -> None:
    packed = data.packing(of_lengths([5, 5, 5, 5]), seed=0, room=10)
    assert (packed.rows, packed.tokens, packed.waste) == (2, 16, pytest.approx(0.2))
    # a large set is judged by a part of it
    many = of_lengths([2 + n % 60 for n in range(50_000)])
    exact = data.packing(many, seed=0, room=100, segments=999)
    assert data.packing(many, seed=0, room=100).rows == pytest.approx(exact.rows, rel=0.01)


def test_the_fingerprint_tells_what_is_used() -> None:
    rows = [("a", 2, 9), ("b", 2, 9)]
    samples = data.select(table(rows), 99).samples
    assert data.fingerprint(samples) == data.fingerprint(data.select(table(rows), 99).samples)
    longer = data.select(table([("a", 2, 9), ("b", 2, 10)]), 99).samples
    assert data.fingerprint(samples) != data.fingerprint(longer)
    assert data.fingerprint(samples) != data.fingerprint(data.select(table(rows), 8).samples)
    assert data.fingerprint(samples) != data.fingerprint(samples.take(np.array([0])))
