"""A program with the openai client and nothing else: what a request costs before draftmill does
anything with its answer. `URL MODEL REQUESTS CONCURRENCY`; prints a JSON object of figures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai

WARM_UP = 100
FILLER = "lorem ipsum dolor sit amet " * 12


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _measured(ask: Callable[[int], Awaitable[object]], requests: int, slots: int) -> float:
    """CPU milliseconds of each of so many requests."""

    async def work(numbers: itertools.count[int], last: int) -> None:
        while (number := next(numbers)) < last:
            await ask(number)

    async def all_of(count: int) -> None:
        numbers = itertools.count()
        await asyncio.gather(*(work(numbers, count) for _ in range(slots)))

    await all_of(WARM_UP)
    before_s = _cpu_s()
    await all_of(requests)
    return 1e3 * (_cpu_s() - before_s) / requests


async def _main(url: str, model: str, requests: int, slots: int) -> dict[str, float]:
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, http_client=openai.DefaultAioHttpClient()
    ) as client:

        def question(number: int) -> list[Any]:
            return [{"role": "user", "content": f"question {number} about {FILLER}"}]

        async def whole(number: int) -> None:
            """As people use it: the reply becomes an object."""
            await client.chat.completions.create(
                model=model,
                messages=question(number),
                max_completion_tokens=1000,
                extra_body={"return_token_ids": True},
            )

        async def bare(number: int) -> None:
            """Only the way there and back: nobody reads the reply."""
            body = {"model": model, "messages": question(number), "return_token_ids": True}
            await client.post(
                "/chat/completions",
                cast_to=httpx2.Response,
                content=json.dumps(body | {"max_completion_tokens": 1000}).encode(),
            )

        return {
            "client_ms": await _measured(whole, requests, slots),
            "transport_ms": await _measured(bare, requests, slots),
        }


if __name__ == "__main__":
    target, name, *numbers = sys.argv[1:]
    json.dump(asyncio.run(_main(target, name, *map(int, numbers))), sys.stdout)
