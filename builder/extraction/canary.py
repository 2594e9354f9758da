"""The canary: whether a server's hidden states are the target's. Shared by extract and doctor.

Owns what is compared, what a failure says and what to do about it. Arithmetic is `agreement`'s,
the request `probe`'s, transformers `reference`'s; when a running stage looks is `watch`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from draftmill.builder.extraction.agreement import (
    Difference,
    LayerMatch,
    explanation,
    last_layer,
    match_layers,
)
from draftmill.builder.extraction.intake import Layers
from draftmill.builder.extraction.probe import Probe
from draftmill.builder.extraction.reference import NoReferenceError, residual_streams
from draftmill.builder.extraction.settings import ExtractSettings
from draftmill.manifests.errors import ConfigError, WrongStatesError
from draftmill.manifests.target.output_head import OutputHead
from draftmill.manifests.target.target import TargetModel

ENABLE = "give the folder of its config and weights with --weights DIR (or target.path)"


class Canary:
    """Judges probes of one target. `target` None: its weights are not at hand.

    Raises ConfigError when the weights are those of a model of another size.
    """

    def __init__(
        self,
        target: TargetModel | None,
        layers: Layers,
        settings: ExtractSettings,
        say: Callable[[str], None],
    ) -> None:
        self.layers = layers
        self._settings = settings
        self.say = say
        self._target = target if settings.canary else None
        self._head: OutputHead | None = None
        # Of the last probe that was compared: all servers get the same first one.
        self._reference: Mapping[int, NDArray[np.float32]] = {}
        self._reference_ids: list[int] | None = None
        self._no_reference: str | None = None
        if self._target is None:
            return
        found = (self._target.hidden_size, self._target.num_layers)
        if found != (layers.hidden_size, layers.layer_ids[-1]):
            raise ConfigError(
                f"{self._target.folder}: hidden size {found[0]} and {found[1]} layers, the dataset "
                f"has {layers.hidden_size} and {layers.layer_ids[-1]}: this is another model"
            )

    @property
    def can_look(self) -> bool:
        """Whether there is anything to compare with."""
        return self._target is not None

    def explain_absence(self) -> None:
        """Say once what is not checked, and how it would be."""
        if not self._settings.canary:
            self.say("canary: off (extract.canary), hidden states are not compared with anything")
        elif self._target is None:
            self.say(
                "canary: not run, the target's weights are not at hand. That the last layer and "
                f"the layer ids are right is not checked; {ENABLE}."
            )

    async def judge(self, name: str, probe: Probe, *, first: bool) -> None:
        """Compare one probe of the server `name`; `first`: its layers' identity, too.

        Raises WrongStatesError with the numbers. What could not be compared is said.
        """
        assert self._target is not None
        difference, head = await asyncio.to_thread(self._last, probe)
        matches, missing = await self._matches(probe) if first else ([], None)
        wrong = [str(each) for each in matches if each.ok is False]
        if wrong or (difference is not None and not difference.ok):
            why = None
            if head is not None and difference is not None and not difference.ok:
                why = await asyncio.to_thread(explanation, head, probe, self.layers.layer_ids)
            raise WrongStatesError(self._accusation(name, difference, wrong, why))
        if first:
            self._tell(name, difference, matches, missing)

    def _last(self, probe: Probe) -> tuple[Difference | None, OutputHead | None]:
        assert self._target is not None
        try:
            self._head = self._head or OutputHead.of(self._target)
        except ConfigError as error:
            self.say(f"canary: the last layer cannot be checked: {error}")
            return None, None
        allowed = self._settings.canary_tolerance or None
        return last_layer(self._head, probe, allowed), self._head

    async def _matches(self, probe: Probe) -> tuple[list[LayerMatch], str | None]:
        """The layers against transformers; or why not."""
        assert self._target is not None
        memory_bytes = self._settings.canary_memory_bytes
        if not memory_bytes:
            return [], "extract.canary_memory is 0"
        layer_ids, token_ids = self.layers.layer_ids, probe.token_ids.tolist()
        if self._no_reference is None and token_ids != self._reference_ids:
            try:
                self._reference = await residual_streams(
                    self._target, probe.token_ids, layer_ids, memory_bytes
                )
                self._reference_ids = token_ids
            except NoReferenceError as error:
                self._no_reference = str(error)
        if self._no_reference is not None:
            return [], self._no_reference
        return match_layers(probe.states_TLH, layer_ids, self._reference), None

    def _accusation(
        self, name: str, difference: Difference | None, wrong: list[str], why: str | None
    ) -> str:
        assert self._target is not None
        parts = [f"{name}: its hidden states are not those of {self._target.folder}."]
        if difference is not None:
            parts.append(f"The {difference}.")
        if why is None and not wrong:
            why = (
                f"the server has other weights, its last layer id is not {self._target.num_layers} "
                "(off by one), or the states are another request's"
            )
        parts += [f"{each[0].upper()}{each[1:]}." for each in (*wrong, why) if each]
        ids = ",".join(map(str, self.layers.layer_ids))
        parts.append(
            f"Start it with layer ids {ids} of this model (`draftmill serve extract --print` shows "
            "how)."
        )
        if difference is not None and not difference.ok:
            parts.append(
                "If the server is right and only computes otherwise, for example with a quantised "
                "lm_head, raise extract.canary_tolerance."
            )
        return " ".join(parts)

    def _tell(
        self,
        name: str,
        difference: Difference | None,
        matches: list[LayerMatch],
        missing: str | None,
    ) -> None:
        if difference is not None:
            self.say(f"canary: {name} agrees with the target's weights: {difference}")
        sure = [f"{each.layer_id} ({each.error:.2g})" for each in matches if each.ok]
        if sure:
            self.say(
                f"canary: layers {', '.join(sure)} are transformers' (relative error in brackets)"
            )
        unsure = [f"{each.layer_id} ({each.error:.2g})" for each in matches if each.ok is None]
        if unsure:
            self.say(
                f"canary: layers {', '.join(unsure)} cannot be told from their neighbours "
                "(relative error in brackets)"
            )
        left = set(self.layers.layer_ids[:-1]) - {each.layer_id for each in matches}
        if left:
            reason = missing or "only the first layers of the model fit extract.canary_memory"
            self.say(
                f"canary: auxiliary layers {', '.join(map(str, sorted(left)))} were not compared "
                f"with transformers: {reason}"
            )
