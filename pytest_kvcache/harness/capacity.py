"""A server's KV cache against arithmetic, and filled: what it tells of its pool, a batch that fits, one that does not, the longest request.

Every part that a server cannot be asked has its reason under `not_told` in `load["capacity"]`; `core.capacity` judges the others.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import capacity as core
from ..core import gguf
from ..core.readings import Readings
from ..core.record import OK, RequestRecord, Trace
from ..core.scenarios import Capacity, ClosedLoop
from ..core.spec import Model, UserError
from ..core.text import one_line
from .weights import hub_file

if TYPE_CHECKING:
    from .running import Ask, Asked, RunningEngine

DRAIN_S = 5.0  # how long a server may take to say that nothing runs any more
REST_S = 1.0  # and, of the one request that came before, to give back what that took
REFUSAL_S = 60.0  # a request that cannot fit is refused at once; what says nothing for so long hangs
SHORT = 8  # output tokens of the longest request: the rest is its prompt


def sized(engine: RunningEngine, scenario: Capacity) -> Trace:
    """What the cache of a fresh server holds, and what it did with the requests of `scenario`."""
    told, not_told = _told(engine, scenario)
    told["not_told"] = not_told
    with engine.asked() as ask:
        before = _at_rest(engine)
        block, tokens = told.get("block_size", 1), told.get("kv_tokens")
        batch, load = _batch(engine, scenario, ask, told, block)
        if why := _above(engine, scenario, ask, told, block):
            not_told["above"] = why
        limit, why = core.longest(engine.resolved, tokens)
        if limit is None:
            not_told["longest"] = why
        else:
            told["longest"] = _longest(engine, ask, limit)
        _drained(engine, before, told)
    return Trace(
        scenario=str(scenario), arm=engine.arm.name, run=engine.run, workload=engine.workload(scenario), isl=scenario.isl, osl=scenario.osl,
        concurrency=len(batch.records), records=batch.records, load=load | {"capacity": told},
    )  # fmt: skip


def _told(engine: RunningEngine, scenario: Capacity) -> tuple[dict[str, Any], dict[str, str]]:
    """What the server says of its pool beside what arithmetic says."""
    pool, not_told = core.pool(engine.resolved)
    form = core.format_of(engine.framework, engine.arm, engine.resolved)
    limit, _ = core.longest(engine.resolved, pool.get("kv_tokens"))
    by_arithmetic, how = core.expected(engine.config(), form, engine.tp, limit)
    told: dict[str, Any] = {**pool, **core.blocks(engine.resolved)}
    if by_arithmetic is None:
        not_told.setdefault("kv_size_ratio", how)
    else:
        told |= {"expected_bytes_per_token": by_arithmetic, "expected_by": how}
    if wrong := core.asked_pool(engine.arm, pool.get("kv_bytes")):
        told["not_asked_pool"] = wrong
    return told, not_told


def _batch(engine: RunningEngine, scenario: Capacity, ask: Ask, told: dict[str, Any], block: int) -> tuple[Asked, dict[str, Any]]:
    """As many requests at once as fill the asked share of the pool; what came of it, also as a part of a trace's load."""
    tokens = told.get("kv_tokens")
    n = min(max(1, core.fits(tokens or 0, scenario.fill, scenario, block)), _at_once(engine))
    batch = ask(ClosedLoop(isl=scenario.isl, osl=scenario.osl, concurrency=n, requests=n), "filling")
    if batch.short:
        raise UserError(batch.short)
    each = core.taken_by(scenario, block)
    told["batch"] = {"requests": n, "share": n * each / tokens if tokens else None, **_preempted(batch.load, told, "batch")}
    return batch, batch.load


def _at_once(engine: RunningEngine) -> int:
    if engine.framework.one_at_a_time:
        return 1
    return engine.arm.max_requests or 10**9


def _preempted(load: Mapping[str, Any], told: dict[str, Any], name: str) -> dict[str, Any]:
    """By how many the server's counter of preempted requests grew, where it has one."""
    counters = [c["preemptions"] for c in load.get("counters", ()) if "preemptions" in c]
    if len(counters) == 2:
        return {"preempted": counters[1] - counters[0]}
    told["not_told"][f"{name}.preempted"] = load.get("not_read") or "the server counts no preemptions"
    return {}


def _above(engine: RunningEngine, scenario: Capacity, ask: Ask, told: dict[str, Any], block: int) -> str:
    """Half as many again at once as the pool holds: each must be answered. Why that was not asked; empty when it was."""
    tokens = told.get("kv_tokens")
    if not scenario.fill:
        return "the scenario asks for one request"
    if tokens is None:
        return "the server told no tokens"
    if engine.framework.one_at_a_time:
        return f"{engine.framework.name} answers one request at a time"
    fit = core.fits(tokens, 1.0, scenario, block)
    n = math.ceil(core.ABOVE * max(1, fit))
    if (most := engine.arm.max_requests) and most <= fit:
        return f"max_requests={most} keeps it below its pool, which holds {fit} of these requests"
    asked = ask(ClosedLoop(isl=scenario.isl, osl=scenario.osl, concurrency=n, requests=n), "above", counted=False)
    told["above"] = {
        "share": n * core.taken_by(scenario, block) / tokens,
        **core.outcome(asked.records),
        **_preempted(asked.load, told, "above"),
    }
    return ""


def _longest(engine: RunningEngine, ask: Ask, limit: int) -> dict[str, Any]:
    """A request of all but one of the tokens of the longest context, and one whose prompt alone leaves no room for an answer."""
    osl = min(SHORT, max(1, limit // 4))
    fits = ask(ClosedLoop(isl=limit - 1 - osl, osl=osl, concurrency=1, requests=1), "longest")
    short = fits.short or next((_short(r, osl) for r in fits.records), "")
    return {
        "tokens": limit, "fits": limit - 1, **core.outcome(fits.records), **({"short": short} if short else {}),
        "beyond": {"tokens": limit + 1, **_beyond(engine, ClosedLoop(isl=limit, osl=1, concurrency=1, requests=1))},
    }  # fmt: skip


def _beyond(engine: RunningEngine, scenario: ClosedLoop) -> dict[str, Any]:
    """What becomes of a request that cannot fit: `answered`, `refused`, `hung` or `broke`."""
    try:
        status, text = engine.plainly(scenario, "beyond", REFUSAL_S)
    except TimeoutError as e:
        return {"became": core.HUNG, "words": str(e)}
    except OSError as e:
        return {"became": core.BROKE, "words": str(e) or repr(e)}
    return {"became": core.ANSWERED if status == 200 else core.REFUSED, "status": status, "words": one_line(text)[:200]}


def _short(record: RequestRecord, osl: int) -> str:
    told = record.output_tokens
    return f"{told} of {osl} output tokens came" if record.outcome == OK and told is not None and told < osl else ""


def _at_rest(engine: RunningEngine) -> Readings:
    """The page before anything is asked: the least of the cache in use for a moment. What the request before still holds just now would
    hide a leak as large."""
    least, until = engine.readings(), time.monotonic() + REST_S
    while least.values.get("kv_usage") and time.monotonic() < until:
        time.sleep(0.1)
        now = engine.readings()
        if (used := now.values.get("kv_usage")) is not None and used <= (least.values["kv_usage"] or 0.0):
            least = now
    return least


def _drained(engine: RunningEngine, before: Readings, told: dict[str, Any]) -> None:
    """What of the pool is still in use once all has ended; a server has a few seconds to say so."""
    used = before.values.get("kv_usage")
    if used is None:
        told["not_told"]["drained"] = before.absent.get("kv_usage", "the server's page has no share of its cache in use")
        return
    began = time.monotonic()
    while True:
        now = engine.readings().values
        usage, running = now.get("kv_usage"), now.get("running")
        done = time.monotonic() - began
        if (usage is not None and usage <= used and not running) or done > DRAIN_S:
            break
        time.sleep(0.25)
    told["drained"] = {"before": used, "usage": usage, "running": running, "seconds": round(done, 2)}
    if usage is None:
        told["not_told"]["drained"] = "the server's page had no share of its cache in use any more"


# -- the model's own configuration --------------------------------------------------------------------------------------


def config_reader(model: Model, serve: str, python: str) -> Callable[[], Mapping[str, Any]]:
    """A function that gives what a model says of its shape: config.json of its folder, the head of its GGUF file, the catalogue's row, or
    the hub's file, in this order; empty where none is to be had."""

    def config() -> Mapping[str, Any]:
        path = Path(serve)
        try:
            if path.suffix == ".gguf" and path.is_file():
                with path.open("rb") as file:
                    found: Mapping[str, Any] = gguf.config_of(file)
                return found or _of_row(model)
            if path.is_dir():
                return _json(path / "config.json") or _of_row(model)
            return _of_row(model) or _json(hub_file(python, model, "config.json"))
        except (OSError, UserError):
            return _of_row(model)

    return config


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _of_row(model: Model) -> Mapping[str, Any]:
    if model.config or not (model.layers and model.kv_heads and model.head_dim):
        return model.config
    heads = model.kv_heads
    return {"num_hidden_layers": model.layers, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": model.head_dim}
