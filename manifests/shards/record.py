"""Self-describing records: what a shard holds for one sample and one attempt at one stage.

A record is a header (magic, lengths, JSON, checksum) followed by its payloads without gaps; the
layout is specified in docs/format.md. Files and offsets are left to `shard`, bytes of payloads to
`codec`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import xxhash

from draftmill.manifests.codec import codec
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.shards import record_fields
from draftmill.manifests.shards.record_fields import whole
from draftmill.manifests.types import Attempt, Completion, Result, Stage, StatesPayload

# The first byte is not ASCII and the last two are CR LF: a text-mode copy breaks it visibly.
MAGIC = b"\x89DMREC\r\n"
_PREFIX = struct.Struct("<8sIIQ")  # magic, JSON length, number of payloads, bytes of all payloads
_CHECK = struct.Struct("<Q")
HEADER_MIN = _PREFIX.size + _CHECK.size
MAX_JSON = 1 << 20
MAX_TEXT = 1 << 28
VERSION = 1
_ATTEMPT_FIELDS = tuple(field.name for field in fields(Attempt))


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """Name, length in bytes and xxh3-64 of one payload of a record."""

    name: str
    length: int
    xxh3: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A record that has no place yet: header fields and payload bytes."""

    id: int
    hash: str
    stage: Stage
    attempt: Attempt
    digest: str
    tokens: int
    raw_bytes: int
    content: dict[str, Any]
    payloads: Sequence[tuple[str, bytes | memoryview]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A record's header as read from a shard. `length` is header and payloads together."""

    shard: int
    offset: int
    header_length: int
    id: int
    hash: str
    stage: Stage
    attempt: Attempt
    digest: str
    tokens: int
    raw_bytes: int
    content: dict[str, Any]
    payloads: tuple[Payload, ...]

    @property
    def length(self) -> int:
        return self.header_length + sum(payload.length for payload in self.payloads)

    @property
    def name(self) -> str:
        """Prefix of this record's tensor names in a sealed shard."""
        return record_name(self.id, self.attempt.attempt)


def record_name(prompt_id: int, attempt: int) -> str:
    """`ID.ATTEMPT`: unique within a shard, because a shard holds one stage."""
    return f"{prompt_id}.{attempt}"


def completion_digest(completion: Completion) -> str:
    """xxh3-128 of the number of prompt tokens (u64) and all token ids (int32), 32 hex digits."""
    state = xxhash.xxh3_128()
    state.update(struct.pack("<Q", len(completion.prompt_token_ids)))
    state.update(np.ascontiguousarray(completion.token_ids, dtype="<i4").tobytes())
    return state.hexdigest()


def settings_tag(values: dict[str, Any]) -> str:
    """xxh3-64 of a stage's settings, 16 hex digits; every record carries it."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def draft(result: Result, fingerprint: str) -> Draft:
    """The record that stores what `result` brought."""
    if result.completion is not None:
        return _completion_draft(result, result.completion, fingerprint)
    if result.states is not None:
        return _states_draft(result, result.states, fingerprint)
    raise ValueError("a result without completion or states has no record")


def _completion_draft(result: Result, completion: Completion, fingerprint: str) -> Draft:
    ids = np.ascontiguousarray(completion.token_ids, dtype="<i4").tobytes()
    text = json.dumps(
        {
            "content": completion.content,
            "reasoning": completion.reasoning,
            "extra": completion.extra,
        },
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode("utf-8", "surrogatepass")
    if len(text) > MAX_TEXT:
        raise ValueError(f"a completion text of {len(text)} bytes is over {MAX_TEXT}")
    return Draft(
        id=result.attempt.id,
        hash=result.hash,
        stage="generate",
        attempt=result.attempt,
        digest=completion_digest(completion),
        tokens=len(completion.prompt_token_ids) + len(completion.completion_token_ids),
        raw_bytes=len(ids) + len(text),
        content={
            "fingerprint": fingerprint,
            "prompt_tokens": len(completion.prompt_token_ids),
            "completion_tokens": len(completion.completion_token_ids),
            "finish_reason": completion.finish_reason,
            "ids_rebuilt": completion.ids_rebuilt,
            "text_bytes": len(text),
        },
        payloads=[("token_ids", codec.compress(ids)), ("text", codec.compress(text))],
    )


def _states_draft(result: Result, states: StatesPayload, fingerprint: str) -> Draft:
    tokens, layers, hidden = states.shape
    return Draft(
        id=result.attempt.id,
        hash=result.hash,
        stage="extract",
        attempt=result.attempt,
        digest=states.digest,
        tokens=tokens,
        raw_bytes=tokens * layers * hidden * 2,
        content={
            "fingerprint": fingerprint,
            "codec": states.codec,
            "dtype": "bfloat16",
            "shape": list(states.shape),
            "block_tokens": codec.BLOCK_TOKENS,
            "layer_ids": list(states.target_layer_ids),
        },
        payloads=[(f"states.{i:04d}", block) for i, block in enumerate(states.blocks)],
    )


def pack(item: Draft, shard: int, offset: int) -> tuple[Record, bytes]:
    """The header of `item` for its place in a shard: parsed form and bytes."""
    payloads = tuple(
        Payload(name=name, length=len(data), xxh3=codec.checksum(data))
        for name, data in item.payloads
    )
    body = json.dumps(
        {
            "version": VERSION,
            # A record knows its place, so a copy of one inside a payload is never taken for one.
            "shard": shard,
            "offset": offset,
            "id": item.id,
            "hash": item.hash,
            "stage": item.stage,
            "digest": item.digest,
            "tokens": item.tokens,
            "raw_bytes": item.raw_bytes,
            "content": item.content,
            "attempt": _attempt_fields(item.attempt),
            "payloads": [[p.name, p.length, f"{p.xxh3:016x}"] for p in payloads],
        },
        separators=(",", ":"),
    ).encode()
    if len(body) > MAX_JSON:
        raise ValueError(f"a record header of {len(body)} bytes is over {MAX_JSON}")
    total = sum(p.length for p in payloads)
    head = _PREFIX.pack(MAGIC, len(body), len(payloads), total) + body
    head += _CHECK.pack(codec.checksum(head))
    record = Record(
        shard=shard,
        offset=offset,
        header_length=len(head),
        id=item.id,
        hash=item.hash,
        stage=item.stage,
        attempt=item.attempt,
        digest=item.digest,
        tokens=item.tokens,
        raw_bytes=item.raw_bytes,
        content=item.content,
        payloads=payloads,
    )
    return record, head


def _attempt_fields(attempt: Attempt) -> dict[str, Any]:
    values = ((name, getattr(attempt, name)) for name in _ATTEMPT_FIELDS)
    return {name: record_fields.storable(value) for name, value in values if value is not None}


def header_length(prefix: bytes) -> int:
    """Length of the header that starts with `prefix` (at least HEADER_MIN bytes).

    Raises DamagedError when it is not the start of a record.
    """
    if len(prefix) < HEADER_MIN:
        raise DamagedError("the file ends inside a record header")
    magic, body_length, _, _ = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise DamagedError("no record starts here")
    if body_length > MAX_JSON:
        raise DamagedError(f"record header claims {body_length} bytes")
    return HEADER_MIN + cast(int, body_length)


def parse(head: bytes, shard: int, offset: int) -> Record:
    """Parse a whole header that was read at `offset` of `shard`; raises DamagedError."""
    length = header_length(head)
    if len(head) < length:
        raise DamagedError("the file ends inside a record header")
    head = head[:length]
    (check,) = _CHECK.unpack_from(head, length - _CHECK.size)
    if check != codec.checksum(head[: -_CHECK.size]):
        raise DamagedError("record header fails its checksum")
    _, _, count, total = _PREFIX.unpack_from(head)
    try:
        return _parse_body(head, shard, offset, count, total)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"record header is not understood: {error!r}") from error
    except RecursionError:
        raise DamagedError("record header is not understood: too deep") from None


def _parse_body(head: bytes, shard: int, offset: int, count: int, total: int) -> Record:
    body = json.loads(head[_PREFIX.size : -_CHECK.size])
    if body["version"] != VERSION:
        raise ValueError(f"version {body['version']}, this program reads {VERSION}")
    if (body["shard"], body["offset"]) != (shard, offset):
        raise ValueError(f"it belongs to shard {body['shard']} byte {body['offset']}")
    payloads = tuple(
        Payload(name=record_fields.text(name), length=whole(length), xxh3=int(xxh3, 16))
        for name, length, xxh3 in body["payloads"]
    )
    if len(payloads) != count or sum(p.length for p in payloads) != total:
        raise ValueError("payload lengths contradict the prefix")
    row = record_fields.attempt(body["attempt"])
    if body["stage"] not in ("generate", "extract") or row.stage != body["stage"]:
        raise ValueError(f"stage {body['stage']!r}")
    if row.id != body["id"]:
        raise ValueError(f"attempt of sample {row.id} in a record of {body['id']}")
    return Record(
        shard=shard,
        offset=offset,
        header_length=len(head),
        id=whole(body["id"]),
        hash=record_fields.text(body["hash"]),
        stage=body["stage"],
        attempt=row,
        digest=record_fields.text(body["digest"]),
        tokens=whole(body["tokens"], 31),
        raw_bytes=whole(body["raw_bytes"]),
        content=dict(body["content"]),
        payloads=payloads,
    )


def decode_completion(
    record: Record, payloads: dict[str, bytes], *, text: bool = True
) -> Completion:
    """The completion stored in `record`; without `text`, content and reasoning stay None."""
    content = record.content
    prompt_tokens = whole(content["prompt_tokens"], 31)
    expected = 4 * (prompt_tokens + whole(content["completion_tokens"], 31))
    raw = codec.decompress(payloads["token_ids"], min(expected, MAX_TEXT))
    if len(raw) != expected:
        raise DamagedError(f"{len(raw)} bytes of token ids where {expected} belong")
    ids = np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)
    words: dict[str, Any] = {"content": None, "reasoning": None, "extra": {}}
    if text:
        blob = codec.decompress(payloads["text"], min(content["text_bytes"], MAX_TEXT))
        try:
            words = json.loads(blob.decode("utf-8", "surrogatepass"))
        except RecursionError:
            raise DamagedError("the text of a completion is not understood: too deep") from None
    return Completion(
        prompt_token_ids=ids[:prompt_tokens],
        completion_token_ids=ids[prompt_tokens:],
        content=words["content"],
        reasoning=words["reasoning"],
        finish_reason=content["finish_reason"],
        ids_rebuilt=content["ids_rebuilt"],
        extra=words["extra"],
    )
