"""What `doctor` asks a running server: whether it does what generate or extract needs of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftmill.builder.extraction.intake import Layers, LengthMismatchError, check_claims
from draftmill.builder.extraction.staging import Staging
from draftmill.builder.requests.client import TargetClient
from draftmill.manifests.errors import (
    ConfigError,
    RejectedError,
    RequestError,
    ServerError,
    TransientError,
)
from draftmill.tools.doctor.findings import Finding, faults

Stage = Literal["generate", "extract"]
# What more a dataset wants to know of an extraction server, as fields of findings.
Look = Callable[[TargetClient], Awaitable[list[dict[str, Any]]]]
_REASONING_TOKENS = 128
_REQUEST = "draftmill-doctor-"  # how the ids of the probes begin
_REPLY_S = 120.0
_FILE_S = 20.0
_PROBE_TOKENS = 96  # some blocks of a prefix cache
_MARKS = ("<think>", "</think>", "◁think▷", "◁/think▷")
_QUESTION = json.dumps(
    {"messages": [{"role": "user", "content": "What is 17 times 23? Think before you answer."}]}
)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a dataset needs of its servers; fields that are None are not compared."""

    stage: Stage | None = None
    reasoning: str | None = None
    longest: int | None = None
    dataset: Path | None = None
    staging: Path | None = None
    layers: Layers | None = None
    look: Look | None = None


async def server(url: str, model: str | None, expected: Expected) -> list[Finding]:
    """What a server says and does, from its name to a probe of its stage."""
    found: list[Finding] = []
    async with TargetClient(url, model=model) as client:
        try:
            served = await client.connect()
            limit = served.max_model_len
            found.append(Finding(ok=True, what=f"{url} serves {served.id}, {limit} tokens at most"))
            found += _length(limit, expected)
            ids = await client.probe_token_ids()
            path = await client.prefill(_long(ids), request_id=f"{_REQUEST}0")
        except ServerError as error:
            return [*found, _unusable(str(error), expected)]
        except RequestError as error:
            return [*found, _unusable(f"a probe request failed: {error}", expected)]
        if path is None:
            found += await _generates(client, expected)
        else:
            found += await _extracts(client, _long(ids), path, expected)
            if expected.look is not None and not faults(found):
                found += [Finding(**each) for each in await expected.look(client)]
        if await client.metrics() is None:
            found.append(
                Finding(
                    ok=None,
                    what=f"{url} has no /metrics",
                    why="concurrency and deadlines then follow from latency alone",
                    fix="leave --disable-log-stats out of the server's arguments",
                )
            )
    return found


def _unusable(what: str, expected: Expected) -> Finding:
    kind = expected.stage or "generate|extract"
    return Finding(
        ok=False,
        what=what,
        why="no stage can use this server",
        fix=f"`draftmill serve {kind} MODEL --print` prints the command of one that can; its log "
        "says why it refuses or does not answer; --url if it is elsewhere",
    )


def _long(ids: Sequence[int]) -> list[int]:
    """The probe's ids, repeated: a cached prefix shows only in prompts of several blocks."""
    some = list(ids) or [1, 2, 3]
    return (some * (_PROBE_TOKENS // len(some) + 1))[:_PROBE_TOKENS]


def _length(limit: int | None, expected: Expected) -> list[Finding]:
    if limit is None or expected.longest is None or limit >= expected.longest:
        return []
    return [
        Finding(
            ok=None,
            what=f"the server takes {limit:,} tokens, the dataset's settings allow "
            f"{expected.longest:,}",
            why="longer prompts and completions are cut or rejected",
            fix=f"start it with --max-model-len {expected.longest}, or lower max_completion_tokens "
            "or max_seq_len in config.toml",
        )
    ]


# -- a server that generates ---------------------------------------------------------------------


async def _generates(client: TargetClient, expected: Expected) -> list[Finding]:
    wrong = expected.stage == "extract"
    found = [
        Finding(
            ok=False if wrong else True if expected.stage else None,
            what=f"{client.url} generates; it does not extract hidden states",
            why="extract needs a server with the extract_hidden_states method",
            fix="draftmill serve extract MODEL --print",
        )
    ]
    if wrong:
        return found
    try:
        async with asyncio.timeout(_REPLY_S):
            reply = await client.chat(_QUESTION, sampling={}, max_tokens=_REASONING_TOKENS)
    except TimeoutError:
        what = f"no reply of {_REASONING_TOKENS} tokens within {_REPLY_S:.0f} s"
        slow = Finding(
            ok=False,
            what=what,
            why="generate would wait as long",
            fix="look at the server's log and at who else uses it, then run doctor again",
        )
        return [*found, slow]
    except (RequestError, ServerError, RejectedError) as error:
        return [*found, _unusable(f"a probe request failed: {error}", expected)]
    if reply.ids_rebuilt:
        found.append(
            Finding(
                ok=False,
                what="replies carry no token ids (return_token_ids is not honoured)",
                why="token ids rebuilt from text can differ from those that were served",
                fix="use vLLM 0.10.2 or newer, and no proxy that drops fields it does not know",
            )
        )
    else:
        count = len(reply.completion_token_ids)
        found.append(Finding(ok=True, what=f"replies carry token ids ({count} in the probe)"))
    found.append(_parser(reply.reasoning, reply.content or "", expected))
    return found


def _parser(reasoning: str | None, content: str, expected: Expected) -> Finding:
    if reasoning:
        return Finding(ok=True, what="reasoning comes apart from the answer: a parser is on")
    fix = "start the server with --reasoning-parser NAME, or set reasoning_parser under [serve]"
    if mark := next((mark for mark in _MARKS if mark in content), None):
        return Finding(
            ok=False,
            what=f"the answer's text holds {mark}: no reasoning parser is on",
            why="reasoning is then stored as part of the answer, and cut replies look empty",
            fix=fix,
        )
    if expected.reasoning == "required":
        return Finding(
            ok=False,
            what='the probe\'s reply has no reasoning, and generate.reasoning is "required"',
            why="every reply would be rejected",
            fix=f'{fix}; or set reasoning = "any" under [generate]',
        )
    return Finding(ok=True, what="no reasoning in the probe's reply, and no mark of it either")


# -- a server that extracts ----------------------------------------------------------------------


async def _extracts(
    client: TargetClient, ids: list[int], path: str, expected: Expected
) -> list[Finding]:
    if expected.stage == "generate":
        return [
            Finding(
                ok=False,
                what=f"{client.url} extracts hidden states",
                why="tokens that are generated while states are captured are corrupted "
                "(vllm#56417)",
                fix="draftmill serve generate MODEL --print",
            )
        ]
    if expected.staging is None or expected.dataset is None or expected.layers is None:
        return [
            Finding(
                ok=None,
                what=f"{client.url} extracts hidden states into {Path(path).parent}",
                why="without a DATASET nothing is compared; the probe's file stays",
                fix="draftmill doctor DATASET --url URL",
            )
        ]
    try:
        staging = Staging(expected.staging, expected.dataset)
    except ConfigError as error:
        return [_staging_fault(error, expected.staging)]
    try:
        for number in (1, 2):  # the second one meets a cache that the first one filled
            await _look(client, staging, path, ids, expected.layers)
            if number == 1:
                again = await client.prefill(ids, request_id=f"{_REQUEST}1")
                path = again or path
    except LengthMismatchError as error:
        return [
            Finding(
                ok=False,
                what=str(error),
                why="a prefix cache leaves out the states of what it has seen before",
                fix="restart the server with --no-enable-prefix-caching",
            )
        ]
    except RejectedError as error:
        return [
            Finding(
                ok=False,
                what=str(error),
                why="extract would reject every sample",
                fix=f"draftmill serve extract MODEL --layer-ids "
                f"{','.join(map(str, expected.layers.layer_ids))} --print",
            )
        ]
    except ConfigError as error:
        return [_staging_fault(error, expected.staging)]
    except (RequestError, ServerError) as error:
        return [
            Finding(
                ok=False,
                what=f"the server says {path}, which does not arrive: {error}",
                why="extract reads what the server writes: both must see the same folder",
                fix=f"draftmill extract … --staging {Path(path).parent}, or restart the server "
                "with ours",
            )
        ]
    finally:
        staging.close()
    layers = ", ".join(map(str, expected.layers.layer_ids))
    return [
        Finding(
            ok=True,
            what=f"{client.url} extracts layers {layers} of {expected.layers.hidden_size} into "
            f"{expected.staging}, twice the same for the same prompt",
        )
    ]


def _staging_fault(error: ConfigError, folder: Path) -> Finding:
    return Finding(
        ok=False,
        what=str(error),
        why="extract reads what the server writes there, and deletes it",
        fix=f"mkdir -p {folder}, owned by the user that runs both; or name another with `staging` "
        "under [extract]",
    )


async def _look(
    client: TargetClient, staging: Staging, path: str, ids: list[int], layers: Layers
) -> None:
    """Check the probe's file and remove it."""
    name = staging.name_of(path)
    try:
        await staging.wait(name, _FILE_S, client.url)
        with staging.open(name) as staged:
            check_claims(staged, np.array(ids, dtype=np.int32), layers)
    except FileNotFoundError:
        raise TransientError(f"{name} went away before it was read") from None
    finally:
        if _REQUEST in name:  # a server could name the file of somebody else's request
            staging.remove(name)
