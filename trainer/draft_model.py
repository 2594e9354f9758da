"""The door to speculators: makes, loads, runs and saves EAGLE-3 draft models.

Everything that knows speculators' classes and key names is here. What to train on and for how long
is left to `train`, the vocabulary to `vocab`, the decoder's sizes to `draft_shape`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor

from draftmill.manifests.errors import ConfigError, DamagedError
from draftmill.manifests.target import TargetModel, check_target_layer_ids
from draftmill.trainer.draft_shape import decoder_config
from draftmill.trainer.settings import TrainSettings
from draftmill.trainer.vocab import VocabMapping

DraftModel: TypeAlias = Eagle3DraftModel

# The target's own weights: needed to compute the loss, never saved with the draft.
_VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


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
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=settings.ttt_steps)],
            default_proposal_method="greedy",
            # The name, not the folder: a checkpoint is used on other machines than this one.
            verifier=VerifierConfig(
                name_or_path=target.name, architectures=list(target.architectures)
            ),
        ),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Eagle3DraftModel(config)
    if model.use_draft_vocab:
        model.load_vocab_mappings(torch.from_numpy(vocab.t2d), torch.from_numpy(vocab.d2t))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(_tensor(target.embed_tokens()))
        model.lm_head.weight.copy_(_tensor(target.lm_head(vocab.target_ids)))
    return _finish(model, target, settings)


def load_draft(folder: Path, target: TargetModel, settings: TrainSettings) -> DraftModel:
    """A draft saved by `save_draft` (or by speculators), ready to go on training.

    Every weight is accounted for: missing, unexpected and misshapen ones raise ConfigError.
    """
    try:
        config = Eagle3SpeculatorConfig.from_pretrained(folder)
        weights = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedError(f"{folder} is no draft model in speculators' form: {error}") from error
    config.transformer_layer_config._attn_implementation = _attention("cpu")
    model = Eagle3DraftModel(config)
    if "embed_tokens.weight" not in weights:
        weights["embed_tokens.weight"] = _tensor(target.embed_tokens())
    expected = {k: v for k, v in model.state_dict().items() if k not in _VERIFIER}
    faults = [f"{name} is missing" for name in expected if name not in weights]
    faults += [f"{name} is not known" for name in weights if name not in expected]
    faults += [
        f"{name} has shape {list(weights[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if faults:
        raise ConfigError(f"{folder / WEIGHTS_FILE}: " + "; ".join(faults))
    model.load_state_dict(weights, strict=False)
    return _finish(model, target, settings)


def _finish(model: DraftModel, target: TargetModel, settings: TrainSettings) -> DraftModel:
    """Give the model the target's norm and head, and decide what is trained."""
    if model.use_draft_vocab:
        target_ids = model.t2d.nonzero().flatten().cpu().numpy()
    else:
        target_ids = np.arange(target.vocab_size)
    with torch.no_grad():
        model.verifier_lm_head.weight.copy_(_tensor(target.lm_head(target_ids)))
        norm = _tensor(target.final_norm()).float()
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


def _tensor(array: NDArray[Any]) -> Tensor:
    """numpy to torch; uint16 are bf16 bit patterns."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def trained_state(model: DraftModel) -> dict[str, Tensor]:
    """The parameters that training changes, in float32, by name."""
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def restore_trained_state(model: DraftModel, state: Mapping[str, Tensor]) -> None:
    """Put back what `trained_state` gave. Raises DamagedError when it is not this model's."""
    mine = trained_state(model)
    if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in state.items()}:
        raise DamagedError("the checkpoint holds other parameters than this draft model")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(state[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """What one packed row gave: the loss to minimise, sums to average, and what was drafted.

    `sums` holds `NAME_sum` and `NAME_total` for loss, full_acc_i (draft tokens 0 to i all the
    target's choice) and cond_acc_i. `drafted` are target token ids [K, T].
    """

    loss: Tensor
    sums: dict[str, Tensor]
    drafted: Tensor


def forward(model: DraftModel, tensors: Mapping[str, Tensor], settings: TrainSettings) -> Forward:
    """Run the draft over one packed row, on the device and in the type that its tensors have."""
    drafted, loss, sums = model(
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


def save_draft(model: DraftModel, folder: Path) -> None:
    """Write the draft into an existing folder as vLLM and speculators load it, in bfloat16."""
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None)
        for name, tensor in model.state_dict().items()
        if name not in _VERIFIER
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    config = model.config.to_dict()
    config["dtype"] = "bfloat16"
    config["transformer_layer_config"]["dtype"] = "bfloat16"
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
