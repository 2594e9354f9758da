"""An experiment in its folder: what binds it, what it recodes, and what it keeps of its drafts."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import DraftmillError, SettingsMismatch, UsageError
from draftmill.manifests.types import Location, Prompt
from draftmill.tools.bench.experiments import docstrings, drafts, on_policy
from draftmill.tools.bench.experiments import work as work_module
from draftmill.tools.bench.experiments.precision import CODECS, EXACT, Precision, split
from draftmill.tools.bench.experiments.size import SMALL, ExperimentSize, Machine
from draftmill.tools.bench.experiments.work import HUMAN, Work, run_steps
from draftmill.tools.init import create
from draftmill.tools.settings import TargetSettings
from draftmill.trainer.loading import data
from draftmill.trainer.run_folder import locked_run
from draftmill.trainer.runlog import read_log
from tests.sources import CLONE
from tests.trainer import tiny

SIZE = replace(SMALL, prompts=12, held_out=2, sample_tokens=64, row_tokens=128, steps=2, seeds=2)
MakeWork = Callable[..., Work]


@pytest.fixture
def make_work(tmp_path: Path) -> MakeWork:
    def make(
        experiment: str = "precision", size: ExperimentSize = SIZE, model: Path = Path("m")
    ) -> Work:
        return Work(tmp_path / "work", experiment, size, Machine(device="cpu"), model)

    return make


def fill(work: Work, samples: list[tiny.Sample]) -> Dataset:
    """The work's dataset as generation and extraction would have left it."""
    create(
        work.samples.path,
        TargetSettings(
            model="tiny",
            path=str(work.model),
            hidden_size=tiny.HIDDEN,
            num_layers=tiny.LAYERS,
            vocab_size=tiny.VOCAB,
            target_layer_ids=tiny.LAYER_IDS,
        ),
        train={
            "draft_vocab_size": 256,
            "max_seq_len": work.size.row_tokens,
            "validation": work.size.validation,
            "ttt_steps": 2,
        },
    )
    return tiny.build_dataset(work.samples.path, samples)


def result(accepted: float, validation: float) -> dict[str, object]:
    return {
        "accepted_per_step": accepted,
        "accepted_by_position": [accepted, 0.0, 0.0],
        "drafts": 100,
        "validation": {"full_acc_0": validation, "loss": 3.0},
    }


# -- binding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k for k in SIZE.__dataclass_fields__ if k != "seeds"])
def test_another_size_is_refused(make_work: MakeWork, key: str) -> None:
    make_work()
    make_work(size=replace(SIZE, seeds=5))  # more seeds add to what is there
    with pytest.raises(SettingsMismatch, match=f"{key} was "):
        make_work(size=replace(SIZE, **{key: getattr(SIZE, key) + 1}))


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_servers_share_a_gpu(
    make_work: MakeWork, monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    monkeypatch.setattr(work_module, "vllm_engine", lambda python: "gpu")
    work = make_work()
    fill(work, tiny.random_samples(1))
    work.machine = Machine(server_args=("--attention-backend", "FLASH_ATTN"))
    args = work.settings(side_by_side=servers).serve.args
    assert args[0] == "--enforce-eager"
    assert args[-2:] == ("--attention-backend", "FLASH_ATTN")
    assert ("--gpu-memory-utilization" in args) == (servers > 1)
    if servers > 1:
        share = float(args[args.index("--gpu-memory-utilization") + 1])
        assert 0.5 < servers * share < 0.95


def test_steps_end_where_they_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    steps = [(name, partial(done.append, name)) for name in ("one", "two", "three")]
    run_steps(steps, "two")
    assert done == ["one", "two"]
    run_steps(steps, None)
    assert done[2:] == ["one", "two", "three"]


# -- prompts -----------------------------------------------------------------------------------


def test_questions_are_added_once_and_with_human_answers_when_asked(
    make_work: MakeWork, tmp_path: Path
) -> None:
    work = make_work(model=tiny_config(tmp_path / "m"))
    for human in (False, True, True):
        work.add_prompts(human=human)
        with work.samples.reader() as reader:
            rows = reader.sql("SELECT source, row, off_policy FROM prompts").to_pylist()
        own = {each["row"] for each in rows if each["source"] == docstrings.SOURCE}
        given = {each["row"] for each in rows if each["source"] == HUMAN}
        assert len(own) == SIZE.prompts
        assert given == (own if human else set())
        assert all(each["off_policy"] == (each["source"] == HUMAN) for each in rows)
    other = make_work("on-policy", size=replace(SIZE, prompts=5))
    with pytest.raises(UsageError, match="holds 14 questions and 7 are wanted"):
        other.add_prompts(human=True)


def tiny_config(folder: Path) -> Path:
    folder.mkdir()
    facts = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": tiny.HIDDEN,
        "num_hidden_layers": tiny.LAYERS,
        "vocab_size": tiny.VOCAB,
        "num_attention_heads": 4,
        "max_position_embeddings": tiny.CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


# -- recoding ----------------------------------------------------------------------------------


def codecs_of(dataset: Dataset) -> tuple[list[str], np.ndarray]:
    """The codec of each sample, and whether it is one to validate on."""
    with dataset.reader() as reader:
        samples = data.select(reader.extracted(), SIZE.sample_tokens).samples
        used = [
            str(reader.shards.header("extract", Location(*place)).content["codec"])
            for place in samples.states_at.tolist()
        ]
    return used, data.is_validation(samples, SIZE.validation)


def test_validation_states_stay_exact_in_every_dataset(make_work: MakeWork) -> None:
    work = make_work()
    fill(work, tiny.random_samples(40))
    experiment = Precision(work)
    experiment.recode()
    experiment.recode()  # once more changes nothing
    facts = work.log.facts["samples"]
    prints = set()
    for codec, path in experiment.datasets.items():
        used, held_out = codecs_of(Dataset(path))
        assert len(used) == 40
        assert 0 < held_out.sum() < 40
        assert used == [EXACT if is_held_out else codec for is_held_out in held_out]
        assert facts["validation samples"] == held_out.sum()
        with Dataset(path).reader() as reader:
            prints.add(data.fingerprint(data.select(reader.extracted(), 64).samples))
    assert len(prints) == 1  # the trainer cannot tell them apart but by their states
    sizes = [facts[f"bytes per token {codec}"] for codec in CODECS]
    assert sizes == sorted(sizes, reverse=True)


def test_answers_of_others_are_no_part_of_it(make_work: MakeWork) -> None:
    samples = tiny.random_samples(30)
    work = make_work()
    fill(work, samples[:20])
    with work.samples.writer() as writer:
        writer.add_prompts(
            Prompt(
                hash=f"given{number}",
                conversation="{}",
                source=HUMAN,
                row=number,
                conversation_id=sample.conversation,
                off_policy=True,
            )
            for number, sample in enumerate(samples[20:])
        )
        pending = writer.pending(0, 99)
        writer.commit([tiny._generated(p, s) for p, s in zip(pending, samples[20:], strict=True)])
        generated = writer.generated(0, 99)
        layers = (*tiny.LAYER_IDS, tiny.LAYERS)
        writer.commit(
            [
                tiny._extracted(each, sample, EXACT, layers)
                for each, sample in zip(generated, samples[20:], strict=True)
            ]
        )
    parts = split(work.samples, sample_tokens=SIZE.sample_tokens, validation=SIZE.validation)
    assert sorted((*parts.train, *parts.validation)) == list(range(1, 21))


def test_something_must_be_exact(make_work: MakeWork) -> None:
    with pytest.raises(UsageError, match="lossless"):
        Precision(make_work(), ["rot4"])


# -- drafts ------------------------------------------------------------------------------------


def test_what_was_measured_comes_out(make_work: MakeWork) -> None:
    work = make_work()
    fill(work, tiny.random_samples(20))
    experiment = Precision(work)
    experiment.recode()
    with pytest.raises(DraftmillError, match="no draft of em-zfast is measured yet"):
        experiment.figures()
    for number, draft in enumerate(experiment.drafts):
        work.log.put(draft.name, result(1.0 + number / 8, 0.5))
    again = Precision(make_work())  # from the file
    figures = {row["name"]: row for row in again.figures()}
    for codec in CODECS:
        values = [
            1.0 + number / 8 for number, draft in enumerate(experiment.drafts) if draft.arm == codec
        ]
        assert len(values) == SIZE.seeds
        assert figures[f"{codec}.accepted_per_step"]["value"] == np.mean(values)
        assert figures[f"{codec}.accepted_per_step"]["baseline"] == EXACT
        assert figures[f"{codec}.validation_accepted"]["value"] == 0.5
    page = again.markdown()
    assert page.count("\n| ") == 2 + len(CODECS)
    for codec in CODECS:
        assert f"| {codec} |" in page
    assert "2 steps of 128 tokens" in page


def test_validation_of_on_policy_compares_nothing(make_work: MakeWork) -> None:
    work = make_work("on-policy")
    experiment = on_policy.OnPolicy(work)
    with pytest.raises(DraftmillError, match="measured draft yet"):
        experiment.figures()
    for draft in experiment.drafts:
        work.log.put(draft.name, result(0.5 if draft.arm == on_policy.HUMAN else 0.75, 0.5))
    figures = {row["name"]: row for row in experiment.figures()}
    assert figures["own.accepted_per_step"]["ratio"] == 1.5
    assert not any("validation" in name for name in figures)


def test_the_validation_of_the_published_checkpoint_is_kept(tmp_path: Path) -> None:
    entries = [
        {"kind": "validation", "step": 1, "accepted_per_step": 0.2, "full_acc_0": 0.1},
        {"kind": "validation", "step": 2, "accepted_per_step": 0.9, "full_acc_0": 0.2},
        {"kind": "validation", "step": 3, "accepted_per_step": 0.9, "full_acc_0": 0.3},
        {"kind": "validation", "step": 4, "accepted_per_step": 0.5, "full_acc_0": 0.4},
        {"kind": "end", "step": 4, "interrupted": True},
    ]
    log = tmp_path / "log.jsonl"
    assert not drafts.is_trained(tmp_path)
    log.write_text("".join(json.dumps(each) + "\n" for each in entries))
    assert not drafts.is_trained(tmp_path)
    with log.open("a") as file:
        file.write(json.dumps({**entries[-1], "interrupted": False}) + "\n")
    assert drafts.is_trained(tmp_path)
    assert drafts.best_validation(tmp_path)["full_acc_0"] == 0.3


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_jobs_run_some_at_once_and_all_end(at_once: int) -> None:
    running = most = 0
    ended: list[int] = []

    async def job(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        if number == 1:
            raise DraftmillError("one failed")
        ended.append(number)

    with pytest.raises(DraftmillError, match="one failed"):
        drafts._run([partial(job, number) for number in range(4)], at_once)
    assert sorted(ended) == [0, 2, 3]
    assert most == min(at_once, 4)


@pytest.mark.slow
def test_drafts_are_trained_by_the_command_and_only_once(
    make_work: MakeWork, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = make_work(size=replace(SIZE, seeds=1), model=tiny.save_target(tmp_path / "m"))
    fill(work, list(tiny.answers(work.model, 24)))
    experiment = Precision(work, [EXACT, "rot4"])
    experiment.recode()
    drafts.train_drafts(work, experiment.drafts)
    for draft in experiment.drafts:
        folder = drafts.draft_folder(work, draft)
        assert drafts.is_trained(folder)
        assert (folder / "config.json").is_file()
        assert "full_acc_0" in drafts.best_validation(folder)
    capsys.readouterr()
    drafts.train_drafts(work, experiment.drafts)
    assert "2 of 2 drafts are trained already" in capsys.readouterr().err


LONG = replace(SIZE, seeds=1, steps=32)


def train_until_stopped(root: str, model: str) -> None:
    """What the process of the next test does."""
    work = Work(Path(root), "precision", LONG, Machine(device="cpu"), Path(model))
    drafts.train_drafts(work, Precision(work, [EXACT]).drafts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stopped_training_is_saved_and_goes_on(make_work: MakeWork, tmp_path: Path) -> None:
    work = make_work(size=LONG, model=tiny.save_target(tmp_path / "m"))
    fill(work, list(tiny.answers(work.model, 24)))
    experiment = Precision(work, [EXACT])
    experiment.recode()
    arguments = f"{str(work.root)!r}, {str(work.model)!r}"
    code = f"from {__name__} import train_until_stopped; train_until_stopped({arguments})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=CLONE)
    folder = drafts.draft_folder(work, experiment.drafts[0])
    while not any(each["kind"] == "train" for each in read_log(folder / "log.jsonl")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() != 0
    stopped = read_log(folder / "log.jsonl")[-1]
    assert (stopped["kind"], stopped["interrupted"]) == ("end", True)
    assert 0 < stopped["step"] < LONG.steps
    with locked_run(folder):
        pass  # nobody is left who trains it
    drafts.train_drafts(work, experiment.drafts)
    assert drafts.is_trained(folder)
    steps = [each["step"] for each in read_log(folder / "log.jsonl") if each["kind"] == "train"]
    assert steps == sorted(set(steps))
