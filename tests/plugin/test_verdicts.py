"""From the option to the outcome: recording, judging, failing, on made-up runs with known truth."""

import json

import pytest


def test_recording_stores_five_runs_of_every_gate_and_passes(kv_project):
    result = kv_project.run("--kv-record=missing")
    assert result.code == 0, result.out
    doc = json.loads(kv_project.baseline.read_text())
    assert len(doc["entries"]) == 8
    assert {len(e["runs"]) for e in doc["entries"].values()} == {5}
    assert len(result.starts) == 5
    assert "8 gates: 8 recorded" in result.out


def test_an_unchanged_engine_passes_after_three_runs(recorded):
    result = recorded.run(seed=1)
    assert result.code == 0, result.out
    assert set(result.verdicts.values()) == {"pass"}
    assert len(result.starts) == 3
    assert "false alarms to expect by chance in 8 judged gate(s): below 0.016" in result.out
    assert result.run["expected_false_alarms"] == pytest.approx(8 * 0.002)


def test_a_slower_engine_fails_at_the_third_run_and_names_what_changed(recorded):
    result = recorded.run(seed=1, slow={"isl64-osl16-c2": 1.5}, version="2.0")
    assert result.code == 1
    bad = {k for k, v in result.verdicts.items() if v == "regression"}
    assert bad == {
        f"{f}/isl64-osl16-c2/base/{m}"
        for f, m in (("fixed_length", "output_tok_s"), ("fixed_length", "tpot_ms.p50"), ("streaming", "ttft_ms.p50"))
    }
    assert "changed since the baseline: dist:engine: 1.0 -> 2.0" in result.out
    assert "moved with it: isl64-osl16-c2/base/tpot_ms.p50" in result.out
    assert len(result.starts) == 3
    changes = [abs(v["change"]) for v in result.run["verdicts"] if v["verdict"] == "regression"]
    assert all(0.25 < c < 0.6 for c in changes)


def test_without_a_baseline_the_test_fails_at_once_with_the_command_that_cures_it(kv_project):
    result = kv_project.run("-k", "streaming")
    assert result.code == 1
    assert set(result.verdicts.values()) == {"no-baseline"}
    assert "to cure it: pytest" in result.out
    assert "--kv-record=missing" in result.out
    assert result.starts == []


def test_smoke_leaves_out_what_belongs_to_a_larger_profile(recorded):
    result = recorded.run("--kv-profile=smoke", "-k", "fixed")
    assert result.code == 5, "the grid's scenarios belong to profile ci"
    assert result.starts == []


def test_smoke_measures_once_and_only_reports(recorded):
    suite = recorded.folder / "test_fixed.py"
    suite.write_text(suite.read_text().replace("concurrency=c)", "concurrency=c, profile='smoke')"))
    result = recorded.run("--kv-profile=smoke", "-k", "fixed", all_slow=3)
    assert result.code == 0, result.out
    assert set(result.verdicts.values()) == {"inconclusive"}
    assert len(result.starts) == 1


def test_smoke_without_a_baseline_reports_without_failing(kv_project):
    (kv_project.folder / "test_fixed.py").write_text(
        (kv_project.folder / "test_fixed.py").read_text().replace("concurrency=c)", "concurrency=c, profile='smoke')")
    )
    result = kv_project.run("--kv-profile=smoke", "-k", "fixed")
    assert result.code == 0, result.out
    assert set(result.verdicts.values()) == {"no-baseline"}
    assert all(v["value"] for v in result.run["verdicts"])
    assert len(result.starts) == 1


def test_noise_beyond_the_margin_is_inconclusive_and_passes_in_ci_but_not_when_strict(recorded):
    told = {"seed": 1, "all_slow": 1.05, "cv": 0.05}
    result = recorded.run("-k", "fixed", **told)
    assert result.code == 0, result.out
    assert "inconclusive" in result.verdicts.values()
    assert len(result.starts) == 5
    assert "smallest margin these runs could certify" in result.out
    strict = recorded.run("-k", "fixed", "-o", "kv_strict=true", **told)
    assert strict.code == 1
    assert strict.verdicts == result.verdicts


def test_improvement_passes_and_says_how_to_record_it(recorded):
    result = recorded.run("-k", "fixed", seed=1, all_slow=0.5)
    assert result.code == 0, result.out
    assert set(result.verdicts.values()) == {"improvement"}
    assert "--kv-record=all" in result.out


def test_record_all_supersedes_and_keeps_what_it_replaced(recorded):
    before = json.loads(recorded.baseline.read_text())
    assert recorded.run("--kv-record=all", "-k", "fixed", seed=2).code == 0
    doc = json.loads(recorded.baseline.read_text())
    for key, entry in doc["entries"].items():
        if key.startswith("fixed_length"):
            assert entry["supersedes"][0]["runs"] == before["entries"][key]["runs"]
            assert entry["runs"] != before["entries"][key]["runs"]
        else:
            assert entry == before["entries"][key], "recording part of the gates must not touch the others"


def test_a_busy_machine_is_invalid_never_a_regression_and_records_nothing(recorded):
    before = recorded.baseline.read_bytes()
    result = recorded.run("--kv-record=all", "-k", "c1 and fixed", all_slow=4, busy_runs=[2])
    assert result.code == 1
    assert set(result.verdicts.values()) == {"invalid"}
    assert "pid 4711 python burn.py 0.97" in result.out
    assert recorded.baseline.read_bytes() == before


def test_a_window_that_the_machine_spoiled_is_measured_once_more(recorded):
    result = recorded.run("-k", "fixed", seed=1, busy_runs=[2], busy_attempts=1)
    assert result.code == 0, result.out
    assert set(result.verdicts.values()) == {"pass"}
    assert len(result.starts) == 4
    spoiled = [m for b in result.run["blocks"].values() for m in b["measurements"] if not m["valid"]]
    assert len(spoiled) == 3


@pytest.mark.parametrize("failed", [1, 8])
def test_failed_requests_are_invalid(recorded, failed):
    result = recorded.run("-k", "fixed and c1", failed=failed)
    assert result.code == 1
    assert set(result.verdicts.values()) == {"invalid"}
    assert f"{failed} of 8 requests failed ({failed} http_status); the first: HTTP 500" in result.out


def test_an_engine_that_dies_fails_the_tests_with_invalid_and_shows_the_log(recorded):
    result = recorded.run("-k", "fixed or plain", dies=True)
    assert result.code == 1
    assert "3 failed, 1 passed" in result.out
    assert "error" not in result.out.splitlines()[-1], "a broken server is a FAILED test, not an ERROR"
    assert "out of memory" in result.out
    assert "last line of its log" in result.out


def test_a_baseline_of_another_cpu_is_refused_and_recording_supersedes_it(recorded):
    result = recorded.run("-k", "fixed and c1", cpu="Other CPU, 64 cores")
    assert result.code == 1
    assert set(result.verdicts.values()) == {"invalid"}
    assert "gpu: Test CPU, 2 cores -> Other CPU, 64 cores" in result.out
    assert result.starts == []
    kept = recorded.run("-k", "fixed and c1", "--kv-record=missing", cpu="Other CPU, 64 cores")
    assert (kept.code, kept.starts) == (1, []), "what is stored is not missing: left on in CI, the flag must not replace it unseen"
    assert "--kv-record=all   (in place of what is stored of the other)" in kept.out
    again = recorded.run("-k", "fixed and c1", "--kv-record=all", cpu="Other CPU, 64 cores")
    assert again.code == 0, again.out
    entry = json.loads(recorded.baseline.read_text())["entries"]["fixed_length/isl64-osl16-c1/base/output_tok_s"]
    assert "Other CPU" in entry["supersedes"][0]["why"]


def test_a_spent_budget_stops_new_runs_and_says_so(recorded):
    result = recorded.run("-k", "fixed and c1", "--kv-budget=2s", sleep=2.1, seed=1)
    assert len(result.starts) == 1
    assert set(result.verdicts.values()) == {"inconclusive"}
    assert "the time budget is spent" in result.out


@pytest.mark.parametrize("when", ["start", "measure"])
def test_a_machine_that_is_never_quiet_is_invalid(recorded, when):
    result = recorded.run("-k", "fixed", spoiled=when)
    assert result.code == 1
    assert set(result.verdicts.values()) == {"invalid"}
    assert "pid 4711 python burn.py" in result.out
    assert len(result.starts) == 2, "one more attempt, then it is said"


@pytest.mark.parametrize("when", ["start", "measure"])
def test_a_machine_that_becomes_quiet_is_measured(recorded, when):
    result = recorded.run("-k", "fixed", spoiled=when, busy_attempts=1, seed=1)
    assert result.code == 0, result.out
    assert set(result.verdicts.values()) == {"pass"}
    assert len(result.starts) == 6


def test_a_machine_in_another_state_is_not_taken_for_a_regression(recorded):
    """The canary moved and the engine with it: nothing can be said, unless the engine moved by more than that explains."""
    other = {"all_slow": 1.25, "canary": dict.fromkeys("012345", 6.0)}
    accused = recorded.run("-k", "fixed", seed=1, cv=0.01, all_slow=1.25)
    assert "regression" in accused.verdicts.values(), accused.out
    same = recorded.run("-k", "fixed", seed=1, cv=0.01, **other)
    assert same.code == 0, same.out
    assert set(same.verdicts.values()) == {"inconclusive"}
    assert (
        "the machine itself was in another state than at the baseline (canary: memory traffic of the processors took -40.0 %)" in same.out
    )
    halved = recorded.run("-k", "fixed", seed=1, cv=0.01, **other | {"all_slow": 1.6})
    assert set(halved.verdicts.values()) == {"regression"}, halved.out
    other_cores = recorded.run("-k", "fixed", seed=1, cv=0.01, cores=1, **other)
    assert "regression" in other_cores.verdicts.values(), "a canary of another number of cores is not compared"


def test_one_broken_scenario_leaves_the_others_their_verdicts(recorded):
    told = {"seed": 1, "broken": ["isl64-osl16-c1"]}
    result = recorded.run(**told)
    assert result.code == 1
    for key, word in result.verdicts.items():
        assert word == ("invalid" if "c1" in key else "pass"), result.verdicts
    alone = recorded.run("-k", "c2 or c4", **told)
    assert alone.verdicts.items() <= result.verdicts.items()


def test_an_arm_the_framework_does_not_have_is_skipped_and_said(kv_project):
    suite = kv_project.folder / "test_fixed.py"
    text = suite.read_text().replace("ClosedLoop, Gate", "Arm, ClosedLoop")
    suite.write_text(text.replace("concurrency=c)", "concurrency=c, arms=(Arm(name='b', kv_dtype='int8'),))"))
    result = kv_project.run("-k", "fixed")
    assert result.code == 0, result.out
    assert "not judged: 3 test(s): transformers has no kv_dtype 'int8'; it has auto" in result.out


def test_a_budget_spent_before_the_first_run_is_said(recorded):
    result = recorded.run("-k", "fixed and c1", "--kv-budget=0.001s")
    assert result.code == 0, result.out
    assert set(result.verdicts.values()) == {"inconclusive"}
    assert "the time budget was spent before the first run" in result.out


def test_a_started_baseline_is_no_baseline(recorded):
    doc = json.loads(recorded.baseline.read_text())
    for entry in doc["entries"].values():
        del entry["runs"][2:]
    recorded.baseline.write_text(json.dumps(doc))
    result = recorded.run("-k", "fixed and c1")
    assert result.code == 1
    assert set(result.verdicts.values()) == {"no-baseline"}
    assert "only 2 of the 5 runs" in result.out


def test_the_log_of_a_failed_start_stays_where_the_message_says(recorded):
    recorded.run("-k", "fixed and c1", dies=True, report=False)
    assert [p for p in (recorded.folder / "tmp").iterdir() if p.name.startswith("pytest-kvcache-")]
