"""Which stages a build still has to do, and when one server does two of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.types import Prompt
from draftmill.manifests.writer import DatasetWriter
from draftmill.tools.turns import Kind, turns

BOTH: list[Kind] = ["generate", "extract"]


class Counts:
    """What a writer answers about its rows; a real one is below."""

    def __init__(self, pending: int, given: int, generated: int) -> None:
        self.pending, self.given, self.generated = pending, given, generated

    def count(self, state: str, *, off_policy: bool = False) -> int:
        if state == "generated":
            return self.generated
        return self.given if off_policy else self.pending


@given(
    asked=st.integers(0, 2),
    answered=st.integers(0, 2),
    generated=st.integers(0, 2),
    stages=st.sampled_from([["generate"], ["extract"], BOTH]),
    url=st.sampled_from([(), ("http://a",)]),
    extract_url=st.sampled_from([(), ("http://b",)]),
)
def test_no_model_is_loaded_only_to_tokenise(
    asked: int,
    answered: int,
    generated: int,
    stages: list[Kind],
    url: tuple[str, ...],
    extract_url: tuple[str, ...],
) -> None:
    counts = Counts(asked + answered, answered, generated)
    urls: dict[Kind, tuple[str, ...]] = {"generate": url, "extract": extract_url}
    found = []
    for turn in turns(stages, urls, counts):  # type: ignore[arg-type]
        found.append(turn)
        if "generate" in turn:  # what it did
            counts.pending, counts.generated = 0, counts.generated + asked + answered
    together = stages == BOTH and answered and not asked and not url and not extract_url
    assert (BOTH in found) == bool(together)
    done = [stage for turn in found for stage in turn]
    assert done == [
        stage for stage in stages if (asked + answered if stage == "generate" else counts.generated)
    ]


@pytest.mark.parametrize("given", [True, False])
def test_of_a_dataset(tmp_path: Path, given: bool) -> None:
    with Dataset.create(tmp_path / "d", "").writer() as writer:
        assert isinstance(writer, DatasetWriter)
        prompt = Prompt(
            hash=f"{1:032x}", conversation="{}", source="s", row=1, conversation_id="1",
            off_policy=given,
        )  # fmt: skip
        writer.add_prompts([prompt])
        first = next(turns(BOTH, {"generate": (), "extract": ()}, writer))
        assert first == (BOTH if given else ["generate"])
