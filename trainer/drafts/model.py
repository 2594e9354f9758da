"""The door to speculators: makes, loads, runs and saves EAGLE-3 draft models.

Everything that knows speculators' classes and key names is here. What to train on and for how long
is left to `train`, the vocabulary to `vocab`, the decoder's sizes to `shape`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig

from draftmill.manifests.errors import ConfigError
from draftmill.manifests.target.target import TargetModel, check_target_layer_ids
from draftmill.trainer.drafts.forms import (
    CONFIG_FILE,
    LAYER_KEY,
    SWITCHES,
    DraftFiles,
    sound_config,
    write_draft,
)
from draftmill.trainer.drafts.shape import decoder_config
from draftmill.trainer.drafts.vocab import VocabMapping
from draftmill.trainer.drafts.vocab_tables import as_tensor
from draftmill.trainer.settings import DraftForm, TrainSettings

DraftModel: TypeAlias = Eagle3DraftModel

# The target's own weights: needed to compute the loss, never saved with the draft.
_VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")
EMBEDDINGS = "embed_tokens.weight"
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def create_draft(
    target: TargetModel,
    target_layer_ids: Sequence[int],
    vocab: VocabMapping,
    settings: TrainSettings,
    *,
    device: str = "cpu",
) -> DraftModel:
    """An untrained draft in float32: random projections and layers, the target's embeddings and
    output projection. Reads those three weights of the target and nothing else of it.

    Raises ConfigError for layer ids that a draft cannot have.
    """
    check_target_layer_ids(target_layer_ids, target.num_layers)
    shape = decoder_config(target, settings.num_layers)
    shape._attn_implementation = _attention(device)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=shape,
        draft_vocab_size=vocab.size,
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_before_fc,
        norm_output=settings.norm_output,
        eagle_aux_hidden_state_layer_ids=list(target_layer_ids),
        speculators_config=_made_for(target.name, target.architectures, settings.ttt_steps),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Eagle3DraftModel(config)
    if model.use_draft_vocab:
        model.load_vocab_mappings(torch.from_numpy(vocab.t2d), torch.from_numpy(vocab.d2t))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(as_tensor(target.embed_tokens()))
        model.lm_head.weight.copy_(as_tensor(target.lm_head(vocab.target_ids)))
    model.shares_embeddings = True
    return _finish(model, target, settings)


def load_draft(
    files: DraftFiles, target: TargetModel, settings: TrainSettings, *, device: str = "cpu"
) -> DraftModel:
    """The draft that was read, in float32, ready to go on training for `target`.

    Its decoder and its switches are its own, its context is the target's. Embeddings that it does
    not bring are the target's. Raises ConfigError unless every weight is accounted for.
    """
    config = _config_of(
        files,
        made_for=_made_for(target.name, target.architectures, settings.ttt_steps),
        layer_ids=files.layer_ids_of(target.num_layers),
        context=target.max_position_embeddings,
    )
    weights = dict(files.weights)
    embeddings = as_tensor(target.embed_tokens())
    own = weights.setdefault(EMBEDDINGS, embeddings)
    _check_weights(config, weights, files.folder)
    config.transformer_layer_config._attn_implementation = _attention(device)
    model = Eagle3DraftModel(config)
    model.load_state_dict(weights, strict=False)
    model.shares_embeddings = own is embeddings or torch.equal(own, embeddings)
    return _finish(model, target, settings)


def speculators_files(
    files: DraftFiles, *, target: TargetModel | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A draft's config.json and weights in speculators' form, every weight accounted for.

    With `target` the draft is made out to it and gets its context; without, everything is kept.
    Raises ConfigError where that leaves something open.
    """
    with sound_config(files.folder / CONFIG_FILE):
        return _speculators_files(files, target)


def _speculators_files(
    files: DraftFiles, target: TargetModel | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if target is None:
        made_for = files.config.get("speculators_config")
        if made_for is None:
            raise ConfigError(
                f"{files.folder} does not say which target model it is for: name it with --target"
            )
        made_for = SpeculatorsConfig.model_validate(made_for)
        config = _config_of(files, made_for=made_for, layer_ids=files.layer_ids, context=None)
    else:
        config = _config_of(
            files,
            made_for=_made_for(target.name, target.architectures, _draft_tokens(files)),
            layer_ids=files.layer_ids_of(target.num_layers),
            context=target.max_position_embeddings,
        )
    _check_weights(config, files.weights, files.folder)
    # What is stored, which is not always what a config says.
    dtype = str(files.weights["fc.weight"].dtype).removeprefix("torch.")
    return _config_dict(config, dtype), dict(files.weights)


def _made_for(name: str, architectures: Sequence[str], draft_tokens: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=draft_tokens)],
        default_proposal_method="greedy",
        # The name, not the folder: a checkpoint is used on other machines than this one.
        verifier=VerifierConfig(name_or_path=name, architectures=list(architectures)),
    )


def _draft_tokens(files: DraftFiles) -> int:
    methods = (files.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens") or 3)


def _config_of(
    files: DraftFiles,
    *,
    made_for: SpeculatorsConfig,
    layer_ids: Sequence[int] | None,
    context: int | None,
) -> Eagle3SpeculatorConfig:
    with sound_config(files.folder / CONFIG_FILE):
        decoder = LlamaConfig(**files.decoder)
        if context is not None:
            decoder.max_position_embeddings = context
        return Eagle3SpeculatorConfig(
            transformer_layer_config=decoder,
            draft_vocab_size=files.config["draft_vocab_size"],
            target_hidden_size=files.config.get("target_hidden_size"),
            speculators_config=made_for,
            **{name: bool(files.config.get(name)) for name in SWITCHES},
            **{LAYER_KEY: None if layer_ids is None else list(layer_ids)},
        )


def _check_weights(
    config: Eagle3SpeculatorConfig, weights: Mapping[str, Tensor], folder: Path
) -> None:
    """Raise ConfigError that names every weight that is missing, not known or misshapen."""
    with torch.device("meta"), sound_config(folder / CONFIG_FILE):
        model = Eagle3DraftModel(config)
    state = {k: v for k, v in model.state_dict().items() if k not in _VERIFIER}
    expected = {name: tensor.shape for name, tensor in state.items()}
    # Servers take the target's where a draft has none.
    needed = expected.keys() - {EMBEDDINGS}
    faults = [f"{name} is missing" for name in expected if name in needed - weights.keys()]
    faults += [f"{name} is not known" for name in weights if name not in expected]
    faults += [
        f"{name} has shape {list(weights[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in weights and weights[name].shape != shape
    ]
    faults += [
        f"{name} {fault}"
        for name in expected
        if name in weights and state[name].is_floating_point()
        if (fault := _fault_of_numbers(weights[name]))
    ]
    if faults:
        raise ConfigError(f"{folder} does not fit its {CONFIG_FILE}: " + "; ".join(faults))


def _fault_of_numbers(weight: Tensor) -> str | None:
    """What makes a weight unfit for training, if anything does."""
    if weight.dtype not in _PLAIN:
        return f"is stored as {str(weight.dtype).removeprefix('torch.')}, not as plain numbers"
    if not bool(weight.isfinite().all()):
        return "holds NaN or infinity"
    return None


def _finish(model: DraftModel, target: TargetModel, settings: TrainSettings) -> DraftModel:
    """Give the model the target's norm and head, and decide what is trained."""
    if model.use_draft_vocab:
        target_ids = model.t2d.nonzero().flatten().cpu().numpy()
    else:
        target_ids = np.arange(target.vocab_size)
    with torch.no_grad():
        model.verifier_lm_head.weight.copy_(as_tensor(target.lm_head(target_ids)))
        norm = as_tensor(target.final_norm()).float()
        model.verifier_norm.weight.copy_(norm + 1 if target.norm_adds_one else norm)
    if model._attn_impl == "eager":
        model._create_mask_fn = _dense_mask
    for name, parameter in model.named_parameters():
        frozen = name in _VERIFIER or name == "embed_tokens.weight"
        frozen |= name == "lm_head.weight" and not settings.train_lm_head
        parameter.requires_grad_(not frozen)
    return model.float().train()


def _attention(device: str) -> str:
    # Flex attention is compiled for a GPU; on a CPU the plain one is what works.
    return "eager" if device == "cpu" else "simple_flex_attention"


def _dense_mask(
    mask_mod: Callable[..., Tensor],
    *,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
) -> Tensor:
    """Additive attention mask [1, 1, Q, K] of a rule over positions: 0 to attend, -inf not to.

    In place of speculators' own, which maps the rule over single positions: that costs more than
    the layers of a small draft. Here the rule sees all positions at once.
    """
    queries = torch.arange(Q_LEN, device=device).unsqueeze(1)
    keys = torch.arange(KV_LEN, device=device).unsqueeze(0)
    zero = queries.new_zeros(())
    allowed = mask_mod(zero, zero, queries, keys)
    return torch.zeros(Q_LEN, KV_LEN, device=device).masked_fill_(~allowed, -torch.inf)[None, None]


def trained_state(model: DraftModel) -> dict[str, Tensor]:
    """The parameters that training changes, in float32, by name."""
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """What one packed row gave: the loss to minimise, sums to average, and what was drafted.

    `sums` holds `NAME_sum` and `NAME_total` for loss, full_acc_i (draft tokens 0 to i all the
    target's choice) and cond_acc_i. `drafted` are target token ids [K, T].
    """

    loss: Tensor
    sums: dict[str, Tensor]
    drafted: Tensor


def forward(
    model: DraftModel,
    tensors: Mapping[str, Tensor],
    settings: TrainSettings,
    *,
    run: Callable[..., Any] | None = None,
) -> Forward:
    """Run the draft over one packed row, on the device and in the type that its tensors have.

    `run` is called in the model's place: something that wraps it.
    """
    drafted, loss, sums = (run or model)(
        **tensors,
        ttt_steps=settings.ttt_steps,
        ttt_step_loss_decay=settings.ttt_decay,
        # The fused losses are Triton kernels; under torch.compile of torch 2.11 they do not build.
        loss_config=resolve_loss_config(settings.loss, "eager"),
    )
    ids = torch.cat(drafted)
    if model.use_draft_vocab:
        ids = ids + model.d2t[ids]
    return Forward(loss=loss, sums=sums, drafted=ids)


def save_draft(
    model: DraftModel,
    folder: Path,
    form: DraftForm = "speculators",
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the draft into an existing folder as vLLM loads it, in bfloat16.

    `weights` stand for the model's own where those are spread over devices. The flat form leaves
    out embeddings that are the target's own; servers share those.
    """
    left_out = {*_VERIFIER, *((EMBEDDINGS,) if form == "flat" and model.shares_embeddings else ())}
    written = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None)
        for name, tensor in (weights or model.state_dict()).items()
        if name not in left_out
    }
    write_draft(_config_dict(model.config, "bfloat16"), written, folder, form)


def _config_dict(config: Eagle3SpeculatorConfig, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = config.to_dict()
    found["dtype"] = found["transformer_layer_config"]["dtype"] = dtype
    return found
