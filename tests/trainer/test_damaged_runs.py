"""Files of a run that are gone, cut or flipped: one error that names them, or the same batches."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DamagedError, DraftmillError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import checkpoint
from draftmill.trainer.checkpoint import folder_of
from draftmill.trainer.devices import Group
from draftmill.trainer.drafts.model import create_draft
from draftmill.trainer.drafts.vocab import load_mapping
from draftmill.trainer.engine import Engine
from draftmill.trainer.loading.plan import load_plan
from draftmill.trainer.runlog import read_log
from draftmill.trainer.settings import TrainSettings
from tests.trainer import tiny
from tests.trainer.test_train import SETTINGS, Killed, Steps, run

pytestmark = pytest.mark.slow

STATE, TENSORS = "training/state.json", "training/state.pt"
MORE = {"checkpoint_every": 2, "steps": 6}


@pytest.fixture(scope="module")
def died(dataset: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that died after its fifth: checkpoints of steps 2 and 4."""
    output = tmp_path_factory.mktemp("died") / "run"
    with pytest.raises(Killed):
        run(dataset, target, output, Steps(die_at=5), **MORE)
    assert checkpoint.checkpoints(output) == [2, 4]
    return output


@pytest.fixture
def own(died: Path, tmp_path: Path) -> Path:
    """The same to break."""
    return Path(shutil.copytree(died, tmp_path / "run"))


@pytest.fixture(scope="module")
def engine(died: Path, target: TargetModel) -> Engine:
    """The model of that run."""
    vocab = load_mapping(died / "vocab" / "mapping.safetensors", target.vocab_size)
    assert vocab is not None
    settings = TrainSettings(ttt_steps=2, draft_vocab_size=256)
    return Engine(create_draft(target, tiny.LAYER_IDS, vocab, settings), settings, Group())


def gone(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def text(words: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(words)

    write.__name__ = f"text {words[:9]!r}"
    return write


def flip(seed: int) -> Callable[[Path], None]:
    """One bit, somewhere."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        chosen = random.Random(seed)
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        path.write_bytes(content)

    damage.__name__ = f"flip {seed}"
    return damage


RUBBISH = [text(""), text("{"), text("[]"), text("{}"), text("null"), text("[" * 5000), cut, folder]


@pytest.mark.parametrize("name", [STATE, TENSORS])
@pytest.mark.parametrize(
    "damage", [gone, *RUBBISH, *map(flip, range(12))], ids=lambda d: d.__name__
)
def test_a_checkpoint_with_a_damaged_file_is_put_aside(
    own: Path, name: str, damage: Callable[[Path], None]
) -> None:
    path = folder_of(own, 4) / name
    before = path.read_bytes()
    damage(path)
    said: list[str] = []
    found = checkpoint.latest(own, note=said.append, ties={})
    assert found is not None
    if name == STATE and path.exists() and checkpoint.checkpoints(own) == [2, 4]:
        # a bit of the white space between
        assert found[0].step == 4
        assert path.read_bytes() != before
        return
    assert found[0].step == 2
    assert [str(path.parent) in each and "Going on from step 2" in each for each in said] == [True]
    assert checkpoint.checkpoints(own) == [2]
    # nothing is thrown away
    assert (own / "checkpoints" / "damaged-step-000004" / "model.safetensors").is_file()


def test_without_any_good_checkpoint_it_says_which_file_and_what_to_do(own: Path) -> None:
    for step in (2, 4):
        gone(folder_of(own, step) / TENSORS)
    with pytest.raises(DamagedError) as caught:
        checkpoint.latest(own, ties={})
    words = str(caught.value)
    for part in (
        str(folder_of(own, 4) / TENSORS),
        "No such file",
        "2 looked at",
        "--finetune-from",
    ):
        assert part in words
    assert checkpoint.checkpoints(own) == [2, 4]


def less(key: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        del state[key]

    return change


def to(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


WEIGHT = "layers.0.mlp.up_proj.weight"
CHANGES = [
    *[(less(key), f"lacks {key}") for key in ("weights", "optimizer", "rng", "rng_cuda")],
    (lambda state: state["weights"].pop(WEIGHT), rf"weights lacks {WEIGHT}"),
    (to(torch.zeros(3), "weights", "other"), "weights has other, which the model has not"),
    (to(torch.zeros(3, 4), "weights", WEIGHT), r"of shape \[3, 4\], not \[128, 64\]"),
    (to([1.0], "weights", WEIGHT), "not in float32"),
    (to(torch.zeros(128, 64).half(), "weights", WEIGHT), "not in float32"),
    *[(to(odd, "weights"), "weights is no table") for odd in (None, [], 3, torch.zeros(2))],
    *[(to(odd, "optimizer"), "optimizer is none") for odd in (None, [], {0: 3}, {"a": {}})],
    (to(torch.zeros(2), "optimizer", 0, "exp_avg"), r"0\.exp_avg of shape"),
    (to({}, "optimizer", 999), "optimizer"),
    (lambda state: state["optimizer"][0].pop("exp_avg_sq"), "lacks moments"),
    (lambda state: state["optimizer"][0].pop("step"), "optimizer"),
    (to(torch.zeros(3), "optimizer", 0, "step"), "optimizer"),
    *[(to(odd, "rng"), "rng is no random state") for odd in (None, 3, torch.zeros(9))],
    *[(to(odd, "rng_cuda"), "rng_cuda is no random") for odd in (3, torch.zeros(9))],
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_tensors_that_are_not_this_models_are_named(own: Path, engine: Engine, number: int) -> None:
    """Whole files, as another version or another model would have written them."""
    change, words = CHANGES[number]
    position, tensors = checkpoint.load(own, 4, {})
    engine.check(tensors)
    change(tensors)
    checkpoint.save(own, position, tensors, lambda folder: None, {})
    said: list[str] = []
    found = checkpoint.latest(own, engine.check, said.append, ties={})
    assert found is not None
    assert found[0].step == 2
    with pytest.raises(DamagedError, match=words):
        engine.check(tensors)
    assert str(folder_of(own, 4) / TENSORS) in said[0]


@pytest.mark.parametrize("tensors", [None, [], 3, "x", torch.zeros(2)])
def test_tensors_without_names_are_nothing(own: Path, engine: Engine, tensors: Any) -> None:
    position, _ = checkpoint.load(own, 4, {})
    checkpoint.save(own, position, tensors, lambda folder: None, {})
    found = checkpoint.latest(own, engine.check, ties={})
    assert found is not None
    assert found[0].step == 2


def test_the_run_goes_on_with_the_same_batches(
    own: Path, dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    whole = Steps()
    run(dataset, target, tmp_path / "whole", whole, **MORE)
    flip(1)(folder_of(own, 4) / TENSORS)
    rest, said = Steps(), []
    run(dataset, target, own, rest, note=said.append, **MORE)
    assert rest.seen == whole.seen[2:]
    assert any("Going on from step 2" in each for each in said)
    # the checkpoints that were written then are the newest, and stay
    assert checkpoint.checkpoints(own)[-2:] == [4, 6]


def test_killed_while_a_checkpoint_is_replaced_one_of_both_is_there(own: Path) -> None:
    position, tensors = checkpoint.load(own, 4, {})
    target = folder_of(own, 4)
    for killed_after in ("first rename", "second rename"):
        aside = target.with_name(f".{target.name}.replaced")
        if killed_after == "first rename":
            target.rename(aside)
        else:
            shutil.copytree(target, aside)
        found = checkpoint.latest(own, ties={})
        assert found is not None
        assert found[0] == position
        assert not list((own / "checkpoints").glob(".*"))
    checkpoint.save(own, position, tensors, lambda folder: None, {})
    assert not list((own / "checkpoints").glob(".*"))


# -- the other files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.json", "plan.parquet", "vocab/mapping.safetensors"])
@pytest.mark.parametrize("damage", [gone, *RUBBISH], ids=lambda d: d.__name__)
def test_a_run_with_a_damaged_file_says_which(
    own: Path,
    dataset: Path,
    target: TargetModel,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    damage(own / name)
    with pytest.raises(DamagedError) as caught:
        run(dataset, target, own, **MORE)
    assert str(own / name) in str(caught.value)
    assert "Restore it from a copy" in str(caught.value)
    assert caught.value.exit_code == 1
    assert checkpoint.checkpoints(own) == [2, 4]
    assert (own / "log.jsonl").exists()


def test_each_key_of_the_settings_is_missed(own: Path, dataset: Path, target: TargetModel) -> None:
    path = own / "run.json"
    stored = json.loads(path.read_text())
    for key in stored:
        rest = {name: value for name, value in stored.items() if name != key}
        path.write_text(json.dumps(rest))
        with pytest.raises(DraftmillError, match=key):
            run(dataset, target, own, **MORE)


def test_a_plan_is_what_was_written_or_none(own: Path, dataset: Path) -> None:
    path = own / "plan.parquet"
    with Dataset.open(dataset).reader() as reader:
        table = reader.trainable()
    wanted = load_plan(path, table, SETTINGS.max_seq_len)
    content = path.read_bytes()
    refused = 0
    for seed in range(150):
        path.write_bytes(content)
        flip(seed)(path)
        if seed % 3 == 0:
            path.write_bytes(path.read_bytes()[: random.Random(seed).randrange(len(content))])
        try:
            found = load_plan(path, table, SETTINGS.max_seq_len)
        except DamagedError:
            refused += 1
            continue
        for name in ("since", "steps", "packing", "cut", "nothing_supervised", "fingerprint"):
            assert np.array_equal(getattr(found, name), getattr(wanted, name))
        assert found.train.id.tolist() == wanted.train.id.tolist()
        assert found.validation.id.tolist() == wanted.validation.id.tolist()
    assert refused > 75
    path.write_bytes(content)
    frozen = pq.read_table(path)
    for changed in (
        *(frozen.drop_columns([name]) for name in frozen.column_names),
        frozen.replace_schema_metadata(None),
        frozen.slice(0, 0),
        frozen.slice(1),
        frozen.set_column(0, "id", frozen.column("id").cast("int32")),
        frozen.append_column("id", frozen.column("id")),
    ):
        pq.write_table(changed, path)
        with pytest.raises(DamagedError, match="no plan of a run"):
            load_plan(path, table, SETTINGS.max_seq_len)


def test_before_the_first_checkpoint_the_vocabulary_is_made_again(
    dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with pytest.raises(Killed):
        run(dataset, target, output, Steps(die_at=1), **MORE)
    path = output / "vocab" / "mapping.safetensors"
    before = load_mapping(path, target.vocab_size)
    cut(path)
    run(dataset, target, output, **MORE)
    after = load_mapping(path, target.vocab_size)
    assert before is not None
    assert after is not None
    assert np.array_equal(after.d2t, before.d2t)
    assert np.array_equal(after.counts, before.counts)


def test_a_log_full_of_rubbish_is_cleaned(own: Path, dataset: Path, target: TargetModel) -> None:
    path = own / "log.jsonl"
    rubbish = [
        "{",
        "[]",
        "3",
        "[" * 5000,
        '{"step": "x", "kind": "train"}',
        '{"kind": "train"}',
        '{"step": 3}',
        '{"step": 2, "kind": "train", "loss": "high"}',
    ]
    lines = [*path.read_text().splitlines(), *rubbish]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe")
    run(dataset, target, own, **MORE)
    steps = [each["step"] for each in read_log(path) if each["kind"] == "train"]
    assert sorted(steps) == [1, 2, 2, 3, 4, 5, 6]
    assert (own / "training.png").stat().st_size > 0


def test_a_best_checkpoint_that_is_gone_is_stood_for_by_the_newest(
    own: Path, dataset: Path, target: TargetModel
) -> None:
    position, tensors = checkpoint.load(own, 4, {})
    best = {"accepted_per_step": 99.0}
    whole = checkpoint.Position(**{**_fields(position), "best_step": 3, "best_validation": best})
    draft = folder_of(own, 4)
    files = {name: (draft / name).read_bytes() for name in ("model.safetensors", "config.json")}

    def write(path: Path) -> None:
        for name, content in files.items():
            (path / name).write_bytes(content)

    checkpoint.save(own, whole, tensors, write, ties_of(own, 4))
    said: list[str] = []
    run(dataset, target, own, note=said.append, **MORE)
    assert any("step 3, the best, is gone" in each for each in said)
    newest = folder_of(own, 6) / "model.safetensors"
    assert (own / "model.safetensors").read_bytes() == newest.read_bytes()
    # and whoever removes the checkpoints of a finished run keeps its draft
    shutil.rmtree(own / "checkpoints" / "step-000004")
    (folder_of(own, 6) / "model.safetensors").unlink()
    run(dataset, target, own, **MORE)
    assert (own / "model.safetensors").is_file()


def ties_of(run: Path, step: int) -> dict[str, list[str]]:
    """What a checkpoint says of the run that it belongs to."""
    state = json.loads((folder_of(run, step) / STATE).read_text())
    return {name: [digest] for name, digest in state["run"].items()}


def _fields(position: checkpoint.Position) -> dict[str, Any]:
    return {name: getattr(position, name) for name in position.__dataclass_fields__}
