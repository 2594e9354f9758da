"""The shape of a draft model after its target: the one decoder layer that EAGLE-3 adds.

Turns a target model's config into a plain Llama decoder config that vLLM can load. Weights and
speculators' own config are left to `model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, LlamaConfig

from draftmill.manifests.errors import ConfigError
from draftmill.manifests.target.target import TargetModel


def decoder_config(target: TargetModel, num_layers: int) -> LlamaConfig:
    """A dense decoder of `num_layers` with the target's sizes, context and rotary embedding."""
    facts = _facts(target)
    heads = facts.get("num_attention_heads")
    if not isinstance(heads, int) or heads <= 0:
        raise ConfigError(
            f"{target.folder / 'config.json'}: num_attention_heads is {heads!r}; a draft model "
            "takes its attention heads from it."
        )
    kv_heads = facts.get("num_key_value_heads") or heads
    if facts.get("kv_lora_rank"):
        # Multi-head latent attention: `head_dim` there is the rotary part alone, and a draft has
        # no latent cache, so it gets plain heads of the value size.
        head_dim = facts.get("v_head_dim") or 128
    else:
        head_dim = facts.get("head_dim") or target.hidden_size // heads
    # Sparse targets have no dense width of their own; three times the hidden size is usual.
    intermediate = facts.get("intermediate_size") or 3 * target.hidden_size
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=int(intermediate),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=int(head_dim),
        hidden_act=facts.get("hidden_act") or facts.get("hidden_activation") or "silu",
        max_position_embeddings=target.max_position_embeddings,
        initializer_range=facts.get("initializer_range") or 0.02,
        rms_norm_eps=facts.get("rms_norm_eps") or 1e-6,
        rope_parameters=_rope(facts),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=facts.get("bos_token_id"),
        eos_token_id=facts.get("eos_token_id"),
        pad_token_id=None,
    )


def _facts(target: TargetModel) -> Mapping[str, Any]:
    """The language model's config with the defaults of its class filled in, where it is known."""
    try:
        config = AutoConfig.from_pretrained(target.folder, local_files_only=True)
    except (KeyError, OSError, ValueError):
        return target.text_config
    filled: dict[str, Any] = config.get_text_config().to_dict()
    return {**filled, **{k: v for k, v in target.text_config.items() if v is not None}}


def _rope(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The target's rotary embedding in the form that both transformers and vLLM compute alike."""
    rope = facts.get("rope_parameters") or {}
    if "rope_theta" not in rope:
        # Some models have one entry for each kind of layer.
        nested = rope.get("full_attention") or rope.get("sliding_attention") or {}
        rope = dict(nested) if isinstance(nested, dict) else {}
    rope = {**(facts.get("rope_scaling") or {}), **rope}
    rope.setdefault("rope_theta", facts.get("rope_theta") or 10000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    # `type` is the old name. The draft rotates whole heads. vLLM's plain YaRN ignores the mscale
    # pair that transformers would apply, so training with it would not match serving.
    for key in ("type", "mscale", "mscale_all_dim", "mrope_interleaved"):
        rope.pop(key, None)
    if "mrope_section" not in rope:
        rope.pop("partial_rotary_factor", None)
    return rope
