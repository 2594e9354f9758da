"""`draftmill estimate`: bytes, hours and what fits, before anything is started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import UsageError
from draftmill.manifests.sizes import format_size, parse_size
from draftmill.tools.render import duration
from draftmill.tools.settings import load

BF16_BYTES = 2
# Stored share of raw bf16 by codec, as `draftmill bench shards` measures it on SmolLM2-135M.
STORED_SHARE = {"raw": 1.0, "em-zfast": 1 / 1.48, "bitround-4": 1 / 2.05, "rot4": 1 / 4.0}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured or assumed speeds, in tokens per second over all servers or devices."""

    generate: float = 1600.0
    extract: float = 2900.0
    train: float = 24_000.0


def estimate(
    *,
    hidden_size: int,
    layers: int,
    samples: int,
    tokens_per_sample: float,
    completion_share: float = 1.0,
    rates: Rates,
    epochs: float = 1.0,
    budget_bytes: int | None = None,
    codec: str = "em-zfast",
) -> dict[str, Any]:
    """The document of `estimate --json`.

    `layers` counts everything stored per token: the auxiliary layers and the last one. A token
    costs layers × hidden_size × 2 bytes of bf16 before compression.
    """
    bytes_per_token = layers * hidden_size * BF16_BYTES
    tokens = round(samples * tokens_per_sample)
    raw = tokens * bytes_per_token
    stored = {name: round(raw * share) for name, share in STORED_SHARE.items()}
    per_sample = tokens_per_sample * bytes_per_token * STORED_SHARE[codec]
    return {
        "hidden_size": hidden_size,
        "layers": layers,
        "bytes_per_token": bytes_per_token,
        "samples": samples,
        "tokens": tokens,
        "raw_bytes": raw,
        "stored_bytes": stored,
        "hours": {
            "generate": round(tokens * completion_share / rates.generate / 3600, 3),
            "extract": round(tokens / rates.extract / 3600, 3),
            "train": round(epochs * tokens / rates.train / 3600, 3),
        },
        "samples_that_fit": None if budget_bytes is None else int(budget_bytes // per_sample),
    }


def _both_units(size: float) -> str:
    return f"{size / 1e12:,.3g} TB ({size / 2**40:,.3g} TiB)" if size >= 1e11 else format_size(size)


def _explain(found: dict[str, Any], rates: Rates, tokens_per_sample: float, codec: str) -> str:
    hours = found["hours"]
    lines = [
        f"bytes per token   {found['layers']} layers x {found['hidden_size']} x 2 bytes = "
        f"{found['bytes_per_token']:,}",
        f"tokens            {found['samples']:,} samples x {tokens_per_sample:,.0f} = "
        f"{found['tokens']:,}",
        f"raw hidden states {_both_units(found['raw_bytes'])}",
    ]
    lines += [
        f"  stored, {name:<11} {_both_units(size)}{'  (chosen)' if name == codec else ''}"
        for name, size in found["stored_bytes"].items()
        if name != "raw"
    ]
    lines += [
        f"generate          {duration(3600 * hours['generate'])} at {rates.generate:,.0f} tokens/s",
        f"extract           {duration(3600 * hours['extract'])} at {rates.extract:,.0f} tokens/s",
        f"train             {duration(3600 * hours['train'])} at {rates.train:,.0f} tokens/s",
    ]
    if found["samples_that_fit"] is not None:
        lines.append(f"samples that fit the budget: {found['samples_that_fit']:,}")
    return "\n".join(lines)


def _measured(dataset: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Sizes and the averages that a running dataset has shown so far."""
    opened = Dataset.open(dataset)
    settings = load(opened)
    with opened.reader() as reader:
        summary = reader.summary()
        row = reader.sql(
            "SELECT count(*) AS n, avg(prompt_tokens) AS prompt, avg(completion_tokens) AS done "
            "FROM samples WHERE completion_tokens IS NOT NULL"
        ).to_pylist()[0]
    averages = {"prompt": row["prompt"] or 0.0, "completion": row["done"] or 0.0}
    facts = {
        "hidden_size": settings.target.hidden_size,
        "layers": len(settings.target.extraction_layer_ids),
        "samples": summary["prompts"]["total"],
        "budget": settings.dataset.disk_budget,
        "codec": settings.extract.codec,
        "max": settings.generate.max_completion_tokens,
        "epochs": settings.train.epochs,
    }
    return facts, averages


@click.command("estimate")
@click.argument("dataset", required=False)
@click.option("--hidden-size", type=click.IntRange(min=1), help="Width of the residual stream.")
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    help="Stored layers: the auxiliary ones and the last (4 for EAGLE-3).",
)
@click.option("--samples", type=click.IntRange(min=1), help="Number of prompts.")
@click.option(
    "--tokens-per-sample",
    type=click.FloatRange(min=0, min_open=True),
    help="Prompt and completion together.",
)
@click.option(
    "--completion-share",
    type=click.FloatRange(min=0, min_open=True),
    help="Share of the tokens that is generated.",
)
@click.option(
    "--generate-rate",
    type=click.FloatRange(min=0, min_open=True),
    default=1600,
    show_default=True,
    help="Tokens/s.",
)
@click.option(
    "--extract-rate",
    type=click.FloatRange(min=0, min_open=True),
    default=2900,
    show_default=True,
    help="Tokens/s.",
)
@click.option(
    "--train-rate",
    type=click.FloatRange(min=0, min_open=True),
    default=24000,
    show_default=True,
    help="Tokens/s.",
)
@click.option(
    "--epochs", type=click.FloatRange(min=0, min_open=True), help="Passes of the training."
)
@click.option("--disk-budget", help='e.g. "3TB": how many samples fit.')
@click.option("--codec", type=click.Choice(list(STORED_SHARE)), help="How states are stored.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with stable keys.")
def estimate_command(
    dataset: str | None,
    hidden_size: int | None,
    layers: int | None,
    samples: int | None,
    tokens_per_sample: float | None,
    completion_share: float | None,
    generate_rate: float,
    extract_rate: float,
    train_rate: float,
    epochs: float | None,
    disk_budget: str | None,
    codec: str | None,
    as_json: bool,
) -> None:
    """Say what a job costs: bytes, hours, what fits. With DATASET, from what it has shown so far.

    \b
    draftmill estimate --hidden-size 7168 --layers 4 --samples 10000 --tokens-per-sample 4096
    """
    facts: dict[str, Any] = {}
    share = completion_share
    if dataset:
        facts, averages = _measured(dataset)
        length = averages["prompt"] + averages["completion"]
        # Nothing generated yet: the limit is the only figure there is.
        tokens_per_sample = tokens_per_sample or length or float(facts["max"])
        if share is None and length:
            share = averages["completion"] / length
    values: dict[str, Any] = {
        "--hidden-size": hidden_size or facts.get("hidden_size"),
        "--layers": layers or facts.get("layers"),
        "--samples": samples or facts.get("samples"),
        "--tokens-per-sample": tokens_per_sample,
    }
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise UsageError(f"name a DATASET, or give {', '.join(missing)}")
    codec = codec or (facts["codec"] if facts.get("codec") in STORED_SHARE else "em-zfast")
    budget = disk_budget or facts.get("budget")
    try:
        budget_bytes = parse_size(budget) if budget and not budget.endswith("%") else None
    except ValueError as error:
        raise UsageError(f"--disk-budget: {error}") from error
    rates = Rates(generate=generate_rate, extract=extract_rate, train=train_rate)
    found = estimate(
        hidden_size=int(values["--hidden-size"]),
        layers=int(values["--layers"]),
        samples=int(values["--samples"]),
        tokens_per_sample=float(values["--tokens-per-sample"]),
        completion_share=1.0 if share is None else share,
        rates=rates,
        epochs=epochs or facts.get("epochs") or 1.0,
        budget_bytes=budget_bytes,
        codec=codec,
    )
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(_explain(found, rates, float(values["--tokens-per-sample"]), codec))
