"""Lets speculators' own trainer read a draftmill dataset: all its algorithms, without an export.

Owns the registered hidden-states backend and the small folder that stands in for a dataset of
speculators (token ids, masks, places; never hidden states). Importing this module registers the
backend, which must happen before `speculators.train.config` is imported.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from numpy.typing import NDArray
from torch import Tensor

from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DatasetError, UsageError
from draftmill.manifests.shards.reader import ShardReader
from draftmill.manifests.target.target import TargetModel
from draftmill.manifests.types import Location
from draftmill.trainer.drafts.vocab import make_vocab
from draftmill.trainer.loading.data import Samples
from draftmill.trainer.loading.plan import Plan, load_plan, make_plan, save_plan
from draftmill.trainer.settings import TrainSettings

BACKEND = "draftmill"
_PLACES = "places.npy"
_ROWS_AT_ONCE = 512


class DraftmillTransfer(HiddenStatesTransfer):
    """Reads sample `file_idx` of the folder that `prepare` wrote from the dataset's shards.

    Picklable; every worker process opens shards for itself.
    """

    def __init__(self, dataset: Path, folder: Path) -> None:
        self._shards = ShardReader(dataset)
        self._folder = folder
        self._places: NDArray[np.int64] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}

    def get_cached(self, file_idx: int) -> dict[str, Tensor]:
        """`token_ids` int64 [T] and `hidden_states` bf16 [T, L, H] of one sample.

        Raises DamagedError where its bytes are not what was stored.
        """
        if self._places is None:
            self._places = np.load(self._folder / _PLACES, mmap_mode="r")
        place = self._places[file_idx].tolist()
        tokens = place[6]
        completion = self._shards.completion(Location(*place[:3]), text=False)
        states = self._shards.states(Location(*place[3:6]), tokens=tokens)
        return {
            "token_ids": torch.from_numpy(completion.token_ids[:tokens].astype(np.int64)),
            "hidden_states": torch.from_numpy(states).view(torch.bfloat16),
        }

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Tensor] | None:
        """Never asked for: a prepared folder holds only samples that are there."""
        raise UsageError("hidden states come from draftmill's shards; use --on-missing raise")


@HiddenStatesBackend.register(BACKEND)
class DraftmillBackend(HiddenStatesBackend):
    """`--hidden-states-backend draftmill --draftmill-dataset DIR`."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """The one flag that it needs."""
        parser.add_argument(
            "--draftmill-dataset", default=None, help="Folder of the draftmill dataset."
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Servers for extraction are started by `draftmill serve extract`."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> DraftmillTransfer:
        """The transfer for a folder that `prepare` wrote."""
        if not args.draftmill_dataset:
            raise UsageError("--hidden-states-backend draftmill needs --draftmill-dataset DIR")
        return DraftmillTransfer(Path(args.draftmill_dataset), Path(data_path))

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Nothing here runs in a server."""
        raise UsageError("`draftmill serve extract` starts the server that fills a dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A folder for speculators' trainer: its training samples first, then those of validation."""

    folder: Path
    plan: Plan
    draft_vocab_size: int

    @property
    def train_ratio(self) -> float:
        """Cuts the samples exactly where validation begins."""
        train = len(self.plan.train)
        return (train + 0.5) / (train + len(self.plan.validation))


def prepare(
    dataset: Path, settings: TrainSettings, *, target: TargetModel, folder: Path
) -> Prepared:
    """Write what speculators wants to know of the dataset's samples into `folder`.

    The samples are those of the first call (`plan.parquet`), so that a run can be resumed while the
    dataset grows; where they lie is looked up anew. Raises DatasetError when one of them is gone,
    and when the split leaves nothing for validation, without which speculators does not train.
    """
    with Dataset.open(dataset).reader() as reader:
        table = reader.trainable()
    folder.mkdir(parents=True, exist_ok=True)
    frozen = folder / "plan.parquet"
    if frozen.exists():
        plan = load_plan(frozen, table, settings.max_seq_len)
    else:
        plan = make_plan(table, settings)
        if len(plan.validation) == 0:
            raise DatasetError(
                f"Of {len(plan.train)} samples none is kept for validation, which speculators "
                f"insists on. Raise validation (now {settings.validation}), or add samples."
            )
        _write_tokens(dataset, plan, folder)
        save_plan(plan, frozen)
    size = settings.draft_vocab_size
    if not (folder / f"t2d-{size}.npy").exists():  # of another size than before, perhaps
        vocab = make_vocab(dataset, size, target=target)
        _save(vocab.d2t, folder / f"d2t-{size}.npy")
        _save(vocab.t2d, folder / f"t2d-{size}.npy")
    places = [
        np.concatenate([part.completion_at, part.states_at, part.tokens[:, None]], axis=1)
        for part in (plan.train, plan.validation)
    ]
    _save(np.concatenate(places).astype(np.int64), folder / _PLACES)
    return Prepared(folder=folder, plan=plan, draft_vocab_size=settings.draft_vocab_size)


def _save(array: NDArray[Any], path: Path) -> None:
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        np.save(file, array)
    files.publish(temporary, path, "prepared")


def _write_tokens(dataset: Path, plan: Plan, folder: Path) -> None:
    """The Arrow dataset that speculators loads, written in pieces."""
    import datasets

    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
            ("seq_len", pa.int64()),
        ]
    )
    # In a folder of its own: `datasets` saves nothing beside the file that it reads from.
    with tempfile.TemporaryDirectory(prefix=".tokens-", dir=folder) as scratch:
        stream = str(Path(scratch) / "tokens.arrow")
        with closing(ShardReader(dataset)) as shards, pa.OSFile(stream, "wb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for part in (plan.train, plan.validation):
                    for rows in _token_rows(shards, part):
                        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        # Its bars would stand among draftmill's own lines.
        datasets.disable_progress_bars()
        found = datasets.Dataset.from_file(stream).with_format("torch")
        found.save_to_disk(str(folder))


def _token_rows(shards: ShardReader, samples: Samples) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(samples), _ROWS_AT_ONCE):
        rows = []
        for row in range(start, min(start + _ROWS_AT_ONCE, len(samples))):
            tokens, prompt = int(samples.tokens[row]), int(samples.prompt_tokens[row])
            found = shards.completion(samples.completion_location(row), text=False)
            mask = np.zeros(tokens, np.int8)
            mask[prompt:] = 1
            ids = found.token_ids[:tokens]
            rows.append({"input_ids": ids, "loss_mask": mask, "seq_len": tokens})
        yield rows


def arguments(
    prepared: Prepared,
    *,
    dataset: Path,
    target: TargetModel,
    target_layer_ids: Sequence[int],
    settings: TrainSettings,
    output: Path,
) -> list[str]:
    """What `speculators train` is told; arguments after these win."""
    return [
        *("--verifier-name-or-path", str(target.folder)),
        *("--data-path", str(prepared.folder)),
        *("--save-path", str(output / "checkpoints")),
        *("--log-dir", str(output / "logs")),
        *("--hidden-states-backend", BACKEND),
        *("--draftmill-dataset", str(dataset)),
        *("--on-missing", "raise"),
        *("--train-data-ratio", repr(prepared.train_ratio)),
        *("--total-seq-len", str(settings.max_seq_len)),
        *("--draft-vocab-size", str(prepared.draft_vocab_size)),
        *("--target-layer-ids", *map(str, target_layer_ids)),
        *("--seed", str(settings.seed)),
    ]


def check_device() -> None:
    """UsageError where there is nothing that speculators' trainer could run on."""
    if not torch.accelerator.is_available():
        raise UsageError(
            "speculators' trainer needs a GPU, and there is none here; `draftmill train` trains an "
            "EAGLE-3 draft on a CPU, too"
        )


def run(arguments: Sequence[str]) -> None:
    """`speculators train` with this backend; needs a GPU, as that trainer does."""
    from speculators.train.cli import main
    from speculators.train.config import TrainConfig

    main(TrainConfig.resolve(list(arguments)))


def file_loader(
    folder: Path,
    *,
    room: int,
    hidden_size: int,
    transfer: HiddenStatesTransfer | None = None,
    workers: int = 0,
    split: str = "train",
    ratio: float = 1.0,
    seed: int = 0,
) -> torch.utils.data.DataLoader[Any]:
    """speculators' loader over such a folder, put together as its trainer does.

    Without `transfer` it reads one safetensors file a sample, from `folder`/hidden_states.
    """
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    dataset = ArrowDataset(
        max_len=room,
        datapath=folder,
        transfer=transfer,
        on_missing="raise",
        train_ratio=ratio,
        split=split,
    )
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=MultipackDistributedBatchSamplerV2(
            batch_max_length=room, lengths=dataset.approx_lengths, num_replicas=1, rank=0, seed=seed
        ),
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.cuda.is_available(),
        collate_fn=CollateFn(room, hidden_size, preprocess=shift_batch),
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,
    )
