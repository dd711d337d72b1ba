"""What caches hold through the whole plugin, on made-up pools with known truth: one start of each arm, limits, gains, drift, replay."""

import json

import pytest

SUITE = """
import pytest
from pytest_kvcache import Arm, Capacity, Gate

ARMS = (Arm(name="fp16"), *(Arm(name=n, kv_dtype=w) for n, w in (("fp8", "fp8"), ("int8", "q8_0"), ("int4", "q4_0"))))

def of(name, gain=None):
    gates = [Gate("kv_size_ratio", arm=name, limit=1.05), Gate("kv_bytes_per_token", arm=name)]
    return pytest.mark.kv_gates(*gates, *([Gate("kv_bytes_per_token", arm=name, against="fp16", at_least=gain)] if gain else []))

@pytest.mark.parametrize("kv_scenario", [Capacity(isl=448, osl=16, arms=ARMS)], ids=str)
@pytest.mark.parametrize("precision", [
    pytest.param("fp16", marks=of("fp16")), pytest.param("fp8", marks=of("fp8", 1.9)), pytest.param("int8", marks=of("int8", 1.8)),
    pytest.param("int4", marks=of("int4", 3.4)),
])
def test_size(precision, kv_result, kv_gate):
    kv_gate(kv_result)
"""
NAME = "size/capacity-isl448-osl16"


@pytest.fixture
def project(kv_project):
    (kv_project.folder / "test_fixed.py").write_text(SUITE)
    (kv_project.folder / "test_other.py").unlink()
    return kv_project


def run(project, *args, **told):
    return project.run("--kv-framework=llama_cpp", *args, **told)


@pytest.fixture
def known(project):
    result = run(project, "--kv-record=missing", report=False)
    assert result.code == 0, result.out
    return project


def test_one_start_of_each_arm_that_the_framework_has_judges_limits_and_gains_and_records_the_rest(project):
    result = run(project, "--kv-record=missing")
    assert result.code == 0, result.out
    assert [line.split("arm:")[1].split()[0] for line in result.starts] == ["fp16", "int8", "int4"], "fp8 is beyond the framework"
    assert {k: v for k, v in result.verdicts.items() if "-limit/" in k or "-vs-" in k} == {
        **{f"{NAME}/{a}-limit/kv_size_ratio": "pass" for a in ("fp16", "int8", "int4")},
        **{f"{NAME}/{a}-vs-fp16/kv_bytes_per_token": "pass" for a in ("int8", "int4")},
    }
    doc = json.loads(next(project.folder.glob("baselines/cpu/llama_cpp/*.json")).read_text())
    assert {k: [r["value"] for r in e["runs"]] for k, e in doc["entries"].items()} == {
        f"{NAME}/{a}/kv_bytes_per_token": [pytest.approx(v, rel=1e-3)] for a, v in (("fp16", 23040), ("int8", 12240), ("int4", 6480))
    }
    assert {r.get("canary") for e in doc["entries"].values() for r in e["runs"]} == {None}
    assert "llama_cpp has no kv_dtype 'fp8'" in result.out
    assert "1.88 times as good, at least 1.8 times is claimed" in result.out


def test_the_same_pools_pass_and_others_on_the_machine_are_no_matter(known):
    result = run(known)
    assert result.code == 0 and set(result.verdicts.values()) == {"pass"}, result.out
    assert len(result.starts) == 3


def test_an_option_that_was_not_applied_fails_its_gain_and_its_arithmetic(known):
    result = run(known, sizes={"int8": {"kv_tokens": 2**30 // 23040}})
    assert result.code == 1
    assert {k.removeprefix(NAME): v for k, v in result.verdicts.items() if "/int8" in k} == {
        "/int8-limit/kv_size_ratio": "regression", "/int8-vs-fp16/kv_bytes_per_token": "regression", "/int8/kv_bytes_per_token": "regression",
    }  # fmt: skip
    assert {v for k, v in result.verdicts.items() if "/int8" not in k} == {"pass"}
    assert "1 times as good, at least 1.8 times is claimed" in result.out


def test_a_pool_that_lost_a_fiftieth_of_its_tokens_drifted(known):
    result = run(known, sizes={"int4": {"kv_tokens": int(0.98 * 2**30 / 6480)}})
    assert {k.removeprefix(NAME): v for k, v in result.verdicts.items() if v != "pass"} == {"/int4/kv_bytes_per_token": "regression"}


def test_what_a_filled_cache_may_not_do_makes_the_arm_invalid_and_no_other(known):
    result = run(known, sizes={"int8": {"batch": {"requests": 9, "share": 0.9, "preempted": 3}}})
    assert result.code == 1
    assert {v for k, v in result.verdicts.items() if "/int8" in k} == {"invalid"}
    assert {v for k, v in result.verdicts.items() if "/int8" not in k} == {"pass"}
    assert "the server preempted 3 of 9 requests at 90% of its pool; none may be" in result.out


def test_an_arm_that_cannot_be_started_costs_its_own_gates_and_those_beside_it(known):
    result = run(known, dies_arm="int4")
    assert {v for k, v in result.verdicts.items() if "/int4" in k} == {"invalid"}
    assert {v for k, v in result.verdicts.items() if "/int4" not in k} == {"pass"}
    assert "this device has no such cache" in result.out
    without = run(known, dies_arm="fp16")
    assert {v for k, v in without.verdicts.items() if "/fp16" in k or "-vs-fp16" in k} == {"invalid"}
    assert without.verdicts[f"{NAME}/int8-limit/kv_size_ratio"] == "pass"


def test_a_figure_that_a_server_did_not_tell_is_invalid_with_the_reason(known):
    nothing = {"expected_bytes_per_token": None, "not_told": {"kv_size_ratio": "the arithmetic of this precision is not known"}}
    result = run(known, sizes={"int8": nothing})
    assert {k.removeprefix(NAME): v for k, v in result.verdicts.items() if v != "pass"} == {"/int8-limit/kv_size_ratio": "invalid"}
    assert "kv_size_ratio is missing from what was measured of int8: the arithmetic of this precision is not known" in result.out


def test_one_test_alone_measures_its_arm_and_the_one_beside_it(known):
    result = run(known, "-k", "int8")
    assert result.code == 0, result.out
    assert [line.split("arm:")[1].split()[0] for line in result.starts] == ["fp16", "int8"]


def test_a_stored_run_is_judged_again_to_the_last_digit(known):
    first = run(known)
    again = known.run(f"--kv-replay={known.folder / 'report2' / 'run.json'}")
    assert again.code == 0, again.out
    assert again.log == [] and again.verdicts == first.verdicts
    same = ("verdict", "value", "baseline", "change", "margin", "notes")
    assert [{k: v[k] for k in same} for v in again.run["verdicts"]] == [{k: v[k] for k in same} for v in first.run["verdicts"]]


def test_a_framework_that_tells_nothing_and_options_that_start_nothing_twice_skip_it_with_the_reason(project):
    result = project.run(report=False)
    assert result.code == 0 and result.starts == []
    assert "not judged: 4 test(s): transformers does not tell how many tokens its KV cache holds and how many bytes it takes" in result.out
    for option in ("--kv-calibrate", "--kv-endpoint=http://127.0.0.1:9"):
        result = run(project, option, report=False)
        assert f"leave {option.partition('=')[0]} out" in result.out, result.out
        assert result.log == []


def test_smoke_reports_drift_and_judges_what_needs_no_baseline(known):
    suite = known.folder / "test_fixed.py"
    suite.write_text(suite.read_text().replace("arms=ARMS)", "arms=ARMS, profile='smoke')"))
    result = run(known, "--kv-profile=smoke")
    assert result.code == 0, result.out
    assert result.verdicts[f"{NAME}/int8-vs-fp16/kv_bytes_per_token"] == "pass"
    assert result.verdicts[f"{NAME}/int8/kv_bytes_per_token"] == "inconclusive"


@pytest.mark.parametrize(("gate", "why"), [
    ("Gate('output_tok_s')", "is no figure of what a cache holds"), ("Gate('kv_size_ratio', limit=2.0)", "1.25 is the loosest"),
])  # fmt: skip
def test_a_gate_that_says_nothing_is_refused_at_collection(project, gate, why):
    (project.folder / "test_fixed.py").write_text(f"""
import pytest
from pytest_kvcache import Capacity, Gate
@pytest.mark.kv_gates({gate})
@pytest.mark.parametrize("kv_scenario", [Capacity(isl=8, osl=8)], ids=str)
def test_size(kv_result, kv_gate):
    kv_gate(kv_result)
""")
    result = run(project, report=False)
    assert result.code != 0 and why in result.out, result.out
