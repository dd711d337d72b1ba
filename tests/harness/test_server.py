"""Real processes, a fake engine: a server is ready only when it answers, and whatever happens nothing of it is left."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_kvcache.core.framework import Framework, Launch
from pytest_kvcache.core.spec import Arm
from pytest_kvcache.harness import ready
from pytest_kvcache.harness.server import MARKER, Server, ServerError, marked_processes, orphans, serve

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "fake_engine.py"

Start = Callable[..., AbstractContextManager[Server]]


def body(model: str, prompt: str, osl: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": osl, "stream": True}


def fake(*options: str) -> Framework:
    def argv(launch: Launch) -> list[str]:
        return [sys.executable, str(FAKE), "--port", str(launch.port), "--model", launch.model, *options]

    failures = ((r"wants (\d+) GiB", "it needs {0} GiB"), (r"out of memory", "the model does not fit"))
    return Framework(name="fake", argv=argv, body=body, needs=(), cure="", known_failures=failures)


def launch(port: int = 0, command: tuple[str, ...] = ()) -> Launch:
    return Launch(python=sys.executable, model="org/model", port=port, device="cpu", arm=Arm(), command=command)


def alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
        except psutil.NoSuchProcess:
            pass
    return found


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return int(probe.getsockname()[1])


def children_in(log: Path) -> set[int]:
    """The sleepers of --spawn-child: one in its own session, one orphaned as well."""
    found = {int(line.split()[-1]) for line in log.read_text().splitlines() if line.startswith("child pid")}
    assert len(found) == 2
    return found


def wait_until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"not so within {limit_s} s"
        time.sleep(0.05)


@pytest.fixture
def session() -> Iterator[str]:
    name = f"test-{uuid.uuid4()}"
    yield name
    assert marked_processes(name) == []


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "server.log"


@pytest.fixture
def start(session: str, log: Path) -> Start:
    def start(framework: Framework, asked: Launch | None = None, **more: Any) -> AbstractContextManager[Server]:
        options = {"env": {}, "timeout_s": 60.0, **more}
        return serve(framework, asked or launch(), log=log, session_id=session, **options)

    return start


@pytest.fixture
def taken() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as holder:
        yield holder.getsockname()[1]


def test_server_answers_and_leaves_nothing(start: Start, session: str, log: Path) -> None:
    """Every process is seen while it runs, those outside the group too, and is gone afterwards."""
    with start(fake("--spawn-child")) as server:
        ours = server.pids()
        assert {server.pid, server.supervisor_pid} | children_in(log) <= ours
        assert alive(ours) == ours
        assert set(marked_processes(session)) >= {server.pid, server.supervisor_pid}
        assert os.getsid(server.pid) != os.getsid(0) and os.getpgid(server.pid) == server.pid
        assert server.base_url == f"http://127.0.0.1:{server.port}"
        assert server.argv[0] == sys.executable and log.read_text().startswith(f"$ {sys.executable}")
        assert server.failure() is None and 0 < server.start_s < 60

    assert alive(ours) == set()
    assert marked_processes(session) == [] and server.pids() >= ours


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_in_the_block_stops_the_server(start: Start, error: type[BaseException]) -> None:
    with pytest.raises(error), start(fake()) as server:
        ours = server.pids()
        raise error

    assert alive(ours) == set()


def test_engine_that_ignores_sigterm_is_gone(start: Start, log: Path) -> None:
    with start(fake("--ignore-sigterm", "--spawn-child")) as server:
        ours = server.pids()

    assert alive(ours) == set()


@pytest.mark.parametrize("option", ["--start-delay", "--one-token-delay"])
def test_ready_means_a_token(start: Start, option: str) -> None:
    """/health and the model list are not enough."""
    with start(fake(option, "1.5")) as server:
        assert server.start_s >= 1.5


def test_death_is_told_at_once(start: Start, log: Path) -> None:
    """What it means, the end of the log and the command; not the time-out."""
    text = "loading\ntorch.OutOfMemoryError: wants 80 GiB\ngoodbye"
    began = time.monotonic()
    with pytest.raises(ServerError) as caught, start(fake("--never-ready", "--die-after", "0.5", "--die-text", text)):
        pass

    message = str(caught.value)
    assert time.monotonic() - began < 30
    assert "fake: the engine exited with code 1 after" in message
    assert "reason: it needs 80 GiB" in message
    assert "  goodbye" in message and str(log) in message
    assert f"by hand: {sys.executable} {FAKE} --port" in message


def test_unknown_death_shows_the_error_line(start: Start) -> None:
    options = ("--die-after", "0", "--die-text", "\x1b[31mValueError: odd\x1b[0m\nbye")
    with pytest.raises(ServerError, match="reason: ValueError: odd\n"), start(fake("--never-ready", *options)):
        pass


def test_death_by_signal_is_named(start: Start) -> None:
    framework = dataclasses.replace(fake(), argv=lambda launch: ["sh", "-c", "kill -9 $$"])
    with pytest.raises(ServerError, match=r"killed by SIGKILL .*\n.*\n  \(nothing was logged\)"), start(framework):
        pass


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--never-ready"], "(?:GET /health answered 503|no answer yet to GET /health)"),  # the end may come within a question
        (["--one-token-delay", "600"], "(?:POST /v1/completions answered 503: .*loading|no answer yet to POST /v1/completions)"),
        (["--ttft-ms", "600000"], "no answer yet to POST /v1/completions"),
    ],
)
def test_never_ready(start: Start, monkeypatch: pytest.MonkeyPatch, options: list[str], answer: str) -> None:
    monkeypatch.setattr(ready, "SAY_EVERY_S", 1.0)
    said: list[str] = []
    limit = rf"not ready within 2.5 s; last probe: {answer}"
    with pytest.raises(ServerError, match=limit), start(fake(*options), timeout_s=2.5, say=said.append):
        pass

    assert said and said[0].startswith("fake: not ready after 1 s of 2.5 s; last probe: ")


def test_refused_token_is_told_before_the_timeout(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "REFUSED_S", 0.5)
    framework = dataclasses.replace(fake(), body=lambda model, prompt, osl: body("unknown", prompt, osl))
    with pytest.raises(ServerError, match=r"refuses a one-token request; .* 404: .*'unknown'"), start(framework):
        pass


def test_other_model_is_refused(start: Start) -> None:
    told = "another server answers .* it has other, not org/model"
    with pytest.raises(ServerError, match=told), start(fake("--model-name", "other")):
        pass


def test_last_part_of_a_models_path_is_its_name(start: Start) -> None:
    """Some servers list a folder by its last part; then they must also take it in requests, which this one does."""
    framework = dataclasses.replace(fake("--model-name", "model"), body=lambda model, *rest: body("model", *rest))
    with start(framework):
        pass


def test_users_port_that_is_taken(start: Start, taken: int) -> None:
    """No other port is tried; the holder is named."""
    told = rf"cannot use port {taken} .* held by pid {os.getpid()} \("
    with pytest.raises(ServerError, match=told), start(fake(), launch(taken)):
        pass


def test_users_port_that_is_free(start: Start) -> None:
    port = free_port()
    with start(fake(), launch(port)) as server:
        assert server.port == port


def test_port_lost_before_the_engine_binds_it(start: Start, log: Path) -> None:
    """One more try on another port, and it is said; the log keeps both."""
    thieves: list[socket.socket] = []
    honest = fake().argv

    def argv(launch: Launch) -> list[str]:
        if not thieves:
            thieves.append(socket.create_server(("127.0.0.1", launch.port)))
        return honest(launch)

    said: list[str] = []
    with start(dataclasses.replace(fake(), argv=argv), say=said.append) as server:
        assert server.port != thieves[0].getsockname()[1]
    thieves[0].close()

    assert len(said) == 1 and said[0].endswith("trying once more on another port")
    assert log.read_text().count("$ ") == 2


def test_foreign_server_on_the_port_is_not_measured(start: Start) -> None:
    """It has the right model and answers everything; the engine started here never listens."""
    foreign: list[subprocess.Popen[bytes]] = []

    def argv(launch: Launch) -> list[str]:
        foreign.append(subprocess.Popen(fake().argv(launch), stdout=subprocess.DEVNULL))
        return ["sleep", "600"]

    asked = launch(free_port())
    try:
        with pytest.raises(ServerError) as caught, start(dataclasses.replace(fake(), argv=argv), asked):
            pass
        assert f"port {asked.port} is answered by pid {foreign[0].pid} " in str(caught.value)
        assert foreign[0].poll() is None
    finally:
        for process in foreign:
            process.kill()
            process.wait()


def test_executable_not_found(start: Start) -> None:
    framework = dataclasses.replace(fake(), argv=lambda launch: ["/no/such/engine", "serve"])
    with pytest.raises(ServerError) as caught, start(framework):
        pass

    assert str(caught.value) == "fake: cannot start /no/such/engine: No such file or directory"


def test_environment_and_the_command_to_type(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """`env` beats the framework's, which beats ours; secrets are not shown."""
    monkeypatch.setenv("SHADE", "ours")
    show = ["sh", "-c", "echo $SHADE $MODE $PYTEST_KVCACHE_SESSION; exit 3"]
    framework = dataclasses.replace(fake(), argv=lambda launch: show, env={"SHADE": "theirs", "MODE": "slow"})
    with pytest.raises(ServerError) as caught, start(framework, env={"MODE": "fast", "HF_TOKEN": "hush"}):
        pass

    message = str(caught.value)
    assert "  theirs fast test-" in message and "hush" not in message
    assert "by hand: env SHADE=theirs MODE=fast sh -c " in message


TALKATIVE = """
import os, sys
secret = sys.argv[-1]
print("INFO non-default args:", {"model": "m", "api_key": [secret], "env": dict(os.environ)})
print("ValueError: api key", secret, "is too short for", os.environ["SSHPASS"], "and", os.environ["MY_TOKEN_VALUE"])
sys.exit(1)
"""


@pytest.mark.parametrize("option", ["--api-key", "--hftoken", "--jwt"])
def test_an_engine_that_prints_our_secrets_is_quoted_without_them(
    start: Start, log: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv("SSHPASS", "Zq9-environment")
    framework = dataclasses.replace(fake(), argv=lambda launch: [sys.executable, "-c", TALKATIVE, option, "Zq9-option"])
    with pytest.raises(ServerError) as caught, start(framework, env={"MY_TOKEN_VALUE": "Zq9-given"}):
        pass

    message = str(caught.value)
    assert "Zq9" not in message
    assert "reason: ValueError: api key *** is too short for *** and ***\n" in message
    assert f"{option} '***'" in message.splitlines()[-1]
    assert "Zq9-option" in log.read_text(), "the log itself is left as it is, for its owner"


@pytest.mark.clock
def test_a_probe_is_quoted_without_secrets(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "SAY_EVERY_S", 1.0)
    monkeypatch.setenv("HF_TOKEN", "loading")  # which is what the fake answers
    said: list[str] = []
    with pytest.raises(ServerError) as caught, start(fake("--one-token-delay", "600"), timeout_s=2.5, say=said.append):
        pass
    assert "loading" not in str(caught.value) + "".join(said)
    assert any('"message": "***"' in line for line in said)


def test_death_while_serving_is_known(start: Start) -> None:
    with start(fake("--die-after", "2", "--die-text", "out of memory")) as server:
        wait_until(lambda: server.failure() is not None)
        failure = str(server.failure())

    assert "the engine exited with code 1" in failure and "reason: the model does not fit" in failure


def test_killed_supervisor_leaves_nothing(start: Start, log: Path) -> None:
    """The engine dies with it by the kernel's hand, the rest because it is remembered."""
    with start(fake("--spawn-child", "--ignore-sigterm")) as server:
        ours = server.pids()
        os.kill(server.supervisor_pid, signal.SIGKILL)
        wait_until(lambda: alive({server.pid}) == set())
        assert alive(children_in(log)) == children_in(log)
        assert "supervisor was killed by signal 9" in str(server.failure())

    assert alive(ours) == set()


PARENT = """
import dataclasses, json, os, signal, sys, time
from pathlib import Path
sys.path[:0] = [{root!r}, {here!r}]
from test_server import fake, launch, serve
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would inherit that it is ignored
options = ["--spawn-child", *sys.argv[3:]]
with serve(fake(*options), launch(), log=Path(sys.argv[1]), env={{}}, timeout_s=60, session_id=sys.argv[2]) as server:
    forked = os.fork() if {fork!r} else 0
    if {fork!r} and not forked:
        time.sleep(600)
    print(json.dumps([forked, *server.pids()]), flush=True)
    time.sleep(600)
"""


def parent(log: Path, session: str, *options: str, fork: bool = False) -> tuple[subprocess.Popen[str], set[int], int]:
    """A Python process that serves; the pids of its server; its forked child that inherited the pipe."""
    source = PARENT.format(root=str(ROOT), here=str(Path(__file__).parent), fork=fork)
    argv = [sys.executable, "-c", source, str(log), session, *options]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    forked, *ours = json.loads(process.stdout.readline())
    assert alive(set(ours)) == set(ours) >= children_in(log)
    return process, set(ours), forked


def finish(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    process.stdout.close()
    process.wait(30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_parent_leaves_nothing(log: Path, session: str, number: signal.Signals) -> None:
    process, ours, _ = parent(log, session)
    process.send_signal(number)
    finish(process)

    wait_until(lambda: not alive(ours) and not marked_processes(session))


def test_second_interrupt_during_the_stop_leaves_nothing(log: Path, session: str) -> None:
    process, ours, _ = parent(log, session, "--ignore-sigterm")
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.4)
    finish(process)

    wait_until(lambda: not alive(ours) and not marked_processes(session))


def test_forked_child_that_holds_the_pipe_is_no_rescue(log: Path, session: str) -> None:
    """A fork of pytest keeps the pipe open; the supervisor sees that its parent is another one."""
    process, ours, forked = parent(log, session, fork=True)
    try:
        process.kill()
        wait_until(lambda: not alive(ours))
    finally:
        os.kill(forked, signal.SIGKILL)
        finish(process)


def test_marker_tells_sessions_apart(start: Start, session: str) -> None:
    with start(fake()) as server:
        assert {server.pid, server.supervisor_pid} <= set(marked_processes()) & set(marked_processes(session))
        assert marked_processes(session[:-1]) == []


def test_what_a_session_that_is_over_has_left_is_found_and_left_alone() -> None:
    """By the pid in its mark, which is gone; a mark that says no pid is nobody's to judge."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]

    def marked(owner: int | str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(sleeper, env={**os.environ, MARKER: f"20261130-120000-{owner:x}" if isinstance(owner, int) else owner})

    left, ours = marked(ended.pid), marked(os.getpid())
    strange = [marked(word) for word in ("no session of ours", "", f"test-{uuid.uuid4()}", "20261130-120000-ffffffffffff")]
    other = subprocess.Popen(sleeper)
    try:
        taken = marked(other.pid)
        wait_until(lambda: set(marked_processes()) >= {left.pid, ours.pid, taken.pid, *(p.pid for p in strange)})
        assert left.pid in orphans() and not {ours.pid, taken.pid, *(p.pid for p in strange)} & set(orphans())
        assert all(p.poll() is None for p in (left, ours, taken, *strange))
    finally:
        for process in (left, ours, other, taken, *strange):
            process.kill()
            process.wait()


SHARED = """
import signal, sys, time
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
print(block.name, file=sys.stderr, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["time.sleep(60)", "sys.exit(1)", "import os; os._exit(1)"], ids=["stopped", "failed", "died"])
def test_shared_memory_of_an_engine_that_is_gone_is_given_back(end: str) -> None:
    """Its own helper unlinks it once it is gone, if it is let."""
    supervisor = Path(ready.__file__).with_name("supervisor.py")
    argv = [sys.executable, "-I", "-S", str(supervisor), str(os.getpid()), "5", sys.executable, "-c", SHARED.format(end=end)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdin and run.stderr
        block = Path("/dev/shm", run.stderr.readline().strip().lstrip("/"))
        run.stdin.close()
        run.wait(20)
        run.stderr.read()
    assert not block.exists()
