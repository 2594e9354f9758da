"""A server that behaves like vLLM for draftmill's purposes, in this process or in its own.

Chat with token ids and reasoning, tokenize, metrics, models, health; extraction through
/v1/completions into a staging folder. Faults come by rate (`faults`), by prompt (`plan`) or in
outages (`go_down`). Answers are those of `toy_model`, times those of `scheduler`.

In a test:      async with TargetServer(faults={"http_500": 0.1}) as server: server.url
On its own:     python -m tests.fakes.target_server --port 8000 --set tokens_per_s=1600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fakes import toy_model as toy
from tests.fakes.answers import CHAT_FAULTS, TRANSIENT, Options, chat_reply
from tests.fakes.scheduler import Scheduler, metrics_text
from tests.fakes.staged_writer import STATE_FAULTS, StagedWriter


class TargetServer:
    """The running fake. `requests` and `answered` count by prompt key (`toy_model.digest`)."""

    def __init__(self, port: int = 0, **options: Any) -> None:
        self.options = Options(**options)
        self.port = port
        self.requests: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.tokenized: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.bodies: deque[dict[str, Any]] = deque(maxlen=64)
        self.headers: deque[Mapping[str, str]] = deque(maxlen=64)
        self.plans: defaultdict[str, deque[str]] = defaultdict(deque)
        self.in_flight = 0
        self.peak_in_flight = 0
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._outages: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def plan(self, prompt: Sequence[Any], faults: Sequence[str]) -> None:
        """The next requests for this prompt (messages, or token ids) meet these; "ok" is none."""
        self.plans[toy.digest(list(prompt))].extend(faults)

    def count(self, prompt: Sequence[Any]) -> int:
        """How often this prompt (messages, or token ids) was asked."""
        return self.requests[toy.digest(list(prompt))]

    async def __aenter__(self) -> TargetServer:
        self.scheduler = Scheduler(self.options)
        self.staged = StagedWriter()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/fake/counts", self._counts)
        app.router.add_post("/fake/options", self._set_options)
        # as vLLM: a client that goes away aborts its request
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0
        )
        await self._runner.setup()
        await self.come_up()
        if self.options.outages:
            self._outages = asyncio.create_task(self._run_outages())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._outages is not None:
            self._outages.cancel()
        await self.go_down()
        assert self._runner is not None
        await self._runner.cleanup()
        await self.scheduler.close()
        self.staged.close()

    async def come_up(self) -> None:
        """Listens again, on the same port as before."""
        assert self._runner is not None
        if self._site is None:
            self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
            await self._site.start()
            self.port = self._runner.addresses[0][1]

    async def go_down(self) -> None:
        """As a killed server: connections cut, new ones refused."""
        assert self._runner is not None
        assert self._runner.server is not None
        if self._site is not None:
            await self._site.stop()
            self._site = None
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def _run_outages(self) -> None:
        start = time.monotonic()
        for begin, end in self.options.outages:
            await asyncio.sleep(max(0.0, start + begin - time.monotonic()))
            await self.go_down()
            await asyncio.sleep(max(0.0, start + end - time.monotonic()))
            await self.come_up()

    # -- faults ---------------------------------------------------------------------------------

    def _fault(self, key: str, known: Sequence[str]) -> str | None:
        """The fault of this request: planned, else drawn by rate."""
        self.requests[key] += 1
        if self.plans and self.plans.get(key):
            planned = self.plans[key].popleft()
            return None if planned == "ok" else planned
        options = self.options
        for name, rate in options.faults.items():
            if name not in known or rate <= 0:
                continue
            draw = (name, options.seed, key, self.requests[key] if name in TRANSIENT else "")
            if rate >= 1 or toy.unit(*draw) < rate:
                return name
        return None

    async def _failure(self, request: web.Request, fault: str | None) -> web.Response | None:
        """The reply of a fault that is about HTTP; None when the request goes on."""
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError
        if fault == "garbage":
            self.statuses[200] += 1
            return web.Response(text='{"choices": [{"mess', content_type="application/json")
        if fault == "http_429":
            headers = {"Retry-After": f"{self.options.retry_after_s:g}"}
            return self._error(429, "too many requests", headers)
        if fault is not None and fault.startswith("http_"):
            return self._error(int(fault[5:]), f"planned fault {fault}")
        return None

    def _error(
        self, status: int, message: str, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        self.statuses[status] += 1
        kind = "BadRequestError" if status < 500 else "InternalServerError"
        if status == 404:
            kind = "NotFoundError"
        error = {"message": message, "type": kind, "param": None, "code": status}
        return web.json_response({"error": error}, status=status, headers=headers)

    def _refusal(self, request: web.Request, body: Mapping[str, Any]) -> web.Response | None:
        options = self.options
        if options.api_key and request.headers.get("Authorization") != f"Bearer {options.api_key}":
            return self._error(401, "Unauthorized")
        if body.get("model") not in (None, options.model):
            return self._error(404, f"The model `{body.get('model')}` does not exist.")
        return None

    # -- endpoints ------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request, {})) is not None:
            return refusal
        options = self.options
        card = {"id": options.model, "object": "model", "created": 1, "owned_by": "vllm"}
        card |= {"root": options.model, "max_model_len": options.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    def _render(self, body: Mapping[str, Any], *, generate: bool = True) -> list[int]:
        messages = body["messages"]
        if self.options.template:
            messages = [{"role": "system", "content": self.options.template}, *messages]
        return toy.render(
            messages,
            add_generation_prompt=generate,
            after_turn=self.options.after_turn,
            strip_reasoning=self.options.strip_reasoning,
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.options.tokenize:
            return self._error(404, "Not Found")
        body = await request.json()
        if "messages" in body:
            key = toy.digest(body["messages"])
            self.tokenized[key] += 1
            draw = ("tokenize_500", self.options.seed, key, self.tokenized[key])
            if toy.unit(*draw) < self.options.faults.get("tokenize_500", 0):
                return self._error(500, "planned fault tokenize_500")
            tokens = self._render(body, generate=body.get("add_generation_prompt", True))
            tokens = [*self.options.tokenize_template.encode(), *tokens]
        else:
            tokens = list(body["prompt"].encode())
        count = {"count": len(tokens), "max_model_len": self.options.max_model_len}
        return web.json_response({**count, "tokens": tokens, "token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        if not self.options.tokenize:
            return self._error(404, "Not Found")
        return web.json_response({"prompt": toy.text_of((await request.json())["tokens"])})

    async def _chat(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(request.headers)
        if (refusal := self._refusal(request, body)) is not None:
            return refusal
        options = self.options
        key = toy.digest(body["messages"])
        fault = self._fault(key, CHAT_FAULTS)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            if (failure := await self._failure(request, fault)) is not None:
                return failure
            prompt_ids = self._render(body)
            limit = body.get("max_completion_tokens") or body.get("max_tokens")
            room = options.max_model_len - len(prompt_ids)
            if room < 1 or (options.refuse_over_length and limit and limit > room):
                return self._error(
                    400,
                    f"This model's maximum context length is {options.max_model_len} tokens. "
                    f"However, you requested {limit or 0} output tokens and your prompt contains "
                    f"{len(prompt_ids)} input tokens.",
                )
            reply = chat_reply(options, key, fault, prompt_ids, min(room, limit or room))
            usage = reply["usage"]
            await self.scheduler.run(usage["prompt_tokens"], usage["completion_tokens"])
            self.answered[key] += 1
            self.statuses[200] += 1
            return web.Response(body=json.dumps(reply).encode(), content_type="application/json")
        finally:
            self.in_flight -= 1

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        if (refusal := self._refusal(request, body)) is not None:
            return refusal
        options = self.options
        ids = body["prompt"]
        if ids and isinstance(ids[0], list):
            ids = ids[0]
        if len(ids) >= options.max_model_len:
            return self._error(
                400,
                f"This model's maximum context length is {options.max_model_len} tokens. "
                f"However, your prompt contains {len(ids)} input tokens.",
            )
        key = toy.digest(ids)
        fault = self._fault(key, (*TRANSIENT, "http_400", *STATE_FAULTS))
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            if (failure := await self._failure(request, fault)) is not None:
                return failure
            await self.scheduler.run(len(ids), int(body.get("max_tokens") or 1))
            reply: dict[str, Any] = {"id": f"cmpl-{key[:12]}", "object": "text_completion"}
            choice: dict[str, Any] = {
                "index": 0,
                "text": "a",
                "finish_reason": "length",
                "token_ids": [97],
            }
            reply |= {"created": 1, "model": options.model, "choices": [choice]}
            reply["usage"] = {"prompt_tokens": len(ids), "completion_tokens": 1}
            states = None
            if options.target is not None:
                states, log_probs = options.target.answer(ids)
                if body.get("prompt_logprobs") is not None:
                    choice["prompt_logprobs"] = log_probs
            if options.staging is not None:
                name = request.headers.get("X-Request-Id") or key[:12]
                if fault == "late":
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        self.staged.write(options, name, ids, fault, states)
                path = self.staged.write(options, name, ids, fault, states)
                reply["kv_transfer_params"] = path and {"hidden_states_path": path}
            if fault == "hang_after_write":
                await asyncio.sleep(3600)
            self.answered[key] += 1
            self.statuses[200] += 1
            return web.json_response(reply)
        finally:
            self.in_flight -= 1

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self.options.metrics:
            return web.Response(status=404, text="Not Found")
        return web.Response(text=metrics_text(self.scheduler, self.options.model))

    async def _counts(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "requests": dict(self.requests),
                "answered": dict(self.answered),
                "statuses": dict(self.statuses),
                "wasted_tokens": self.scheduler.wasted_tokens,
                "generated_tokens": self.scheduler.generated_total(),
                "peak_in_flight": self.peak_in_flight,
            }
        )

    async def _set_options(self, request: web.Request) -> web.Response:
        for name, value in (await request.json()).items():
            setattr(self if name == "stuck" else self.options, name, value)
        return web.json_response({})

    @property
    def stuck(self) -> bool:
        return self.scheduler.stuck

    @stuck.setter
    def stuck(self, value: bool) -> None:
        self.scheduler.generated_total()  # what was generated so far stays generated
        self.scheduler.stuck = value


async def serve(port: int, options: Mapping[str, Any], ready: Path | None) -> None:
    """Runs until SIGTERM or SIGINT; writes the port into `ready` once it listens."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with TargetServer(port, **options) as server:
        if ready is not None:
            temporary = ready.with_suffix(".tmp")
            temporary.write_text(str(server.port))
            os.replace(temporary, ready)
        print(server.url, flush=True)
        await stop.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="any field of Options"
    )
    given = parser.parse_args(arguments)
    known = {each.name for each in fields(Options)}
    options: dict[str, Any] = {}
    for item in given.set:
        name, _, value = item.partition("=")
        if name not in known:
            sys.exit(f"unknown option {name}; known: {', '.join(sorted(known))}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    asyncio.run(serve(given.port, options, given.ready_file))


if __name__ == "__main__":
    main()
