"""The canary in `draftmill doctor`: one probe of a server that extracts, told as findings."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.builder.extraction.canary import Canary
from draftmill.builder.extraction.intake import Layers
from draftmill.builder.extraction.probe import Probe, ask, probe_ids, read
from draftmill.builder.extraction.staging import Staging
from draftmill.builder.requests.client import TargetClient
from draftmill.manifests.dataset import Dataset
from draftmill.manifests.errors import (
    ConfigError,
    RejectedError,
    RequestError,
    ServerError,
    WrongStatesError,
)
from draftmill.tools.settings import Settings, staging_folder, target_weights

_TIMEOUT_S = 600.0
_WHY = "a draft that learned from wrong states trains well and is never accepted"


async def look(
    client: TargetClient, dataset: Dataset, settings: Settings
) -> list[dict[str, bool | str | None]]:
    """What the canary finds on an extraction server, as fields of doctor's findings."""
    said: list[str] = []
    target = settings.target
    layers = Layers(layer_ids=target.extraction_layer_ids, hidden_size=target.hidden_size)
    try:
        canary = Canary(target_weights(settings), layers, settings.extract, said.append)
        if not canary.can_look:
            canary.explain_absence()
            fix = f"draftmill doctor {dataset.path} --url {client.url} --weights DIR"
            return [{"ok": None, "what": said[0], "why": _WHY, "fix": fix}]
        probe = await _probe(client, dataset, settings, layers)
        await canary.judge(client.url, probe, first=True)
    except WrongStatesError as error:
        model = target.path or target.model
        fix = f"draftmill serve extract {model} --print, and start the server so"
        return [{"ok": False, "what": str(error), "why": _WHY, "fix": fix}]
    except ConfigError as error:
        why, fix = "the canary compares with these weights", "--weights DIR of the served target"
        return [{"ok": False, "what": str(error), "why": why, "fix": fix}]
    except (RequestError, ServerError, RejectedError) as error:
        what = f"canary: its probe failed: {error}"
        fix = "look at the server's log and at the staging folder, then run doctor again"
        return [{"ok": False, "what": what, "why": _WHY, "fix": fix}]
    return [
        {
            "ok": True if "agrees" in line or "transformers'" in line else None,
            "what": line,
            "why": _WHY,
            "fix": 'raise canary_memory under [extract], or see docs/vllm.md, "The canary"',
        }
        for line in said
    ]


async def _probe(
    client: TargetClient, dataset: Dataset, settings: Settings, layers: Layers
) -> Probe:
    ids: Any = np.array(await client.probe_token_ids() or [1, 2, 3], np.int32)
    ids = probe_ids(ids, client.max_model_len)
    # Under a name of its own: an extraction that runs meanwhile sweeps what bears its dataset's.
    owner: Path = dataset.path / "doctor"
    with closing(Staging(staging_folder(dataset, settings), owner)) as staging:
        request_id = staging.request_id(0, 1)
        try:
            path, said = await ask(client, ids, request_id, _TIMEOUT_S)
            name = staging.name_of(path)
            await staging.wait(name, settings.extract.lock_timeout_s, client.url)
            states_TLH = read(staging, name, ids, layers)
        finally:
            staging.sweep((), max_age_s=_TIMEOUT_S)
    return Probe(token_ids=ids, states_TLH=states_TLH, said=said)
