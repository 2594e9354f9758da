"""Residual streams of a target model by transformers, in a process of its own.

`residual_streams` is the caller's side and imports neither torch nor transformers; `_main` is the
process. Only the first layers are loaded, as many as the wanted ones need and memory takes: so the
first auxiliary layer of a model of any size can be checked. A process, because its memory must go
back, and because nothing that happens to it may end an extraction.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.sizes import format_size
from draftmill.manifests.target.target import TargetModel
from draftmill.manifests.types import TokenIds

Floats = NDArray[np.float32]

_TIMEOUT_S = 1800.0
_ENDING_S = 5.0


class NoReferenceError(Exception):
    """Why there is nothing to compare with; no fault of the server's."""


def layers_that_fit(
    target: TargetModel, layer_ids: Sequence[int], memory_bytes: int
) -> tuple[int, bool]:
    """(decoder layers to load, whether they are loaded in float32): for as many of `layer_ids` as
    `memory_bytes` allow, each with the layer after it. (0, False) when there is no room for any.
    """
    for last in sorted(set(layer_ids), reverse=True):
        num_layers = min(last + 1, target.num_layers)
        stored = target.weight_bytes(num_layers)
        if stored and stored <= memory_bytes:
            wide = stored * (4 // target.float_bytes) if target.float_bytes else stored
            return num_layers, target.float_bytes > 0 and wide <= memory_bytes
    return 0, False


async def residual_streams(
    target: TargetModel, token_ids: TokenIds, layer_ids: Sequence[int], memory_bytes: int
) -> dict[int, Floats]:
    """{layer id: residual stream [T, H]} of the wanted layers that fit and of their neighbours.

    Raises NoReferenceError with the reason when none can be computed.
    """
    if not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")):
        raise NoReferenceError("transformers is not installed here (pip install draftmill[train])")
    memory_bytes = min(memory_bytes, _available_bytes() // 2)
    num_layers, wide = layers_that_fit(target, layer_ids, memory_bytes)
    if not num_layers:
        first = min(min(layer_ids) + 1, target.num_layers)
        raise NoReferenceError(
            f"the first {first} layers of {target.folder} take "
            f"{format_size(target.weight_bytes(first))}, {format_size(memory_bytes)} may be used "
            "(extract.canary_memory, and half of what is free)"
        )
    wanted = {near for each in layer_ids for near in (each - 1, each, each + 1)}
    with tempfile.TemporaryDirectory(prefix="draftmill-reference-") as folder:
        job = {
            "folder": str(target.folder),
            "out": str(Path(folder) / "streams.npy"),
            "num_layers": num_layers,
            "dtype": "float32" if wide else "auto",
            "wanted": sorted(each for each in wanted if 0 <= each <= num_layers),
            "token_ids": token_ids.tolist(),
        }
        await _run(job)
        streams = np.load(job["out"])
    return dict(zip(job["wanted"], streams, strict=True))


async def _run(job: dict[str, Any]) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for who waits for it
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, errors = await process.communicate(json.dumps(job).encode())
    except TimeoutError:
        raise NoReferenceError(f"transformers took longer than {_TIMEOUT_S:,.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.wait_for(process.wait(), _ENDING_S)
    if process.returncode:
        reason = _reason(errors.decode(errors="replace"))
        raise NoReferenceError(
            f"transformers could not run it (exit code {process.returncode}): {reason}"
        )


def _reason(text: str) -> str:
    """The line of a process's last words that tells most: the exception, which may be long."""
    lines = text.strip().splitlines() or ["it said nothing"]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (raised or lines)[-1][:300]


def _available_bytes() -> int:
    """Memory that can be used without swapping; unlimited where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration, ValueError):
        return 1 << 62


# -- the process ---------------------------------------------------------------------------------


def _main() -> None:
    job = json.load(sys.stdin)
    import torch

    model = _load(job["folder"], job["num_layers"], job["dtype"])
    layers = _decoder_layers(model, job["num_layers"])
    seen: list[torch.Tensor] = []

    def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(given[0] if given else named["hidden_states"])

    for layer in layers:
        layer.register_forward_pre_hook(before, with_kwargs=True)
    layers[-1].register_forward_hook(
        lambda _, given, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([job["token_ids"]]), use_cache=False)
    if len(seen) != job["num_layers"] + 1:
        sys.exit(f"{len(seen)} residual streams for {job['num_layers']} layers")
    streams = torch.stack([seen[each].reshape(-1, seen[each].shape[-1]) for each in job["wanted"]])
    np.save(job["out"], streams.float().numpy())


def _load(folder: str, num_layers: int, dtype: str) -> Any:
    """The model with its first `num_layers` layers, for text alone where it has other sides."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    before = text.num_hidden_layers
    text.num_hidden_layers = num_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before and name.endswith("types"):
            setattr(text, name, value[:num_layers])
    try:
        made = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    except ValueError as error:
        if "Unrecognized configuration" not in str(error):
            raise
        made = AutoModelForImageTextToText.from_pretrained(folder, config=config, dtype=dtype)
    return made.eval()


def _decoder_layers(model: Any, num_layers: int) -> Any:
    """The list of the language model's decoder layers."""
    from torch.nn import ModuleList

    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ModuleList)
        and len(module) == num_layers
        and name.rpartition(".")[2] in ("layers", "h", "blocks")
        and "vision" not in name
    }
    if not found:
        sys.exit(f"no list of {num_layers} decoder layers in {type(model).__name__}")
    return found[min(found, key=len)]


if __name__ == "__main__":
    _main()
