"""What a job takes: bytes, hours, money, what fits and what makes it fit. Arithmetic only.

Reading models, prompts and datasets is left to `estimate`, which also shows the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from draftmill.manifests.headroom import room_for_samples

Stage = Literal["generate", "extract", "train"]
STAGES: tuple[Stage, ...] = ("generate", "extract", "train")
BF16_BYTES = 2
# Stored share of raw bf16 by codec, as `draftmill bench shards` prints it for the embedded model.
STORED_SHARE = {"raw": 1.0, "em-zfast": 1 / 1.48, "bitround-4": 1 / 2.05, "rot4": 1 / 4.07}
LOSSLESS = ("raw", "em-zfast")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Tokens per second of each stage, all servers or devices together, and who saw them."""

    source: str
    generate: float
    extract: float
    train: float


# Planning figures for machines and models of other people; measured ones go before them.
HARDWARE = {
    "kimi-8gpu": Hardware(
        source="a published Kimi-K2.5 run on one 8-GPU box; training 6 steps/s of 4,096 tokens",
        generate=1600,
        extract=2912,
        train=6 * 4096,
    ),
    "smollm2-h200": Hardware(
        source="SmolLM2-135M on one H200; training 29 steps/s of 4,096 tokens",
        generate=21_615,
        extract=57_560,
        train=29 * 4096,
    ),
    "smollm2-cpu": Hardware(
        source="SmolLM2-135M on two CPU cores; training 250 steps of at most 512 tokens in 353 s",
        generate=64,
        extract=162,
        train=250 * 512 / 353,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Tokens per second of one stage, and where the figure is from."""

    tokens_per_s: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done. `layers` counts all that is stored: the auxiliary ones and the last.

    `other_bytes` are what a dataset holds beside hidden states.
    """

    hidden_size: int
    layers: int
    samples: int
    tokens_per_sample: float
    completion_tokens: float
    rates: Mapping[Stage, Rate]
    epochs: float = 1.0
    codec: str = "em-zfast"
    shares: Mapping[str, float] = field(default_factory=lambda: dict(STORED_SHARE))
    budget_bytes: int | None = None
    other_bytes: int = 0
    cost_per_hour: float | None = None
    link_gbps: float | None = None

    @property
    def bytes_per_token(self) -> int:
        """Raw bf16: layers x hidden size x 2."""
        return self.layers * self.hidden_size * BF16_BYTES

    @property
    def tokens(self) -> int:
        """All tokens, prompts and completions."""
        return max(1, round(self.samples * self.tokens_per_sample))

    @property
    def stored_bytes(self) -> float:
        """What the hidden states of all samples take with the job's codec."""
        return self.tokens * self.bytes_per_token * self.shares[self.codec]

    @property
    def room_bytes(self) -> int | None:
        """What the budget leaves for hidden states beside the database and `other_bytes`."""
        if self.budget_bytes is None:
            return None
        return room_for_samples(
            limit_bytes=self.budget_bytes,
            used_bytes=self.other_bytes,
            free_bytes=self.budget_bytes,
        )


def estimate(job: Job) -> dict[str, Any]:
    """The document of `estimate --json`."""
    raw = job.tokens * job.bytes_per_token
    hours = _hours(job)
    return {
        "hidden_size": job.hidden_size,
        "layers": job.layers,
        "bytes_per_token": job.bytes_per_token,
        "samples": job.samples,
        "tokens_per_sample": round(job.tokens_per_sample, 1),
        "completion_tokens": round(job.completion_tokens, 1),
        "tokens": job.tokens,
        "codec": job.codec,
        "raw_bytes": raw,
        "stored_bytes": {name: round(raw * share) for name, share in job.shares.items()},
        "rates": {
            stage: {"tokens_per_s": round(rate.tokens_per_s, 1), "from": rate.source}
            for stage, rate in job.rates.items()
        },
        "epochs": job.epochs,
        "hours": {stage: round(value, 3) for stage, value in hours.items()},
        "cost": _cost(job, hours),
        "move": _move(job, hours),
        "budget_bytes": job.budget_bytes,
        "samples_that_fit": _fit(job, job.codec),
        "room_bytes": job.room_bytes,
        "fits": None if job.room_bytes is None else job.stored_bytes <= job.room_bytes,
        "ways": _ways(job, hours),
    }


def _hours(job: Job) -> dict[Stage, float]:
    work = {
        "generate": job.samples * job.completion_tokens,
        "extract": job.tokens,
        "train": job.epochs * job.tokens,
    }
    return {stage: work[stage] / job.rates[stage].tokens_per_s / 3600 for stage in STAGES}


def _cost(job: Job, hours: Mapping[Stage, float]) -> dict[str, Any] | None:
    if job.cost_per_hour is None:
        return None
    by_stage = {stage: round(hours[stage] * job.cost_per_hour, 2) for stage in STAGES}
    total = round(sum(hours.values()) * job.cost_per_hour, 2)
    return {"per_hour": job.cost_per_hour, "by_stage": by_stage, "total": total}


def _move(job: Job, hours: Mapping[Stage, float]) -> dict[str, Any] | None:
    """Extracting here and training elsewhere: shards leave as they are sealed, beside extraction.

    What is slower sets the pace. While the link is slower, the extraction servers wait for room,
    or stand idle until the last shard has left.
    """
    if job.link_gbps is None:
        return None
    transfer_h = job.stored_bytes * 8 / (job.link_gbps * 1e9) / 3600
    idle_h = max(0.0, transfer_h - hours["extract"])
    here_h = sum(hours.values())
    return {
        "link_gbps": job.link_gbps,
        "transfer_hours": round(transfer_h, 3),
        "idle_hours": round(idle_h, 3),
        "idle_cost": None
        if job.cost_per_hour is None
        else round(idle_h * job.cost_per_hour, 2),
        "hours_all_here": round(here_h, 3),
        "hours_with_move": round(here_h + idle_h, 3),
        "gbps_without_idling": round(job.stored_bytes * 8 / (hours["extract"] * 3600) / 1e9, 3),
    }  # fmt: skip


def _fit(job: Job, codec: str) -> int | None:
    if job.room_bytes is None:
        return None
    per_sample = job.tokens_per_sample * job.bytes_per_token * job.shares[codec]
    return int(job.room_bytes // per_sample)


def _ways(job: Job, hours: Mapping[Stage, float]) -> list[dict[str, Any]]:
    """How a job that is too large is brought into the budget; empty when it fits."""
    room = job.room_bytes
    if room is None or job.stored_bytes <= room:
        return []
    fit = _fit(job, job.codec) or 0
    longest = math.floor(job.tokens_per_sample * room / job.stored_bytes)
    ways: list[dict[str, Any]] = [
        {"way": "fewer samples", "works": fit > 0, "samples": fit},
        {"way": "shorter samples", "works": longest > 0, "tokens_per_sample": longest},
    ]
    for codec, share in job.shares.items():
        if share < job.shares[job.codec]:
            size = round(job.tokens * job.bytes_per_token * share)
            ways.append(
                {
                    "way": "lossless" if codec in LOSSLESS else "lossy",
                    "codec": codec,
                    "works": size <= room,
                    "stored_bytes": size,
                    "samples": min(job.samples, _fit(job, codec) or 0),
                }
            )
    rounds = math.ceil(job.samples / fit) if fit else None
    ways.append(
        {
            "way": "evict and extract again",
            "works": bool(fit),
            "rounds": rounds,
            # Every pass of the training over the data needs all hidden states once more.
            "extract_hours": round(hours["extract"] * max(1.0, job.epochs), 3),
        }
    )
    return ways
