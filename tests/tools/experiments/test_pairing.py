"""Human answers and the target's own to the same questions, with the same number of tokens."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from draftmill.tools.bench.experiments.on_policy import cross_coverage, pair
from draftmill.trainer.drafts.vocab import VocabMapping, build_mapping

answer = st.none() | st.tuples(st.integers(1, 9), st.integers(1, 40))  # prompt, supervised


@given(rows=st.lists(st.tuples(answer, answer), max_size=30), shuffle=st.randoms())
def test_every_question_with_both_answers_once(rows: list, shuffle: object) -> None:
    samples = [
        {
            "id": 100 * number + off_policy,
            "row": number,
            "off_policy": bool(off_policy),
            "prompt_tokens": each[0],
            "tokens": sum(each),
        }
        for number, answers in enumerate(rows)
        for off_policy, each in enumerate(answers)
        if each is not None
    ]
    shuffle.shuffle(samples)  # type: ignore[attr-defined]
    found, left_out = pair(pa.Table.from_pylist(samples) if samples else pa.table({"id": []}))
    both = {n: (own, human) for n, (own, human) in enumerate(rows) if own and human}
    same = {n: each for n, each in both.items() if each[0][0] == each[1][0]}
    assert [each.own // 100 for each in found] == sorted(same)
    for each in found:
        assert each.human == each.own + 1
        own, human = same[each.own // 100]
        assert each.supervised == min(own[1], human[1])
    assert left_out["other prompt"] == len(both) - len(same)
    assert left_out["only own"] == sum(bool(own) and not human for own, human in rows)
    assert left_out["only human"] == sum(bool(human) and not own for own, human in rows)


counts = st.lists(st.integers(0, 9), min_size=12, max_size=12).map(np.array)


def mapping(supervised: np.ndarray) -> VocabMapping:
    return build_mapping(supervised, np.zeros(12, np.int64), 5, "x")


@given(one=counts, other=counts)
def test_no_vocabulary_covers_more_than_the_own(one: np.ndarray, other: np.ndarray) -> None:
    mine, others = mapping(one), mapping(other)
    assert cross_coverage(mine, mine) == mine.coverage
    assert 0.0 <= cross_coverage(others, mine) <= mine.coverage
