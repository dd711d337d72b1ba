"""Authors can measure by hand, observe verdicts, and bring their own runs; each through a public name."""

import json
import os

import pytest

BY_HAND = """
import pytest
from pytest_kvcache import ClosedLoop

def test_first_token(kv_drive):
    found = kv_drive(ClosedLoop(isl=64, osl=16, concurrency=2))
    assert 50 < found["ttft_ms.p50"] < 200

def test_specs(kv_gpu, kv_framework, kv_model):
    assert (kv_gpu.key, kv_framework.name, kv_model.key) == ("cpu", "transformers", "smollm2-135m")
"""


@pytest.fixture
def by_hand(kv_project):
    (kv_project.folder / "test_fixed.py").unlink()
    (kv_project.folder / "test_other.py").write_text(BY_HAND)
    return kv_project


def test_a_test_may_measure_for_itself(by_hand):
    result = by_hand.run()
    assert result.code == 0, result.out
    assert result.measured == ["isl64-osl16-c2"]


def test_one_server_by_hand_a_test(by_hand):
    suite = by_hand.folder / "test_other.py"
    suite.write_text(suite.read_text().replace("(kv_drive)", "(kv_endpoint, kv_drive)"))
    result = by_hand.run("-k", "first")
    assert result.code == 1
    assert "use one of the two" in result.out


def test_what_does_not_count_fails_with_the_reason(by_hand):
    result = by_hand.run("-k", "first", failed=2)
    assert result.code == 1
    assert "invalid: 2 of 8 requests failed" in result.out
    dead = by_hand.run("-k", "first", dies=True)
    assert dead.code == 1
    assert "out of memory" in dead.out
    assert "1 failed" in dead.out


def test_verdicts_can_be_observed(recorded):
    conftest = recorded.folder / "conftest.py"
    conftest.write_text(conftest.read_text() + """
@pytest.hookimpl(optionalhook=True)
def pytest_kv_verdict(config, record):
    with open("seen.jsonl", "a") as f:
        f.write(json.dumps(record) + "\\n")
""")  # fmt: skip
    result = recorded.run("-k", "c1", "-n", "2", seed=1)
    seen = [json.loads(line) for line in (recorded.folder / "seen.jsonl").read_text().splitlines()]
    assert {r["key"]: r["verdict"] for r in seen} == result.verdicts
    assert len(seen) == 3, "each verdict once, on the controller"


def test_an_internal_fault_is_one_line_and_loses_nothing(recorded):
    conftest = recorded.folder / "conftest.py"
    conftest.write_text(conftest.read_text() + """
def broken(self, scenario):
    raise ZeroDivisionError("oops")
Running.measure = broken
""")  # fmt: skip
    result = recorded.run("-k", "fixed and c1")
    assert result.code == 1
    assert "internal error: ZeroDivisionError('oops')" in result.out
    assert "INTERNALERROR" not in result.out


def test_a_device_named_in_a_clone_runs_the_suites_only():
    import subprocess
    import sys
    from pathlib import Path

    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "--kv-gpu=cpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert collected
    assert all(line.startswith("suites/") for line in collected), collected


@pytest.mark.parametrize(("model", "arms"), [
    ("qwen3-4b-2507", "fp16+wfp8,quantization=fp8+w8a8,quantization=w8a8+awq,quantization=awq+gptq,quantization=gptq"),
    ("granite-3.3-8b", "fp16+wfp8,quantization=fp8"),
    ("qwen3-4b-2507:dummy", None),
])  # fmt: skip
def test_the_suites_ask_for_the_weights_that_the_catalogue_names(model, arms):
    import subprocess
    import sys
    from pathlib import Path

    command = [
        sys.executable,
        "-m",
        "pytest",
        "suites/test_quantization.py",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "-k",
        "weight_precision",
    ]
    asked = ["--kv-gpu=h100", "--kv-framework=vllm", f"--kv-model={model}", "--kv-profile=full"]
    done = subprocess.run(
        [*command, *asked], cwd=Path(__file__).parents[2], capture_output=True, text=True, env=os.environ | {"COLUMNS": "400"}
    )
    planned = [line.partition("/text:")[2].partition(":")[0] for line in done.stdout.splitlines() if line.startswith("kv:   ")]
    assert planned == ([arms] if arms else []), done.stdout + done.stderr
