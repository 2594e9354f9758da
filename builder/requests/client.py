"""The one door to openai: requests to a target server.

Maps every failure of the transport and every HTTP status to draftmill's errors. When to ask, whom,
and how long to wait for the answer is left to the stages; what a reply must hold, to `replies`;
asking again, to `retry_policy`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import httpx2
import openai

from draftmill.builder.requests.api_key import api_key
from draftmill.builder.requests.failures import (
    ConnectionCutError,
    OverloadedError,
    ServerFailedError,
    one_line,
    retry_after_s,
    status_error,
    words,
)
from draftmill.builder.requests.metrics import ServerLoad, parse_metrics
from draftmill.builder.requests.replies import (
    PROBE_CONVERSATION,
    completion_of_reply,
    hidden_states_path,
    ids_of_tokenizer,
    json_of,
    rebuilt_completion,
    text_of_tokenizer,
)
from draftmill.builder.requests.urls import split_url
from draftmill.manifests.errors import (
    PermanentError,
    ServerError,
    TimedOutError,
    TransientError,
    UnreachableError,
)
from draftmill.manifests.open_files import USED_UP
from draftmill.manifests.types import Completion, TokenIds

T = TypeVar("T")

# vLLM closes idle connections after 5 s; one that is reused at that instant fails a request.
KEEPALIVE_S = 3.0
CONNECT_S = 10.0
SHORT_CALL_S = 15.0
PROBE_S = 120.0
PROBE_ID = "draftmill-probe-0x"  # an extraction server makes a file of it, which `staging` sweeps
MAX_CONNECTIONS = 8192
BAD_URLS = (aiohttp.InvalidURL, httpx2.UnsupportedProtocol, httpx2.InvalidURL)
TELEMETRY_HEADERS = ("x-stainless-read-timeout",) + tuple(
    f"X-Stainless-{part}"
    for part in ("Arch", "Async", "Lang", "OS", "Package-Version", "Runtime", "Runtime-Version")
)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One entry of /v1/models."""

    id: str
    max_model_len: int | None


class TargetClient:
    """One server. `connect` first; `model` is then the name that requests carry."""

    def __init__(self, url: str, *, model: str | None = None) -> None:
        self.url, self._root = split_url(url)
        self.model = model or ""
        self.max_model_len: int | None = None
        self._has_tokenize: bool | None = None
        parts = urlsplit(self.url)
        # without TLS no time is spent on reading certificates; such a context trusts nobody
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if parts.scheme == "http" else True
        self._openai = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=api_key() or "none",
            max_retries=0,
            # what the SDK tells of this machine costs a fifth of a request's processor time
            default_headers=dict.fromkeys(TELEMETRY_HEADERS, openai.Omit()),  # type: ignore[arg-type]
            http_client=openai.DefaultAioHttpClient(
                # deadlines are the stage's: it revises them while requests are in flight
                timeout=httpx2.Timeout(None, connect=CONNECT_S),
                limits=httpx2.Limits(
                    max_connections=MAX_CONNECTIONS,
                    max_keepalive_connections=MAX_CONNECTIONS,
                    keepalive_expiry=KEEPALIVE_S,
                ),
                verify=bare,
                # a proxy from the environment never knows the way to this very machine
                trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),
            ),
        )

    async def __aenter__(self) -> TargetClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; requests in flight are aborted on the server."""
        await self._openai.close()

    # -- what the server is ----------------------------------------------------------------------

    async def connect(self) -> ServedModel:
        """Checks that the server answers and serves the model; ServerError in one line if not.

        Without a model name the only one served is taken.
        """
        try:
            models = await self.models()
        except UnreachableError as error:
            raise ServerError(
                f"no server answers at {self.url} ({error}). Start one or correct --url."
            ) from error
        except (TransientError, PermanentError) as error:
            raise ServerError(
                f"{self.url} is not an OpenAI-compatible server that can be used: {error}"
            ) from error
        return self.choose(models)

    def choose(self, models: Sequence[ServedModel]) -> ServedModel:
        """The model to ask for out of those served; ServerError names them if it is not there."""
        served = ", ".join(each.id for each in models) or "none"
        if not self.model and len(models) == 1:
            self.model = models[0].id
        for each in models:
            if each.id == self.model:
                self.max_model_len = each.max_model_len
                return each
        if not self.model:
            raise ServerError(f"{self.url} serves several models ({served}); name one of them.")
        raise ServerError(
            f"{self.url} does not serve {self.model!r}; it serves: {served}. Start it with "
            f"--served-model-name {self.model} (draftmill serve: --name), or set `model` under "
            "[generate] in config.toml."
        )

    async def models(self) -> list[ServedModel]:
        """What /v1/models lists."""
        data = json_of(await self._get("/models"))
        try:
            return [
                ServedModel(id=str(each["id"]), max_model_len=_length(each.get("max_model_len")))
                for each in data["data"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise PermanentError(f"{self.url}/models does not list models") from error

    async def healthy(self) -> bool:
        """Whether the server answers and does not call itself broken."""
        try:
            await self._get(f"{self._root}/health")
        except (PermanentError, ServerError):
            return True  # it has no such page, but it is there
        except TransientError:
            return False
        return True

    async def metrics(self) -> ServerLoad | None:
        """The server's load from /metrics; None if it has none."""
        text = await self.metrics_text()
        return None if text is None else parse_metrics(text)

    async def metrics_text(self) -> str | None:
        """The text of /metrics; None if the server has none."""
        try:
            return (await self._get(f"{self._root}/metrics")).decode(errors="replace")
        except (PermanentError, ServerError):
            return None

    async def probe_token_ids(self, timeout_s: float = PROBE_S) -> list[int]:
        """Prompt token ids of a fixed conversation: they change with template or tokenizer.

        Generates one token, so an answer also shows that the server works; a tokenizer that it had
        must be there too.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.chat(
                    PROBE_CONVERSATION, sampling={}, max_tokens=1, request_id=PROBE_ID
                )
                if self._has_tokenize:
                    await self.tokenize({"prompt": "a"})
        except TimeoutError:
            raise TimedOutError(
                f"{self.url} did not answer a request for one token within {timeout_s:.0f} s"
            ) from None
        return [int(each) for each in reply.prompt_token_ids]

    # -- requests --------------------------------------------------------------------------------

    async def chat(
        self,
        conversation: str,
        *,
        sampling: Mapping[str, Any],
        max_tokens: int | None,
        request_id: str | None = None,
    ) -> Completion:
        """One completion of a conversation (canonical JSON object with `messages`), not streamed.

        Waits for ever: the caller cancels. Raises TransientError, PermanentError (the server's
        own words) or ServerError (this server answers no such request at all).
        """
        parameters: dict[str, Any] = {"model": self.model, "return_token_ids": True, **sampling}
        if max_tokens is not None:
            parameters["max_completion_tokens"] = max_tokens
        # both are JSON objects: joining the texts spares parsing and rendering the messages
        body = f"{conversation[:-1]},{json.dumps(parameters)[1:]}"
        reply = json_of(await self._post("/chat/completions", body, _named(request_id)))
        completion = completion_of_reply(reply)
        if completion is None:
            completion = await rebuilt_completion(reply, conversation, self.tokenize)
        return completion

    async def prefill(
        self, token_ids: TokenIds | Sequence[int], *, request_id: str | None = None
    ) -> str | None:
        """Has the server compute one prompt; returns `hidden_states_path` as the server names it.

        None if the reply names none. `request_id` becomes part of the file's name.
        """
        return hidden_states_path(await self.complete(token_ids, request_id=request_id))

    async def complete(
        self, token_ids: TokenIds | Sequence[int], *, request_id: str | None = None, **more: Any
    ) -> Any:
        """The reply to one prompt of token ids, one token long; `more` goes into the request."""
        ids = token_ids if isinstance(token_ids, Sequence) else token_ids.tolist()
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, **more}
        headers = _named(request_id)
        return json_of(await self._post("/completions", json.dumps(body), headers))

    async def tokenize(self, request: Mapping[str, Any]) -> list[int] | None:
        """Ids from vLLM's /tokenize for {"messages": …} or {"prompt": …}; None if it has none."""
        return await self._ask_tokenizer("tokenize", request, ids_of_tokenizer)

    async def detokenize(self, token_ids: Sequence[int]) -> str | None:
        """Their text from vLLM's /detokenize; None if it has none."""
        return await self._ask_tokenizer("detokenize", {"tokens": [*token_ids]}, text_of_tokenizer)

    async def _ask_tokenizer(
        self, name: str, request: Mapping[str, Any], parse: Callable[[Any], T]
    ) -> T | None:
        if self._has_tokenize is False:
            return None
        try:
            async with asyncio.timeout(SHORT_CALL_S):
                body = json.dumps({"model": self.model, **request})
                reply = json_of(await self._post(f"{self._root}/{name}", body))
        except TimeoutError:
            raise ServerFailedError(f"{self._root}/{name} did not answer") from None
        except ServerError:
            if self._has_tokenize:  # it is the server as a whole that is wrong now
                raise
            self._has_tokenize = False
            return None
        self._has_tokenize = True
        return parse(reply)

    # -- transport -------------------------------------------------------------------------------

    async def _get(self, path: str) -> bytes:
        try:
            async with asyncio.timeout(SHORT_CALL_S):
                response = await self._openai.get(path, cast_to=httpx2.Response)
        except TimeoutError:
            raise UnreachableError(f"no answer within {SHORT_CALL_S:.0f} s") from None
        except openai.APIError as error:
            raise self._mapped(error) from error
        return response.content

    async def _post(self, path: str, body: str, headers: Mapping[str, str] | None = None) -> bytes:
        try:
            response = await self._openai.post(
                path,
                cast_to=httpx2.Response,
                content=body.encode(),
                options={"headers": headers} if headers else {},
            )
        except openai.APIError as error:
            raise self._mapped(error) from error
        return response.content

    def _mapped(self, error: openai.APIError) -> Exception:
        if isinstance(error, openai.APIStatusError):
            again_s = retry_after_s(error.response.headers.get("retry-after", ""))
            return status_error(self.url, error.status_code, _server_words(error), again_s)
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in USED_UP:
                # no fault of the server's: fewer requests at once is what helps
                return OverloadedError(f"{words(cause)}: ulimit -n, or lower max_concurrency")
            if isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                return UnreachableError(words(cause))
            if isinstance(cause, BAD_URLS):
                return ServerError(f"{self.url} is not a URL that can be asked: {words(cause)}")
            if isinstance(cause, aiohttp.ClientError):
                return ConnectionCutError(f"connection to {self.url} cut: {words(cause)}")
            cause = cause.__cause__
        return ConnectionCutError(f"request to {self.url} failed: {words(error)}")


def _length(value: Any) -> int | None:
    """A limit as a server names it; what is no number above 0 says nothing."""
    return value if type(value) is int and value > 0 else None


def _server_words(error: openai.APIStatusError) -> str:
    """The server's own message, on one line."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    text = one_line(message if isinstance(message, str) else error.response.text)
    return text[:600] or error.response.reason_phrase


def _named(request_id: str | None) -> dict[str, str] | None:
    return None if request_id is None else {"X-Request-Id": request_id}
