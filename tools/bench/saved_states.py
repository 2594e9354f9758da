"""The hidden states that benches work on: those of a file, or of the embedded model.

Owns where they come from; computing them is left to `states`, which needs torch.
States are bf16 bit patterns, uint16 [T, L, H]: tokens, layers, hidden size.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftmill.manifests.errors import UsageError

Words = NDArray[np.uint16]


def load_states(path: Path) -> Words:
    """Hidden states from a .npy file; UsageError where it holds something else."""
    try:
        states = np.load(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no array of hidden states: {error}") from error
    if states.dtype != np.uint16 or states.ndim != 3 or not states.size:
        raise UsageError(
            f"{path}: hidden states are uint16 [tokens, layers, hidden size], "
            f"this is {states.dtype} {list(states.shape)}"
        )
    words: Words = states
    return words


def states_of_bench(states_file: Path | None) -> tuple[Words, Path | None]:
    """The states in a file or, without one, those of the embedded model, and its folder."""
    if states_file is not None:
        return load_states(states_file), None
    # only here, so that a file can be benched where there is no torch
    from draftmill.tools.bench import states as bench_states
    from draftmill.tools.demo.command import cache_folder
    from draftmill.tools.demo.embedded import ensure_model

    model_folder = ensure_model(cache_folder())
    return load_states(bench_states.saved_states(model_folder, cache_folder())), model_folder
