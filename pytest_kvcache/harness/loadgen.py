"""Drive a workload against an endpoint: closed loop, warm-up outside the window."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable

from ..core.record import OK, RequestRecord
from ..core.spec import ClosedLoop
from ..core.workload import Request, make_requests
from .client import Client

CALIBRATION_WORDS = 32


async def closed_loop(client: Client, requests: Iterable[Request], concurrency: int) -> list[RequestRecord]:
    """`concurrency` workers share one queue: each sends its next request when its last is answered."""
    queue = iter(requests)
    records: list[RequestRecord] = []

    async def worker() -> None:
        for request in queue:
            records.append(await client.ask(request))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return sorted(records, key=lambda r: r.index)


async def extra_tokens(client: Client, words: tuple[str, ...]) -> int:
    """How many tokens the server adds to every prompt (a BOS, say), by its own count of a prompt of known length."""
    shape = ClosedLoop(isl=CALIBRATION_WORDS, osl=2, concurrency=1, requests=1)
    (request,) = make_requests(shape, words, part="calibration")
    record = await client.ask(request)
    return max(0, (record.input_tokens or CALIBRATION_WORDS) - CALIBRATION_WORDS)


async def warm_up(client: Client, requests: tuple[Request, ...], concurrency: int) -> str:
    """Send shape-matched requests outside the window; the first failure in words, or an empty string."""
    for record in await closed_loop(client, requests, concurrency):
        if record.outcome != OK:
            return f"{record.outcome}: {record.error}"
    return ""


async def drive(client: Client, requests: tuple[Request, ...], concurrency: int) -> list[RequestRecord]:
    """The measured window. The collector rests meanwhile: its pauses would be the client's, not the server's."""
    gc.collect()
    gc.disable()
    try:
        return await closed_loop(client, requests, concurrency)
    finally:
        gc.enable()
