"""A tiny random target model and datasets of its own answers, for the trainer's tests."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import pyarrow as pa

from draftmill.manifests.codec import codec
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DamagedError
from draftmill.manifests.shards.reader import StatesBlocks
from draftmill.manifests.types import (
    Attempt,
    Completion,
    Location,
    Prompt,
    Result,
    StatesPayload,
)
from draftmill.trainer.loading import data
from draftmill.trainer.loading.data import Samples
from draftmill.trainer.loading.groups import StatesShape

HIDDEN, LAYERS, VOCAB, CONTEXT = 64, 6, 512, 256
LAYER_IDS = (1, 3, 5)
SHAPE = StatesShape(layers=4, hidden_size=HIDDEN)


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer and hidden states, uint16 [T, L, H]."""

    prompt: np.ndarray
    completion: np.ndarray
    states: np.ndarray
    conversation: str
    text: str | None = "x"


def random_samples(count: int, seed: int = 0, longest: int = 40) -> list[Sample]:
    """Samples of noise: for everything that does not learn."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 8), dtype=np.int32)
        completion = rng.integers(0, VOCAB, rng.integers(1, longest), dtype=np.int32)
        states = rng.normal(size=(len(prompt) + len(completion), 4, HIDDEN)).astype("<f4")
        bits = (states.view("<u4") >> 16).astype(np.uint16)
        found.append(Sample(prompt, completion, bits, f"c{number // 2}"))
    return found


class MemoryReader:
    """Samples in memory behind the interface of a shard reader; counts what is read."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.read: list[int] = []
        self.broken: set[int] = set()
        self.unanswered: set[int] = set()
        self.stuck = -1  # on a disk that does not answer

    def completion(self, location: Location, *, text: bool = True) -> Completion:
        if location.offset in self.broken:
            raise DamagedError("flipped bit", shard="completions/000000", offset=location.offset)
        if location.offset in self.unanswered:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sample = self.samples[location.offset]
        return Completion(
            prompt_token_ids=sample.prompt,
            completion_token_ids=sample.completion,
            content=None,
            reasoning=None,
            finish_reason="stop",
        )

    def blocks(self, location: Location, *, tokens: int | None = None) -> StatesBlocks:
        self.read.append(location.offset)
        while location.offset == self.stuck:
            time.sleep(0.05)
        states = self.samples[location.offset].states[:tokens]
        lengths = codec.block_lengths(len(states))
        payloads = [memoryview(b) for b in codec.encode_states(states, "em-zfast")]
        return StatesBlocks("em-zfast", states.shape, lengths, payloads)


def columns(samples: list[Sample], max_seq_len: int = CONTEXT) -> Samples:
    """The planning columns of samples in memory."""
    count = len(samples)
    at = np.stack([np.zeros(count, int), np.arange(count), np.ones(count, int)], axis=1)
    return Samples(
        id=np.arange(count) + 100,
        digest=np.stack([np.zeros(count), np.arange(count)], axis=1).astype(np.uint64),
        conversation=data._hashes(pa.chunked_array([[s.conversation for s in samples]])),
        prompt_tokens=np.array([len(s.prompt) for s in samples], np.int32),
        tokens=np.minimum([len(s.states) for s in samples], max_seq_len).astype(np.int32),
        completion_at=at,
        states_at=at,
    )


def build_dataset(
    path: Path,
    samples: list[Sample],
    *,
    source: str = "s",
    layer_ids: tuple[int, ...] = (*LAYER_IDS, LAYERS),
    codecs: Sequence[str] = ("em-zfast",),
) -> Dataset:
    """A real dataset that holds `samples` extracted; called again, it adds more.

    The samples take turns with `codecs`.
    """
    dataset = Dataset(path)
    if not dataset.config_path.exists():
        dataset = Dataset.create(path, "# test\n")
    with dataset.writer() as writer:
        first = len(writer.pending(0, 1 << 20)) + writer.count("extracted")
        numbers = range(first, first + len(samples))
        writer.add_prompts(
            Prompt(
                hash=f"{number:032x}",
                conversation=json.dumps({"messages": [{"role": "user", "content": str(number)}]}),
                source=source,
                row=number,
                conversation_id=sample.conversation,
            )
            for number, sample in zip(numbers, samples, strict=True)
        )
        pending = writer.pending(0, 1 << 20)
        writer.commit([_generated(p, s) for p, s in zip(pending, samples, strict=True)])
        states = iter(zip(samples, cycle(codecs)))
        generated = writer.generated(0, 1 << 20)
        writer.commit([_extracted(g, *next(states), layer_ids) for g in generated])
        writer.publish(snapshot=True)
    return dataset


def completion(sample: Sample) -> Completion:
    """The completion of a sample, as a server would have given it."""
    return Completion(
        prompt_token_ids=sample.prompt,
        completion_token_ids=sample.completion,
        content=sample.text,
        reasoning=None,
        finish_reason="stop",
    )


def _generated(prompt, sample: Sample) -> Result:
    attempt = Attempt(
        id=prompt.id,
        stage="generate",
        attempt=prompt.attempts + 1,
        outcome="generated",
        finish_reason="stop",
        prompt_tokens=len(sample.prompt),
        completion_tokens=len(sample.completion),
    )
    return Result(attempt=attempt, hash=prompt.hash, completion=completion(sample))


def _extracted(generated, sample: Sample, name: str, layer_ids: tuple[int, ...]) -> Result:
    payload = StatesPayload(
        codec=name,
        shape=sample.states.shape,
        blocks=codec.encode_states(sample.states, name),
        digest=generated.digest,
        target_layer_ids=layer_ids,
    )
    attempt = Attempt(
        id=generated.id, stage="extract", attempt=generated.attempts + 1, outcome="extracted"
    )
    return Result(attempt=attempt, hash=generated.hash, states=payload)


def save_target(folder: Path, *, seed: int = 5) -> Path:
    """A random Llama of six layers, saved as Hugging Face saves one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def answers(folder: Path, count: int, length: int = 24, seed: int = 0) -> Iterator[Sample]:
    """Greedy answers of the tiny target to random prompts, with its own hidden states."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    rng = np.random.default_rng(seed)
    # Few different first tokens, so that answers repeat and a draft can learn them.
    prompts = torch.from_numpy(rng.integers(0, 24, (count, 4)))
    with torch.no_grad():
        ids = prompts
        for _ in range(length):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        before_norm.clear()
        layers = model(ids, output_hidden_states=True).hidden_states
        states = torch.stack([*(layers[k] for k in LAYER_IDS), before_norm[0]], dim=2)
    bits = states.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    for number in range(count):
        token_ids = ids[number].numpy().astype(np.int32)
        yield Sample(token_ids[:4], token_ids[4:], bits[number], f"c{number}")
