"""Drafts that are compared: trained by `draftmill train`, measured as `draftmill eval` does.

Owns how many run at once and what is kept of each. What they learn from is the experiments'.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftmill.builder.serving.command import ServeSettings
from draftmill.builder.serving.log import last_line
from draftmill.manifests.errors import DraftmillError, ServerError
from draftmill.tools.bench.experiments.report import Arm, Measured
from draftmill.tools.bench.experiments.work import Work
from draftmill.tools.measure import Load, document, held_out, measure_own_server
from draftmill.tools.render import say
from draftmill.trainer.runlog import read_log

_SAY_EVERY_S = 30.0

Job = Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One draft to train and to measure: its arm, its seed, and the dataset that it learns from."""

    arm: str
    seed: int
    dataset: Path

    @property
    def name(self) -> str:
        """Name of its folder and of its result."""
        return f"{self.arm}-{self.seed}"


def drafts_of(work: Work, datasets: dict[str, Path]) -> list[Draft]:
    """One draft for each seed and arm, seed by seed: what is done first can be compared first."""
    return [
        Draft(arm=arm, seed=seed, dataset=dataset)
        for seed in work.seeds
        for arm, dataset in datasets.items()
    ]


def draft_folder(work: Work, draft: Draft) -> Path:
    """Where a draft is trained."""
    return work.folder / "drafts" / draft.name


def train_drafts(work: Work, drafts: Sequence[Draft]) -> None:
    """Train those that are not trained yet, `machine.trainers` at once."""
    todo = [each for each in drafts if not is_trained(draft_folder(work, each))]
    say(f"    {len(drafts) - len(todo)} of {len(drafts)} drafts are trained already")
    _run([partial(_train, work, each) for each in todo], work.machine.trainers)


async def _train(work: Work, draft: Draft) -> None:
    folder = draft_folder(work, draft)
    folder.parent.mkdir(exist_ok=True)
    log = folder.with_name(f"{draft.name}.log")
    command = [sys.executable, "-m", "draftmill.tools.cli", "train", str(draft.dataset)]
    command += ["--output", str(folder), "--target", str(work.model)]
    command += ["--seed", str(draft.seed), "--steps", str(work.size.steps)]
    command += ["--device", work.machine.device]
    say(f"    training {draft.name}; its log is {log}")
    with log.open("ab") as out:
        # A session of its own: Ctrl-C reaches it once, through us, and it saves what it has.
        child = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while child.returncode is None:
            try:
                await asyncio.wait_for(child.wait(), _SAY_EVERY_S)
            except TimeoutError:
                say(f"    {draft.name}: {last_line(log)}")
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            await child.wait()
    if child.returncode:
        raise DraftmillError(f"training {draft.name} failed: {last_line(log)}\nits log is {log}")
    say(f"    {draft.name} is trained")


def measure_drafts(work: Work, drafts: Sequence[Draft]) -> None:
    """Serve and measure those that are not measured yet, `machine.servers` at once."""
    todo = [each for each in drafts if each.name not in work.log.facts]
    say(f"    {len(drafts) - len(todo)} of {len(drafts)} drafts are measured already")
    if todo:
        servers = min(work.machine.servers, len(todo))
        serve = work.settings(side_by_side=servers).serve
        _run([partial(_measure, work, each, serve) for each in todo], servers)


async def _measure(work: Work, draft: Draft, serve: ServeSettings) -> None:
    folder = draft_folder(work, draft)
    found = await measure_own_server(
        folder,
        str(work.model),
        held_out([str(work.root / "prompts/held_out.jsonl")], None),
        Load(max_tokens=work.size.eval_tokens, concurrency=work.size.in_flight),
        settings=serve,
        name=work.model.name,
        run_folder=work.folder / "servers" / draft.name,
    )
    failed = found.whole.failed
    if failed:
        raise ServerError(
            f"{draft.name}: {failed} held-out prompts failed, so it is not comparable; "
            "run the command again"
        )
    result = {**document(found, None), "validation": best_validation(folder)}
    work.log.put(draft.name, result)
    say(f"    {draft.name}: {result['accepted_per_step']:.3f} accepted tokens per step")


def arms(work: Work, names: Sequence[str]) -> list[Arm]:
    """What has been measured so far, by arm and seed."""
    found = []
    for name in names:
        results = {seed: work.log.facts.get(f"{name}-{seed}") for seed in work.seeds}
        measured = {seed: _measured(each) for seed, each in results.items() if each is not None}
        if measured:
            found.append(Arm(name=name, drafts=measured))
    return found


def _measured(result: dict[str, Any]) -> Measured:
    return Measured(
        accepted_per_step=result["accepted_per_step"],
        accepted_by_position=tuple(result["accepted_by_position"]),
        drafts=result["drafts"],
        validation=result["validation"],
    )


def is_trained(folder: Path) -> bool:
    """Whether the run in this folder came to its end."""
    entries = read_log(folder / "log.jsonl")
    return bool(entries) and entries[-1].get("kind") == "end" and not entries[-1]["interrupted"]


def best_validation(folder: Path) -> dict[str, float]:
    """The validation of the checkpoint that a finished run published; empty if it made none."""
    entries = [each for each in read_log(folder / "log.jsonl") if each["kind"] == "validation"]
    if not entries:
        return {}
    best = max(entries, key=lambda each: (each.get("accepted_per_step", 0.0), each["step"]))
    return {key: value for key, value in best.items() if isinstance(value, int | float)}


def _run(jobs: Sequence[Job], at_once: int) -> None:
    """All jobs, some at once; the first error is raised when the others have ended.

    SIGINT and SIGTERM cancel them, so that they end what they have started.
    """

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        slots = asyncio.Semaphore(at_once)

        async def one(job: Job) -> None:
            async with slots:
                await job()

        ended = await asyncio.gather(*map(one, jobs), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
