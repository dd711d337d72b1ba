"""However pytest is run, the same data give the same verdicts, each block is measured once, and nothing is left."""

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

# Slow at concurrency 2; everything else as recorded.
SLOW = {"seed": 1, "slow": {"isl64-osl16-c2": 1.5}, "version": "2.0"}


@pytest.fixture
def plain_verdicts(recorded):
    return recorded.run(**SLOW).verdicts


@pytest.mark.parametrize("args", [
    ("-n", "2"), ("-n", "2", "--dist", "loadfile"), ("-p", "randomly"), ("--timeout=1",), ("--reruns", "2"), ("-v",), ("-q", "-q"),
    ("test_other.py", "test_fixed.py"), ("-W", "error"),
], ids=" ".join)  # fmt: skip
def test_the_way_of_running_changes_no_verdict(recorded, plain_verdicts, args):
    told = SLOW | ({"sleep": 0.2} if "--timeout=1" in args else {})
    result = recorded.run(*args, **told)
    assert result.code == 1, result.out
    assert result.verdicts == plain_verdicts
    assert len(result.starts) == 3, "the block is measured once, whoever asks first"


@pytest.mark.parametrize("selection", ["c2", "streaming", "fixed and c4", "c1 or c2"])
def test_selecting_fewer_tests_changes_no_verdict(recorded, plain_verdicts, selection):
    result = recorded.run("-k", selection, **SLOW)
    assert result.verdicts.items() <= plain_verdicts.items()
    assert result.verdicts


def test_last_failed_runs_only_what_failed_and_gives_the_same_verdict(recorded, plain_verdicts):
    first = recorded.run("--keep", **SLOW)
    again = recorded.run("--lf", **SLOW)
    assert first.code == again.code == 1
    assert set(again.measured) == {"isl64-osl16-c2"}
    assert again.verdicts.items() <= plain_verdicts.items()


def test_stopping_at_the_first_failure_still_records_what_was_found(recorded):
    result = recorded.run("-x", **SLOW)
    assert result.code == 1
    assert "stopping after 1 failures" in result.out
    assert "regression" in result.verdicts.values()


def test_workers_never_measure_at_the_same_time(recorded):
    (recorded.folder / "test_two.py").write_text(
        (recorded.folder / "test_fixed.py")
        .read_text()
        .replace("concurrency=c)", "concurrency=c, arms=(Arm(name='b', block_size=c),))")
        .replace("ClosedLoop, Gate", "Arm, ClosedLoop")
    )
    result = recorded.run("-n", "3", "--kv-record=missing", sleep=0.05)
    times = [(line.split()[0], float(line.rsplit("t", 1)[1])) for line in result.log if line.startswith(("start", "stop"))]
    assert [kind for kind, _ in sorted(times, key=lambda e: e[1])] == ["start", "stop"] * (len(times) // 2)
    assert len(times) > 20


def test_time_is_billed_to_the_tests_that_asked_for_it(recorded):
    result = recorded.run("-k", "fixed or plain", sleep=0.1, seed=1)
    times = {c.get("name").split("[")[0] + c.get("name")[-3:-1]: float(c.get("time")) for c in result.junit.iter("testcase")}
    measured = {k: v for k, v in times.items() if k.startswith("test_fixed_length")}
    assert len(measured) == 3
    assert all(0.25 < v < 2 for v in measured.values()), times
    assert sum(v for k, v in times.items() if k not in measured) < 0.2


def test_junit_carries_the_verdicts(recorded):
    result = recorded.run("-k", "fixed and c2", **SLOW)
    assert result.junit.find("testsuite").get("failures") == "1"
    properties = {p.get("name"): p.get("value") for p in result.junit.iter("property")}
    assert properties["kv.base.output_tok_s"].startswith("regression ")
    record = json.loads(properties["kv.record"])
    assert record[0]["key"] == "fixed_length/isl64-osl16-c2/base/output_tok_s"


def test_collect_only_prints_the_plan_and_starts_nothing(kv_project):
    result = kv_project.run("--collect-only", report=False)
    assert result.code == 0
    assert "kv: plan: 1 block(s), 3 scenario(s), 8 gate(s); 3 to 5 server start(s)" in result.out
    assert result.log == []
    assert list((kv_project.folder / "tmp").iterdir()) == []


@pytest.mark.parametrize("option", ["--setup-plan", "--fixtures", "--help", "--version", "--markers"])
def test_showing_things_starts_nothing(kv_project, option):
    result = kv_project.run(option, report=False)
    assert result.code == 0, result.out
    assert result.log == []
    assert list((kv_project.folder / "tmp").iterdir()) == []


def test_skipped_tests_are_not_measured(recorded):
    text = (recorded.folder / "test_fixed.py").read_text().replace("@pytest.mark.kv_gates", "@pytest.mark.skip\n@pytest.mark.kv_gates")
    (recorded.folder / "test_fixed.py").write_text(text)
    assert recorded.run("test_fixed.py").log == []


def test_without_a_device_everything_measured_is_skipped_with_one_reason(kv_project):
    env = kv_project.environment({})
    done = subprocess.run([sys.executable, "-m", "pytest", "-rs"], cwd=kv_project.folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "1 passed, 5 skipped" in done.stdout
    reasons = {line.split(": ", 1)[1] for line in done.stdout.splitlines() if line.startswith("SKIPPED")}
    assert reasons == {"needs --kv-gpu (for example: pytest --kv-gpu=cpu)"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_keeps_what_was_measured_marked_incomplete_and_records_nothing(recorded, number):
    before = recorded.baseline.read_bytes()
    out = recorded.folder / "out"
    process = subprocess.Popen(
        recorded.command("--kv-record=all", f"--kv-report={out}"),
        cwd=recorded.folder,
        env=recorded.environment({"sleep": 0.4}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    log = recorded.folder / "starts.log"
    log.unlink()
    wait_for(lambda: log.exists() and log.read_text().count("measure") > 3)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 2, printed
    run = json.loads((out / "run.json").read_text())
    assert run["complete"] is False
    assert run["interrupted"]
    (block,) = run["blocks"].values()
    assert len(block["measurements"]) >= 3
    assert recorded.baseline.read_bytes() == before
    assert "incomplete: what was measured is kept in" in printed


def test_two_sessions_take_turns_on_one_device(recorded):
    env = recorded.environment({"sleep": 0.3, "seed": 1})
    log = recorded.folder / "starts.log"
    log.unlink()
    both = [
        subprocess.Popen(recorded.command("-k", "fixed and c1"), cwd=recorded.folder, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [p.communicate(timeout=60)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], printed
    owners = [line.rsplit("pid", 1)[1] for line in log.read_text().splitlines() if line.startswith("measure")]
    assert len(owners) == 6
    assert sum(a != b for a, b in itertools.pairwise(owners)) == 1, owners
    assert any("waiting for device cpu: pid" in text for text in printed)


def test_a_lock_left_by_a_dead_process_does_not_block(recorded):
    lock = recorded.folder / "locks" / "cpu.lock"
    script = f"import fcntl,os,signal; f=open({str(lock)!r},'a'); fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script], check=False)
    with lock.open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert recorded.run("-k", "fixed and c1").code == 0


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def test_nothing_is_left_in_the_temporary_folder(recorded):
    recorded.run("-k", "fixed", seed=1)
    assert [p.name for p in (recorded.folder / "tmp").iterdir() if p.name.startswith("pytest-kvcache")] == []
    assert os.listdir(recorded.folder / "locks") == ["cpu.lock"]
