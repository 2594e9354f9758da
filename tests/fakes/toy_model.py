"""What the fake target model says: ids, answers and hidden states as functions of the content.

Pure arithmetic on bytes, so that a test can work out what any server must have answered.
The HTTP side is in `target_server`, the timing in `scheduler`.

Token ids are byte values; what a chat template would add are the ids from 256 on.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

BOS, SYSTEM, USER, ASSISTANT, TOOL, END, THINK, THINK_END = range(256, 264)
VOCAB_SIZE = 264
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


def _text_base() -> str:
    """64 KiB of words in an order that does not repeat itself."""
    rng = random.Random(7)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(4000)]
    return " ".join(rng.choice(words) for _ in range(16000))[: 1 << 16]


TEXT = _text_base()


def digest(value: Any) -> str:
    """32 hex digits of the canonical JSON of a value: the key by which the server counts."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def unit(*parts: object) -> float:
    """A number in (0, 1) that depends on the parts alone."""
    raw = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return (int.from_bytes(raw, "little") + 0.5) / 2.0**64


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    after_turn: str = "",
    strip_reasoning: bool = False,
) -> list[int]:
    """The fake chat template: role id, bytes of the content, END; ASSISTANT opens the answer.

    As some templates do: `after_turn` stands behind each message, and with `strip_reasoning` the
    generation prompt opens with THINK, which is left out again once there is an answer.
    """
    ids = [BOS]
    for message in messages:
        ids.append(ROLES.get(str(message.get("role")), USER))
        if message.get("reasoning") and not strip_reasoning:
            ids += [THINK, *str(message["reasoning"]).encode(), THINK_END]
        content = message.get("content")
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
            ids += text.encode()
        ids += [END, *after_turn.encode()]
    if add_generation_prompt:
        ids += [ASSISTANT, THINK] if strip_reasoning else [ASSISTANT]
    return ids


def text_of(token_ids: Sequence[int]) -> str:
    """The text of ids, special ones as <|NUMBER|>."""
    return "".join(chr(each) if each < 256 else f"<|{each}|>" for each in token_ids)


def answer_tokens(key: str, median: float, sigma: float) -> int:
    """Length of the full answer to one prompt: lognormal, always the same for the same prompt."""
    z = NormalDist().inv_cdf(unit("length", key))
    return max(2, int(median * math.exp(sigma * z)))


def answer(key: str, tokens: int, reasoning_share: float) -> tuple[str | None, str]:
    """(reasoning, content) that take `tokens` ids together with THINK, THINK_END and END."""
    start = int(key[:8], 16) % (len(TEXT) // 2)
    body = tokens - 1
    if reasoning_share <= 0 or body < 4:
        return None, _text(start, body)
    num_reasoning = max(1, int((body - 2) * reasoning_share))
    num_content = max(1, body - 2 - num_reasoning)
    return _text(start, num_reasoning), _text(start + 7919, num_content)


def _text(start: int, length: int) -> str:
    start %= len(TEXT)
    text = TEXT[start : start + length]
    while len(text) < length:
        text += TEXT[: length - len(text)]
    return text


def states_of(
    token_ids: Sequence[int] | NDArray[Any], layers: int, hidden: int
) -> NDArray[np.uint16]:
    """bf16 bit patterns [T, L, H] of these ids: finite, of ordinary sizes, different everywhere."""
    ids = np.asarray(token_ids, dtype=np.uint32)[:, None, None]
    position = np.arange(ids.shape[0], dtype=np.uint32)[:, None, None]
    layer = np.arange(layers, dtype=np.uint32)[None, :, None]
    channel = np.arange(hidden, dtype=np.uint32)[None, None, :]
    mix = ids * np.uint32(2654435761) ^ position * np.uint32(40503) ^ layer * np.uint32(2246822519)
    mix = (mix ^ channel * np.uint32(3266489917)) * np.uint32(668265263)
    mix ^= mix >> np.uint32(15)
    sign = (mix >> np.uint32(31)) << np.uint32(15)
    exponent = (np.uint32(121) + ((mix >> np.uint32(8)) & np.uint32(7))) << np.uint32(7)
    states: NDArray[np.uint16] = (sign | exponent | (mix & np.uint32(127))).astype(np.uint16)
    return states


def safetensors_bytes(tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> bytes:
    """A safetensors file from {name: (dtype, shape, raw bytes)}, without torch."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values())


def hidden_states_file(
    token_ids: Sequence[int],
    layers: int,
    hidden: int,
    fault: str | None,
    states: NDArray[np.uint16] | None = None,
) -> bytes:
    """The file that the extraction server writes for one prompt, with one fault in it or none.

    Without `states` they are the toy's own.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if states is None:
        states = states_of(ids, layers + (fault == "wrong_layers"), hidden)
    dtype = "BF16"
    middle = len(ids) // 2
    if fault == "nan":
        states[middle, layers - 1, hidden // 2] = 0x7FC0
    elif fault == "inf":
        states[middle, 0, 0] = 0x7F80
    elif fault == "huge":
        states[middle, 1, hidden // 2] = 0x7C00  # 2 ** 121: finite, and too much for rot4
    elif fault == "zeros":
        states[:] = 0
    elif fault == "constant":
        states[:] = 0x3F80
    elif fault == "zero_layer":
        states[:, layers - 1] = 0
    elif fault == "wrong_length":
        states = states[: max(0, len(ids) - 16)]
    elif fault == "wrong_ids":
        ids = ids.copy()
        ids[middle] = (ids[middle] + 1) % VOCAB_SIZE
    elif fault == "wrong_dtype":
        dtype = "F16"
    elif fault == "wrong_hidden":
        states = states[..., : hidden // 2]
    raw = safetensors_bytes(
        {
            "hidden_states": (dtype, states.shape, np.ascontiguousarray(states).tobytes()),
            "token_ids": ("I64", ids.shape, ids.tobytes()),
        }
    )
    return raw[: len(raw) * 2 // 3] if fault == "truncated_file" else raw
