"""Half of a surrogate pair, which JSON can hold and UTF-8 cannot, in the words of a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.types import Attempt, Result
from tests.manifests import workload


@settings(max_examples=6)
@given(st.text(st.characters(codec=None, exclude_categories=[]), max_size=20))
def test_any_words_are_committed(tmp_path_factory: object, words: str) -> None:
    _commit(tmp_path_factory.mktemp("d") / "d", words)  # type: ignore[attr-defined]


def test_the_halves_can_still_be_read(tmp_path: Path) -> None:
    found = _commit(tmp_path / "d", "HTTP 400: \ud83d é 漢 \x00 \udfff")
    assert found == r"HTTP 400: \ud83d é 漢 " + "\x00" + r" \udfff"


def _commit(path: Path, words: str) -> str:
    dataset = Dataset.create(path, "")
    with dataset.writer() as writer:
        writer.add_prompts(workload.prompts(2))
        failed, done = writer.pending(0, 2)
        attempt = Attempt(
            id=failed.id, stage="generate", attempt=1, outcome="failed", error=words,
            error_class=words, endpoint=words,
        )  # fmt: skip
        good = workload.generate_result(done)
        good = replace(good, attempt=replace(good.attempt, error=words))
        writer.commit([Result(attempt=attempt, hash=failed.hash), good])
        assert (writer.count("failed"), writer.count("generated")) == (1, 1)
    for each in path.glob("manifest.*"):
        each.unlink()
    with dataset.writer() as writer:  # the record in the shard has them as well
        assert writer.count("generated") == 1
        text = writer.manifest.rows("SELECT error FROM attempts WHERE outcome = 'generated'")
    return str(text[0][0])
