"""A tiny random Kimi-K2.5: multimodal wrapper, nested config, MLA, experts, published names.

Small enough for a test, and still what an engine has to cope with: `language_model.` in the names
of its weights, sizes only in `text_config`, low-rank attention, one dense layer and then experts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, VOCAB, CONTEXT = 256, 6, 512, 1024
LAYER_IDS = (1, 3, 4)
MEDIA_PAD, IM_END = 258, 257

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",  # vLLM looks for it, and takes softmax where no scoring is named
    "scoring_func": "sigmoid",
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.06,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": IM_END,
}
_VISION: dict[str, Any] = {
    "patch_size": 14,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
}
# What the image processor of vLLM's Kimi class asks for, even where no image is ever sent.
_MEDIA: dict[str, Any] = {
    "in_patch_limit": 256,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 64,
    "in_patch_limit_each_frame": 256,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}
_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def save_tiny_kimi(folder: Path, *, seed: int = 3) -> Path:
    """Writes config, bf16 weights and a tokenizer of bytes; returns the folder."""
    import torch
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    torch.manual_seed(seed)
    config = Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", **_TEXT},
        vision_config=_VISION,
        projection_hidden_size=64,
        image_token_id=MEDIA_PAD,
        tie_word_embeddings=False,
    )
    model = Kimi_K25ForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    _name_as_published(folder)
    _tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": _MEDIA}))
    return folder


def _name_as_published(folder: Path) -> None:
    """Architecture, model type and weight names as in the published checkpoint.

    transformers 5.19 undoes its renaming of the vision tower in the language model, too: it writes
    `language_model.model.blocks`, which nothing reads.
    """
    from safetensors.torch import load_file, save_file

    (file,) = sorted(folder.glob("*.safetensors"))
    weights = {
        re.sub(
            r"^language_model\.model\.blocks\.", "language_model.model.layers.", name
        ).removeprefix("model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["text_config"]["model_type"] = "kimi_k2"
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _tokenizer() -> Any:
    """Ids 0 to 255 are the bytes, behind them come the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|im_end|>", "<|media_pad|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|im_end|>"
    )


def reference_states(folder: Path, token_ids: list[int]) -> np.ndarray:
    """transformers' own residual streams in float32, [LAYERS + 1, T, HIDDEN]: id k is row k."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    text = model.model.language_model
    seen: list[torch.Tensor] = []
    for layer in text.layers:
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    text.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return torch.stack(seen)[:, 0].numpy()


def weight_names(folder: Path) -> list[str]:
    """The names in the saved safetensors header."""
    (file,) = sorted(folder.glob("*.safetensors"))
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return [name for name in json.loads(stream.read(length)) if name != "__metadata__"]
