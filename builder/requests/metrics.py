"""What a vLLM server says about its load on /metrics. Pure parsing of the Prometheus text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Newest name first: the KV gauge was renamed.
_GAUGES = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total",),
    "generated_tokens": ("vllm:generation_tokens_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
}
_LINE = re.compile(r"^(vllm:[a-z_]+)(?:\{([^}]*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class ServerLoad:
    """One reading of /metrics, summed over the engines of the server (KV use: the fullest)."""

    running: int
    waiting: int
    kv_usage: float
    preemptions: float
    generated_tokens: float
    prompt_tokens: float
    kv_tokens: int | None
    kv_tokens_of_one: int | None  # what a single request can have: the smallest engine's

    @property
    def requests(self) -> int:
        return self.running + self.waiting


def parse_metrics(text: str) -> ServerLoad | None:
    """The load in a Prometheus text; None if it is not vLLM's or lacks the main counters."""
    values: dict[str, list[float]] = {}
    kv_tokens: list[int] = []
    for name, labels, number in _LINE.findall(text):
        if name == "vllm:cache_config_info":
            found = dict(_LABEL.findall(labels))
            try:
                kv_tokens.append(int(found["num_gpu_blocks"]) * int(found["block_size"]))
            except (KeyError, ValueError):
                continue  # not known before the first request in some releases
            continue
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):  # the format allows NaN and +Inf, which tell nothing
            values.setdefault(name, []).append(value)
    found_values: dict[str, float] = {}
    for field, names in _GAUGES.items():
        readings = next((values[name] for name in names if name in values), None)
        if readings is None:
            if field in ("running", "waiting", "generated_tokens"):
                return None
            readings = [0.0]
        found_values[field] = max(readings) if field == "kv_usage" else sum(readings)
    return ServerLoad(
        running=int(found_values["running"]),
        waiting=int(found_values["waiting"]),
        kv_usage=found_values["kv_usage"],
        preemptions=found_values["preemptions"],
        generated_tokens=found_values["generated_tokens"],
        prompt_tokens=found_values["prompt_tokens"],
        kv_tokens=sum(kv_tokens) or None,
        kv_tokens_of_one=min(kv_tokens, default=0) or None,
    )
