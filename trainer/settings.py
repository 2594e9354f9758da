"""Settings of `train`: every key of [train], explained and checked. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from draftmill.manifests.config import setting

# speculators' own, and the flat one of class LlamaForCausalLMEagle3.
DraftForm: TypeAlias = Literal["speculators", "flat"]
# Told what a person should know.
OnNote: TypeAlias = Callable[[str], None]


def is_leader() -> bool:
    """Whether this process speaks for its run, of those that `torchrun` may have started."""
    return int(os.environ.get("RANK", "0")) == 0


def _key(default: Any, text: str, *, free: bool = False) -> Any:
    """A setting with its explanation; a `free` one cannot change what is learnt."""
    return setting(default, text, free=free)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a draft model is trained. Sizes in tokens, lengths of a run in optimizer steps."""

    draft_vocab_size: int = _key(
        32000, "Tokens that the draft can propose: the most frequent ones of the completions."
    )
    max_seq_len: int = _key(
        4096, "Tokens in one packed row. Longer samples are cut at the end, never dropped."
    )
    rows_per_step: int = _key(1, "Packed rows in one optimizer step, over all devices.")
    epochs: float = _key(3.0, "Passes over the training samples; `steps`, when not 0, wins.")
    steps: int = _key(0, "Optimizer steps of the whole run; 0 follows from `epochs`.")
    lr: float = _key(1e-3, "Highest learning rate.")
    schedule: str = _key(
        "one-cycle", "Shape of the learning rate: one-cycle, cosine, linear or constant."
    )
    warmup: float = _key(0.1, "Part of the run in which the learning rate rises, 0 to 1.")
    weight_decay: float = _key(0.01, "AdamW's weight decay, on matrices only.")
    beta2: float = _key(0.95, "AdamW's second-moment decay.")
    clip_norm: float = _key(1.0, "Longest gradient (L2 norm) that is applied whole; 0 for any.")
    seed: int = _key(0, "Seed of the initial weights and of the order of samples.")
    num_layers: int = _key(1, "Decoder layers of the draft model.")
    ttt_steps: int = _key(3, "Draft tokens in a row that each position is trained to predict.")
    ttt_decay: float = _key(1.0, "Weight of each further draft token's loss, relative to the last.")
    loss: str = _key(
        "kl_div", "Loss against the target's distribution: kl_div, rkl, jsd, ce, tv or lk_hybrid."
    )
    norm_before_fc: bool = _key(True, "Normalise the auxiliary hidden states before joining them.")
    norm_output: bool = _key(False, "Feed the normalised output to the next draft step.")
    norm_before_residual: bool = _key(True, "Normalise before the residual branch in layer 0.")
    train_lm_head: bool = _key(
        True, "Train the draft's output projection, starting from the target's; else keep it."
    )
    validation: float = _key(
        0.05, "Part of the conversations kept for validation, chosen by hash: 0 to 0.5."
    )
    validation_rows: int = _key(64, "Most packed rows looked at in one validation.", free=True)
    checkpoint_every: int = _key(
        0, "Steps between validations, each with a checkpoint; 0 for ten in a run.", free=True
    )
    keep_checkpoints: int = _key(
        2, "Newest checkpoints that are kept, besides the best one.", free=True
    )
    log_every: int = _key(10, "Steps between lines of the log.", free=True)
    decode_workers: int = _key(
        2,
        "Threads, or processes beside a GPU, that read samples ahead of need; 0: none is ahead.",
        free=True,
    )
    prefetch_mb: int = _key(1024, "Most megabytes of decoded samples that wait.", free=True)
    fsdp: bool = _key(
        False, "Share weights and optimizer between GPUs (FSDP2), in place of copies.", free=True
    )
    device: str = _key("auto", "auto, cpu or cuda.", free=True)
    checkpoint_format: Literal["speculators", "flat"] = _key(
        "speculators",
        "Form of the written draft: speculators, or flat as AQ-MedAI's. vLLM loads both.",
        free=True,
    )
    tensorboard: bool = _key(
        False, "Also write the log for TensorBoard, into tensorboard/ of the run.", free=True
    )
    precision: str = _key(
        "auto", "Arithmetic: fp32, bf16 (float32 master weights), auto (bf16 on a GPU)."
    )

    def __post_init__(self) -> None:
        at_least = {
            "draft_vocab_size": 2,
            "steps": 0,
            "num_layers": 1,
            "ttt_steps": 1,
            "seed": 0,
            "validation_rows": 1,
            "checkpoint_every": 0,
            "keep_checkpoints": 1,
            "log_every": 1,
            "prefetch_mb": 1,
        }
        for key, least in at_least.items():
            if getattr(self, key) < least:
                raise ValueError(f"{key}: at least {least}, not {getattr(self, key)}")
        between = {
            "rows_per_step": (1, 65536),
            "max_seq_len": (8, 2**31 - 1),
            "epochs": (0, 1e6),
            "lr": (0, 10),
            "warmup": (0, 1),
            "weight_decay": (0, 10),
            "beta2": (0, 1),
            "clip_norm": (0, math.inf),
            "ttt_decay": (0, 1),
            "validation": (0, 0.5),
            # Each may be a process: a slip of a digit must not take the machine down.
            "decode_workers": (0, 256),
        }
        for key, (low, high) in between.items():
            if not low <= getattr(self, key) <= high:
                raise ValueError(f"{key}: between {low} and {high}, not {getattr(self, key)}")
        if self.lr == 0:
            raise ValueError("lr: above 0")
        if self.epochs == 0 and self.steps == 0:
            raise ValueError("epochs: above 0, unless steps is given")
        choices = {
            "schedule": ("one-cycle", "cosine", "linear", "constant"),
            "loss": ("kl_div", "rkl", "jsd", "ce", "tv", "lk_hybrid"),
            "device": ("auto", "cpu", "cuda"),
            "checkpoint_format": get_args(DraftForm),
            "precision": ("auto", "fp32", "bf16"),
        }
        for key, known in choices.items():
            if getattr(self, key) not in known:
                raise ValueError(f"{key}: one of {', '.join(known)}, not {getattr(self, key)!r}")

    def binding(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the one that it resumes."""
        return {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if not item.metadata["free"]
        }


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """The draft to go on from.

    Its vocabulary is kept, unless `new_vocab` asks for one of the dataset's. `layer_ids` overrides
    what its config says about layers, counted as in draftmill. `other_target` allows a draft that
    was made for a target model of another name.
    """

    checkpoint: str | Path
    new_vocab: bool = False
    layer_ids: tuple[int, ...] | None = None
    other_target: bool = False

    @property
    def name(self) -> str:
        """How the draft is called: its name where it has one, else its folder's; no local path."""
        path = Path(self.checkpoint)
        return path.resolve().name if path.is_dir() else str(self.checkpoint)
