"""Acceptance arithmetic: from a server's counters, and along known completions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.trainer.acceptance import Acceptance, from_metrics, total, walk

# As vLLM 0.32 prints them, with two engines and the creation times that look like counters.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 940.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 60.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 707.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 405.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 196.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.06e+02
vllm:generation_tokens_total{engine="0",model_name="m"} 1647.0
"""


def test_counters_are_read_and_summed() -> None:
    found = from_metrics(METRICS)
    assert found == Acceptance(
        drafts=1000, draft_tokens=3000, accepted=707, by_position=(405, 196, 106)
    )
    assert found.accepted_per_step == pytest.approx(0.707)
    assert found.tokens_per_step == pytest.approx(1.707)
    assert found.accepted_by_position == pytest.approx((0.405, 0.196, 0.106))
    assert found.to_json()["accepted_per_step"] == 0.707


def test_a_server_that_does_not_draft_counts_nothing() -> None:
    nothing = from_metrics("vllm:generation_tokens_total 5\nnot a metric {\n")
    assert nothing == Acceptance()
    assert nothing.accepted_per_step == 0.0
    assert nothing.to_json()["accepted_by_position"] == []


def test_deltas_between_two_readings() -> None:
    before = from_metrics(METRICS)
    after = Acceptance(drafts=1010, draft_tokens=3030, accepted=720, by_position=(414, 199, 107))
    delta = after - before
    assert (delta.drafts, delta.accepted, delta.by_position) == (10, 13, (9, 3, 1))
    # positions appear in the counters only once they were drafted
    assert (before - Acceptance()) == before
    with pytest.raises(ValueError, match="restarted"):
        before - after


def test_sums_over_sources() -> None:
    parts = {
        "b": Acceptance(drafts=1, draft_tokens=3, accepted=1, by_position=(1, 0, 0)),
        "a": Acceptance(drafts=3, draft_tokens=9, accepted=5, by_position=(3, 2, 0)),
    }
    assert parts["a"].to_json()["accepted_per_step"] == pytest.approx(1.6667)
    assert total(parts.values()).accepted_per_step == pytest.approx(1.5)


def test_a_walk_by_hand() -> None:
    # places 0..6, completion from place 2; runs there: 2 0 1 3 0
    correct = np.array(
        [
            [1, 1, 1, 0, 1, 1, 0],
            [1, 1, 1, 1, 0, 1, 1],
            [1, 1, 0, 1, 1, 1, 1],
        ],
        dtype=bool,
    )
    # place 2: run 2 → place 5: run 3 → past the end
    found = walk(correct, first=2)
    assert found == Acceptance(drafts=2, draft_tokens=6, accepted=5, by_position=(2, 2, 1))


@given(st.data())
def test_a_walk_is_what_greedy_speculative_decoding_does(data: st.DataObject) -> None:
    """Against a decoder that knows nothing of places: it emits tokens and asks an oracle."""
    width = data.draw(st.integers(1, 4))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=30))
    prompt = data.draw(st.integers(1, len(tokens) - 1))
    guesses = data.draw(
        st.lists(
            st.lists(st.integers(0, 2), min_size=width, max_size=width),
            min_size=len(tokens),
            max_size=len(tokens),
        )
    )
    emitted = prompt + 1  # the first generated token is the target's own
    drafts, accepted = 0, []
    while emitted < len(tokens):
        drafts += 1
        run = 0
        for guess in guesses[emitted - 1]:
            if emitted + run >= len(tokens) or guess != tokens[emitted + run]:
                break
            run += 1
        accepted.append(run)
        emitted += run + 1
    places = len(tokens) - 1
    correct = np.zeros((width, places), bool)
    for place in range(places):
        for k in range(width):
            following = place + 2 + k
            correct[k, place] = (
                following < len(tokens) and guesses[place + 1][k] == tokens[following]
            )
    found = walk(correct, first=prompt - 1)
    assert (found.drafts, found.accepted) == (drafts, sum(accepted))
    for position, count in enumerate(found.by_position):
        assert count == sum(run > position for run in accepted)
