"""Now and then: what the lossy codec of a run does to real states of this target.

Owns which samples are measured and the sums of this run; the arithmetic is `codec_error`'s, keeping
it the writer's. Lossless codecs are never measured: they are exact.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from draftmill.builder.budget import Budget
from draftmill.builder.progress import Progress
from draftmill.builder.publish import Publisher, PublishingWriter
from draftmill.manifests.codec.codec import decode_block, is_lossless
from draftmill.manifests.codec_error import ErrorSums, error_sums
from draftmill.manifests.errors import ConfigError
from draftmill.manifests.target.target import TargetModel
from draftmill.manifests.types import Result, StatesTLH

EVERY_SAMPLES = 256
# Each reads the whole lm_head once: enough for a mean, little beside a sample's own work.
KL_TOKENS = 16

log = logging.getLogger(__name__)


class Keeper(PublishingWriter, Protocol):
    """The part of a dataset writer that keeps what was measured."""

    def add_codec_error(self, codec: str, found: ErrorSums) -> None: ...


class Precision:
    """Measures the first block of the first and of every 256th sample. Thread-safe.

    `target` gives the KL through its norm and lm_head; without it, or where its weights cannot be
    used, only the error by layer is measured.
    """

    def __init__(
        self, codec: str, layer_ids: tuple[int, ...], target: TargetModel | None = None
    ) -> None:
        self.codec = codec
        self._layer_ids = layer_ids
        self._target = target
        self._lossy = not is_lossless(codec)
        self._seen = 0
        self._sums: ErrorSums | None = None
        self._lock = threading.Lock()

    def is_wanted(self) -> bool:
        """Whether the sample at hand is one to measure; counts it."""
        with self._lock:
            self._seen += 1
            return self._lossy and self._seen % EVERY_SAMPLES == 1

    def measure(self, states_TLH: StatesTLH, payload: bytes | memoryview) -> None:
        """Compare one block, uint16 [T, L, H] and finite, with what its payload decodes to."""
        decoded = np.empty(states_TLH.shape, np.uint16)
        decode_block(self.codec, payload, decoded)
        exact = np.ascontiguousarray(states_TLH)
        try:
            found = self._compare(exact, decoded, self._target)
        except ConfigError as error:
            log.warning("KL through the lm_head is not measured: %s", error)
            self._target = None
            found = self._compare(exact, decoded, None)
        with self._lock:
            self._sums = found if self._sums is None else self._sums + found

    def _compare(
        self, exact: StatesTLH, decoded: StatesTLH, target: TargetModel | None
    ) -> ErrorSums:
        return error_sums(exact, decoded, self._layer_ids, target=target, kl_tokens=KL_TOKENS)

    def take(self) -> ErrorSums | None:
        """The sums since the last call; None if there is nothing new."""
        with self._lock:
            found, self._sums = self._sums, None
        return found


class MeasuringPublisher(Publisher):
    """Also keeps what was measured of a lossy codec since the last commit."""

    def __init__(
        self, writer: Keeper, progress: Progress, budget: Budget, precision: Precision
    ) -> None:
        super().__init__(writer, progress, lambda: budget.used_bytes)
        self._keeper = writer
        self._precision = precision

    def commit(self, results: Sequence[Result], /) -> None:
        """Make results durable, then the measurements."""
        super().commit(results)
        if (found := self._precision.take()) is not None:
            self._keeper.add_codec_error(self._precision.codec, found)
