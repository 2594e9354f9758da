"""Settings of the extract stage: the section [extract] of config.toml.

Only `max_seq_len` changes what a sample is; the others are free to change from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftmill.manifests.codec.names import parse_codec
from draftmill.manifests.config import setting
from draftmill.manifests.errors import ConfigError
from draftmill.manifests.sizes import parse_size


@dataclass(frozen=True, kw_only=True)
class ExtractSettings:
    """How hidden states are extracted and stored. Durations in seconds, lengths in tokens."""

    max_seq_len: int = setting(
        8192, "Prompt and completion together are cut to so many tokens; the end is cut off."
    )
    codec: str = setting(
        "em-zfast",
        "How hidden states are stored. Lossless: em-zfast, raw. Lossy and smaller: bitround-4 "
        "(half of bf16), rot4 (a quarter).",
    )
    staging: str = setting(
        "",
        "Folder that the extraction server writes into, best on a RAM disk like /dev/shm. Empty: "
        "`staging` in the dataset.",
    )
    staging_size: str = setting(
        "16GiB", "The most bytes of staged files at once; sending waits beyond that."
    )
    concurrency: int = setting(32, "Requests at once on each server.")
    max_in_flight_tokens: int = setting(65536, "Tokens at once on each server.")
    encode_threads: int = setting(0, "Threads that check and compress. 0: one per core, 8 at most.")
    request_timeout_s: float | None = setting(
        None, "Seconds that a request may take. Unset: ten times what measured speed says."
    )
    lock_timeout_s: float = setting(
        120.0, "Seconds that a server may take to write a file after it has answered."
    )
    tries: int = setting(4, "Tries for a sample that fails in a way that may pass.")
    retry_base_s: float = setting(1.0, "Wait after the first failure; doubled, with jitter.")
    retry_max_s: float = setting(30.0, "The longest wait between two tries.")
    give_up_s: float = setting(
        3600.0, "Stop after so many seconds without any server; big models load for long."
    )
    stop_after_bad: int = setting(
        16,
        "Use a server no more when so many of its samples in a row fail or are rejected; their "
        "rows go to the other servers, or stay generated. 0: never.",
    )
    stop_grace_s: float = setting(
        5.0, "After the first Ctrl-C, wait so long for samples that are about to arrive."
    )
    canary: bool = setting(
        True,
        "Whether hidden states are compared with what the server says of the same tokens, through "
        "the target's own weights, before the first sample and every `canary_every` ones.",
    )
    canary_every: int = setting(
        1000, "Samples of one server from one look of the canary to the next. 0: only the first."
    )
    canary_memory: str = setting(
        "8GiB",
        "Memory for comparing the layers with transformers once per server: the first layers of "
        "the target, as many as fit. 0: compare none.",
    )
    canary_tolerance: float = setting(
        0.0,
        "Mean difference of log-probabilities, in nats, that is no fault. 0: what rounding to "
        "bf16 explains; raise it for servers with a quantised lm_head.",
    )
    orphan_age_s: float = setting(
        600.0, "A staged file that nobody waits for is deleted at this age even while it is locked."
    )

    def __post_init__(self) -> None:
        for name in (
            "max_seq_len",
            "concurrency",
            "max_in_flight_tokens",
            "lock_timeout_s",
            "tries",
            "give_up_s",
            "orphan_age_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0, not {getattr(self, name)}")
        for name in (
            "encode_threads",
            "retry_base_s",
            "retry_max_s",
            "stop_after_bad",
            "stop_grace_s",
            "canary_every",
            "canary_tolerance",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative, not {getattr(self, name)}")
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise ValueError(f"request_timeout_s: must be above 0, not {self.request_timeout_s}")
        try:
            parse_codec(self.codec)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        for name in ("staging_size", "canary_memory"):
            try:
                parse_size(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

    @property
    def staging_bytes(self) -> int:
        """`staging_size` in bytes."""
        return parse_size(self.staging_size)

    @property
    def canary_memory_bytes(self) -> int:
        """`canary_memory` in bytes."""
        return parse_size(self.canary_memory)

    def fingerprint(self, model: str, layer_ids: Sequence[int], hidden_size: int) -> dict[str, Any]:
        """What makes the hidden states of two samples the same kind of thing."""
        return {
            "model": model,
            "layer_ids": list(layer_ids),
            "hidden_size": hidden_size,
            "dtype": "bfloat16",
            "max_seq_len": self.max_seq_len,
        }
