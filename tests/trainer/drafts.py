"""Draft checkpoints as other trainers write them, with their names and fields and small sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from draftmill.manifests.target.target import TargetModel

INTERMEDIATE = 96


def flat_config(target: TargetModel, size: int, **changes: Any) -> dict[str, Any]:
    """config.json with the fields of AQ-MedAI's Kimi drafts."""
    heads = 4
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "draft_vocab_size": size,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
            "use_aux_hidden_state": True,
        },
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 131072,
        "max_window_layers": 48,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": heads,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
        **changes,
    }


def flat_weights(target: TargetModel, ids: np.ndarray, seed: int = 0) -> dict[str, torch.Tensor]:
    """The 15 tensors of such a draft; row i of the head is for target token `ids[i]`."""
    generator = torch.Generator().manual_seed(seed)
    hidden = target.hidden_size

    def noise(*shape: int) -> torch.Tensor:
        return (0.1 * torch.randn(*shape, generator=generator)).bfloat16()

    mask = torch.zeros(target.vocab_size, dtype=torch.bool)
    mask[torch.from_numpy(ids)] = True
    return {
        "fc.weight": noise(hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": 1 + noise(hidden),
        "midlayer.input_layernorm.weight": 1 + noise(hidden),
        "midlayer.post_attention_layernorm.weight": 1 + noise(hidden),
        "midlayer.self_attn.q_proj.weight": noise(64, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": noise(64, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": noise(64, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": noise(hidden, 64),
        "midlayer.mlp.gate_proj.weight": noise(INTERMEDIATE, hidden),
        "midlayer.mlp.up_proj.weight": noise(INTERMEDIATE, hidden),
        "midlayer.mlp.down_proj.weight": noise(hidden, INTERMEDIATE),
        "norm.weight": 1 + noise(hidden),
        "lm_head.weight": noise(len(ids), hidden),
        "d2t": torch.from_numpy(ids) - torch.arange(len(ids)),
        "t2d": mask,
    }


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], how: str) -> Path:
    """Write a checkpoint as `safetensors`, `bin`, or in `parts` with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if how == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif how == "parts":
        names = sorted(weights)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, members in parts.items():
            save_file({name: weights[name] for name in members}, folder / file)
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def some_ids(target: TargetModel, size: int, seed: int = 0) -> np.ndarray:
    """Target ids of a draft vocabulary, rising."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(target.vocab_size, size, replace=False)).astype(np.int64)
