"""`draftmill extract` at the end of its budget: what fits is kept, exit code 3, the account."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftmill.manifests.dataset import Dataset
from draftmill.manifests.files import folder_bytes
from draftmill.manifests.headroom import MIN_HEADROOM
from draftmill.tools.cli import main
from tests.fakes.target_server import TargetServer
from tests.tools.served import served

PROMPTS = 40
HIDDEN = 64


@pytest.mark.slow
def test_extract_on_a_budget_that_is_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = capsys.readouterr()
        assert ended.value.code == code, captured
        return captured.out + captured.err

    path, staging, prompts = tmp_path / "ds", tmp_path / "staging", tmp_path / "prompts.jsonl"
    staging.mkdir()
    prompts.write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(PROMPTS)))
    dataset = str(path)
    sizes = ("--hidden-size", str(HIDDEN), "--layers", "30", "--vocab-size", "512")
    run("init", dataset, "--target", "m", *sizes)
    run("add", dataset, str(prompts))
    with served(TargetServer(model="m", hidden=HIDDEN, staging=str(staging))) as server:
        run("generate", dataset, "--url", server.url)
        words = ("extract", dataset, "--url", server.url, "--staging", str(staging))
        with Dataset.open(path).writer() as writer:
            need = 8 * HIDDEN * writer.to_extract(8192)[1]
        # raw, they would fit; but a shard's header takes 1 MiB, and what is staged takes room, too
        limit = folder_bytes(path) + MIN_HEADROOM + need
        text = run(*words, "--disk-budget", f"{limit}B", "--concurrency", "2", code=3)
        account = [line for line in text.splitlines() if line.startswith("The budget: ")]
        assert len(account) == 1
        stored = re.search(r"(\d+) samples have hidden states \(.+\) and can be", account[0])
        left = re.search(r"the other (\d+) need about .+ more as em-zfast", account[0])
        assert stored is not None
        assert left is not None
        assert int(stored[1]) > 0
        assert int(left[1]) > 0
        assert int(stored[1]) + int(left[1]) == PROMPTS
        assert "bitround-4 (lossy) would save" in account[0]
        assert "rot4 (lossy) would save" in account[0]
        assert "The disk budget of" in text
        assert f"{stored[1]} extracted" in text
        assert folder_bytes(path) + folder_bytes(staging) <= limit
        # nothing fits that did not fit before, and it is said again
        assert "The budget: " in run(*words, "--disk-budget", f"{limit}B", code=3)
        text = run(*words, "--disk-budget", f"{limit + 4 * need}B")
        assert "The budget: " not in text
        assert f"{PROMPTS} extracted" in text


@pytest.mark.slow
def test_generate_counts_a_staging_folder_outside_the_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left there is part of the budget at every stage."""
    path, staging, prompts = tmp_path / "ds", tmp_path / "staging", tmp_path / "prompts.jsonl"
    staging.mkdir()
    prompts.write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(PROMPTS)))
    config = path / "config.toml"

    def run(*words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(words)
        return int(str(ended.value.code))

    sizes = ("--hidden-size", str(HIDDEN), "--layers", "30", "--vocab-size", "512")
    run("init", str(path), "--target", "m", *sizes, "--disk-budget", "100MB")
    text = config.read_text().replace('staging = ""', f'staging = "{staging}"')
    config.write_text(text)
    run("add", str(path), str(prompts))
    left = staging / "left.safetensors"
    left.write_bytes(bytes(95 << 20))
    with served(TargetServer(model="m", hidden=HIDDEN, staging=str(staging))) as server:
        words = ("generate", str(path), "--url", server.url)
        assert run(*words) == 3
        assert "The disk budget of 100 MB is used up" in capsys.readouterr().err
        left.unlink()
        assert run(*words) == 0
