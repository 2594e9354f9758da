"""The extract stage against what its codec alone can do. Behind `draftmill bench extract`.

Owns samples, folders and the timing. The server is `prepared_server`'s and hands over files that
are there already, so that reading, checking, compressing, storing and committing are what is
measured. Every round times the stage and then the codec alone, on the same states.

Legend: T tokens, L layers, H hidden size; states are bf16 bit patterns, uint16 [T, L, H].
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.builder.budget import Budget
from draftmill.builder.extraction.settings import ExtractSettings
from draftmill.builder.extraction.stage import Layers, extract
from draftmill.builder.extraction.validate import StatesCheck
from draftmill.manifests.codec import codec
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ServerError
from draftmill.manifests.types import Attempt, Completion, Prompt, Result, StatesTLH
from draftmill.tools.bench.figures import Figure
from draftmill.tools.bench.process import ram_disk
from draftmill.tools.bench.saved_states import states_of_bench

MODEL = "bench/prepared"
_PROMPT_TOKENS = 16
_IDS = 30_000


@dataclass(frozen=True, kw_only=True)
class ExtractBench:
    """What to measure. `folder` is where the datasets go, `memory` a folder on a RAM disk."""

    rounds: int = 5
    samples: int = 96
    sample_tokens: int = 4096
    codec: str = "em-zfast"
    threads: int = 2
    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    memory: Path = field(default_factory=ram_disk)

    def __post_init__(self) -> None:
        codec.parse_codec(self.codec)
        for name in ("rounds", "samples", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1, not {getattr(self, name)}")
        if self.sample_tokens <= _PROMPT_TOKENS:
            raise ValueError(f"sample_tokens: above {_PROMPT_TOKENS}, not {self.sample_tokens}")


def run(states_file: Path | None = None, **settings: Any) -> list[Figure]:
    """The bench on the states in a file or, without one, on those of the embedded model."""
    return bench_extract(states_of_bench(states_file)[0], ExtractBench(**settings))


def bench_extract(
    states_TLH: StatesTLH,
    settings: ExtractBench | None = None,
    *,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> list[Figure]:
    """MB of raw states a second through the stage, and of its parts alone."""
    settings = settings or ExtractBench()
    parts = _samples(states_TLH, settings.sample_tokens)
    layers = Layers(
        layer_ids=tuple(range(1, 1 + states_TLH.shape[1])), hidden_size=states_TLH.shape[2]
    )
    seconds: dict[str, list[float]] = {"extract": [], "encode_threads": [], "check": []}
    with _folders(settings) as (work, memory):
        prepared, staging = memory / "prepared", memory / "staging"
        prepared.mkdir()
        staging.mkdir()
        ids = [_write(prepared, number, part) for number, part in enumerate(parts)]
        order = [number % len(parts) for number in range(1, 1 + settings.samples)]
        template = _dataset(work / "template", [ids[each] for each in order])
        raw_bytes = sum(parts[each].nbytes for each in order)
        with _server(prepared, staging) as url, ThreadPoolExecutor(settings.threads) as pool:
            for done in range(settings.rounds):
                folder = work / f"round-{done}"
                shutil.copytree(template.path, folder)
                seconds["extract"].append(_extract(folder, url, staging, layers, settings))
                shutil.rmtree(folder)
                seconds["encode_threads"].append(_encode(pool, parts, order, settings.codec))
                seconds["check"].append(_check(parts, ids, order, layers))
                on_round(done + 1, settings.rounds)
    return _figures(raw_bytes, seconds, settings.codec)


def _figures(raw_bytes: int, seconds: dict[str, list[float]], name: str) -> list[Figure]:
    speed = {key: raw_bytes / 1e6 / median(times) for key, times in seconds.items()}
    # the machine's other load is the same within a round: the ratio is that of each round
    ratios = [
        alone / stage
        for alone, stage in zip(seconds["encode_threads"], seconds["extract"], strict=True)
    ]
    alone = f"{name}.encode_threads_mb_s"
    unit = "MB/s"
    return [
        Figure(
            name="extract.mb_s",
            value=speed["extract"],
            unit=unit,
            baseline=alone,
            ratio=median(ratios),
        ),
        Figure(name=alone, value=speed["encode_threads"], unit=unit, baseline=None, ratio=None),
        Figure(name="check.mb_s", value=speed["check"], unit=unit, baseline=None, ratio=None),
    ]


# ---- what is prepared ---------------------------------------------------------------------------


@contextmanager
def _folders(settings: ExtractBench) -> Iterator[tuple[Path, Path]]:
    with (
        tempfile.TemporaryDirectory(prefix="draftmill-bench-", dir=settings.folder) as work,
        tempfile.TemporaryDirectory(prefix="draftmill-bench-", dir=settings.memory) as memory,
    ):
        yield Path(work), Path(memory)


def _samples(states_TLH: StatesTLH, sample_tokens: int) -> list[StatesTLH]:
    """The states in pieces of one sample each; what is left over is not used, if there is more."""
    whole = max(sample_tokens, len(states_TLH) // sample_tokens * sample_tokens)
    return [
        np.ascontiguousarray(states_TLH[start : start + sample_tokens])
        for start in range(0, min(whole, len(states_TLH)), sample_tokens)
    ]


def _write(folder: Path, number: int, states: StatesTLH) -> NDArray[np.int32]:
    """One file as the connector writes it; returns the token ids in it."""
    ids = np.random.default_rng(number).integers(0, _IDS, len(states)).astype(np.int32)
    wide = ids.astype(np.int64)
    header = {
        "hidden_states": {
            "dtype": "BF16",
            "shape": list(states.shape),
            "data_offsets": [0, states.nbytes],
        },
        "token_ids": {
            "dtype": "I64",
            "shape": [len(ids)],
            "data_offsets": [states.nbytes, states.nbytes + wide.nbytes],
        },
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / f"{number:06d}.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(states.data)
        file.write(wide.data)
    return ids


def _dataset(path: Path, ids: Sequence[NDArray[np.int32]]) -> Dataset:
    """A dataset of generated samples with these token ids."""
    dataset = Dataset.create(path, "# made by draftmill bench extract\n")
    with dataset.writer() as writer:
        writer.add_prompts(
            Prompt(
                hash=f"{row:032x}",
                conversation=json.dumps({"messages": [{"role": "user", "content": str(row)}]}),
                source="bench",
                row=row,
                conversation_id=str(row),
            )
            for row in range(len(ids))
        )
        writer.commit(
            [
                Result(
                    attempt=Attempt(id=row.id, stage="generate", attempt=1, outcome="generated"),
                    hash=row.hash,
                    completion=Completion(
                        prompt_token_ids=each[:_PROMPT_TOKENS],
                        completion_token_ids=each[_PROMPT_TOKENS:],
                        content="",
                        reasoning=None,
                        finish_reason="stop",
                    ),
                )
                for row, each in zip(writer.pending(0, len(ids)), ids, strict=True)
            ]
        )
    return dataset


@contextmanager
def _server(prepared: Path, staging: Path) -> Iterator[str]:
    module = "draftmill.tools.bench.prepared_server"
    command = [sys.executable, "-m", module, str(prepared), str(staging), MODEL]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        port = process.stdout.readline().strip()
        if not port:
            raise ServerError(f"{module} did not start (exit code {process.wait()})")
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.stdin.close()
            process.terminate()


# ---- what is timed ------------------------------------------------------------------------------


def _extract(
    folder: Path, url: str, staging: Path, layers: Layers, settings: ExtractBench
) -> float:
    chosen = ExtractSettings(
        codec=settings.codec,
        encode_threads=settings.threads,
        max_seq_len=max(8192, settings.sample_tokens),
        concurrency=16,
        max_in_flight_tokens=16 * settings.sample_tokens,
    )
    with Dataset.open(folder).writer() as writer:
        budget = Budget(limit_bytes=None, dataset=folder, staging=staging)
        start = time.perf_counter()
        report = asyncio.run(
            extract(
                writer, chosen, [url], model=MODEL, layers=layers, staging=staging, budget=budget
            )
        )
        seconds = time.perf_counter() - start
    if report.outcomes != {"extracted": settings.samples}:
        raise ServerError(f"the bench's samples became {dict(report.outcomes)}: {report.stopped}")
    return seconds


def _encode(
    pool: ThreadPoolExecutor, parts: Sequence[StatesTLH], order: Sequence[int], name: str
) -> float:
    start = time.perf_counter()
    for _ in pool.map(lambda number: codec.encode_states(parts[number], name), order):
        pass
    return time.perf_counter() - start


def _check(
    parts: Sequence[StatesTLH],
    ids: Sequence[NDArray[np.int32]],
    order: Sequence[int],
    layers: Layers,
) -> float:
    start = time.perf_counter()
    for number in order:
        check = StatesCheck(ids[number], layers.layer_ids, layers.hidden_size)
        check.update(parts[number])
        check.finish()
    return time.perf_counter() - start
