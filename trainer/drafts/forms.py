"""The two forms in which EAGLE-3 drafts lie on disk, and the way between them.

Reads speculators' form and the flat one (`LlamaForCausalLMEagle3` of AQ-MedAI, SpecForge, SGLang)
into speculators' names, and writes the flat one. Models are made of them in `model`; what a
run does with a foreign checkpoint is left to `finetune`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from draftmill.manifests.errors import ConfigError, DamagedError, DraftmillError
from draftmill.manifests.target.target import default_target_layer_ids
from draftmill.trainer.drafts.vocab_tables import canonical_vocab
from draftmill.trainer.drafts.weight_files import WEIGHTS_FILE, read_weights
from draftmill.trainer.settings import DraftForm

CONFIG_FILE = "config.json"
LAYER_KEY = "eagle_aux_hidden_state_layer_ids"

_FLAT_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Switches of EAGLE-3 that both forms call alike; a flat config that is silent means off.
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# vLLM computes them; SGLang's class for flat drafts came later to them (sglang#32334), or not yet.
_UNKNOWN_TO_SGLANG = ("norm_before_residual", "norm_before_fc")
_DECODER_KEYS = (
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "pretraining_tp",
    "rms_norm_eps",
    "tie_word_embeddings",
    "use_cache",
    "vocab_size",
)
# How rotary embeddings and types are spelt by older and newer trainers.
_SPELLINGS = ("rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype")
_PREFIXES = ("draft_model.", "model.")
# Computed from the config; old checkpoints carry it all the same.
_COMPUTED = "rotary_emb.inv_freq"


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftFiles:
    """A draft as it was read: `config` and `weights` as speculators has them, whatever the form.

    `layer_ids` count as everywhere in draftmill (id k is the input of decoder layer k); None when
    the config is silent. `layers_as_written` is what the config says, for messages. `target_name`
    is the target model that the draft was made for, None when it does not say.
    """

    form: DraftForm
    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    layer_ids: tuple[int, ...] | None
    layers_as_written: str
    target_name: str | None

    @property
    def decoder(self) -> Mapping[str, Any]:
        """The config of the decoder layer."""
        layer: Mapping[str, Any] = self.config["transformer_layer_config"]
        return layer

    def layer_ids_of(self, num_layers: int) -> tuple[int, ...]:
        """The auxiliary layers; of a silent config those that trainers and servers fall back to.

        SpecForge's default is (1, n // 2 - 1, n - 4) counted as outputs of layers, vLLM's and
        SGLang's is (2, n // 2, n - 3) counted as inputs: the same ones.
        """
        return self.layer_ids or default_target_layer_ids(num_layers)


def read_draft(folder: Path) -> DraftFiles:
    """Read a draft in either form.

    Raises ConfigError for what is no such draft, DamagedError for files that cannot be read.
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is no draft model: it has no {CONFIG_FILE}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise DamagedError(f"{path}: an object was expected")
    with sound_config(path):
        if config.get("speculators_model_type") == "eagle3":
            return _read_speculators(folder, config)
        if any(name in _FLAT_ARCHITECTURES for name in config.get("architectures") or ()):
            return _read_flat(folder, config)
    raise ConfigError(
        f"{path} is of no EAGLE-3 draft with a Llama decoder: its architectures are "
        f"{config.get('architectures')}. Known are speculators' eagle3 and "
        f"{_FLAT_ARCHITECTURES[0]}."
    )


@contextmanager
def sound_config(path: Path) -> Iterator[None]:
    """Whatever a strange config does to the code that reads it becomes one ConfigError."""
    try:
        yield
    except DraftmillError:
        raise
    except Exception as error:  # transformers and speculators raise many kinds
        words = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{path} is no sound config of a draft: {type(error).__name__}: {words}"
        ) from error


def _read_speculators(folder: Path, config: dict[str, Any]) -> DraftFiles:
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict) or layer.get("model_type") != "llama":
        kind = layer.get("model_type") if isinstance(layer, dict) else None
        raise ConfigError(
            f"{folder / CONFIG_FILE}: the decoder is {kind!r}; only drafts with a Llama decoder "
            "can be read"
        )
    ids = config.get(LAYER_KEY)
    return DraftFiles(
        form="speculators",
        folder=folder,
        config=config,
        weights=_weights(folder, LlamaConfig(**layer).vocab_size),
        layer_ids=_layer_ids(ids) if ids else None,
        layers_as_written=f"{ids}, counted as inputs of layers" if ids else "nothing",
        target_name=_verifier_name(config),
    )


def _read_flat(folder: Path, config: dict[str, Any]) -> DraftFiles:
    if config.get("model_type", "llama") != "llama":
        raise ConfigError(
            f"{folder / CONFIG_FILE}: the decoder is {config['model_type']!r}; only drafts with a "
            "Llama decoder can be read"
        )
    eagle = config.get("eagle_config") or {}
    decoder = LlamaConfig(**{k: config[k] for k in (*_DECODER_KEYS, *_SPELLINGS) if k in config})
    weights = _weights(folder, decoder.vocab_size)
    ids, as_written = _flat_layers(config, eagle)
    # A flat config has no place for these; a draft that draftmill wrote keeps them all the same.
    own = config.get("draftmill") or {}
    head = weights.get("lm_head.weight")
    size = config.get("draft_vocab_size") or (decoder.vocab_size if head is None else len(head))
    return DraftFiles(
        form="flat",
        folder=folder,
        config={
            **{name: bool(eagle.get(name, config.get(name))) for name in SWITCHES},
            **own,
            "speculators_model_type": "eagle3",
            "draft_vocab_size": size,
            LAYER_KEY: None if ids is None else list(ids),
            "target_hidden_size": config.get("target_hidden_size"),
            "transformer_layer_config": decoder.to_diff_dict(),
        },
        weights=weights,
        layer_ids=ids,
        layers_as_written=as_written,
        target_name=_verifier_name(own),
    )


def _flat_layers(
    config: Mapping[str, Any], eagle: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, str]:
    """The layers of a flat config in our convention, and what it says itself.

    Flat drafts count in two ways. A list at the top is vLLM's: inputs of layers. One in
    `eagle_config` is read as SGLang reads it (sglang#25454): outputs of layers, one less, when it
    begins with 1, else inputs. `target_layer_ids` are outputs in vLLM.
    """
    if ids := config.get(LAYER_KEY):
        return _layer_ids(ids), f"{ids}, counted as inputs of layers"
    if ids := eagle.get(LAYER_KEY):
        if _layer_ids(ids)[0] == 1:
            return tuple(k + 1 for k in ids), f"{ids}, counted as outputs of layers"
        return _layer_ids(ids), f"{ids}, counted as inputs of layers"
    if ids := config.get("target_layer_ids"):
        return tuple(k + 1 for k in _layer_ids(ids)), f"{ids}, counted as outputs of layers"
    return None, "nothing"


def _layer_ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(k) is int for k in ids):
        raise ValueError(f"layer ids must be a list of whole numbers, not {ids!r}")
    return tuple(ids)


def _verifier_name(config: Mapping[str, Any]) -> str | None:
    speculators = config.get("speculators_config") or {}
    name: str | None = (speculators.get("verifier") or {}).get("name_or_path")
    return name


def _weights(folder: Path, vocab_size: int) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for stored, tensor in read_weights(folder).items():
        name = stored
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        if name.endswith(_COMPUTED):
            continue
        if name in named:
            raise DamagedError(f"{folder}: {stored} is there twice under different names")
        named[name] = tensor
    return canonical_vocab(named, vocab_size, folder)


def flat_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in speculators' names under the names of the flat form."""
    return {
        "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: t
        for name, t in weights.items()
    }


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """speculators' config.json as the flat form has it, with the fields of AQ-MedAI's drafts.

    The layers stand at the top for vLLM and in `eagle_config` for SGLang.
    """
    decoder = LlamaConfig(**config["transformer_layer_config"]).to_dict()
    rope = dict(decoder["rope_parameters"])
    theta = rope.pop("rope_theta")
    flat = {key: decoder[key] for key in _DECODER_KEYS}
    flat |= {
        "architectures": [_FLAT_ARCHITECTURES[0]],
        "dtype": config.get("dtype") or "bfloat16",
        "torch_dtype": config.get("dtype") or "bfloat16",
        "draft_vocab_size": config["draft_vocab_size"],
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        **{name: True for name in SWITCHES if config.get(name)},
    }
    if config.get("target_hidden_size"):
        flat["target_hidden_size"] = config["target_hidden_size"]
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if ids := config.get(LAYER_KEY):
        flat[LAYER_KEY] = list(ids)
        eagle[LAYER_KEY] = list(ids)
    if config.get("norm_before_fc"):
        eagle["norm_before_fc"] = True
    flat["eagle_config"] = eagle
    if config.get("speculators_config"):
        flat["draftmill"] = {"speculators_config": config["speculators_config"]}
    return flat


def flat_limits(config: Mapping[str, Any]) -> list[str]:
    """What a flat draft cannot say to SGLang; vLLM understands all of it."""
    notes = [
        f"SGLang releases without {name} would ignore it silently: serve this draft with vLLM, "
        "or measure it there first"
        for name in _UNKNOWN_TO_SGLANG
        if config.get(name)
    ]
    ids = config.get(LAYER_KEY)
    if ids and ids[0] == 1:
        notes.append(
            f"SGLang would count the layers {list(ids)} as outputs of layers, because they begin "
            "with 1: serve this draft with vLLM"
        )
    return notes


def write_draft(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path, form: DraftForm
) -> None:
    """Write a draft, given as speculators has it, into an existing folder in either form."""
    if form == "flat":
        config, weights = flat_config(config), flat_weights(weights)
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
