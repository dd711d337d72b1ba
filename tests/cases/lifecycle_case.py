"""Cases of kind `lifecycle` on the product: what a server's log says, a real one that answers in time or not, what is left of one that is
killed. A second of a case is `SECOND` here."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.core.framework import Framework, Launch
from pytest_kvcache.core.gpus import find_gpu
from pytest_kvcache.core.resolved import not_applied, resolved
from pytest_kvcache.core.spec import Arm, Model
from pytest_kvcache.harness import engine as engines
from pytest_kvcache.harness import gpu_memory, weights
from pytest_kvcache.harness.ready import listeners
from pytest_kvcache.harness.resolved import start_of
from pytest_kvcache.harness.server import EngineProcess, Server, ServerError, marked_processes, serve

from ..harness.test_server import FAKE, alive, children_in, free_port, wait_until
from ..recorded_nvml import RecordedNvml, card
from .catalogue import contains, includes
from .metrics_case import engine

SECOND = 0.05
NEVER_S = 600.0
MODEL = "org/model"
# Classes of the cases by the product's words.
CLASSES = {
    "port_in_use": r"\bport is taken|\bport \d+ is (?:taken|answered by)|cannot use port \d+ .* held by",
    "unknown_flag": r"does not know the (?:argument|option|setting) ",
    "kv_cache_too_small": r"is larger than the KV cache, which holds|of KV cache, there are|is too small for one request",
    "no_kv_memory": r"no memory is left for the KV cache",
    "kv_dtype_not_applied": r"kv_dtype=\S+ was not applied",
}
NUMBERS = {
    "needs_tokens": r"(?:context|one request) of (\d+) tokens", "has_tokens": r"KV cache, which holds (\d+)",
    "needs_gib": r"needs ([\d.]+) GiB of KV cache", "has_gib": r"of KV cache, there are ([\d.]+) GiB",
}  # fmt: skip
FLAG = r"does not know the (?:argument|option|setting) ([\w.-]+)"
PROBES = {"t_s", "health", "models", "model_ids", "one_token"}
# How a field of `expected` is compared with what was found.
TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "error_class": lambda found, wanted: wanted in found if wanted else not found, "warnings": includes, "shows": contains,
    "fails_before_s": lambda found, wanted: found is not None and found < wanted, "must_not": lambda found, wanted: wanted not in found,
}  # fmt: skip


def launch(port: int = 0, model: str = MODEL) -> Launch:
    return Launch(python=sys.executable, model=model, port=port, device="gpu", arm=Arm())


def reason_of(message: str) -> str:
    """The reason that a failure gives, without the log behind it."""
    return message.splitlines()[0].rpartition("; reason: ")[2] if "; reason: " in message.splitlines()[0] else ""


def classes(message: str) -> set[str]:
    """What the first line of a failure is, in the words of the cases: the lines below it are the log."""
    return {name for name, words in CLASSES.items() if re.search(words, message.splitlines()[0])}


def in_reason(reason: str) -> dict[str, Any]:
    numbers = {name: re.search(words, reason) for name, words in NUMBERS.items()}
    found: dict[str, Any] = {name: match and (float if "gib" in name else int)(match[1]) for name, match in numbers.items()}
    flag = re.search(FLAG, reason)
    return found | {"flag": flag and flag[1]}


# --- a piece of log --------------------------------------------------------------------------------------------------------


def of_log(case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What the product reads in a log, of a server that ended with it and of one that runs."""
    framework, log = engine(case), folder / "server.log"
    log.write_text(case["log_text"], encoding="utf-8")
    said = resolved(start_of(log), framework.resolved + framework.known_warnings)
    asked = dataclasses.replace(launch(), arm=Arm(name="b", kv_dtype="fp8"))
    message = str(EngineProcess(framework, asked, log).failure(not_applied(said, asked.arm) or "the engine ended"))
    warnings = {name for name, _ in framework.known_warnings if name in said}
    found = classes(message)
    ports = {int(word) for word in re.findall(r"\b\d{4,5}\b", case["log_text"])}
    clash = [port for port in ports if EngineProcess(framework, launch(port), log).port_clash()]
    return in_reason(reason_of(message)) | {
        "outcome": "error" if reason_of(message) or found else "ok", "error_class": found, "warnings": warnings,
        "port": clash[0] if len(clash) == 1 else None, "shows": " ".join(map(str, said.values())), "reason": reason_of(message),
        "log_tail_shown": shown(case["log_text"], message),
    }  # fmt: skip


def shown(text: str, message: str) -> bool:
    return all(line.strip() in message for line in text.splitlines())


# --- a real server ---------------------------------------------------------------------------------------------------------


@contextmanager
def leftover(model: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A foreign server that answers every probe."""
    process = subprocess.Popen([sys.executable, str(FAKE), "--port", str(port), "--model", model], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: process.pid in listeners("127.0.0.1", port))
        yield process
    finally:
        process.kill()
        process.wait()


def fake(framework: Framework, *options: str, before: Callable[[], None] = lambda: None) -> Framework:
    """The adapter with a real small process in place of its engine; `before` runs when its command is written."""

    def argv(asked: Launch) -> list[str]:
        before()
        return [sys.executable, str(FAKE), "--port", str(asked.port), "--model", asked.model, *options]

    return dataclasses.replace(framework, argv=argv)


def options(case: Mapping[str, Any]) -> list[str]:
    """The fake engine's options: when it is healthy, when it answers, when it dies. AssertionError for what it cannot do."""
    probes, process = case.get("probes", []), case.get("process", {})
    odd = {key for probe in probes for key in probe} - PROBES | set(process) - {"exit_code_at_s", "log_tail"}
    assert not odd, f"this runner does not know {', '.join(sorted(odd))}"
    first = {key: next((p["t_s"] * SECOND for p in probes if p.get(key) == 200), NEVER_S) for key in ("health", "one_token")}
    said = ["--start-delay", str(first["health"]), "--one-token-delay", str(first["one_token"])]
    for at, code in process.get("exit_code_at_s", {}).items():
        assert code == 1, f"this runner does not know the exit code {code}"
        said += ["--die-after", str(float(at) * SECOND), "--die-text", process["log_tail"]]
    return said


def answers(server: Server, model: str) -> dict[str, int]:
    """What the three probes get at this moment."""
    found = {}
    for name, method, path in (("health", "GET", "/health"), ("models", "GET", "/v1/models"), ("one_token", "POST", "/v1/completions")):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request(method, path, json.dumps({"model": model, "prompt": "a", "max_tokens": 1}) if method == "POST" else None)
        found[name] = connection.getresponse().status
        connection.close()
    return found


def of_server(case: Mapping[str, Any], folder: Path, taken: str = "before") -> dict[str, Any]:
    """What became of a start. Who else is on the port was there `before` it, or came `between` the look at it and the start."""
    model, theirs = case.get("asked", {}).get("model", MODEL), {m for p in case.get("probes", []) for m in p.get("model_ids", ())}
    said, asked, ends = options(case), launch(free_port(), model), []
    if not theirs - {model}:
        return _started(case, fake(engine(case), *said), asked, folder)
    (other,) = theirs
    someone = leftover(other, asked.port)

    def come() -> None:
        ends.append(someone.__enter__())

    # The engine started here lives on a port of its own until it dies: it is the other one that answers.
    framework = fake(engine(case), *said, "--port", "0", before=come if taken == "between" else lambda: None)
    try:
        if taken == "before":
            come()
        found = _started(case, framework, asked, folder)
        return found | {"leftover_lives": ends[0].poll() is None}
    finally:
        if ends:
            someone.__exit__(None, None, None)


def _started(case: Mapping[str, Any], framework: Framework, asked: Launch, folder: Path) -> dict[str, Any]:
    """One start by the product's own code; nothing of it is left."""
    session, limit_s = f"case-{uuid.uuid4()}", case.get("limit_s", NEVER_S) * SECOND
    deaths = [float(at) for at in case.get("process", {}).get("exit_code_at_s", {})]
    ready_at, message, began = None, "", time.monotonic()
    try:
        with serve(framework, asked, log=folder / "server.log", env={}, timeout_s=limit_s, session_id=session) as server:
            now = answers(server, asked.model)
            ready_at = next((p["t_s"] for p in case.get("probes", ()) if now.items() >= {k: p[k] for k in now if k in p}.items()), None)
    except ServerError as e:
        message = str(e)
    took_s = time.monotonic() - began
    assert marked_processes(session) == []
    return in_reason(reason_of(message) if message else "") | {
        "outcome": "error" if message else "ok", "error_class": classes(message) if message else set(), "ready_at_s": ready_at,
        # Time before its death is scaled, time after it is not.
        "fails_before_s": deaths[0] + took_s - deaths[0] * SECOND if message and deaths else None,
        "log_tail_shown": shown(case.get("process", {}).get("log_tail", ""), message), "message": message,
        "must_not": {"measure the other server"} if not message else set(), "warnings": set(),
    }  # fmt: skip


# --- what is left ----------------------------------------------------------------------------------------------------------


def of_processes(case: Mapping[str, Any], folder: Path, victim: str) -> dict[str, Any]:
    """Which processes of the case's table are gone after the stop and which are left alone.

    Its engine is a real one with children, two of them for each in the table: one in a session of its own, one that has lost its parent.
    What is not below it is a process of ours. The `victim` of the SIGKILL is the engine, or its supervisor: then its children really belong
    to somebody else.
    """
    ours, log, session = {case["launched"]["pid"]}, folder / "server.log", f"case-{uuid.uuid4()}"
    for row in case["before"]:
        ours |= {row["pid"]} if row["ppid"] in ours else set()
    foreign = {row["pid"]: subprocess.Popen(["sleep", "600"]) for row in case["before"] if row["pid"] not in ours}
    try:
        with serve(fake(engine(case), "--spawn-child"), launch(), log=log, env={}, timeout_s=60, session_id=session) as server:
            children = children_in(log)
            assert alive(children) == children
            os.kill(server.pid if victim == "engine" else server.supervisor_pid, signal.SIGKILL)
            wait_until(lambda: not alive({server.pid}))
            if victim == "supervisor":
                assert alive(children) == children
        assert marked_processes(session) == []
        gone = ours - {case["launched"]["pid"]} if not alive(children) else set()
        return {"stops": sorted(gone), "leaves_alone": sorted(p for p, process in foreign.items() if process.poll() is None)}
    finally:
        for process in foreign.values():
            process.kill()
            process.wait()


POLLS = 3  # looks at the memory until it is back


def waits_for_gpu_memory(case: Mapping[str, Any], folder: Path, victim: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the next start's command line is written only once the card has as much memory free as before the first one.

    NVML is played back: the engine's memory outlives its processes and comes back only while somebody waits for it.
    """
    ours = {case["launched"]["pid"]}
    for row in case["before"]:
        ours |= {row["pid"]} if row["ppid"] in ours else set()
    held = sum(row.get("gpu_mem_b", 0) for row in case["before"])
    free = sum(row.get("gpu_mem_b", 0) for row in case["before"] if row["pid"] not in ours)
    nvml, clock, slept, at_launch = RecordedNvml(card()), [0.0], [], []

    def holds(used: int) -> None:
        nvml.cards[0]["nvmlDeviceGetMemoryInfo"] = {"struct": {"total": 150754820096, "used": used}}

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        slept.append(seconds)
        if len(slept) == POLLS:
            holds(free)

    def note() -> None:
        at_launch.append(nvml.cards[0]["nvmlDeviceGetMemoryInfo"]["struct"]["used"])

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_memory, "time", types.SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(weights, "locate", lambda *_: weights.Weights(serve=MODEL, tokenizer={}, identity={}, local=True))
    monkeypatch.setattr(engines, "single_token_words", lambda tokenizer: ())
    monkeypatch.setattr(engines.EngineRunner, "_wait_for_quiet", lambda self, cards: None)
    framework = dataclasses.replace(fake(engine(case), before=note), distributions=())
    gpu = find_gpu("h200")
    spec = engines.EngineSpec(framework=framework, model=Model(key="m"), gpu=gpu, python=sys.executable, start_timeout_s=60)
    session = f"case-{uuid.uuid4()}"
    runner = engines.EngineRunner(spec, session_id=session, logs=folder / "gpu" / "logs", say=lambda line: None)
    holds(free)
    with runner.start(Arm(), 1, 1) as running:
        server = running.server
        assert isinstance(server, Server)
        holds(held)
        os.kill(server.pid if victim == "engine" else server.supervisor_pid, signal.SIGKILL)
        wait_until(lambda: not alive({server.pid}))
    with runner.start(Arm(), 2, 1):
        pass
    assert marked_processes(session) == []
    return at_launch == [free, free] and len(slept) == POLLS


# An engine and a child in its group say what they are sent and go on; another child has fled into a session of its own.
STUBBORN = """
import os, signal, subprocess, sys, time
source = '''import os, signal, sys, time
def say(word): os.write(1, f"{sys.argv[1]} {word}{chr(10)}".encode())
signal.signal(signal.SIGTERM, lambda *_: say("got SIGTERM"))
say("is there")
while True:
    time.sleep(0.05)
    say("goes on")
'''
subprocess.Popen([sys.executable, "-S", "-c", source, "fled"], start_new_session=True)
subprocess.Popen([sys.executable, "-S", "-c", source, "child"])
sys.argv[1:] = ["engine"]
exec(source)
"""


def order_of_a_stop(case: Mapping[str, Any], folder: Path) -> list[str]:
    """What the product does to an engine that will not go, by what its processes say: the log is the order."""
    log, session = folder / "stubborn.log", f"case-{uuid.uuid4()}"
    log.write_bytes(b"")
    framework = dataclasses.replace(engine(case), argv=lambda asked: [sys.executable, "-S", "-c", STUBBORN])
    stubborn = EngineProcess(framework, launch(), log)
    try:
        stubborn.start({}, session)
        wait_until(lambda: sum(line.endswith("is there") for line in log.read_text().splitlines()) == 3)
        ours = stubborn.pids()
    finally:
        stubborn.stop()
    said, steps = log.read_text().splitlines(), []
    told = [i for i, line in enumerate(said) if line.endswith("got SIGTERM")]
    if sorted(said[i] for i in told) == ["child got SIGTERM", "engine got SIGTERM"]:
        steps.append("SIGTERM to the group")
    if told and {"engine goes on", "child goes on", "fled goes on"} <= set(said[max(told) :]):
        steps.append("wait")
    if not alive(ours) and not marked_processes(session):
        steps.append("SIGKILL to remembered descendants")
    return steps
