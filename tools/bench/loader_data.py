"""Samples for the loader's bench, made in seconds without a server: a dataset and its files.

Owns their sizes (SmolLM2's by default), their values (real hidden states where a file of them is
given, else noise with channels of different scale) and a random target model beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from draftmill.manifests.codec import codec
from draftmill.manifests.codec.numbers import to_words
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.manifest import Manifest
from draftmill.manifests.target.target import TargetModel
from draftmill.manifests.types import Attempt, Completion, Prompt, Result, StatesPayload
from draftmill.tools.bench.saved_states import Words, load_states
from draftmill.trainer import speculators_store
from draftmill.trainer.loading.groups import StatesShape
from draftmill.trainer.settings import TrainSettings

_CODEC = "em-zfast"
_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Sizes of the samples: `raw_bytes` of bf16 states in all, `mean_tokens` a sample.

    `states_file` is a .npy of hidden states [T, L, H] that the samples are cut from, again and
    again; the sizes of the model follow from it.
    """

    raw_bytes: int = 512 << 20
    mean_tokens: int = 470
    room: int = 4096
    states_file: Path | None = None
    layers: int = 4
    hidden_size: int = 576
    vocab_size: int = 49152
    num_layers: int = 30
    layer_ids: tuple[int, ...] = (2, 15, 27)
    seed: int = 0

    @property
    def states(self) -> StatesShape:
        """Layers and hidden size of every sample."""
        return StatesShape(layers=self.layers, hidden_size=self.hidden_size)


@dataclass(frozen=True, kw_only=True)
class Made:
    """What `make` made: a dataset, the same samples as files for speculators, a target model."""

    folder: Path
    dataset: Path
    files: Path
    target: TargetModel
    samples: int = field(default=0)


def make(bench: Bench, folder: Path) -> Made:
    """Write everything into `folder`, which is empty."""
    target = _target(bench, folder / "target")
    dataset = Dataset.create(folder / "dataset", "# made by draftmill bench loader\n")
    samples = list(_samples(bench))
    with dataset.writer() as writer:
        for start in range(0, len(samples), _AT_ONCE):
            part = samples[start : start + _AT_ONCE]
            writer.add_prompts(_prompt(start + n) for n in range(len(part)))
            waiting = writer.pending(0, _AT_ONCE)
            pairs = list(zip(waiting, part, strict=True))
            writer.commit([_generated(p, ids, prompt) for p, (ids, prompt, _) in pairs])
            done = list(zip(writer.generated(0, _AT_ONCE), part, strict=True))
            writer.commit([_extracted(g, states, bench) for g, (_, _, states) in done])
        writer.publish(snapshot=True)
    return Made(
        folder=folder,
        dataset=dataset.path,
        files=_files(bench, dataset.path, target, folder / "files"),
        target=target,
        samples=len(samples),
    )


def _samples(bench: Bench) -> Iterator[tuple[NDArray[np.int32], int, Words]]:
    """(token ids, prompt tokens, states [T, L, H]) of samples, views of one block of states."""
    rng = np.random.default_rng(bench.seed)
    source = _states(bench, rng)
    left = bench.raw_bytes
    while left > 0:
        # Lengths of answers are spread about like this.
        tokens = int(rng.lognormal(np.log(bench.mean_tokens) - 0.32, 0.8))
        tokens = min(max(tokens, 16), bench.room, len(source))
        start = int(rng.integers(0, len(source) - tokens + 1))
        # Few of the tokens make most of a text.
        ids = np.minimum(rng.zipf(1.3, tokens) - 1, bench.vocab_size - 1).astype(np.int32)
        yield ids, tokens // 4, source[start : start + tokens]
        left -= source[start : start + tokens].nbytes


def _states(bench: Bench, rng: np.random.Generator) -> Words:
    if bench.states_file is not None:
        return load_states(bench.states_file)
    tokens = 8192
    scale = np.exp(rng.normal(0, 0.7, (1, bench.layers, bench.hidden_size)))
    shape = (tokens, bench.layers, bench.hidden_size)
    values = rng.standard_normal(shape, np.float32) * scale.astype(np.float32)
    return to_words(values)


def _prompt(number: int) -> Prompt:
    text = json.dumps({"messages": [{"role": "user", "content": f"question {number}"}]})
    name = f"{number:032x}"
    return Prompt(hash=name, conversation=text, source="bench", row=number, conversation_id=name)


def _generated(prompt: Any, ids: NDArray[np.int32], split: int) -> Result:
    completion = Completion(
        prompt_token_ids=ids[:split],
        completion_token_ids=ids[split:],
        content="",
        reasoning=None,
        finish_reason="stop",
    )
    return Result.taken_over(prompt, completion)


def _extracted(generated: Any, states: Words, bench: Bench) -> Result:
    payload = StatesPayload(
        codec=_CODEC,
        shape=(len(states), bench.layers, bench.hidden_size),
        blocks=codec.encode_states(states, _CODEC),
        digest=generated.digest,
        target_layer_ids=(*bench.layer_ids, bench.num_layers),
    )
    attempt = Attempt(
        id=generated.id, stage="extract", attempt=generated.attempts + 1, outcome="extracted"
    )
    return Result(attempt=attempt, hash=generated.hash, states=payload)


def _target(bench: Bench, folder: Path) -> TargetModel:
    """A target model of those sizes: its config, and the three weights that a draft needs."""
    folder.mkdir(parents=True)
    heads = max(1, bench.hidden_size // 64)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": bench.hidden_size,
        "intermediate_size": bench.hidden_size * 8 // 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3 if heads % 3 == 0 else heads,
        "num_hidden_layers": bench.num_layers,
        "vocab_size": bench.vocab_size,
        "max_position_embeddings": 2 * bench.room,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    rng = np.random.default_rng(bench.seed)
    embeddings = rng.standard_normal((bench.vocab_size, bench.hidden_size), np.float32) * 0.05
    weights = {
        "model.embed_tokens.weight": embeddings.astype(np.float16),
        "model.norm.weight": np.ones(bench.hidden_size, np.float16),
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return TargetModel.from_folder(folder, name="bench/target")


def _files(bench: Bench, dataset: Path, target: TargetModel, folder: Path) -> Path:
    """The same samples as speculators keeps them: an index, and one file a sample."""
    import safetensors.torch

    settings = TrainSettings(
        max_seq_len=bench.room,
        draft_vocab_size=min(32000, bench.vocab_size),
        # Both parts are read; speculators wants a second one to be there.
        validation=0.5,
    )
    prepared = speculators_store.prepare(dataset, settings, target=target, folder=folder)
    transfer = speculators_store.DraftmillTransfer(dataset, folder)
    states = folder / "hidden_states"
    states.mkdir()
    for number in range(len(prepared.plan.train) + len(prepared.plan.validation)):
        found = {name: t.contiguous() for name, t in transfer.get_cached(number).items()}
        safetensors.torch.save_file(found, states / f"hs_{number}.safetensors")
    return folder


def multiply(made: Made, folder: Path, count: int) -> Path:
    """A dataset whose manifest has `count` samples, all of them where those of `made` lie."""
    dataset = Dataset.create(folder, "# made by draftmill bench loader\n")
    with Dataset.open(made.dataset).reader() as reader:
        table = reader.trainable()
    manifest = Manifest(dataset.manifest_path)
    try:
        with manifest.batch("real", table), manifest.transaction("bench"):
            for statement in _MULTIPLY:
                manifest.run(statement.format(count=count, real=table.num_rows))
    finally:
        manifest.close()
    return folder


_MANY = "FROM range({count}) t(i) JOIN (SELECT *, row_number() OVER () - 1 AS n FROM real) r"
_MULTIPLY = (
    "INSERT INTO prompts SELECT i, format('{{:032x}}', i), 'bench', i, format('c{{}}', i), false, "
    "0 FROM range({count}) t(i)",
    "INSERT INTO state SELECT i, 'extracted', 'extract', 2, 1, 1 FROM range({count}) t(i)",
    "INSERT INTO payloads SELECT i, 'generate', 1, generate_shard, generate_offset, "
    f"generate_length, tokens, 0, digest {_MANY} ON r.n = i % {{real}} ORDER BY i",
    "INSERT INTO payloads SELECT i, 'extract', 1, extract_shard, extract_offset, "
    f"extract_length, tokens, 0, digest {_MANY} ON r.n = i % {{real}} ORDER BY i",
    "INSERT INTO attempts SELECT i, 'generate', 1, 'generated', NULL, NULL, NULL, 'stop', "
    "prompt_tokens, tokens - prompt_tokens, 0, 0, 0, 0, 'bench', 0 "
    f"{_MANY} ON r.n = i % {{real}} ORDER BY i",
)
