"""The draft vocabulary: which target tokens the draft can propose, and how they are numbered.

Owns DATASET/vocab. A mapping is keyed by its size and by the fingerprint of the data that it was
counted on, so that one made for other data is never picked up.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import ConfigError, DamagedError, DatasetError
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer.loading import data
from draftmill.trainer.loading.data import Samples
from draftmill.trainer.loading.reading import SampleReader
from draftmill.trainer.loading.threads import Threads
from draftmill.trainer.loading.waiting import Patience, Reads, Watched

_NO_CUT = 2**31 - 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabMapping:
    """Draft token ids and the target's, as speculators and vLLM expect them.

    `d2t` int64 [draft size]: target id = draft id + d2t[draft id]. `t2d` bool [target size]: which
    target tokens are in it. Draft ids follow the order of target ids. `counts` int64 [target size]
    counts supervised tokens.
    """

    d2t: NDArray[np.int64]
    t2d: NDArray[np.bool_]
    counts: NDArray[np.int64]
    fingerprint: str

    @property
    def size(self) -> int:
        """How many tokens the draft can propose."""
        return len(self.d2t)

    @property
    def target_ids(self) -> NDArray[np.int64]:
        """The target's id of each draft token, rising."""
        return np.arange(self.size, dtype=np.int64) + self.d2t

    @property
    def digest(self) -> str:
        """32 hex digits of what the rows of a draft's head mean."""
        return xxhash.xxh3_128(self.target_ids.astype("<i8").tobytes()).hexdigest()

    @property
    def coverage(self) -> float:
        """Part of the supervised tokens that the draft can propose, 0 to 1."""
        total = int(self.counts.sum())
        return int(self.counts[self.t2d].sum()) / total if total else 0.0


def build_mapping(
    supervised: NDArray[np.int64], prompts: NDArray[np.int64], size: int, fingerprint: str
) -> VocabMapping:
    """The `size` most frequent supervised tokens.

    Ties, and places left over by data with few different tokens, go to what is frequent in prompts
    (answers repeat their questions), then to low ids (frequent in byte-pair vocabularies).
    """
    total = len(supervised)
    if not 2 <= size <= total:
        raise ConfigError(
            f"draft_vocab_size is {size}; the target model has {total} tokens, so 2 to {total} fit."
        )
    ranked = np.lexsort((np.arange(total), -prompts, -supervised))
    chosen = np.sort(ranked[:size])
    t2d = np.zeros(total, np.bool_)
    t2d[chosen] = True
    d2t = chosen.astype(np.int64) - np.arange(size, dtype=np.int64)
    return VocabMapping(d2t=d2t, t2d=t2d, counts=supervised, fingerprint=fingerprint)


def count_tokens(
    reader: SampleReader,
    samples: Samples,
    vocab_size: int,
    *,
    threads: int = 2,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How often each target token is supervised, and how often it stands in prompts."""
    supervised = np.zeros(vocab_size, np.int64)
    prompts = np.zeros(vocab_size, np.int64)
    reads = Reads.of(max(1, threads))
    patience = Patience(stop=lambda: False, reads=reads)

    def token_ids(number: int, row: int) -> NDArray[np.int32]:
        watched = Watched(reader, reads, number)
        completion = watched.completion(samples.completion_location(row), text=False)
        return completion.token_ids[: samples.tokens[row]]

    pool = Threads(max(1, threads), "draftmill-count")
    try:
        # In slices, or a million reads would be asked for at once.
        for start in range(0, len(samples), 1024):
            rows = range(start, min(start + 1024, len(samples)))
            asked = [pool.submit(partial(token_ids, row=row)) for row in rows]
            for row, future in zip(rows, asked, strict=True):
                ids = patience.result(future)
                if ids.size and int(ids.max()) >= vocab_size:
                    raise DamagedError(
                        f"sample {samples.id[row]} has token id {int(ids.max())}; the target model "
                        f"has {vocab_size} tokens. Is it the one that the completions came from?"
                    )
                split = int(samples.prompt_tokens[row])
                # Faster than bincount for samples much shorter than the vocabulary.
                np.add.at(supervised, ids[split:], 1)
                np.add.at(prompts, ids[:split], 1)
            if on_progress is not None:
                on_progress(rows.stop, len(samples))
    finally:
        pool.close(reads.hangs)
    return supervised, prompts


def make_vocab(
    dataset: Path,
    size: int,
    *,
    target: TargetModel,
    threads: int = 2,
    on_progress: Callable[[int, int], None] | None = None,
) -> VocabMapping:
    """The mapping of `size` for what the dataset holds now, made when it is not there yet.

    Stored in DATASET/vocab; a dataset that cannot be written (read-only mounts, a full disk) is no
    error.
    Raises DatasetError when nothing is extracted, ConfigError when the size does not fit.
    """
    opened, samples = _trainable(dataset)
    fingerprint = data.fingerprint(samples)
    path = mapping_path(opened.vocab_dir, size, fingerprint)
    found = load_mapping(path, target.vocab_size)
    # The name alone is not believed: a file may have been copied from another dataset.
    if found is not None and (found.size, found.fingerprint) == (size, fingerprint):
        return found
    supervised, prompts = _count(opened, samples, target, threads, on_progress)
    mapping = build_mapping(supervised, prompts, size, fingerprint)
    try:
        path.parent.mkdir(exist_ok=True)
        save_mapping(mapping, path)
    except PermissionError:
        pass
    except OSError as error:
        if files.full_disk(error) is not None:
            log.warning("%s: %s; the vocabulary is not kept there", path.parent, error.strerror)
        elif error.errno != errno.EROFS:
            raise
    return mapping


def keep_vocab(
    dataset: Path, target_ids: NDArray[np.int64], *, target: TargetModel, threads: int = 2
) -> VocabMapping:
    """A draft's own vocabulary (rising target ids) with the counts of this dataset."""
    opened, samples = _trainable(dataset)
    supervised, _ = _count(opened, samples, target, threads, None)
    t2d = np.zeros(target.vocab_size, np.bool_)
    t2d[target_ids] = True
    return VocabMapping(
        d2t=target_ids - np.arange(len(target_ids), dtype=np.int64),
        t2d=t2d,
        counts=supervised,
        fingerprint=data.fingerprint(samples),
    )


def _trainable(dataset: Path) -> tuple[Dataset, Samples]:
    opened = Dataset.open(dataset)
    with opened.reader() as reader:
        table = reader.trainable()
    samples = data.select(table, _NO_CUT).samples
    if len(samples) == 0:
        raise DatasetError(
            f"{dataset} has no sample with hidden states that supervises anything. "
            f"`draftmill extract {dataset}` fetches them."
        )
    return opened, samples


def _count(
    dataset: Dataset,
    samples: Samples,
    target: TargetModel,
    threads: int,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    with closing(ShardReader(dataset.path)) as shards:
        return count_tokens(
            shards, samples, target.vocab_size, threads=threads, on_progress=on_progress
        )


def mapping_path(folder: Path, size: int, fingerprint: str) -> Path:
    """Where the mapping of this size and data lies."""
    return folder / f"{size}-{fingerprint}.safetensors"


def save_mapping(mapping: VocabMapping, path: Path) -> None:
    """Write a mapping atomically, as a safetensors file that others can use too."""
    tensors = {"d2t": mapping.d2t, "t2d": mapping.t2d, "counts": mapping.counts}
    metadata = {"fingerprint": mapping.fingerprint, "coverage": f"{mapping.coverage:.6f}"}
    files.write_atomic(path, safetensors.numpy.save(tensors, metadata), "vocab")


def load_mapping(path: Path, target_vocab_size: int) -> VocabMapping | None:
    """The mapping at `path`; None when there is none or it is not for such a target model."""
    if not path.is_file():  # a pipe would be waited for
        return None
    try:
        with safe_open(path, "numpy") as file:
            mapping = VocabMapping(
                d2t=file.get_tensor("d2t"),
                t2d=file.get_tensor("t2d"),
                counts=file.get_tensor("counts"),
                fingerprint=file.metadata()["fingerprint"],
            )
    except (OSError, SafetensorError, KeyError, TypeError):
        return None
    sound = (
        len(mapping.t2d) == len(mapping.counts) == target_vocab_size
        and int(mapping.t2d.sum()) == mapping.size
        and np.array_equal(np.flatnonzero(mapping.t2d), mapping.target_ids)
    )
    return mapping if sound else None
