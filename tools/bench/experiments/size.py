"""How large an experiment is, and what it may use of the machine. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

PRECISION_STEPS = ("prompts", "generate", "extract", "recode", "train", "eval")
ON_POLICY_STEPS = ("prompts", "generate", "extract", "pair", "train", "eval")


@dataclass(frozen=True, kw_only=True)
class ExperimentSize:
    """How much is generated, trained and measured. Lengths in tokens."""

    prompts: int
    held_out: int
    completion_tokens: int
    sample_tokens: int
    row_tokens: int
    steps: int
    draft_vocab_size: int
    validation: float
    eval_tokens: int
    in_flight: int
    seeds: int


FULL = ExperimentSize(
    prompts=2400,
    held_out=128,
    completion_tokens=512,
    sample_tokens=1024,
    row_tokens=4096,
    steps=1500,
    draft_vocab_size=16384,
    validation=0.1,
    eval_tokens=128,
    in_flight=256,
    seeds=3,
)
SMALL = ExperimentSize(
    prompts=32,
    held_out=4,
    completion_tokens=32,
    sample_tokens=256,
    row_tokens=256,
    steps=8,
    draft_vocab_size=4096,
    validation=0.2,
    eval_tokens=16,
    in_flight=8,
    seeds=1,
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the steps may use of the machine; changes no result but its time."""

    servers: int = 1
    trainers: int = 1
    server_args: tuple[str, ...] = ()
    device: str = "auto"
