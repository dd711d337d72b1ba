"""A throw-away project whose engine is made up (see kv_fake.py): `kv_project.run(...)` is a pytest of its own."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from xml.etree import ElementTree

import pytest

from pytest_kvcache.harness.files import schema_problem

HERE = pathlib.Path(__file__).parent
SUITE = """
import pytest
from pytest_kvcache import ClosedLoop, Gate

GRID = [ClosedLoop(isl=64, osl=16, concurrency=c) for c in (1, 2, 4)]

@pytest.mark.kv_gates("output_tok_s", "tpot_ms.p50")
@pytest.mark.parametrize("kv_scenario", GRID, ids=str)
def test_fixed_length(kv_result, kv_gate):
    kv_gate(kv_result)
"""
OTHER = """
import pytest
from pytest_kvcache import ClosedLoop

@pytest.mark.kv_gates("ttft_ms.p50")
@pytest.mark.parametrize("kv_scenario", [ClosedLoop(isl=64, osl=16, concurrency=c) for c in (1, 2)], ids=str)
def test_streaming(kv_result, kv_gate):
    kv_gate(kv_result)

def test_plain():
    pass
"""


@dataclass
class Result:
    code: int
    out: str
    log: list[str]
    verdicts: dict[str, str]
    run: dict | None
    junit: ElementTree.Element | None

    @property
    def starts(self):
        return [line for line in self.log if line.startswith("start")]

    @property
    def measured(self):
        return [line.split()[1] for line in self.log if line.startswith("measure")]


# Loading every plugin of the environment takes longer than most of these sessions do. Those that a session asks for by its arguments come
# as they do for a user, all of them.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p kvcache"}
OF_OTHERS = ("-n", "--dist", "--timeout", "--reruns", "randomly")


@dataclass
class Project:
    folder: pathlib.Path
    calls: int = 0
    env: dict = field(default_factory=dict)

    def command(self, *args):
        return [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider" if "--lf" not in args and "--keep" not in args else "no:doctest",
            "-p",
            "no:randomly" if "randomly" not in args else "randomly",
            *([] if any(a.startswith(("--kv-replay", "--kv-gpu")) for a in args) else ["--kv-gpu=cpu"]),
            *[a for a in args if a not in ("--keep", "randomly", "-p")],
        ]

    def environment(self, told):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "KV_"))}
        env |= {
            "KV_FAKE_LOG": str(self.folder / "starts.log"),
            "KV_LOCK_DIR": str(self.folder / "locks"),
            "COLUMNS": "200",
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
            **ALONE,
        }
        return env | {f"KV_FAKE_{k.upper()}": json.dumps(v) for k, v in told.items()}

    def run(self, *args, report=True, **told):
        """One invocation of pytest; `told` are the fake engine's truths (see kv_fake.py)."""
        self.calls += 1
        out = self.folder / f"report{self.calls}"
        log, xml = self.folder / "starts.log", self.folder / f"junit{self.calls}.xml"
        log.unlink(missing_ok=True)
        extra = [f"--kv-report={out}"] if report else []
        env = self.environment(told)
        if any(a.startswith(OF_OTHERS) for a in args):
            env = {k: v for k, v in env.items() if k not in ALONE}
        done = subprocess.run(
            self.command(*args, *extra, f"--junitxml={xml}"),
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        run = json.loads((out / "run.json").read_text()) if (out / "run.json").exists() else None
        assert run is None or schema_problem(run, "run") == ""
        return Result(
            code=done.returncode,
            out=done.stdout + done.stderr,
            log=log.read_text().splitlines() if log.exists() else [],
            verdicts={v["key"]: v["verdict"] for v in run["verdicts"]} if run else {},
            run=run,
            junit=ElementTree.parse(xml).getroot() if xml.exists() else None,
        )

    @property
    def baseline(self):
        return self.folder / "baselines" / "cpu" / "transformers" / "smollm2-135m.json"


def make_project(folder):
    (folder / "conftest.py").write_text((HERE / "kv_fake.py").read_text())
    (folder / "test_fixed.py").write_text(SUITE)
    (folder / "test_other.py").write_text(OTHER)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "tmp").mkdir()
    return Project(folder)


@pytest.fixture
def kv_project(tmp_path):
    return make_project(tmp_path)


@pytest.fixture(scope="session")
def recorded_once(tmp_path_factory):
    project = make_project(tmp_path_factory.mktemp("recorded"))
    result = project.run("--kv-record=missing", report=False)
    assert result.code == 0, result.out
    return project


@pytest.fixture
def recorded(recorded_once, tmp_path):
    """A project with a baseline of five runs for each gate, a copy of its own."""
    shutil.copytree(recorded_once.folder, tmp_path, dirs_exist_ok=True)
    return Project(tmp_path, calls=recorded_once.calls)
