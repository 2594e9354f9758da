"""The commands that need no server, as a person types them: output, exit codes, one-line errors."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from draftmill.manifests import files
from draftmill.manifests.dataset import Dataset
from draftmill.tools import reference
from draftmill.tools.cli import COMMANDS, cli, main
from tests.manifests import workload


class Run:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = self.capsys.readouterr()
        self.err = captured.err
        assert ended.value.code == code, captured
        return captured.out


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


NUMBERS = ("--target", "m", "--hidden-size", "64", "--layers", "8", "--vocab-size", "100")


@pytest.fixture
def dataset(run: Run, tmp_path: Path) -> Dataset:
    path = tmp_path / "ds"
    run("init", str(path), *NUMBERS)
    workload.run(path, workload.Journal(tmp_path / "journal"))
    return Dataset(path)


def test_init_add_status(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "ds")
    out = run("init", path, *NUMBERS)
    assert "layers 2, 4, 5, 8" in out
    assert "512 bytes a token" in out
    source = tmp_path / "p.jsonl"
    source.write_text('{"prompt": "a"}\nnonsense\n{"prompt": "b"}\n')
    assert "2 added, 0 known already, 1 skipped" in run("add", path, str(source))
    assert f"{source}:2:" in run.err
    assert "0 added, 2 known already" in run("add", path, str(source))
    found = json.loads(run("status", path, "--json"))
    assert found["prompts"]["total"] == found["prompts"]["pending"] == 2
    assert set(found) >= {"prompts", "tokens", "truncated", "disk"}
    assert "pending" in run("status", path)
    run("init", path, *NUMBERS, code=1)
    assert "is a dataset already" in run.err


def test_sources_of_the_config(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "ds"
    run("init", str(path), *NUMBERS)
    run("add", str(path), code=2)
    assert "name a SOURCE, or list some as [[sources]]" in run.err
    for name, count in (("a", 30), ("b", 10)):
        rows = [{"prompt": f"{name} {n}", "answer": f"{n}"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = path / "config.toml"
    start = config.read_text()
    config.write_text(
        start + '[[sources]]\npath = "../a.jsonl"\nweight = 2\n[[sources]]\n'
        'path = "../b.jsonl"\nmode = "prefill"\n'
    )
    out = run("add", str(path), "--limit", "12")
    assert "a: 8 added, 0 known already, 0 skipped; its share is 8 of 30" in out
    assert "b: 4 added, 0 known already, 0 skipped; its share is 4 of 10" in out
    out = run("add", str(path))
    assert "a: 22 added, 8 known already" in out
    assert "b: 6 added, 4 known already" in out
    found = json.loads(run("status", str(path), "--json"))
    assert found["sources"]["a"] | found["sources"]["b"] == {
        "total": 10, "pending": 10, "generated": 0, "timed_out": 0, "failed": 0, "rejected": 0,
        "extracted": 0, "off_policy": 10,
    }  # fmt: skip
    assert found["sources"]["a"]["off_policy"] == 0
    assert found["off_policy"]["prompts"] == 10
    assert "off-policy" in run("status", str(path))
    run("add", str(path), "--mode", "prefill", code=2)
    assert "--mode goes with a SOURCE" in run.err
    config.write_text(start + '[[sources]]\npath = "a.jsonl"\n[[sources]]\npath = "x/a.jsonl"\n')
    run("add", str(path), code=1)
    line = len(config.read_text().splitlines())
    assert f"line {line}: another of [[sources]] is called 'a' too" in run.err
    config.write_text(start + '[[sources]]\npath = "../none.jsonl"\n')
    run("add", str(path), code=1)
    assert "nothing was added" in run.err
    assert "10 added" in run("add", str(path), str(tmp_path / "b.jsonl"), "--turns", "all")


def test_status_keys_are_stable(run: Run, dataset: Dataset) -> None:
    found = json.loads(run("status", str(dataset.path), "--json"))
    assert list(found["prompts"]) == [
        "total", "pending", "generated", "timed_out", "failed", "rejected", "extracted",
    ]  # fmt: skip
    assert list(found["tokens"]) == ["prompt", "completion", "extracted"]
    assert set(found["disk"]) >= {
        "budget_bytes", "used_bytes", "completions_bytes", "hidden_states_bytes",
        "manifest_bytes", "staging_bytes", "free_bytes", "bytes_per_token",
        "compression_ratio", "samples_that_still_fit",
    }  # fmt: skip
    assert found["disk"]["used_bytes"] == files.folder_bytes(dataset.path)


def test_sql(run: Run, dataset: Dataset) -> None:
    query = "SELECT state, count(*) AS n FROM samples GROUP BY ALL ORDER BY n"
    out = run("sql", str(dataset.path), query, "--json")
    assert [json.loads(line)["n"] for line in out.splitlines()] == [1, 1, 12]
    run("sql", str(dataset.path), "SELECT nonsense", code=2)
    assert "nonsense" in run.err


def test_verify_and_repair(run: Run, dataset: Dataset) -> None:
    path = str(dataset.path)
    assert "24 completions and hidden states" in run("verify", path)
    shard = next(iter(dataset.hidden_states_dir.iterdir()))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    found = json.loads(run("verify", path, "--json", code=1))
    assert not found["ok"]
    assert found["damaged"][0]["shard"].endswith(shard.name)
    assert "1 repaired" in run("verify", path, "--repair")
    assert json.loads(run("verify", path, "--json"))["damaged"] == []


def test_verify_repair_rebuilds_a_lost_manifest(run: Run, dataset: Dataset) -> None:
    dataset.manifest_path.unlink()
    run("status", str(dataset.path), code=1)
    assert "verify" in run.err
    run("verify", str(dataset.path), "--repair")
    assert "rebuilt" in run.err
    assert "24 completions and hidden states" in run("verify", str(dataset.path))


def test_speculators_train_without_a_gpu_says_so_first(run: Run, dataset: Dataset) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    output = dataset.path.parent / "out"
    run("speculators-train", str(dataset.path), "--output", str(output), code=2)
    assert "needs a GPU, and there is none here" in run.err
    assert not output.exists()


def test_retry_and_evict(run: Run, dataset: Dataset) -> None:
    path = str(dataset.path)
    run("retry", path, code=2)
    words = ("retry", path, "--timed-out", "--rejected")
    for _ in range(2):
        out = run(*words, "--dry-run")
        assert out.splitlines() == [
            "1 timed out at generate (Test)",
            "1 rejected at generate (Test)",
            "2 rows would be asked again",
        ]
    assert "1 rows would" in run(*words, "--dry-run", "--prompt-tokens", "..3")
    assert "0 rows would" in run(*words, "--dry-run", "--completion-tokens", "1000..")
    run(*words, "--prompt-tokens", "7", code=2)
    assert "no range of tokens" in run.err
    for odd in ("5..3", "..99999999999999999999", "..", "-1e3.."):
        run(*words, "--prompt-tokens", odd, code=2)
    for option, listed in (("--source", "there are: test"), ("--error-class", "there are: Test")):
        run(*words, option, "typo", "--dry-run", code=2)
        assert "'typo'" in run.err
        assert listed in run.err
    run("evict", path, "--all", "--source", "typo", code=2)
    assert "no row has the source 'typo'" in run.err
    assert "2 rows will be asked again" in run(*words)
    assert "0 rows" in run("retry", path, "--failed")
    for stage in ((), ("--stage", "generate")):
        assert "3 truncated" in run("retry", path, "--truncated", "--dry-run", *stage)
    assert "0 rows" in run("retry", path, "--truncated", "--dry-run", "--stage", "extract")
    run("evict", path, code=2)
    assert "12 rows to extract" in run("evict", path, "--all")


def test_a_second_writer_is_told_who_the_first_is(run: Run, dataset: Dataset) -> None:
    source = dataset.path.parent / "p.jsonl"
    source.write_text('{"prompt": "a"}\n')
    with dataset.writer(**workload.SIZES):
        run("add", str(dataset.path), str(source), code=1)
    assert "is being written by process" in run.err


@pytest.mark.parametrize(
    "words",
    [
        ("status", "nothing-here"),
        ("add", "nothing-here", "x"),
        ("verify", "nothing-here"),
        ("train", "nothing-here", "--output", "x"),
    ],
)
def test_a_folder_that_is_no_dataset(run: Run, words: tuple[str, ...]) -> None:
    run(*words, code=1)
    assert "is not a dataset" in run.err
    assert "Traceback" not in run.err


def test_a_mistake_in_the_config_names_its_line(run: Run, dataset: Dataset) -> None:
    text = dataset.config_path.read_text().replace("max_seq_len", "max_sequence", 1)
    dataset.config_path.write_text(text)
    run("retry", str(dataset.path), "--failed", code=1)
    line = next(n for n, t in enumerate(text.splitlines(), 1) if t.startswith("max_sequence"))
    assert f"line {line}: unknown key 'max_sequence'" in run.err


def test_every_command_has_help_and_a_reference(run: Run) -> None:
    for name in COMMANDS:
        assert name in run(name, "--help")
    context = click.Context(cli, info_name="draftmill")
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        for words, each in reference.with_subcommands(command, context, name):
            text = (each.help or "").replace("\\b", "")
            example = f"draftmill {words} "
            assert isinstance(each, click.Group) or example in text, f"{words}: no example"
    page = Path(__file__).parents[2] / "docs" / "reference.md"
    # In a process of its own: click keeps help options as the first caller of a command saw them.
    made = subprocess.run(
        [sys.executable, "-m", "draftmill.tools.reference"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert page.read_text() == made.stdout, (
        "docs/reference.md is old: python -m draftmill.tools.reference > docs/reference.md"
    )


def test_absurd_values_are_one_line(run: Run, dataset: Dataset, tmp_path: Path) -> None:
    path, url = str(dataset.path), "http://127.0.0.1:9"
    for words in (
        ("generate", path, "--url", url, "--timeout", "nan"),
        ("generate", path, "--url", url, "--timeout", "-1"),
        ("generate", path, "--url", url, "--concurrency", "0"),
        ("generate", path, "--url", url, "--concurrency", "999999999"),
        ("train", path, "--output", str(tmp_path / "t"), "--epochs", "inf"),
        ("train", path, "--output", str(tmp_path / "t"), "--epochs", "1e99"),
        ("train", path, "--output", str(tmp_path / "t"), "--lr", "nan"),
        ("train", path, "--output", str(tmp_path / "t"), "--seed", str(10**30)),
        ("train", path, "--output", str(tmp_path / "t"), "--max-seq-len", str(10**10)),
        ("add", path, ""),
        ("add", path, str(dataset.config_path), "--name", "x\udcff"),
    ):
        run(*words, code=2)
        assert "unexpected" not in run.err
        assert "Traceback" not in run.err
    assert not (tmp_path / "t").exists()


def test_a_place_that_cannot_be_used_is_named_and_is_no_fault_of_draftmill(
    run: Run, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(dataset.path)
    long = str(tmp_path / ("x" * 300))
    run("add", path, long, code=1)
    assert run.err == f"draftmill: {long}: File name too long\n"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/data")

    monkeypatch.setattr("draftmill.tools.add.add_sources", full)
    run("add", path, str(dataset.config_path), code=3)
    assert run.err == "draftmill: /data: No space left on device\n"


def test_names_that_the_terminal_cannot_show_end_no_command(tmp_path: Path) -> None:
    source = tmp_path / "é.jsonl"
    source.write_text('{"prompt": "a"}\n')
    plain = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    for words in (
        ("init", str(tmp_path / "→"), *NUMBERS),
        ("add", str(tmp_path / "→"), str(source)),
    ):
        command = [sys.executable, "-m", "draftmill.tools", *words]
        done = subprocess.run(command, capture_output=True, env=plain, encoding="latin-1")
        assert done.returncode == 0, done.stderr
        assert "\\u2192" in done.stdout


def test_a_folder_whose_name_is_not_utf8(run: Run, tmp_path: Path) -> None:
    path = f"{tmp_path}/d\udcff"
    for words in (("init", path, *NUMBERS), ("status", path)):
        run(*words, code=1)
        assert "is not UTF-8" in run.err


def test_unknown_words_are_usage_errors(run: Run) -> None:
    run("frobnicate", code=2)
    run("status", code=2)


def test_debug_shows_a_traceback(run: Run) -> None:
    run("--debug", "status", "nothing-here", code=1)
    assert "Traceback" in run.err
