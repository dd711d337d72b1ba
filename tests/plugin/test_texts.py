"""Texts through the whole plugin, on made-up scores with known truth: limits, drift, controls, recording, replay."""

import json

import pytest

SUITE = """
import pytest
from pytest_kvcache import Arm, Gate, Text

ARMS = (Arm(name="fp16"), *(Arm(name=n, kv_dtype=n) for n in ("int2", "int8", "int4")))
TEXT = Text(windows=WINDOWS, arms=ARMS)

def of(name, **limits):
    return [Gate(m.replace("_", ".", 1) if m.startswith("kld") else m, arm=name, limit=v) for m, v in limits.items()] + [Gate("kld.mean", arm=name)]

@pytest.mark.parametrize("kv_scenario", [TEXT], ids=str)
@pytest.mark.parametrize("precision", [
    pytest.param("int2", marks=pytest.mark.kv_gates(*of("int2", kld_mean=0.03))),
    pytest.param("int8", marks=pytest.mark.kv_gates(*of("int8", ppl_ratio=1.005, kld_mean=0.01, kld_p99=0.1, top1=0.9))),
    pytest.param("int4", marks=pytest.mark.kv_gates(*of("int4", ppl_ratio=1.03, kld_mean=0.12, kld_p99=1.2, top1=0.8))),
])
def test_precision(precision, kv_result, kv_gate):
    kv_gate(kv_result)
"""
NAME = "text-w512-s512-f257-anybos-r64-n8"


@pytest.fixture
def project(kv_project):
    (kv_project.folder / "test_fixed.py").write_text(SUITE.replace("WINDOWS", "8"))
    (kv_project.folder / "test_other.py").unlink()
    return kv_project


@pytest.fixture
def known(project):
    result = project.run("--kv-record=missing", report=False)
    assert result.code == 0, result.out
    return project


def test_a_text_is_scored_once_for_all_arms_and_its_drift_is_recorded(project):
    result = project.run("--kv-record=missing")
    assert result.code == 0, result.out
    assert [line for line in result.log if line.startswith("score")] == [f"score {NAME} fp16 int8 int4"], "int2 is beyond the framework"
    assert result.starts == []
    assert result.verdicts[f"precision/{NAME}/int8-limit/kld.mean"] == "pass"
    assert result.verdicts[f"precision/{NAME}/int8/kld.mean"] == "no-baseline"
    doc = json.loads(project.baseline.read_text())
    assert {k: len(e["runs"]) for k, e in doc["entries"].items()} == {f"precision/{NAME}/{a}/kld.mean": 1 for a in ("int8", "int4")}
    assert "transformers scores no text with kv_dtype='int2'" in result.out


def test_the_same_scores_pass_against_their_baseline(known):
    result = known.run()
    assert result.code == 0, result.out
    assert set(result.verdicts.values()) == {"pass"}
    assert "0.004" in result.out and "limit 0.0100 nats" in result.out


def test_without_a_baseline_limits_are_judged_and_only_drift_fails(project):
    result = project.run()
    assert result.code == 1
    assert {k: v for k, v in result.verdicts.items() if "-limit/" in k and v != "pass"} == {}
    assert {v for k, v in result.verdicts.items() if "-limit/" not in k} == {"no-baseline"}
    assert "--kv-record=missing" in result.out


def test_a_precision_beyond_its_limit_fails_with_the_limit(known):
    result = known.run(kld={"int8": 0.03})
    assert result.code == 1
    assert result.verdicts[f"precision/{NAME}/int8-limit/kld.mean"] == "regression"
    assert result.verdicts[f"precision/{NAME}/int8/kld.mean"] == "regression", "and it is not what it was"
    assert {v for k, v in result.verdicts.items() if "/int4" in k} == {"pass"}
    assert "limit 0.0100 nats" in result.out


def test_a_drift_within_the_limit_is_a_regression_of_the_baseline_alone(known):
    result = known.run(kld={"int8": 0.006})
    assert result.verdicts[f"precision/{NAME}/int8-limit/kld.mean"] == "pass"
    assert result.verdicts[f"precision/{NAME}/int8/kld.mean"] == "regression"


def test_a_change_that_the_order_of_the_arithmetic_makes_is_none(known):
    result = known.run(kld={"int8": 0.006}, controls=[0.0031, 1.0])
    assert result.verdicts[f"precision/{NAME}/int8/kld.mean"] == "pass"
    assert "what the order of the arithmetic makes is no change" in result.out


@pytest.mark.parametrize(("told", "why"), [
    ({"controls": [0.5, 0.5]}, "the probe does not see the cache"),
    ({"kld": {"int8": 0.0}}, "was not applied"),
    ({"garbage": "the texts of int8 are garbage: 7 of 8 repeat one token"}, "garbage"),
    ({"probe_dies": True}, "the engine's logits are not finite"),
])  # fmt: skip
def test_scores_that_say_nothing_of_the_cache_are_invalid_never_a_number(known, told, why):
    result = known.run(**told)
    assert result.code == 1
    assert result.verdicts[f"precision/{NAME}/int8-limit/kld.mean"] == "invalid"
    assert why in result.out


def test_few_windows_certify_nothing_and_say_how_many_would(project):
    (project.folder / "test_fixed.py").write_text(SUITE.replace("WINDOWS", "3"))
    result = project.run("--kv-record=missing")
    assert result.code == 0
    assert "3 windows; 4 are the least" in result.out


def test_another_text_is_another_number(known):
    doc = json.loads(known.baseline.read_text())
    for entry in doc["entries"].values():
        entry["workload"] = "another"
    known.baseline.write_text(json.dumps(doc))
    result = known.run()
    assert result.code == 1
    assert {v for k, v in result.verdicts.items() if "-limit/" not in k} == {"invalid"}
    assert "workload" in result.out


def test_a_stored_run_is_judged_again_to_the_last_digit(known):
    first = known.run()
    again = known.run(f"--kv-replay={known.folder / 'report2' / 'run.json'}")
    assert again.code == 0, again.out
    assert again.log == []
    assert again.verdicts == first.verdicts
    same = ("verdict", "value", "baseline", "change", "low", "high", "margin", "notes")
    assert [{k: v[k] for k in same} for v in again.run["verdicts"]] == [{k: v[k] for k in same} for v in first.run["verdicts"]]


def test_smoke_reports_drift_and_judges_limits(known):
    suite = known.folder / "test_fixed.py"
    suite.write_text(suite.read_text().replace("arms=ARMS)", "arms=ARMS, profile='smoke')"))
    result = known.run("--kv-profile=smoke", kld={"int8": 0.006})
    assert result.code == 0, result.out
    assert result.verdicts[f"precision/{NAME}/int8/kld.mean"] == "inconclusive"
    assert result.verdicts[f"precision/{NAME}/int8-limit/kld.mean"] == "pass"


@pytest.mark.parametrize(("gate", "why"), [
    ("Gate('kld.mean', arm='int8', limit=3.0)", "would let a cache of noise pass"),
    ("Gate('kld.mean')", "it is the reference"),
    ("Gate('output_tok_s', arm='int8')", "is a figure of a load"),
    ("Gate('kld.mean', arm='int8', against='fp16')", "is compared with fp16 already"),
    ("Gate('kld.mean', arm='int8', limit=0.01, margin=0.1)", "stands alone"),
    ("Gate('kld.mean', arm='int8', limit=float('nan'))", "must be above 0"),
])  # fmt: skip
def test_a_gate_that_says_nothing_is_refused_at_collection(project, gate, why):
    (project.folder / "test_fixed.py").write_text(f"""
import pytest
from pytest_kvcache import Arm, Gate, Text
@pytest.mark.kv_gates({gate})
@pytest.mark.parametrize("kv_scenario", [Text(arms=(Arm(name="fp16"), Arm(name="int8", kv_dtype="int8")))], ids=str)
def test_precision(kv_result, kv_gate):
    kv_gate(kv_result)
""")
    result = project.run(report=False)
    assert result.code != 0
    assert why in result.out


def test_a_text_needs_the_interpreter_of_the_framework(project):
    for option in ("--kv-calibrate", "--kv-endpoint=http://127.0.0.1:9"):
        result = project.run(option, report=False)
        assert f"leave {option.partition('=')[0]} out" in result.out, result.out
        assert result.log == []
