"""Getting several target servers to agree before the first request: one model, one template.

What is found wrong is a ServerError in one line; what they do later is `endpoint`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from draftmill.builder.generation.controller import Controller
from draftmill.builder.generation.deadline import ActiveClock, DeadlineRule, Patience
from draftmill.builder.generation.endpoint import Endpoint, Log
from draftmill.builder.generation.settings import GenerateSettings
from draftmill.builder.requests import open_files
from draftmill.builder.requests.client import PROBE_S, TargetClient
from draftmill.builder.requests.prefill import after_turn
from draftmill.builder.requests.retry_policy import RetryPolicy, retried
from draftmill.builder.requests.twins import distinct
from draftmill.builder.requests.urls import split_url
from draftmill.manifests.errors import (
    PermanentError,
    ServerError,
    TimedOutError,
    TransientError,
    UnreachableError,
    UsageError,
)

log = logging.getLogger(__name__)

# One bad moment of a server must not cost the start of a night; nobody there is told at once.
PROBING = RetryPolicy(tries=5, tries_by_kind={UnreachableError: 1, TimedOutError: 1})


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Clients that serve one model. Those in `away` did not answer yet; another one did."""

    clients: Sequence[TargetClient]
    away: frozenset[str]
    model: str
    probe_ids: list[int]

    @property
    def probe(self) -> str:
        """The probe's prompt token ids in a form that a person can compare."""
        digest = xxhash.xxh3_64_hexdigest(",".join(map(str, self.probe_ids)).encode())
        return f"{len(self.probe_ids)} tokens, {digest}"

    async def after_turn(self) -> list[int]:
        """What the template writes behind an answer; checks that the servers tokenise alike."""
        here = [each for each in self.clients if each.url not in self.away]
        try:
            found = await asyncio.gather(*(after_turn(each, self.probe_ids) for each in here))
        except (TransientError, PermanentError) as error:
            raise ServerError(f"the probe conversation cannot be tokenised: {error}") from error
        return found[0]


async def open_servers(urls: Sequence[str], model: str | None, probe_s: float) -> Servers:
    """Connects to all servers; those that cannot be reached may come later if one can."""
    if not urls:
        raise UsageError("no server to ask: give --url http://HOST:PORT/v1 at least once")
    different = dict.fromkeys(split_url(url)[0] for url in urls)
    clients = [TargetClient(url, model=model) for url in different]
    try:
        if len(clients) > 1:
            clients = await distinct(clients)
        return await _agree(clients, probe_s)
    except BaseException:
        await asyncio.gather(*(each.aclose() for each in clients), return_exceptions=True)
        raise


def endpoints_of(
    servers: Servers,
    settings: GenerateSettings,
    active: ActiveClock,
    *,
    log: Log,
    changed: Callable[[], None],
) -> list[Endpoint]:
    """The servers, ready to be asked."""
    most = open_files.connections(len(servers.clients))
    fixed = None if settings.concurrency == "auto" else min(settings.concurrency, most)
    endpoints = []
    for client in servers.clients:
        endpoint = Endpoint(
            client,
            Controller(maximum=min(settings.max_concurrency, most), fixed=fixed),
            DeadlineRule(
                margin=settings.deadline_margin,
                floor_s=settings.min_deadline_s,
                timeout_s=settings.timeout_s,
            ),
            Patience(
                interval_s=settings.control_interval_s,
                watchdog_s=settings.watchdog_s,
                lost_s=settings.lost_s,
                probe_s=PROBE_S,
            ),
            active,
            probe_ids=servers.probe_ids if settings.check_template else None,
            log=log,
            changed=changed,
        )
        endpoint.max_in_flight_tokens = settings.max_in_flight_tokens
        if client.url in servers.away:
            endpoint.go_down("it has not answered yet")
        endpoints.append(endpoint)
    return endpoints


async def _agree(clients: Sequence[TargetClient], probe_s: float) -> Servers:
    errors = await asyncio.gather(*(_reached(each) for each in clients))
    here = [each for each, error in zip(clients, errors, strict=True) if error is None]
    if not here:
        raise errors[0] or ServerError(f"{clients[0].url} cannot be used")
    model = here[0].model
    for each in clients:
        if each in here and each.model != model:
            raise ServerError(
                f"{each.url} serves {each.model!r}, but {here[0].url} serves {model!r}; "
                "one dataset takes one target model"
            )
        each.model = model
    probes = await asyncio.gather(*(_probed(each, probe_s) for each in here))
    for each, probe in zip(here, probes, strict=True):
        if probe != probes[0]:
            raise ServerError(
                f"{each.url} renders the probe conversation to other token ids than "
                f"{here[0].url}; their chat templates or tokenizers differ"
            )
    away = frozenset(each.url for each in clients if each not in here)
    return Servers(clients=clients, away=away, model=model, probe_ids=probes[0])


async def _reached(client: TargetClient) -> ServerError | None:
    """None, or why it cannot be reached now; a server that is there and wrong raises."""
    try:
        await client.connect()
    except ServerError as error:
        if isinstance(error.__cause__, TransientError):
            return error
        raise
    return None


async def _probed(client: TargetClient, probe_s: float) -> list[int]:
    async def before_wait(tries: int, error: TransientError, wait_s: float) -> None:
        log.warning("%s: %s; asked again in %.0f s", client.url, error, wait_s)

    try:
        return await retried(lambda: client.probe_token_ids(probe_s), PROBING, before_wait)
    except (TransientError, PermanentError) as error:
        raise ServerError(
            f"{client.url} lists the model but does not answer a request of one token: {error}"
        ) from error
