"""`draftmill estimate`: bytes, hours, cost and what fits, before anything is started.

Reads what is known of the model, the prompts and a running dataset; the arithmetic is in `costs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import click

from draftmill.builder.budget import parse_budget
from draftmill.builder.sources.read import read_source
from draftmill.manifests.dataset import Dataset, DatasetReader
from draftmill.manifests.errors import UsageError
from draftmill.manifests.queries import mean_characters
from draftmill.manifests.target.target import TargetModel
from draftmill.manifests.types import Prompt
from draftmill.tools.estimate.costs import (
    HARDWARE,
    STAGES,
    STORED_SHARE,
    Job,
    Rate,
    Stage,
    estimate,
)
from draftmill.tools.estimate.words import explain
from draftmill.tools.render import duration
from draftmill.tools.settings import load
from draftmill.tools.terminal import echo, echo_json

EAGLE3_LAYERS = 4
CHARACTERS_PER_TOKEN = 4.0
_MEASURED_S = 300.0
_AT_MOST = "nothing generated yet: completions are taken to be as long as they may be"
_BIN_S = 60.0
_LEAST, _MOST = 1e-6, 1e15


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the command line, a model, prompts or a dataset say; None where nobody knows."""

    hidden_size: int | None = None
    layers: int | None = None
    samples: int | None = None
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    tokens_per_sample: float | None = None
    epochs: float | None = None
    codec: str | None = None
    ratio: float | None = None
    disk_budget: str | None = None
    other_bytes: int | None = None
    rates: Mapping[Stage, Rate] | None = None
    notes: tuple[str, ...] = ()

    def over(self, other: Known) -> Known:
        """These facts, and those of `other` where there are none."""
        mine = {k: v for k, v in vars(self).items() if v is not None and k != "notes"}
        return replace(other, **mine, notes=(*other.notes, *self.notes))


def of_model(folder: str) -> Known:
    """From a folder with the model's config.json."""
    facts = TargetModel.from_folder(Path(folder))
    return Known(hidden_size=facts.hidden_size, layers=EAGLE3_LAYERS)


def of_prompts(paths: tuple[str, ...]) -> Known:
    """From prompt files: how many, and about how long."""
    count = characters = 0
    for path in paths:
        for item in read_source(Path(path)):
            if isinstance(item, Prompt):
                count += 1
                characters += len(item.conversation)
    if not count:
        raise UsageError(f"--prompts: no prompt in {', '.join(paths)}")
    note = f"prompts: {characters:,} characters, {CHARACTERS_PER_TOKEN:.0f} taken for a token"
    length = characters / CHARACTERS_PER_TOKEN / count
    return Known(samples=count, prompt_tokens=length, notes=(note,))


def of_dataset(path: str) -> Known:
    """From a dataset: its settings, its prompts, and the lengths and rates it has shown."""
    opened = Dataset.open(path)
    settings = load(opened)
    known = Known(
        hidden_size=settings.target.hidden_size,
        layers=len(settings.target.extraction_layer_ids),
        completion_tokens=float(settings.generate.max_completion_tokens),
        disk_budget=settings.dataset.disk_budget or None,
        codec=settings.extract.codec,
        epochs=settings.train.epochs,
    )
    with opened.reader() as reader:
        seen = _shown_by(reader)
    if seen.completion_tokens is None:
        known = replace(known, notes=(_AT_MOST,))
    return seen.over(known)


def _shown_by(reader: DatasetReader) -> Known:
    counts, row = reader.summary(), reader.manifest.table(_AVERAGES).to_pylist()[0]
    rates = {
        cast(Stage, each["stage"]): Rate(
            tokens_per_s=each["tokens"] / each["busy_s"],
            source=f"measured over {duration(each['busy_s'])} of this dataset",
        )
        for each in reader.manifest.table(_RATES).to_pylist()
        if each["busy_s"] >= _MEASURED_S
    }
    prompt = row["prompt_tokens"]
    if prompt is None and counts["prompts"]["total"]:
        characters = mean_characters(reader.manifest, reader.dataset.prompt_files().values())
        prompt = None if characters is None else characters / CHARACTERS_PER_TOKEN
    return Known(
        samples=counts["prompts"]["total"] or None,
        prompt_tokens=prompt,
        completion_tokens=row["completion_tokens"],
        ratio=counts["disk"]["compression_ratio"],
        other_bytes=counts["disk"]["used_bytes"] - counts["disk"]["hidden_states_bytes"],
        rates=rates,
    )


_AVERAGES = """
SELECT avg(prompt_tokens) AS prompt_tokens, avg(completion_tokens) AS completion_tokens
FROM samples WHERE completion_tokens IS NOT NULL"""

_RATES = f"""
SELECT a.stage, sum(coalesce(a.completion_tokens, y.tokens))::BIGINT AS tokens,
       ({_BIN_S} * count(DISTINCT floor((a.started_at + a.total_s) / {_BIN_S})))::DOUBLE AS busy_s
FROM attempts a JOIN payloads y USING (id, stage, attempt)
WHERE a.outcome IN ('generated', 'extracted') AND a.total_s IS NOT NULL GROUP BY a.stage"""


# -- the command ---------------------------------------------------------------------------------


def _rates(given: tuple[str, ...], hardware: str, measured: Mapping[Stage, Rate]) -> Any:
    table = HARDWARE[hardware]
    rates = {s: Rate(tokens_per_s=getattr(table, s), source=hardware) for s in STAGES}
    rates |= measured
    for text in given:
        stage, _, value = text.partition("=")
        try:
            speed = float(value.replace(",", "").replace("_", ""))
        except ValueError:
            speed = 0.0
        if stage not in STAGES or not _LEAST <= speed <= _MOST:
            raise UsageError(f"--rate {text}: write STAGE=TOKENS_PER_S, e.g. generate=1600")
        rates[stage] = Rate(tokens_per_s=speed, source="given")
    return rates


def job_of(known: Known, **more: Any) -> Job:
    """The job that these facts describe; UsageError names what is missing."""
    length = known.tokens_per_sample
    completion = known.completion_tokens
    if length is None and known.prompt_tokens is not None and completion is not None:
        length = known.prompt_tokens + completion
    if length is not None:
        completion = min(length, completion if completion is not None else length)
    values = {
        "--hidden-size": known.hidden_size,
        "--layers": known.layers,
        "--samples": known.samples,
        "--completion-tokens" if known.prompt_tokens else "--tokens-per-sample": length,
    }
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise UsageError(f"name a DATASET, or give {', '.join(missing)}")
    shares = dict(STORED_SHARE)
    codec = known.codec or "em-zfast"
    if known.ratio:
        shares[codec] = 1 / known.ratio
    if codec not in shares:
        raise UsageError(f"--codec {codec}: known sizes are {', '.join(shares)}")
    return Job(
        hidden_size=cast(int, known.hidden_size),
        layers=cast(int, known.layers),
        samples=cast(int, known.samples),
        tokens_per_sample=cast(float, length),
        completion_tokens=cast(float, completion),
        epochs=known.epochs or 1.0,
        codec=codec,
        shares=shares,
        **more,
    )


class _Positive(click.FloatRange):
    """A number above 0 with which there is something to calculate: not inf, not 1e300."""

    def __init__(self) -> None:
        super().__init__(min=_LEAST, max=_MOST)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        found = super().convert(value, param, ctx)
        return found if math.isfinite(found) else self.fail(f"{value} is no number", param, ctx)

    def _describe_range(self) -> str:
        return "x>0"


_POSITIVE = _Positive()


class _Count(click.IntRange):
    """A number from 1 on, within reason."""

    def __init__(self) -> None:
        super().__init__(1, int(_MOST))

    def _describe_range(self) -> str:
        return "x>=1"


_COUNT = _Count()


@click.command("estimate")
@click.argument("dataset", required=False)
@click.option("--model", metavar="DIR", help="Folder with the target's config.json.")
@click.option("--hidden-size", type=_COUNT, help="Width of the residual stream.")
@click.option("--layers", type=_COUNT, help="Layers stored, the last included: 4.")
@click.option("--prompts", multiple=True, metavar="FILE", help="Prompts to count, as for `add`.")
@click.option("--samples", type=_COUNT, help="Number of prompts.")
@click.option("--tokens-per-sample", type=_POSITIVE, help="Prompt and completion, in the mean.")
@click.option("--completion-tokens", type=_POSITIVE, help="The part of it that is generated.")
@click.option("--epochs", type=_POSITIVE, help="Passes of the training over the samples.")
@click.option("--codec", type=click.Choice(list(STORED_SHARE)), help="How states are stored.")
@click.option("--disk-budget", metavar="SIZE", help='e.g. "3TB" or "80%".')
@click.option("--rate", "given", multiple=True, metavar="STAGE=N", help="Tokens/s of a stage.")
@click.option(
    "--hardware",
    type=click.Choice(list(HARDWARE)),
    default="kimi-8gpu",
    show_default=True,
    help="Rates of stages that are neither given nor measured.",
)
@click.option("--cost-per-hour", type=_POSITIVE, metavar="X", help="Price of the machines.")
@click.option("--link-gbps", type=_POSITIVE, metavar="G", help="Train elsewhere, over this link.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with stable keys.")
def estimate_command(
    dataset: str | None,
    model: str | None,
    prompts: tuple[str, ...],
    given: tuple[str, ...],
    hardware: str,
    cost_per_hour: float | None,
    link_gbps: float | None,
    as_json: bool,
    **numbers: Any,
) -> None:
    """Say what a job takes: bytes, hours, cost, and what fits the disk.

    Numbers that are given go before those of a DATASET (its settings, and what it has shown so
    far), of prompt files and of a model's folder.

    \b
    draftmill estimate kimi
    draftmill estimate --hidden-size 7168 --layers 4 --samples 10000 --tokens-per-sample 4096
    draftmill estimate --model ./Kimi-K2.5 --prompts p.jsonl --completion-tokens 2000 \\
        --disk-budget 2TB --cost-per-hour 25 --link-gbps 10
    """
    known = Known()
    if dataset:
        known = of_dataset(dataset)
    if model:
        known = of_model(model).over(known)
    if prompts:
        known = of_prompts(prompts).over(known)
    known = Known(**numbers).over(known)
    if numbers["tokens_per_sample"] or numbers["completion_tokens"]:
        known = replace(known, notes=tuple(note for note in known.notes if note != _AT_MOST))
    budget = known.disk_budget
    try:
        volume = Path(dataset) if dataset else Path()
        budget_bytes = parse_budget(budget, volume) if budget else None
    except ValueError as error:
        raise UsageError(f"--disk-budget: {error}") from error
    job = job_of(
        known,
        rates=_rates(given, hardware, known.rates or {}),
        budget_bytes=budget_bytes,
        other_bytes=known.other_bytes or 0,
        cost_per_hour=cost_per_hour,
        link_gbps=link_gbps,
    )
    found = estimate(job)
    if as_json:
        echo_json(found)
    else:
        echo(explain(found, known.notes))
