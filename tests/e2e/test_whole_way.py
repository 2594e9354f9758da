"""The whole way on a real model, killed twice on it: prompts to accepted tokens, nothing faked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.shards.shard import is_open, list_shards
from draftmill.manifests.types import Location
from draftmill.manifests.verify import verify
from draftmill.tools.demo import command as demo

SIZE = demo.Size(prompts=60, completion_tokens=32, steps=16, eval_untrained=False)
PROGRAM = f"""
import sys
from pathlib import Path
from draftmill.tools.demo import command as demo
size = demo.{SIZE!r}
print(demo.summary(Path(sys.argv[1]), demo.run_demo(Path(sys.argv[1]), size)))
"""


class Job:
    """The demo in a process of its own, killed when a moment has come."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "TMPDIR": str(temporary)}
        self.log = folder.parent / "log"

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(self.folder)],
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    def kill_when(self, moment: Callable[[], bool]) -> None:
        process = self.start()
        while not moment():
            assert process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def finish(self) -> None:
        process = self.start()
        assert process.wait() == 0, self.log.read_text()[-3000:]


def _grown(folder: Path) -> Callable[[], bool]:
    """Whether records have been written: a shard is longer than its reserved header."""
    return lambda: any(
        path.stat().st_size > (1 << 18) + 8 or path.name.endswith("1.safetensors.open")
        for path in list_shards(folder).values()
    )


def _records(folder: Path) -> Callable[[], bool]:
    return lambda: sum(path.stat().st_size for path in list_shards(folder).values()) > 40_000


def _left_behind(temporary: Path) -> set[str]:
    """Sockets and folders of servers, and what Python shares between processes."""
    found = {str(each) for each in temporary.rglob("*") if each.is_socket()}
    found |= {str(each) for each in temporary.glob("draftmill-*")}
    found |= {str(each) for each in temporary.glob("vllm_dist_*")}
    return found | {str(each) for each in Path("/dev/shm").glob("psm_*")}


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """Short: names of sockets go behind it. What is in there at the end is a test's to say."""
    with tempfile.TemporaryDirectory(prefix="dm-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def shared_before() -> set[str]:
    return {str(each) for each in Path("/dev/shm").glob("psm_*")}


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, temporary: Path, shared_before: set[str]
) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    job = Job(folder, temporary)
    job.kill_when(_records(folder / "dataset/completions"))
    job.kill_when(_grown(folder / "dataset/hidden_states"))
    job.finish()
    return folder, job.log.read_text()


def test_the_summary_has_every_figure(done: tuple[Path, str]) -> None:
    folder, log = done
    assert log.count("server of an earlier run") >= 1, "the running server was not found again"
    for word in ("prompts  ", "tokens/s", "of raw", "accepted per step", "trained"):
        assert word in log
    facts = demo.Log(folder / "demo.json").facts
    assert facts["eval_trained"]["drafts"] > 50


@pytest.mark.usefixtures("done")
def test_servers_leave_nothing_on_the_machine(temporary: Path, shared_before: set[str]) -> None:
    """Though draftmill was killed under each of them."""
    assert _left_behind(temporary) <= shared_before


def test_no_prompt_was_lost_or_answered_twice(done: tuple[Path, str]) -> None:
    with Dataset.open(done[0] / "dataset").reader() as reader:
        found = reader.summary()["prompts"]
        assert found["extracted"] == found["total"] == 54
        twice = reader.sql(
            "SELECT id, stage FROM attempts WHERE outcome IN ('generated', 'extracted') "
            "GROUP BY ALL HAVING count(*) > 1"
        )
        assert twice.num_rows == 0
        report = verify(reader.dataset.path, reader.manifest, deep=True)
    assert report.ok, report.document()
    assert report.samples_checked == 2 * 54


def test_sealed_shards_open_as_safetensors(done: tuple[Path, str]) -> None:
    sealed = 0
    for kind in ("completions", "hidden_states"):
        for path in list_shards(done[0] / "dataset" / kind).values():
            if is_open(path):
                continue
            sealed += 1
            with safe_open(path, "np") as tensors:
                assert tensors.metadata()["kind"] == kind
                for name in tensors.keys():  # noqa: SIM118  (not a dict)
                    assert tensors.get_tensor(name).dtype == np.uint8
    assert sealed >= 1


def test_hidden_states_take_at_most_seven_tenths(done: tuple[Path, str]) -> None:
    with Dataset.open(done[0] / "dataset").reader() as reader:
        disk = reader.summary()["disk"]
    assert disk["bytes_per_token"] <= 0.70 * disk["raw_bytes_per_token"]


def test_stored_states_are_the_models_own(done: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dataset = Dataset.open(done[0] / "dataset")
    model_path = _target_path(dataset)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with dataset.reader() as reader:
        rows = reader.extracted().to_pylist()[:3]
        for row in rows:
            _check_sample(reader, row, model, tokenizer, dataset)


def _target_path(dataset: Dataset) -> str:
    from draftmill.tools.settings import load

    return load(dataset).target.path


def _check_sample(
    reader: Any, row: dict[str, Any], model: Any, tokenizer: Any, dataset: Dataset
) -> None:
    place = Location(row["generate_shard"], row["generate_offset"], row["generate_length"])
    completion = reader.shards.completion(place)
    ids = completion.token_ids
    prompt = len(completion.prompt_token_ids)
    # The boundary: the prompt is what the template makes of the messages, and nothing more.
    conversation = _conversation(dataset, row["id"])
    rendered = tokenizer.apply_chat_template(
        conversation["messages"], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert ids[:prompt].tolist() == list(rendered)
    text = tokenizer.decode(ids[prompt:].tolist(), skip_special_tokens=True)
    assert text.strip() == (completion.content or "").strip()
    place = Location(row["extract_shard"], row["extract_offset"], row["extract_length"])
    stored = reader.shards.states(place)
    assert stored.shape[0] == len(ids)
    got: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, k=k: got.__setitem__(k, args[0][0]))
        for k, layer in enumerate(model.model.layers)
    ]
    hooks.append(
        model.model.norm.register_forward_pre_hook(
            lambda _, args: got.__setitem__(len(model.model.layers), args[0][0])
        )
    )
    with torch.no_grad():
        model(torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    states = torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16).float()
    for position, layer in enumerate((2, 15, 27, 30)):
        error = (states[:, position] - got[layer]).norm() / got[layer].norm()
        assert error < 0.03, f"layer {layer}: relative error {error:.4f}"
        wrong = (states[:, position] - got[layer - 1]).norm() / got[layer - 1].norm()
        assert wrong > 2 * error, f"layer {layer} is not told apart from {layer - 1}"


def _conversation(dataset: Dataset, prompt_id: int) -> dict[str, Any]:
    import json

    import pyarrow.parquet as pq

    for path in sorted(dataset.prompts_dir.glob("*.parquet")):
        for row in pq.read_table(path, columns=["id", "conversation"]).to_pylist():
            if row["id"] == prompt_id:
                found: dict[str, Any] = json.loads(row["conversation"])
                return found
    raise AssertionError(f"prompt {prompt_id} is in no prompt file")
