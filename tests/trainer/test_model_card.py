"""The model card and the plots: what they say is what the run and its dataset hold."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.drafts.vocab import build_mapping
from draftmill.trainer.loading.plan import make_plan
from draftmill.trainer.model_card import Data, describe_data, model_card, put_evaluation
from draftmill.trainer.plots import plot_acceptance, plot_training
from draftmill.trainer.settings import TrainSettings
from draftmill.trainer.train import train
from tests.trainer import tiny

SETTINGS = TrainSettings(
    draft_vocab_size=128, max_seq_len=60, steps=4, validation=0.2, decode_workers=0, ttt_steps=2
)
PNG = b"\x89PNG\r\n\x1a\n"


def document(**sources: float) -> dict[str, Any]:
    """A document of `eval --json`."""

    def part(share: float) -> dict[str, Any]:
        shares = [share, share / 2, share / 4]
        return {
            "accepted_per_step": sum(shares),
            "accepted_by_position": shares,
            "drafts": 100,
            "draft_tokens": 300,
            "accepted_tokens": int(100 * sum(shares)),
        }

    return {
        **part(0.5),
        "by_source": {name: part(share) for name, share in sources.items()},
        "prompts": 24,
        "failed": 0,
        "temperature": 0.0,
        "tokens_per_s": {"with_draft": 26.4, "without_draft": 16.4},
    }


@pytest.fixture
def mixed(target: TargetModel, tmp_path: Path) -> Path:
    """A dataset of two sources, one with a licence."""
    samples = list(tiny.answers(target.folder, 30))
    path = tiny.build_dataset(tmp_path / "d", samples[:20], source="chat|logs").path
    tiny.build_dataset(path, samples[20:], source="docs")
    with Dataset.open(path).writer() as writer:
        writer.set_license("docs", "CC-BY-4.0")
        writer.check_fingerprint("generate", {"model": target.name, "temperature": 0.7})
    return path


def rows_of(card: str, head: str) -> list[list[str]]:
    """The cells of the table whose first heading is `head`."""
    lines = card.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {head} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


@pytest.mark.slow
def test_a_trained_draft_has_a_card_and_a_plot(
    mixed: Path, target: TargetModel, tmp_path: Path
) -> None:
    output = tmp_path / "draft"

    def run() -> Any:
        return train(mixed, SETTINGS, target=target, target_layer_ids=tiny.LAYER_IDS, output=output)

    report = run()
    assert (output / "training.png").read_bytes().startswith(PNG)
    card = (output / "README.md").read_text()
    assert card.startswith('---\nbase_model: "tests/tiny-llama"\n')
    sources = rows_of(card, "source")
    assert [row[0] for row in sources] == ["chat\\|logs", "docs"]
    assert [row[1] for row in sources] == ["not given", "CC-BY-4.0"]
    assert sum(int(row[2]) for row in sources) == report.samples
    validation = {name: float(value) for name, value in rows_of(card, "figure")}
    assert validation == pytest.approx(report.validation, abs=1e-4)
    what = dict(rows_of(card, "what"))
    assert what["draft vocabulary"] == "128 tokens"
    assert what["supervised tokens that it covers"] == f"{100 * report.coverage:.2f} %"
    assert what["seed"] == "0"
    assert "[1, 3, 5]" in card
    assert "temperature 0.7" in card
    assert str(tmp_path) not in card
    assert str(target.folder) not in card
    # measured since: a finished run that is started again leaves it there
    assert put_evaluation(output, document(docs=0.5), "held_out.jsonl")
    measured = (output / "README.md").read_text()
    assert "Not measured yet" not in measured
    run()
    assert (output / "README.md").read_text() == measured


@pytest.mark.slow
def test_counts_are_those_of_the_plan(mixed: Path, target: TargetModel) -> None:
    with Dataset.open(mixed).reader() as reader:
        table = reader.extracted()
    for fraction in (0.0, 0.2, 0.5):
        plan = make_plan(table, TrainSettings(max_seq_len=60, validation=fraction))
        data = describe_data(mixed, plan)
        assert sum(part.samples for part in data.sources) == len(plan.train)
        assert sum(part.tokens for part in data.sources) == int(plan.train.tokens.sum())


NAMES = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=20)


@settings(max_examples=20)
@given(st.dictionaries(NAMES, st.floats(0, 1), min_size=1, max_size=4))
def test_measurements_replace_measurements_and_nothing_else(sources: dict[str, float]) -> None:
    counts = np.ones(tiny.VOCAB, np.int64)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = _card(build_mapping(counts, counts, 128, "f"))
        (folder / "README.md").write_text(before, encoding="utf-8")
        assert put_evaluation(folder, document(first=0.9), "a.jsonl")
        assert put_evaluation(folder, document(**sources), "b.jsonl")
        after = (folder / "README.md").read_text(encoding="utf-8")
        head, _, tail = before.partition("Not measured yet: `draftmill eval` fills this in.")
        assert after.startswith(head)
        assert after.endswith(tail)
        found = rows_of(after, "prompts")
        assert len(found) == 1 + len(sources)
        assert [float(row[1]) for row in found[1:]] == pytest.approx(
            [1.75 * share for share in sources.values()], abs=1e-3
        )
        assert "a.jsonl" not in after


def _card(vocab: Any) -> str:
    target = SimpleNamespace(
        name="org/model", max_position_embeddings=256, fingerprint=lambda: "0" * 32
    )
    plan = SimpleNamespace(validation=[], cut=0, nothing_supervised=0, fingerprint="1" * 32)
    return model_card(
        target=target,  # type: ignore[arg-type]
        target_layer_ids=(2, 3, 5),
        settings=SETTINGS,
        plan=plan,  # type: ignore[arg-type]
        vocab=vocab,
        data=Data(sources=[], settings={"generate": {}, "extract": {}}, fingerprints={
            "generate": "g", "extract": "e"}),
        steps=4,
        tokens=100,
        best_step=None,
        validation={},
        finetuned_from="org/other",
    )  # fmt: skip


def test_somebody_elses_readme_is_left_alone(tmp_path: Path) -> None:
    assert not put_evaluation(tmp_path, document(), "p")
    (tmp_path / "README.md").write_text("mine")
    assert not put_evaluation(tmp_path, document(), "p")
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("sources", [{}, {"a": 0.3}, {"a": 0.3, "b": 1.0, "c": 0.0}])
def test_plots_are_images_of_whatever_was_measured(
    sources: dict[str, float], tmp_path: Path
) -> None:
    plot_acceptance(document(**sources), tmp_path / "a.png")
    plot_acceptance(document(**sources), tmp_path / "b.png")
    image = (tmp_path / "a.png").read_bytes()
    assert image.startswith(PNG)
    assert image == (tmp_path / "b.png").read_bytes()


@pytest.mark.slow
def test_a_run_without_validation_or_log_still_has_a_plot(tmp_path: Path) -> None:
    plot_training([], tmp_path / "empty.png")
    plot_training([{"kind": "train", "step": 1, "loss": 2.0}], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "empty.png").read_bytes()
