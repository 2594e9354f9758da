"""`draftmill bench precision`: how exactly the hidden states that a draft learns from must be kept.

The same samples are stored with several codecs; drafts learn from each, several seeds of them, and
are compared by validation on exact hidden states and by what vLLM accepts of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from draftmill.manifests.codec.names import is_lossless, parse_codec
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DraftmillError, UsageError
from draftmill.tools.bench.experiments import drafts, report
from draftmill.tools.bench.experiments.derive import Wanted, derive
from draftmill.tools.bench.experiments.size import PRECISION_STEPS
from draftmill.tools.bench.experiments.work import Work, run_steps
from draftmill.tools.render import say
from draftmill.trainer.loading import data

EXPERIMENT = "precision"
EXACT = "em-zfast"
CODECS = (EXACT, "bitround-4", "rot4")


@dataclass(frozen=True, kw_only=True)
class Split:
    """The samples that the experiment is about, by their ids in the dataset of all samples."""

    train: tuple[int, ...]
    validation: tuple[int, ...]


def split(dataset: Dataset, *, sample_tokens: int, validation: float) -> Split:
    """The target's own answers, split as the trainer splits every dataset made of them."""
    with dataset.reader() as reader:
        table = reader.extracted()
    table = table.filter(np.logical_not(table.column("off_policy").to_numpy(zero_copy_only=False)))
    samples = data.select(table, sample_tokens).samples
    held_out = data.is_validation(samples, validation)
    return Split(
        train=tuple(samples.id[~held_out].tolist()),
        validation=tuple(samples.id[held_out].tolist()),
    )


def wanted(parts: Split, codec: str) -> list[Wanted]:
    """All samples: those to train on in `codec`, those to validate on exact."""
    chosen = {**dict.fromkeys(parts.train, codec), **dict.fromkeys(parts.validation, EXACT)}
    return [Wanted(id=each, codec=chosen[each]) for each in sorted(chosen)]


class Precision:
    """The experiment in its folder."""

    def __init__(self, work: Work, codecs: Sequence[str] = CODECS) -> None:
        for codec in codecs:
            parse_codec(codec)
        if not any(map(is_lossless, codecs)):
            raise UsageError(f"--codec: one of them must be lossless, e.g. {EXACT}")
        self.work = work
        self.codecs = tuple(dict.fromkeys(codecs))
        self.baseline = next(filter(is_lossless, self.codecs))
        self.datasets = {codec: work.folder / "datasets" / codec for codec in self.codecs}
        self.drafts = drafts.drafts_of(work, self.datasets)

    def run(self, until: str | None = None) -> None:
        """All steps, each only as far as it is still to do."""
        work = self.work
        steps = (
            lambda: work.add_prompts(human=False),
            lambda: work.fill("generate"),
            lambda: work.fill("extract"),
            self.recode,
            lambda: drafts.train_drafts(work, self.drafts),
            lambda: drafts.measure_drafts(work, self.drafts),
        )
        run_steps(list(zip(PRECISION_STEPS, steps, strict=True)), until)

    def recode(self) -> None:
        """One dataset for each codec, from the hidden states that are there."""
        work = self.work
        parts = split(
            work.samples, sample_tokens=work.size.sample_tokens, validation=work.size.validation
        )
        facts: dict[str, Any] = {
            "training samples": len(parts.train),
            "validation samples": len(parts.validation),
        }
        for codec, path in self.datasets.items():
            path.parent.mkdir(exist_ok=True)
            dataset = derive(work.samples, path, wanted(parts, codec))
            tokens, stored = _stored(dataset, work.size.validation, work.size.sample_tokens)
            facts["training tokens"] = tokens
            facts[f"bytes per token {codec}"] = stored / tokens if tokens else 0.0
            say(f"    {codec}: {stored / tokens:,.0f} bytes a token in {path}")
        work.log.put("samples", facts)

    def arms(self) -> list[report.Arm]:
        """What has been measured; the lossless one must be among it."""
        found = drafts.arms(self.work, self.codecs)
        if not any(arm.name == self.baseline for arm in found):
            raise DraftmillError(
                f"no draft of {self.baseline} is measured yet: run the steps up to eval first"
            )
        return found

    def figures(self) -> list[report.Figure]:
        """The list of `--json`."""
        found = self.arms()
        return report.figures(found, _named(found, self.baseline))

    def markdown(self) -> str:
        """The results as a section of a page."""
        found = self.arms()
        baseline = _named(found, self.baseline)
        size, facts = self.work.size, self.work.log.facts["samples"]
        stored = {arm.name: f"{facts[f'bytes per token {arm.name}']:,.0f}" for arm in found}
        lines = [
            f"{datetime.now(UTC):%Y-%m-%d}, {self.work.model.name}, {report.environment()}.",
            "",
            f"{facts['training samples']:,} samples of {facts['training tokens']:,} tokens to "
            f"train on, {facts['validation samples']:,} to validate on (exact), "
            f"{size.held_out:,} held-out prompts of at most {size.eval_tokens} tokens; "
            f"{size.steps:,} steps of {size.row_tokens:,} tokens, draft vocabulary "
            f"{size.draft_vocab_size:,}, k = 3, greedy. Mean ± standard deviation over seeds.",
            "",
            *report.table(
                found, baseline, first="states for training", extra={"bytes per token": stored}
            ),
            "",
            *report.fenced(report.plot(found)),
            "",
            *(f"- {report.verdict(arm, baseline)}" for arm in found if arm is not baseline),
        ]
        return "\n".join(lines)


def _named(arms: Sequence[report.Arm], name: str) -> report.Arm:
    return next(arm for arm in arms if arm.name == name)


def _stored(dataset: Dataset, validation: float, sample_tokens: int) -> tuple[int, int]:
    """Tokens and stored bytes of the samples that are trained on."""
    with dataset.reader() as reader:
        samples = data.select(reader.extracted(), sample_tokens).samples
    train = samples.take(~data.is_validation(samples, validation))
    return int(train.tokens.sum()), int(train.states_at[:, 2].sum())
