"""`draftmill bench on-policy`: whether a draft should learn from its target's own answers.

The same questions with answers that people wrote and with the target's own, cut to the same number
of supervised tokens question by question; drafts learn from either, several seeds of them, and are
compared by what vLLM accepts of them on questions that neither has seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DatasetError, DraftmillError
from draftmill.tools.bench.experiments import docstrings, drafts, report
from draftmill.tools.bench.experiments.derive import Wanted, derive
from draftmill.tools.bench.experiments.size import ON_POLICY_STEPS
from draftmill.tools.bench.experiments.work import Work, run_steps
from draftmill.tools.render import say
from draftmill.tools.settings import load
from draftmill.trainer.drafts.vocab import VocabMapping, load_mapping

EXPERIMENT = "on-policy"
HUMAN, OWN = "human", "own"
CODEC = "em-zfast"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """Ids of the answers to one question, and how many tokens of each are supervised."""

    human: int
    own: int
    supervised: int


def pair(samples: pa.Table) -> tuple[list[Pairing], Counter[str]]:
    """Join the answers of each question and equalise them.

    `samples` has id, row (of the source), off_policy, prompt_tokens and tokens of every sample with
    hidden states. Both answers are cut to the shorter one's length: with the same questions, the
    number of supervised tokens, their places and the packing are the same. Counts what is left out:
    questions with one answer only, and with prompts that differ.
    """
    sides: dict[bool, dict[int, dict[str, Any]]] = {False: {}, True: {}}
    for each in samples.to_pylist():
        sides[each["off_policy"]][each["row"]] = each
    own, human = sides[False], sides[True]
    left_out = Counter({"only own": len(own.keys() - human), "only human": len(human.keys() - own)})
    found = []
    for row in sorted(own.keys() & human.keys()):
        a, b = own[row], human[row]
        if a["prompt_tokens"] != b["prompt_tokens"]:
            left_out["other prompt"] += 1
            continue
        supervised = min(each["tokens"] - each["prompt_tokens"] for each in (a, b))
        found.append(Pairing(human=b["id"], own=a["id"], supervised=supervised))
    return found, left_out


def samples_of(dataset: Dataset) -> pa.Table:
    """The columns that `pair` joins."""
    with dataset.reader() as reader:
        return reader.sql(
            "SELECT s.id, p.row, p.off_policy, s.prompt_tokens, s.tokens "
            "FROM samples s JOIN prompts p USING (id) WHERE s.state = 'extracted' ORDER BY s.id"
        )


def cross_coverage(vocab: VocabMapping, counts: VocabMapping) -> float:
    """Part of the supervised tokens counted in one that the draft vocabulary of the other has."""
    total = int(counts.counts.sum())
    return int(counts.counts[vocab.t2d].sum()) / total if total else 0.0


class OnPolicy:
    """The experiment in its folder."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.datasets = {arm: work.folder / "datasets" / arm for arm in (HUMAN, OWN)}
        self.drafts = drafts.drafts_of(work, self.datasets)

    def run(self, until: str | None = None) -> None:
        """All steps, each only as far as it is still to do."""
        work = self.work
        steps = (
            lambda: work.add_prompts(human=True),
            lambda: work.fill("generate"),
            lambda: work.fill("extract"),
            self.pair,
            lambda: drafts.train_drafts(work, self.drafts),
            lambda: drafts.measure_drafts(work, self.drafts),
        )
        run_steps(list(zip(ON_POLICY_STEPS, steps, strict=True)), until)

    def pair(self) -> None:
        """A dataset of human answers and one of the target's own, equal but for what they say."""
        found, left_out = pair(samples_of(self.work.samples))
        if not found:
            raise DatasetError(
                f"{self.work.samples.path}: no question has hidden states of both answers; look at "
                "`draftmill status` there"
            )
        for arm, path in self.datasets.items():
            path.parent.mkdir(exist_ok=True)
            derive(
                self.work.samples,
                path,
                [
                    Wanted(id=getattr(each, arm), codec=CODEC, supervised=each.supervised)
                    for each in found
                ],
            )
            say(f"    {arm}: {len(found):,} answers in {path}")
        lengths = np.array([each.supervised for each in found])
        self.work.log.put(
            "samples",
            {
                "questions": len(found),
                "supervised tokens": int(lengths.sum()),
                "median supervised": float(np.median(lengths)),
                "left out": dict(left_out),
            },
        )

    def arms(self) -> tuple[report.Arm, report.Arm]:
        """What has been measured: human answers, and the target's own."""
        found = {arm.name: arm for arm in drafts.arms(self.work, (HUMAN, OWN))}
        if len(found) < 2:
            raise DraftmillError(
                "not every kind of answers has a measured draft yet: run the steps up to eval first"
            )
        return found[HUMAN], found[OWN]

    def figures(self) -> list[report.Figure]:
        """The list of `--json`. Validation is left out: each arm's is on its own answers."""
        human, own = map(report.without_validation, self.arms())
        return report.figures((human, own), human)

    def markdown(self) -> str:
        """The results as a section of a page."""
        human, own = map(report.without_validation, self.arms())
        size, facts = self.work.size, self.work.log.facts["samples"]
        left_out = ", ".join(
            f"{count:,} {why}" for why, count in facts["left out"].items() if count
        )
        origins = docstrings.read_origins(self.work.root / "prompts")
        lines = [
            f"{datetime.now(UTC):%Y-%m-%d}, {self.work.model.name}, {report.environment()}.",
            "",
            f"{facts['questions']:,} questions, each with both answers (left out: "
            f"{left_out or 'none'}), {facts['supervised tokens']:,} supervised tokens in each arm "
            f"(median {facts['median supervised']:,.0f} an answer), validation samples included; "
            f"{size.held_out:,} held-out questions, answers of at most {size.eval_tokens} tokens; "
            f"{size.steps:,} steps of {size.row_tokens:,} tokens, draft vocabulary "
            f"{size.draft_vocab_size:,}, k = 3, greedy. Mean ± standard deviation over seeds.",
            "",
            *report.table(
                (human, own),
                human,
                first="answers",
                extra={"vocabulary covers own answers": self._coverage()},
            ),
            "",
            *report.fenced(report.plot((human, own))),
            "",
            f"- {report.verdict(own, human)}",
            "",
            "Questions and human answers are docstrings of installed packages:",
            "",
            *(
                f"- {each.package} {each.version} ({each.licence}): {each.pairs:,}"
                for each in origins
                if each.pairs
            ),
        ]
        return "\n".join(lines)

    def _coverage(self) -> Mapping[str, str]:
        """How much of the target's own answers each arm's draft vocabulary has."""
        mappings = {arm: self._mapping(arm) for arm in (HUMAN, OWN)}
        own = mappings[OWN]
        return {
            arm: f"{100 * cross_coverage(mapping, own):.2f} %"
            for arm, mapping in mappings.items()
            if mapping is not None and own is not None
        }

    def _mapping(self, arm: str) -> VocabMapping | None:
        draft = next(each for each in self.drafts if each.arm == arm)
        path = drafts.draft_folder(self.work, draft) / "vocab" / "mapping.safetensors"
        return load_mapping(path, load(self.work.samples).target.vocab_size)
