"""Settings of the generate stage: the section [generate] of config.toml.

Those that change what a completion is are part of the dataset's fingerprint; the others are free
to change from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from draftmill.manifests.config import setting

MAX_CONCURRENCY = 8192  # connections that are kept to one server
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """How completions are asked for. Durations in seconds, lengths in tokens."""

    model: str | None = setting(
        None, "The target model as /v1/models names it. Unset: the only one that is served."
    )
    max_completion_tokens: int = setting(
        4096,
        "The longest completion. May be raised later: `retry --truncated` then asks again for "
        "those that were cut.",
    )
    temperature: float | None = setting(None, "Unset here and below: the server's default.")
    top_p: float | None = setting(None, "Nucleus sampling: the share of probability kept.")
    top_k: int | None = setting(None, "Sample from so many of the most likely tokens.")
    min_p: float | None = setting(None, "Drop tokens less likely than this share of the best.")
    repetition_penalty: float | None = setting(None, "Above 1 discourages repetition.")
    seed: int | None = setting(None, "Sampling seed that is sent with every request.")
    check_template: bool = setting(
        True,
        "Refuse to go on when the server's chat template or tokenizer changed. Set false before "
        "the first run for templates that print the date.",
    )
    concurrency: int | Literal["auto"] = setting(
        "auto", 'Requests at once on each server, or "auto" to find the server\'s level.'
    )
    max_concurrency: int = setting(1024, 'What "auto" never exceeds on one server.')
    max_in_flight_tokens: int | None = setting(
        None,
        "Tokens of prompts and expected completions at once on each server. Unset: 95 % of the KV "
        "memory, where the server tells its size.",
    )
    timeout_s: float | None = setting(
        None,
        "Seconds that a request may take. Unset: derived from measured speed. A value that does "
        "not fit measured speed is raised, and the arithmetic shown.",
    )
    deadline_margin: float = setting(
        1.5, "Deadlines are this many times the worst case at measured speed."
    )
    min_deadline_s: float = setting(30.0, "No request is given up earlier than this.")
    timeout_passes: int = setting(
        2, "How often timed-out rows are tried again at the end, each time with twice the deadline."
    )
    watchdog_s: float = setting(
        120.0, "Seconds without a generated token after which a server counts as stuck."
    )
    lost_s: float = setting(
        60.0, "A request of which an idle server knows nothing for so long is sent again."
    )
    stop_after_bad: int = setting(
        32,
        "Use a server no more when it refuses so many prompts in a row and answers none; their "
        "rows stay pending. 0: never.",
    )
    give_up_s: float = setting(
        3600.0, "Stop after so many seconds without any server; big models load for long."
    )
    tries: int = setting(5, "Tries for a request that fails in a way that may pass.")
    retry_base_s: float = setting(1.0, "Wait after the first failure; doubled, with jitter.")
    retry_max_s: float = setting(60.0, "The longest wait between two tries.")
    control_interval_s: float = setting(2.0, "How often a server's /metrics are read.")
    stop_grace_s: float = setting(
        5.0, "After the first Ctrl-C, wait so long for answers that are about to arrive."
    )
    reasoning: Literal["any", "required", "drop"] = setting(
        "any",
        "Reasoning text: kept if there is some, required (others are rejected), or dropped. The "
        "token ids always hold it.",
    )
    truncated: Literal["keep", "reject"] = setting(
        "keep", "What to do with completions that were cut at max_completion_tokens."
    )
    min_completion_tokens: int = setting(1, "Shorter completions are rejected.")
    max_repetition: float = setting(
        0.9,
        "Reject a completion when more than this share of its last 8-grams are repeats. 1 is off.",
    )
    gate: str | None = setting(
        None,
        'A check of your own, "module:function": called with completion and prompt, returns a '
        "reason to reject or None.",
    )

    def __post_init__(self) -> None:
        positive = (
            "max_completion_tokens",
            "max_concurrency",
            "tries",
            "deadline_margin",
            "control_interval_s",
            "watchdog_s",
            "lost_s",
            "give_up_s",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0, not {getattr(self, name)}")
        for name in ("timeout_s", "max_in_flight_tokens", "top_k"):
            value = getattr(self, name)
            if value is not None and value <= 0 and not (name == "top_k" and value == -1):
                raise ValueError(f"{name}: must be above 0, not {value}")
        not_negative = (
            "min_deadline_s",
            "timeout_passes",
            "stop_after_bad",
            "retry_base_s",
            "retry_max_s",
            "stop_grace_s",
            "min_completion_tokens",
        )
        for name in not_negative:
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative, not {getattr(self, name)}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature: must not be negative, not {self.temperature}")
        for name in ("top_p", "min_p", "max_repetition"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}: must lie between 0 and 1, not {value}")
        if self.deadline_margin < 1:
            raise ValueError(f"deadline_margin: must be at least 1, not {self.deadline_margin}")
        for name in ("concurrency", "max_concurrency"):
            value = getattr(self, name)
            if isinstance(value, int) and not 1 <= value <= MAX_CONCURRENCY:
                raise ValueError(f"{name}: must be 1 to {MAX_CONCURRENCY}, not {value}")
        if self.gate is not None and not all(self.gate.partition(":")):
            raise ValueError(f'gate: expected "module:function", not {self.gate!r}')

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that are sent; what is unset is left to the server."""
        values = {name: getattr(self, name) for name in SAMPLING}
        return {name: value for name, value in values.items() if value is not None}

    def fingerprint(self, model: str, probe: str) -> dict[str, Any]:
        """What makes two completions of one prompt the same kind of sample."""
        return {
            "model": model,
            "probe_prompt": probe if self.check_template else "not checked",
            **{name: getattr(self, name) for name in SAMPLING},
            "max_completion_tokens": self.max_completion_tokens,
        }
