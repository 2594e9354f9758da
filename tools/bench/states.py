"""Real hidden states for benches, from the embedded model and texts that come with Python.

Owns the text, the forward pass and the file they are kept in; imports torch and transformers. What
is measured on the states is left to the benches.

Legend: T tokens, L layers, H hidden size.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import os
import shlex
import statistics
import textwrap
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftmill.manifests.target.target import (
    TargetModel,
    default_target_layer_ids,
    extraction_layer_ids,
)

WINDOW = 512  # tokens of one forward pass; each window starts with an empty context
_DOCS_SHARE = 0.7


def saved_states(model_folder: Path, cache_dir: Path, num_tokens: int = 16_384) -> Path:
    """The .npy file of hidden states, uint16 [T, L, H]; made at the first call, minutes on a CPU.

    The default auxiliary layers and the last one before the final norm, as extraction gives them.
    """
    target = TargetModel.from_folder(model_folder)
    ids = extraction_layer_ids(default_target_layer_ids(target.num_layers), target.num_layers)
    layers = "-".join(map(str, ids))
    path = cache_dir / f"states-{target.name}-{layers}-{num_tokens}.npy"
    if not path.exists():
        states = capture(model_folder, ids, num_tokens)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with partial.open("wb") as file:
            np.save(file, states)
        partial.rename(path)
    return path


def capture(model_folder: Path, layer_ids: tuple[int, ...], num_tokens: int) -> NDArray[np.uint16]:
    """Run the model over `text` and return bf16 bit patterns [T, L, H] of those layers' inputs.

    The forward pass is in float32, many times faster than bf16 on CPUs without bf16 arithmetic;
    what is kept is rounded to bf16, as a server would hand it over.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    ids = tokenizer(text(num_tokens), return_tensors="pt")["input_ids"][:, :num_tokens]
    inputs: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            inputs[layer] = args[0].detach()

        return hook

    body = model.model
    for layer in layer_ids:
        # transformers' own hidden_states have the last entry after the final norm
        module = body.norm if layer == len(body.layers) else body.layers[layer]
        module.register_forward_pre_hook(keep(layer))
    pieces = []
    with torch.inference_mode():
        for window in ids.split(WINDOW, dim=1):
            body(window, use_cache=False)
            states = torch.stack([inputs[layer][0] for layer in layer_ids], dim=1)
            pieces.append(states.to(torch.bfloat16).view(torch.uint16).numpy())
    return np.concatenate(pieces)


def text(num_tokens: int) -> str:
    """English and source code, enough for `num_tokens`: the language reference, then modules."""
    docs = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    modules = (argparse, heapq, textwrap, statistics, shlex)
    code = "\n\n".join(inspect.getsource(module) for module in modules)
    # a token of either is at least two characters in the vocabularies in use, mostly three or four
    size = 5 * num_tokens
    return docs[: int(size * _DOCS_SHARE)] + "\n\n" + code[: int(size * (1 - _DOCS_SHARE))]
