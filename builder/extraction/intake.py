"""From a staged file to an encoded payload: the work of one thread on one sample.

Reads, checks and encodes a part of the sample at a time, so that memory does not grow with its
length. Which file, and what becomes of the result, is left to `extract`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftmill.builder.extraction.precision import Precision
from draftmill.builder.extraction.staging import StagedFile, Staging
from draftmill.builder.extraction.validate import StatesCheck, check_shape, check_token_ids
from draftmill.manifests.codec.block import OutOfRangeError, Plane
from draftmill.manifests.codec.codec import encode_states
from draftmill.manifests.codec.names import BLOCK_TOKENS, worst_case_bytes
from draftmill.manifests.codec.scratch import scratch
from draftmill.manifests.errors import RejectedError, TransientError
from draftmill.manifests.types import StatesPayload, StatesTLH, TokenIds

_PART_BYTES = 16 << 20
_MAGNITUDE = np.uint16(0x7FFF)


class LengthMismatchError(TransientError):
    """The server computed states for another number of tokens than it was sent."""


class Rooms:
    """Memory of payloads that are committed, for the next ones: fresh pages are slow. Thread-safe.

    Keeps at most `most` pieces; a sample that is given up may keep its own for ever.
    """

    def __init__(self, most: int = 24) -> None:
        self._most = most
        self._free: list[Plane] = []

    def take(self, num_bytes: int) -> Plane:
        """A piece of that size or more."""
        try:
            room = self._free.pop()
        except IndexError:
            return np.empty(num_bytes, np.uint8)
        return room if room.size >= num_bytes else np.empty(num_bytes, np.uint8)

    def give_back(self, rooms: Sequence[Plane]) -> None:
        """Nobody reads the payloads in these any more."""
        self._free += rooms[: max(0, self._most - len(self._free))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What `take_in` made of a file. `warning` says how its numbers are odd, if they are."""

    payload: StatesPayload
    warning: str | None
    rooms: Sequence[Plane]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """What hidden states of this dataset look like: ids of the layers in order, and H."""

    layer_ids: tuple[int, ...]
    hidden_size: int

    def raw_bytes(self, num_tokens: int) -> int:
        """bf16 states of so many tokens."""
        return num_tokens * len(self.layer_ids) * self.hidden_size * 2


def take_in(
    staging: Staging,
    name: str,
    sent: TokenIds,
    layers: Layers,
    codec: str,
    digest: str,
    rooms: Rooms | None = None,
    precision: Precision | None = None,
) -> Taken:
    """Read, check and encode one staged file. The payload lies in memory of `rooms`.

    Raises RejectedError for what must not be stored, TransientError for what may be right next
    time. Runs without the GIL for the most part.
    """
    try:
        staged = staging.open(name)
    except FileNotFoundError:
        raise TransientError(f"{name} went away before it was read") from None
    with staged:
        check_claims(staged, sent, layers)
        blocks: list[memoryview] = []
        used: list[Plane] = []
        rooms = rooms or Rooms()
        check = StatesCheck(sent, layers.layer_ids, layers.hidden_size)
        shape = (len(layers.layer_ids), layers.hidden_size)
        part_tokens = BLOCK_TOKENS * max(1, _PART_BYTES // layers.raw_bytes(BLOCK_TOKENS))
        room_bytes = worst_case_bytes(part_tokens, *shape, codec)
        for first in range(0, len(sent), part_tokens):
            part_TLH = scratch(
                "intake.part", (min(part_tokens, len(sent) - first), *shape), np.uint16
            )
            staged.read_into(part_TLH, first)
            check.update(part_TLH)
            # only what fills most of it: few small samples would hold much memory
            room = rooms.take(room_bytes) if 2 * len(part_TLH) >= part_tokens else None
            blocks.extend(_encoded(part_TLH, codec, first, layers, room))
            if room is not None:
                used.append(room)
            if first == 0 and precision is not None and precision.is_wanted():
                precision.measure(part_TLH[:BLOCK_TOKENS], blocks[0])
        warning = check.finish()
    payload = StatesPayload(
        codec=codec,
        shape=(len(sent), *shape),
        blocks=blocks,
        digest=digest,
        target_layer_ids=layers.layer_ids,
    )
    return Taken(payload=payload, warning=warning, rooms=used)


def check_claims(staged: StagedFile, sent: TokenIds, layers: Layers) -> None:
    """Raises RejectedError or LengthMismatchError for a file about other tokens or layers."""
    num_layers = len(layers.layer_ids)
    check_shape(staged.shape, staged.dtype, num_layers=num_layers, hidden_size=layers.hidden_size)
    if staged.layer_ids is not None and staged.layer_ids != layers.layer_ids:
        raise RejectedError(
            f"the server extracts layers {list(staged.layer_ids)}, this dataset has "
            f"{list(layers.layer_ids)}"
        )
    for what, length in (("states", staged.shape[0]), ("token ids", staged.num_token_ids)):
        if length != len(sent):
            raise LengthMismatchError(
                f"{what} for {length} tokens came back, {len(sent)} were sent: start the "
                "extraction server with --no-enable-prefix-caching"
            )
    check_token_ids(sent, staged.token_ids())


def _encoded(
    part_TLH: StatesTLH, codec: str, first: int, layers: Layers, room: Plane | None
) -> Sequence[memoryview]:
    try:
        return encode_states(part_TLH, codec, room=room)
    except OutOfRangeError as error:
        # what a codec cannot hold is too large for it
        largest = np.argmax(part_TLH & _MAGNITUDE)
        t, layer, _ = (int(each) for each in np.unravel_index(largest, part_TLH.shape))
        raise RejectedError(
            f"{codec} cannot hold these states: {error}",
            layer=layers.layer_ids[layer],
            position=first + t,
        ) from error
