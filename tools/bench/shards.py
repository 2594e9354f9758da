"""The codecs of hidden states side by side: size, speed, error. Behind `draftmill bench shards`.

Owns how it is measured; states are `saved_states`'s, the arithmetic of errors `codec_error`'s, what
stands beside the codecs `peer_process`'s. Every figure of a run comes from the same states, one
round after the other: the machine's other load moves all of them, and a ratio less than its parts.

Legend: T tokens, L layers, H hidden size; states are bf16 bit patterns, uint16 [T, L, H].
"""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from draftmill.manifests import codec_error
from draftmill.manifests.codec import codec
from draftmill.manifests.target.target import TargetModel
from draftmill.tools.bench.figures import Figure
from draftmill.tools.bench.peer_process import Rival, rivals_in
from draftmill.tools.bench.reads import bench_reads
from draftmill.tools.bench.saved_states import Words, states_of_bench

BASELINE = "zstd-1"
FP8 = "fp8-e4m3"
RAW = "raw"
SAMPLE_TOKENS = 2048
_MIN_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class ShardsBench:
    """What to measure. `rounds` timings of each operation, taken in turn; the median counts."""

    codecs: tuple[str, ...] = codec.CODECS
    rounds: int = 7
    threads: int = 2
    kl_tokens: int = 512

    def __post_init__(self) -> None:
        for name in self.codecs:
            codec.parse_codec(name)
        if self.rounds < _MIN_ROUNDS:
            raise ValueError(f"rounds: at least {_MIN_ROUNDS}, not {self.rounds}")
        if self.threads < 1:
            raise ValueError(f"threads: at least 1, not {self.threads}")


def run(
    states_file: Path | None = None,
    *,
    rounds: int = 7,
    codecs: Sequence[str] = codec.CODECS,
    model_folder: Path | None = None,
    peers: Path | None = None,
) -> list[Figure]:
    """The bench on the states in a file or, without one, on those of the embedded model.

    `model_folder` is the model that the states in the file came from: lossy codecs then get their
    KL through its lm_head. `peers` is a Python that has the peers.
    """
    states, embedded = states_of_bench(states_file)
    model_folder = model_folder or embedded
    target = TargetModel.from_folder(model_folder) if model_folder else None
    settings = ShardsBench(codecs=tuple(codecs), rounds=rounds)
    with ExitStack() as stack:
        rivals = []
        if peers is not None:
            rivals = stack.enter_context(rivals_in(peers, states, SAMPLE_TOKENS))
        figures = bench_shards(states, settings, target=target, rivals=rivals)
    return figures + bench_reads(states, Path(tempfile.gettempdir()))


def bench_shards(
    states_TLH: Words,
    settings: ShardsBench | None = None,
    *,
    target: TargetModel | None = None,
    rivals: Sequence[Rival] = (),
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> list[Figure]:
    """Measure every codec, plain zstd-1 and the rivals on these states, in turn.

    With `target`, whose last layer must be the states' last, lossy codecs and fp8 also get their
    KL through its lm_head. `on_round(done, rounds)` is called as the timing goes on.
    """
    settings = settings or ShardsBench()
    samples = [
        np.ascontiguousarray(states_TLH[start : start + SAMPLE_TOKENS])
        for start in range(0, len(states_TLH), SAMPLE_TOKENS)
    ]
    contenders: list[_Contender] = [_PlainZstd(samples)]
    contenders += [_Codec(name, samples) for name in settings.codecs]
    figures = _ratios([*contenders, *rivals], states_TLH.nbytes)
    figures += _speeds(contenders, rivals, states_TLH.nbytes, settings, on_round)
    figures += _errors(contenders, states_TLH, settings, target)
    return figures


class _Contender(ABC):
    """One way to store the samples: what is stored, and operations on sample i, any thread."""

    name: str

    def __init__(self, samples: Sequence[Words]) -> None:
        self.samples = samples
        self.out = [np.zeros_like(sample) for sample in samples]
        self.stored: list[Sequence[bytes | memoryview]] = [[] for _ in samples]
        for index in range(len(samples)):
            self.encode(index)

    @abstractmethod
    def encode(self, index: int) -> None:
        """Encode sample `index` into `stored`."""

    @abstractmethod
    def decode(self, index: int) -> None:
        """Decode `stored` of sample `index` into `out`."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(len(block) for blocks in self.stored for block in blocks)


class _PlainZstd(_Contender):
    """Each block of words as one zstd frame of level 1, read into a buffer that is kept."""

    name = BASELINE

    def encode(self, index: int) -> None:
        self.stored[index] = [
            codec.compress(block.reshape(-1).view(np.uint8), level=1)
            for block in _blocks(self.samples[index])
        ]

    def decode(self, index: int) -> None:
        for frame, block in zip(self.stored[index], _blocks(self.out[index]), strict=True):
            codec.decompress_into(frame, block.reshape(-1).view(np.uint8))


class _Codec(_Contender):
    def __init__(self, name: str, samples: Sequence[Words]) -> None:
        self.name = name
        self._rooms = []
        for sample in samples:
            tokens, layers, hidden = sample.shape
            size = codec.worst_case_bytes(tokens, layers, hidden, name)
            self._rooms.append(np.zeros(size, np.uint8))
        super().__init__(samples)
        # buffers for a whole sample, as a loader has them, and for the last one's short block
        self._planes = {
            (place, block.shape): [
                np.zeros(spec.shape, np.uint8) for spec in codec.plane_specs(name, block.shape)
            ]
            for sample in (samples[0], samples[-1])
            for place, block in enumerate(_blocks(sample))
            if name != RAW
        }

    def encode(self, index: int) -> None:
        # into memory of the caller that is used again, as the extract stage does
        self.stored[index] = codec.encode_states(
            self.samples[index], self.name, room=self._rooms[index]
        )

    def decode(self, index: int) -> None:
        codec.decode_states(self.name, self.stored[index], self.out[index])

    def decode_planes(self, index: int) -> None:
        """Decode to planes for a device that does the rest; what is not coded stays in place."""
        self._to_planes(index, copy=False)

    def copy_planes(self, index: int) -> None:
        """The same with every plane in the caller's buffers."""
        self._to_planes(index, copy=True)

    def _to_planes(self, index: int, *, copy: bool) -> None:
        for place, block in enumerate(_blocks(self.samples[index])):
            planes = self._planes[place, block.shape]
            codec.decode_planes(self.name, self.stored[index][place], planes, copy=copy)


def _blocks(sample: Words) -> list[Words]:
    return [
        sample[start : start + codec.BLOCK_TOKENS]
        for start in range(0, len(sample), codec.BLOCK_TOKENS)
    ]


def _figure(
    name: str, what: str, value: float, unit: str, base: tuple[str, float] | None
) -> Figure:
    return Figure(
        name=f"{name}.{what}",
        value=value,
        unit=unit,
        baseline=base[0] if base else None,
        ratio=value / base[1] if base and base[1] else None,
    )


def _ratios(contenders: Sequence[_Contender | Rival], raw_bytes: int) -> list[Figure]:
    plain = raw_bytes / contenders[0].stored_bytes
    return [
        _figure(item.name, "ratio", raw_bytes / item.stored_bytes, "x", (BASELINE, plain))
        for item in contenders
    ]


def _speeds(
    contenders: Sequence[_Contender],
    rivals: Sequence[Rival],
    raw_bytes: int,
    settings: ShardsBench,
    on_round: Callable[[int, int], None],
) -> list[Figure]:
    """Medians of MB of raw states a second, on one thread and on several."""
    seconds: dict[tuple[str, str], list[float]] = {}
    with ThreadPoolExecutor(settings.threads) as pool:
        work = _timings(contenders, rivals, pool if settings.threads > 1 else None)
        for done in range(settings.rounds):
            for key, timing in work.items():
                seconds.setdefault(key, []).append(timing())
            on_round(done + 1, settings.rounds)
    speed = {key: raw_bytes / 1e6 / median(times) for key, times in seconds.items()}
    figures = []
    for (name, what), value in speed.items():
        if "threads" in what:
            one = what.replace("_threads", "")
            figures.append(_figure(name, what, value, "MB/s", (f"{name}.{one}", speed[name, one])))
            continue
        plain = what.partition("_")[0] + "_mb_s"
        figures.append(_figure(name, what, value, "MB/s", (BASELINE, speed[BASELINE, plain])))
    return figures


def _timings(
    contenders: Sequence[_Contender], rivals: Sequence[Rival], pool: ThreadPoolExecutor | None
) -> dict[tuple[str, str], Callable[[], float]]:
    """What is measured once in each round, by name and figure; each gives its seconds."""
    indices = range(len(contenders[0].samples))

    def timing(
        operation: Callable[[int], None], mapped: Callable[..., Iterable[None]] = map
    ) -> Callable[[], float]:
        def seconds() -> float:
            start = time.perf_counter()
            for _ in mapped(operation, indices):
                pass
            return time.perf_counter() - start

        return seconds

    work: dict[tuple[str, str], Callable[[], float]] = {}
    for item in contenders:
        work[item.name, "encode_mb_s"] = timing(item.encode)
        work[item.name, "decode_mb_s"] = timing(item.decode)
        if isinstance(item, _Codec) and item.name != RAW:
            work[item.name, "decode_planes_mb_s"] = timing(item.decode_planes)
            work[item.name, "decode_planes_copied_mb_s"] = timing(item.copy_planes)
        if pool is not None and item.name != RAW:
            work[item.name, "encode_threads_mb_s"] = timing(item.encode, pool.map)
            work[item.name, "decode_threads_mb_s"] = timing(item.decode, pool.map)
    for rival in rivals:
        for operation in ("encode", "decode"):
            work[rival.name, f"{operation}_mb_s"] = partial(rival.seconds, operation)
    return work


def _errors(
    contenders: Sequence[_Contender],
    states_TLH: Words,
    settings: ShardsBench,
    target: TargetModel | None,
) -> list[Figure]:
    """Errors of the lossy codecs, against fp8 with one scale per token and layer."""
    lossy = [item for item in contenders if isinstance(item, _Codec) and not _lossless(item.name)]
    if not lossy:
        return []
    stored, decoded = codec_error.fp8_round_trip(states_TLH)
    base = _error_values(states_TLH, decoded, settings, target)
    coded = sum(
        len(codec.code_plane(np.ascontiguousarray(stored[start : start + codec.BLOCK_TOKENS, i])))
        for start in range(0, len(stored), codec.BLOCK_TOKENS)
        for i in range(stored.shape[1])
    )
    figures = [_figure(FP8, "ratio", states_TLH.nbytes / coded, "x", None)]
    figures += [_figure(FP8, what, value, unit, None) for what, (value, unit) in base.items()]
    for item in lossy:
        for index in range(len(item.samples)):
            item.decode(index)
        values = _error_values(states_TLH, np.concatenate(item.out), settings, target)
        figures += [
            _figure(item.name, what, value, unit, (FP8, base[what][0]))
            for what, (value, unit) in values.items()
        ]
    return figures


def _lossless(name: str) -> bool:
    return name == BASELINE or codec.is_lossless(name)


def _error_values(
    exact_TLH: Words, decoded_TLH: Words, settings: ShardsBench, target: TargetModel | None
) -> dict[str, tuple[float, str]]:
    values: dict[str, tuple[float, str]] = {}
    by_layer = codec_error.relative_error_by_layer(exact_TLH, decoded_TLH)
    by_channel = codec_error.channel_error_by_layer(exact_TLH, decoded_TLH)
    for layer, (whole, channel) in enumerate(zip(by_layer, by_channel, strict=True)):
        values[f"error.layer_{layer}"] = (whole, "relative")
        values[f"channel_error.layer_{layer}"] = (channel, "relative")
    if target is not None:
        step = max(1, len(exact_TLH) // settings.kl_tokens)
        kl = codec_error.kl_through_lm_head(target, exact_TLH[::step, -1], decoded_TLH[::step, -1])
        values["kl"] = (kl, "nats")
    return values
