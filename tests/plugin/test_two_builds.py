"""--kv-ab: two builds of an engine in turns. Gates between arms of one test are judged alike."""

import json
import re
import sys

import pytest

from pytest_kvcache.core.framework import Framework
from pytest_kvcache.core.gpus import find_gpu
from pytest_kvcache.core.spec import Model, UserError
from pytest_kvcache.harness.engine import EngineSpec, check_installed
from pytest_kvcache.replay import FIGURES

OTHER = f"--kv-ab={sys.executable}"
WAYS = [pytest.param(False, id="one after another"), pytest.param(True, id="side by side")]
ARMS = """
import pytest
from pytest_kvcache import ClosedLoop, Gate
from pytest_kvcache.core.spec import Arm

GRID = [ClosedLoop(isl=64, osl=16, concurrency=2, arms=(Arm(name="whole"), Arm(name="half", block_size=8)))]

@pytest.mark.kv_gates({gates})
@pytest.mark.parametrize("kv_scenario", GRID, ids=str)
def test_arms(kv_result, kv_gate):
    kv_gate(kv_result)
"""


def figures(run):
    return {(v["block"], v["key"]): {k: v[k] for k in (*FIGURES, "outcome", "changed")} for v in run["verdicts"]}


@pytest.mark.parametrize("together", WAYS)
def test_two_equal_builds_pass_at_three_per_cent_without_any_baseline(kv_project, together):
    found = kv_project.run(OTHER, "-k", "fixed", together=together, cv=0.08)
    assert found.code == 0, found.out
    assert set(found.verdicts.values()) == {"pass"}
    assert {v["margin"] for v in found.run["verdicts"]} == {0.03}
    assert {len(v["runs"]) for v in found.run["verdicts"]} == {4}
    assert "of the other build" in found.out
    assert not kv_project.baseline.exists(), "nothing is stored"


@pytest.mark.parametrize("together", WAYS)
def test_a_slower_build_is_a_regression_that_names_what_differs(kv_project, together):
    found = kv_project.run(OTHER, together=together, cv=0.08, arm_slow={"base": 1.1}, version="2.0", other_version="1.9")
    assert found.code == 1
    assert set(found.verdicts.values()) == {"regression"}, found.out
    assert "differs from the other build: dist:engine: 1.9 -> 2.0" in found.out
    assert "kv-record" not in found.out, "there is nothing to record"
    page = (kv_project.folder / "report1" / "report.html").read_text()
    assert "What differs from the other build" in page
    assert "Compared with" in page


def test_a_faster_build_is_an_improvement_and_asks_for_nothing(kv_project):
    found = kv_project.run(OTHER, "-k", "fixed", together=True, arm_slow={"base": 0.8})
    assert set(found.verdicts.values()) == {"improvement"}
    assert "to cure it" not in found.out


def test_builds_take_turns_forwards_then_backwards(kv_project):
    found = kv_project.run(OTHER, "-k", "fixed and c2")
    arms = [line.rsplit("arm:", 1)[1].split()[0] for line in found.starts]
    assert arms == ["base", "base.other", "base.other", "base"] * 2
    beside = kv_project.run(OTHER, "-k", "fixed and c2", together=True)
    assert [line.split()[2:] for line in beside.log if line.startswith("together")] == [["base", "base.other"], ["base.other", "base"]] * 2


@pytest.mark.parametrize("together", WAYS)
def test_a_round_that_the_machine_spoils_for_one_build_counts_for_none_and_is_measured_again(kv_project, together):
    found = kv_project.run(OTHER, "-k", "fixed and c2", together=together, busy_runs=[2], busy_arm="base.other", busy_attempts=1)
    assert set(found.verdicts.values()) == {"pass"}, found.out
    rows = next(iter(found.run["blocks"].values()))["measurements"]
    spoiled = [m["arm"] for m in rows if m["run"] == 2 and not m["valid"]]
    assert spoiled == (["base.other", "base"] if together else ["base.other"])
    assert {len(v["runs"]) for v in found.run["verdicts"]} == {4}
    twice = kv_project.run(OTHER, "-k", "fixed and c2", together=together, busy_runs=[2], busy_arm="base.other")
    assert set(twice.verdicts.values()) == {"invalid"}
    assert "other processes" in twice.out


@pytest.mark.parametrize(("together", "told"), [
    (True, {"arm_cv": 0.05}), (True, {"busy_runs": [2], "busy_attempts": 1}), (False, {"arm_slow": {"base": 1.1}}), (False, {"busy_runs": [1]}),
])  # fmt: skip
def test_a_comparison_is_judged_again_to_the_last_bit(kv_project, together, told):
    measured = kv_project.run(OTHER, together=together, version="2.0", **told)
    again = kv_project.run("--kv-replay=report1", runner=False)
    assert again.starts == []
    assert again.run["verdicts"]
    assert figures(again.run) == figures(measured.run)
    assert (again.run["ab"], again.run["builds"]) == (measured.run["ab"], measured.run["builds"])
    assert again.code == measured.code
    assert "to the last digit" in again.out


def test_it_is_said_which_distributions_differ(kv_project, tmp_path):
    same = kv_project.run(OTHER, "-k", "fixed and c2")
    assert "no distribution differs by name, version or source" in same.out
    home = tmp_path / "other"
    python = home / "python"
    about = {"python": "3.9.1", "distributions": {"torch": "1.0", "only-there": "7"}}
    home.mkdir()
    python.write_text(f"#!/bin/sh\necho '{json.dumps(about)}'\n")
    python.chmod(0o755)
    found = kv_project.run(f"--kv-ab={python}", "-k", "fixed and c2")
    assert "only-there: 7 -> absent" in found.out
    assert any(line.startswith("  python: 3.9.1 -> 3.") for line in found.run["builds"])
    assert "only-there" in (kv_project.folder / "report2" / "report.html").read_text()


@pytest.mark.parametrize(("args", "words"), [
    ((OTHER, "--kv-record=missing"), "--kv-ab compares two builds with each other and stores nothing: leave --kv-record out"),
    (("--kv-ab=no/such/python",), "--kv-ab=no/such/python: no such interpreter; name the python of the environment"),
    (("--kv-ab=",), "--kv-ab= names nothing"),
    ((OTHER, "-o", "kv_command_transformers=docker run x"), "but transformers is started by kv_command_transformers"),
    ((OTHER, "--kv-calibrate"), "leave --kv-ab out"),
])  # fmt: skip
def test_what_cannot_be_meant_is_one_line(kv_project, args, words):
    found = kv_project.run(*args)
    assert found.code == 4
    assert words in found.out
    assert "Traceback" not in found.out


@pytest.mark.parametrize(("python", "words"), [
    ("/bin/true", "--kv-ab=/bin/true: does not answer as a Python interpreter does"),
    (sys.executable, "has no no_such_module; install it, or name another in --kv-ab"),
])  # fmt: skip
def test_an_interpreter_that_cannot_serve_is_told_with_its_option(python, words):
    framework = Framework(name="f", argv=lambda launch: [], body=lambda *a: {}, needs=("no_such_module",), cure="install it")
    spec = EngineSpec(framework=framework, model=Model(key="m"), gpu=find_gpu("cpu"), python=python)
    with pytest.raises(UserError, match=re.escape(words)):
        check_installed(spec, "--kv-ab")


def test_smoke_reports_one_round_and_a_budget_judges_on_those_made(kv_project):
    suite = kv_project.folder / "test_fixed.py"
    suite.write_text(suite.read_text().replace("concurrency=c)", "concurrency=c, profile='smoke')"))
    smoke = kv_project.run(OTHER, "--kv-profile=smoke", "-k", "fixed")
    assert smoke.code == 0
    assert set(smoke.verdicts.values()) == {"inconclusive"}
    assert "about 3 rounds more would settle it" in smoke.out
    short = kv_project.run(OTHER, "-k", "fixed and c2", "--kv-budget=6s", sleep=3)  # a round of two
    assert set(short.verdicts.values()) == {"inconclusive"}
    assert "the least" in short.out


@pytest.mark.parametrize("together", WAYS)
@pytest.mark.parametrize(("told", "words"), [({"failed": 2}, "requests failed"), ({"broken": ["isl64-osl16-c2"]}, "the warm-up of")])
def test_one_build_that_fails_ends_the_comparison_at_once(kv_project, together, told, words):
    found = kv_project.run(OTHER, "-k", "fixed and c2", together=together, **told)
    assert found.code == 1
    assert set(found.verdicts.values()) == {"invalid"}
    assert words in found.out
    assert len(found.starts) <= 2
    again = kv_project.run("--kv-replay=report1", "-k", "fixed and c2", runner=False)
    assert figures(again.run) == figures(found.run)


def test_a_run_of_two_builds_judged_against_other_baselines_still_says_what_differs(kv_project):
    kv_project.run(OTHER, "-k", "fixed and c2", arm_slow={"base": 1.2}, version="2.0", other_version="1.9")
    (kv_project.folder / "some").mkdir()
    again = kv_project.run("--kv-replay=report1", "--kv-baselines=some", runner=False)
    assert set(again.verdicts.values()) == {"regression"}
    assert "dist:engine: 1.9 -> 2.0" in again.out


def test_workers_of_xdist_agree(kv_project):
    found = kv_project.run(OTHER, "-n", "2", together=True)
    assert set(found.verdicts.values()) == {"pass"}, found.out
    assert len([line for line in found.log if line.startswith("together")]) == 4 * 3


def arms(project, gates):
    for name in ("test_fixed.py", "test_other.py"):
        (project.folder / name).unlink()
    (project.folder / "test_arms.py").write_text(ARMS.format(gates=gates))
    return project


@pytest.mark.parametrize(("speed", "verdict", "metric"), [
    (0.7, "pass", "output_tok_s"), (0.9, "regression", "tpot_ms.p50"), (1 / 1.2, "inconclusive", "output_tok_s"),
])  # fmt: skip
def test_a_gain_that_is_claimed_of_one_arm_over_another(kv_project, speed, verdict, metric):
    project = arms(kv_project, f'Gate("{metric}", arm="half", against="whole", at_least=1.2)')
    found = project.run(arm_slow={"half": speed}, cv=0.08)
    assert found.verdicts == {f"arms/isl64-osl16-c2/half-vs-whole/{metric}": verdict}, found.out
    assert "at least 1.2 times as good claimed" in found.out
    assert found.code == (verdict == "regression")
    again = project.run("--kv-replay=report1", runner=False)
    assert figures(again.run) == figures(found.run)


def test_an_arm_that_is_to_be_no_worse_than_another_beside_gates_on_the_baseline(kv_project):
    project = arms(kv_project, '"output_tok_s", Gate("output_tok_s", arm="half", against="whole", margin=0.05)')
    first = project.run("--kv-record=missing", together=True)
    assert first.code == 0, first.out
    stored = json.loads(project.baseline.read_text())["entries"]
    assert set(stored) == {f"arms/isl64-osl16-c2/{arm}/output_tok_s" for arm in ("whole", "half")}
    assert {len(e["runs"]) for e in stored.values()} == {5}
    worse = project.run(together=True, arm_slow={"half": 1.5})
    assert worse.verdicts["arms/isl64-osl16-c2/half-vs-whole/output_tok_s"] == "regression"
    assert worse.verdicts["arms/isl64-osl16-c2/half/output_tok_s"] == "regression"
    assert worse.verdicts["arms/isl64-osl16-c2/whole/output_tok_s"] == "pass"
    assert " of whole: " in worse.out


def test_two_builds_of_a_test_that_compares_arms_have_a_claim_each(kv_project):
    project = arms(kv_project, '"tpot_ms.p50", Gate("output_tok_s", arm="half", against="whole", margin=0.05)')
    found = project.run(OTHER, arm_slow={"half": 1.2, "half.other": 1.2})
    assert found.verdicts == {
        "arms/isl64-osl16-c2/whole/tpot_ms.p50": "pass", "arms/isl64-osl16-c2/half/tpot_ms.p50": "pass",
        "arms/isl64-osl16-c2/half-vs-whole/output_tok_s": "regression",
    }  # fmt: skip


@pytest.mark.parametrize(("gate", "words"), [
    ('Gate("output_tok_s", arm="int8")', "no arm 'int8'; the scenario has whole, half"),
    ('Gate("output_tok_s", arm="half", against="no")', "no arm 'no'"),
])  # fmt: skip
def test_an_arm_that_the_scenario_lacks_is_named(kv_project, gate, words):
    found = arms(kv_project, gate).run()
    assert found.code == 4
    assert words in found.out
