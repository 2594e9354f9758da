"""The folder of an experiment: its size, its samples, and its steps one after the other.

Every step is draftmill's own (add, generate, extract) and leaves its result in the folder, so an
experiment that was stopped goes on where it was. Drafts are `drafts`'.

    WORK/prompts/       questions, human answers, held-out questions, where they came from
    WORK/samples/       the dataset: completions and hidden states
    WORK/EXPERIMENT/    datasets made of it, drafts, their logs, results.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from draftmill.builder.serving.command import vllm_engine
from draftmill.builder.sources.read import SourceError, read_source
from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DraftmillError, SettingsMismatch, UsageError
from draftmill.manifests.types import Prompt
from draftmill.manifests.writer import DatasetWriter
from draftmill.tools.bench.experiments import docstrings
from draftmill.tools.bench.experiments.size import ExperimentSize, Machine
from draftmill.tools.demo.command import Log
from draftmill.tools.init import create, target_settings
from draftmill.tools.render import say
from draftmill.tools.settings import Settings, load, writer_options
from draftmill.tools.stages import build, exit_code

HUMAN = f"{docstrings.SOURCE}-human"
_KV_BYTES = 4 << 30
_GPU_SHARE = 0.85
_VALIDATIONS = 5

Step = tuple[str, Callable[[], None]]


class Work:
    """One experiment in its folder, bound to a size. `log` keeps what each draft came to."""

    def __init__(
        self, root: Path, experiment: str, size: ExperimentSize, machine: Machine, model: Path
    ) -> None:
        self.root, self.folder = root, root / experiment
        self.size, self.machine, self.model = size, machine, model
        self.samples = Dataset(root / "samples")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._bind()
        self.log = Log(self.folder / "results.json")

    def _bind(self) -> None:
        path = self.folder / "experiment.json"
        bound = {key: value for key, value in asdict(self.size).items() if key != "seeds"}
        if not path.exists():
            files.write_atomic(path, json.dumps(bound, indent=1), "experiment")
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
        wrong = [
            f"{key} was {stored.get(key)!r} and is now {value!r}"
            for key, value in bound.items()
            if stored.get(key) != value
        ]
        if wrong:
            raise SettingsMismatch(
                f"{self.folder} holds an experiment of another size: {'; '.join(wrong)}. Use the "
                "same size to go on with it, or another --work."
            )

    @property
    def seeds(self) -> range:
        """The seeds of the drafts."""
        return range(1, self.size.seeds + 1)

    def settings(self, *, side_by_side: int = 1) -> Settings:
        """Settings of the samples, for servers of which so many share the machine."""
        settings = load(self.samples)
        args: tuple[str, ...] = ()
        if vllm_engine(settings.serve.python) == "gpu":
            # A server of a small model takes its time to load, not to decode.
            args += ("--enforce-eager",)
            if side_by_side > 1:
                # Servers that measure free memory at the same time would count each other's.
                share = f"{_GPU_SHARE / side_by_side:.3f}"
                args += ("--gpu-memory-utilization", share)
                args += ("--kv-cache-memory-bytes", str(_KV_BYTES))
        args += self.machine.server_args  # the last one of an option counts
        return replace(settings, serve=replace(settings.serve, args=args))

    def add_prompts(self, *, human: bool) -> None:
        """The questions, for the target to answer; with `human` also with the answers they have."""
        folder, size = self.root / "prompts", self.size
        wanted = size.prompts + size.held_out
        there = sum(origin.pairs for origin in docstrings.read_origins(folder))
        if there not in (0, wanted):
            raise UsageError(
                f"{folder} holds {there:,} questions and {wanted:,} are wanted: use the same "
                "size, or another --work"
            )
        if not there:
            docstrings.write_pairs(folder, train=size.prompts, held_out=size.held_out)
        if not self.samples.config_path.exists():
            self._create()
        source = folder / "train.jsonl"
        with self.samples.writer(**writer_options(self.samples, load(self.samples))) as writer:
            _add(writer, read_source(source, name=docstrings.SOURCE), "questions")
            if human:
                given = read_source(source, name=HUMAN, mode="prefill")
                _add(writer, given, "human answers")

    def _create(self) -> None:
        size = self.size
        create(
            self.samples.path,
            target_settings(str(self.model), name=self.model.name),
            generate={
                "max_completion_tokens": size.completion_tokens,
                # What is measured is greedy decoding.
                "temperature": 0.0,
                "concurrency": size.in_flight,
            },
            extract={"max_seq_len": size.sample_tokens, "concurrency": size.in_flight},
            serve={"max_model_len": 2 * size.sample_tokens},
            train={
                "draft_vocab_size": size.draft_vocab_size,
                "max_seq_len": size.row_tokens,
                "validation": size.validation,
                "checkpoint_every": -(-size.steps // _VALIDATIONS),
            },
        )

    def fill(self, stage: Literal["generate", "extract"]) -> None:
        """Run one stage over the samples, with a server of its own if there is work for one."""
        settings = self.settings()
        reports, left = build(self.samples, settings, [stage], {"generate": (), "extract": ()})
        code = exit_code(reports, left)
        if code == 130:
            raise KeyboardInterrupt
        if code not in (0, 4):
            raise DraftmillError(f"{stage} stopped before its end; see the messages above")


def _add(writer: DatasetWriter, items: Iterable[Prompt | SourceError], what: str) -> None:
    report = writer.add_prompts(each for each in items if isinstance(each, Prompt))
    say(f"    {report.added:,} {what} added, {report.known:,} there already")


def run_steps(steps: Sequence[Step], until: str | None) -> None:
    """Run the steps in order, up to the one called `until`."""
    for number, (name, step) in enumerate(steps, 1):
        say(f"{number}/{len(steps)} {name}")
        step()
        if name == until:
            return
