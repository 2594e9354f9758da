"""Several processes train what one would: the same batches, and weights that agree."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftmill.manifests.errors import ConfigError
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import checkpoint
from draftmill.trainer.devices import joined
from draftmill.trainer.runlog import read_log
from draftmill.trainer.settings import TrainSettings
from draftmill.trainer.train import train
from tests.trainer import tiny

SETTINGS = {
    "draft_vocab_size": 256,
    "max_seq_len": 60,
    "rows_per_step": 4,
    "steps": 8,
    "lr": 5e-3,
    "validation": 0.2,
    "checkpoint_every": 4,
    "log_every": 1,
    "ttt_steps": 2,
    "device": "cpu",
}
# One process of a run. It says which batches it worked on.
PROGRAM = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from draftmill.manifests.target.target import TargetModel
from draftmill.trainer import engine
from draftmill.trainer.settings import TrainSettings
from draftmill.trainer.train import train
from tests.trainer import tiny

dataset, folder, output, settings = sys.argv[1:5]
seen = []
step = engine.Engine.step
def watched(self, batches, lr):
    seen.append([batch.checksum() for batch in batches])
    if os.environ.get("INTERRUPT_AT") == f"{len(seen)} {os.environ['RANK']}":
        os.kill(os.getpid(), signal.SIGINT)
    return step(self, batches, lr)
engine.Engine.step = watched
report = train(
    Path(dataset),
    TrainSettings(**json.loads(settings)),
    target=TargetModel.from_folder(folder, name="tests/tiny-llama"),
    target_layer_ids=tiny.LAYER_IDS,
    output=Path(output),
)
Path(f"{output}.rank{os.environ['RANK']}").write_text(
    json.dumps({"seen": seen, "step": report.step, "validation": report.validation})
)
"""


class Run:
    """Processes of one run, started as torchrun starts them."""

    def __init__(self, size: int, dataset: Path, target: TargetModel, output: Path, **more) -> None:
        self.output, self.size = output, size
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        arguments = [str(dataset), str(target.folder), str(output), json.dumps(SETTINGS | more)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def wait(self) -> list[dict]:
        """What each process found out; fails with the words of one that failed."""
        try:
            ends = [process.communicate(timeout=600) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        for process, (_, err) in zip(self.processes, ends, strict=True):
            assert process.returncode == 0, err
        return [
            json.loads(self.output.with_name(f"{self.output.name}.rank{rank}").read_text())
            for rank in range(self.size)
        ]


def alone(dataset: Path, target: TargetModel, output: Path, **more):
    return train(
        dataset,
        TrainSettings(**SETTINGS | more),
        target=target,
        target_layer_ids=tiny.LAYER_IDS,
        output=output,
    )


def weights_at(output: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.load(output, step, {})[1]["weights"]


def assert_close(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # sums over rows in another order, through eight steps of an optimizer
        torch.testing.assert_close(mine[name], tensor, rtol=2e-3, atol=2e-4, msg=name)


@pytest.fixture(scope="module")
def whole(dataset: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory):
    """One process over all the rows, and the checksums of its batches."""
    from draftmill.trainer import engine

    output = tmp_path_factory.mktemp("alone") / "run"
    seen: list[list[str]] = []
    step = engine.Engine.step

    def watched(self, batches, lr):
        seen.append([batch.checksum() for batch in batches])
        return step(self, batches, lr)

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(engine.Engine, "step", watched)
        report = alone(dataset, target, output)
    return output, report, seen


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_train_what_one_does(
    whole, dataset: Path, target: TargetModel, tmp_path: Path, fsdp: bool
) -> None:
    output, report, seen = whole
    ranks = Run(2, dataset, target, tmp_path / "run", fsdp=fsdp).wait()
    together = [[*a, *b] for a, b in zip(ranks[0]["seen"], ranks[1]["seen"], strict=True)]
    assert together == seen
    for step in (4, 8):
        assert_close(weights_at(tmp_path / "run", step), weights_at(output, step))
    assert ranks[0]["validation"] == ranks[1]["validation"]
    assert ranks[0]["validation"].keys() == report.validation.keys()
    for name in ("loss", "full_acc_0", "cond_acc_1"):
        assert ranks[0]["validation"][name] == pytest.approx(report.validation[name], abs=0.05)
    trained = [e for e in read_log(tmp_path / "run" / "log.jsonl") if e["kind"] == "train"]
    before = [e for e in read_log(output / "log.jsonl") if e["kind"] == "train"]
    assert [e["step"] for e in trained] == list(range(1, 9))
    assert [e["tokens"] for e in trained] == [e["tokens"] for e in before]
    for mine, wanted in zip(trained, before, strict=True):
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
        assert mine["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_of_one_goes_on_with_two_and_comes_back(
    whole, dataset: Path, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT reaches every process; all save together, and the batches go on where they were."""
    output, _, seen = whole
    monkeypatch.setenv("INTERRUPT_AT", "3 1")  # the third step of process 1
    ranks = Run(2, dataset, target, tmp_path / "run", fsdp=True).wait()
    done = ranks[0]["step"]
    assert ranks[1]["step"] == done < 8
    assert checkpoint.checkpoints(tmp_path / "run")[-1] == done
    together = [[*a, *b] for a, b in zip(ranks[0]["seen"], ranks[1]["seen"], strict=True)]
    assert together == seen[:done]
    alone(dataset, target, tmp_path / "run")
    assert_close(weights_at(tmp_path / "run", 8), weights_at(output, 8))


@pytest.mark.slow
def test_a_refusal_of_one_is_that_of_all(
    whole, dataset: Path, target: TargetModel, tmp_path: Path
) -> None:
    run = Run(2, dataset, target, whole[0], lr=1e-4)
    ends = [process.communicate(timeout=600) for process in run.processes]
    for process, (_, err) in zip(run.processes, ends, strict=True):
        assert process.returncode == 1
        assert "holds a run with other settings" in err


def test_processes_that_cannot_share_a_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="4, which 3 processes cannot share"):
        with joined(TrainSettings(**SETTINGS)):
            pass


def test_sharding_needs_company() -> None:
    with pytest.raises(ConfigError, match="fsdp shares a model between processes"):
        with joined(TrainSettings(**SETTINGS | {"fsdp": True})):
            pass
