"""`draftmill export` and `import` as a person types them."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmill.manifests.dataset import Dataset
from draftmill.tools.cli import main
from tests.trainer.tiny import HIDDEN, LAYER_IDS, LAYERS, VOCAB, build_dataset, random_samples


def test_export_and_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = capsys.readouterr()
        assert ended.value.code == code, captured
        return captured.out + captured.err

    def init(path: str) -> None:
        sizes = ("--hidden-size", str(HIDDEN), "--layers", str(LAYERS), "--vocab-size", str(VOCAB))
        ids = ",".join(map(str, LAYER_IDS))
        run("init", path, "--target", "m", *sizes, "--target-layer-ids", ids)

    first, second, out = (str(tmp_path / name) for name in ("a", "b", "out"))
    init(first)
    init(second)
    build_dataset(tmp_path / "a", random_samples(5))
    text = run("export", first, out, "--format", "speculators")
    assert "5 samples, " in text
    assert f"tokens × 4 layers × {HIDDEN} × 2 bytes" in text
    assert "5 samples written" in text
    assert "0 samples written (0 tokens, 0 B), 5 were there already" in run("export", first, out)
    assert "5 prompts added" in run("import", second, out)
    text = run("import", second, out)
    assert "0 prompts added, 5 known already" in text
    assert "0 completions and 0 hidden states stored" in text
    with Dataset.open(second).reader() as reader:
        assert reader.extracted().num_rows == 5
    assert "holds something else" in run("export", first, second, code=1)
