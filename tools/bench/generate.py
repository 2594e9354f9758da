"""How fast `draftmill generate` takes completions in, and at what price, from an instant server.

The command itself is run, in a process of its own: its CPU seconds, its memory and what `status`
answers meanwhile are read from outside. Beside it the bare openai client asks the same server.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DraftmillError
from draftmill.manifests.types import Prompt
from draftmill.tools.bench import bare_client
from draftmill.tools.bench.fake_server import MODEL, FakeServer, fake_server
from draftmill.tools.bench.figures import Figure, figure
from draftmill.tools.bench.process import cpu_s_of, rss_mb

_POLL_S = 0.05
_CONFIG = """[target]
model = "{model}"
hidden_size = 64
num_layers = 8
vocab_size = 264
target_layer_ids = [2, 4, 5]

[generate]
max_completion_tokens = 1000
concurrency = {concurrency}
"""


@dataclass(frozen=True, kw_only=True)
class ThroughputBench:
    """What to ask. Answers have about `tokens` tokens and come at once."""

    prompts: int = 20_000
    concurrency: int = 64
    tokens: int = 400
    client_requests: int = 2_000
    status_every_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("prompts", "concurrency", "tokens", "client_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How far the run was when it last said so, and what it had taken until then."""

    at_s: float
    done: int
    cpu_s: float
    rss_mb: float


def bench_throughput(bench: ThroughputBench) -> list[Figure]:
    """Completions a second, CPU, memory and the answers of `status`, on a new dataset."""
    speed = {"median_tokens": bench.tokens, "sigma": 0.3}
    with tempfile.TemporaryDirectory(prefix="draftmill-bench-") as folder:
        text = _CONFIG.format(model=MODEL, concurrency=bench.concurrency)
        dataset = Dataset.create(Path(folder) / "dataset", text)
        with dataset.writer() as writer:
            writer.add_prompts(prompts(bench.prompts))
        with fake_server(**speed) as server:
            client = _bare(server, bench)
            samples, statuses, peak_mb = _run(dataset, server, bench.status_every_s)
        with dataset.reader() as reader:
            stored = int(reader.sql("SELECT count(*) AS n FROM payloads").to_pylist()[0]["n"])
    if stored != bench.prompts:
        raise DraftmillError(f"{stored:,} of {bench.prompts:,} completions are in the dataset")
    return _figures(samples, statuses, peak_mb, client)


def prompts(count: int) -> Iterator[Prompt]:
    """Questions of about 350 bytes, all different."""
    filler = "lorem ipsum dolor sit amet " * 12
    for number in range(count):
        message = {"content": f"question {number} about {filler}", "role": "user"}
        text = json.dumps({"messages": [message]}, separators=(",", ":"))
        yield Prompt(
            hash=hashlib.md5(text.encode()).hexdigest(),
            conversation=text,
            source="bench",
            row=number,
            conversation_id=str(number),
        )


def _bare(server: FakeServer, bench: ThroughputBench) -> dict[str, float]:
    asked = [str(bench.client_requests), str(bench.concurrency)]
    command = [sys.executable, bare_client.__file__, server.url, MODEL, *asked]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(said)
    return found


def _run(
    dataset: Dataset, server: FakeServer, status_every_s: float
) -> tuple[list[Sample], list[float], float]:
    """Samples, seconds that `status` took, and the most memory in MB, of one run to its end."""
    command = [sys.executable, "-m", "draftmill.tools", "generate", str(dataset.path)]
    samples: list[Sample] = []
    statuses: list[float] = []
    child = subprocess.Popen([*command, "--url", server.url], stderr=subprocess.DEVNULL)
    status_at = time.monotonic() + status_every_s
    while True:
        pid, status, used = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        document = _document(dataset)
        if document["time"] != (samples[-1].at_s if samples else 0.0) and document.get("running"):
            cpu_s, done = cpu_s_of(child.pid), int(document["running"]["done"])
            samples.append(
                Sample(at_s=document["time"], done=done, cpu_s=cpu_s, rss_mb=rss_mb(child.pid))
            )
        if time.monotonic() >= status_at:
            statuses.append(_status_s(dataset))
            status_at = time.monotonic() + status_every_s
        time.sleep(_POLL_S)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise DraftmillError(f"the run ended with exit code {child.returncode}")
    return samples, statuses, used.ru_maxrss / 1e3


def _document(dataset: Dataset) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dataset.status_path.read_text())
    return found


def _status_s(dataset: Dataset) -> float:
    command = [sys.executable, "-m", "draftmill.tools", "status", str(dataset.path), "--json"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _figures(
    samples: list[Sample], statuses: list[float], peak_mb: float, client: dict[str, float]
) -> list[Figure]:
    if len(samples) < 3:
        raise DraftmillError("the run was over too soon to be measured: take more prompts")
    first, last = samples[0], samples[-1]
    half = min(samples, key=lambda each: abs(each.done - last.done / 2))
    done = last.done - first.done
    cpu_ms = 1e3 * (last.cpu_s - first.cpu_s) / done
    found = [
        figure("generate.completions_per_s", done / (last.at_s - first.at_s), "1/s"),
        figure("client.cpu_ms", client["client_ms"], "ms"),
        figure("transport.cpu_ms", client["transport_ms"], "ms"),
        figure("generate.cpu_ms", cpu_ms, "ms", baseline="client.cpu_ms", base=client["client_ms"]),
        figure("generate.cpu_ms_over_client", cpu_ms - client["client_ms"], "ms"),
        figure("generate.cpu_ms_over_transport", cpu_ms - client["transport_ms"], "ms"),
        figure("generate.peak_rss_mb", peak_mb, "MB"),
        figure("generate.second_half_rss_mb", last.rss_mb - half.rss_mb, "MB"),
    ]
    if statuses:
        found.append(figure("status.median_s", median(statuses), "s"))
        found.append(figure("status.worst_s", max(statuses), "s"))
    return found
