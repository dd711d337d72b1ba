"""--kv-replay: a stored run is judged again, from its requests, without an engine."""

import json
import shutil

import numpy as np
import pytest

from pytest_kvcache.replay import FIGURES

STATES = {
    "unchanged": {}, "slower": {"ALL_SLOW": 1.6}, "one scenario slower": {"SLOW": {"isl64-osl16-c2": 1.8}}, "better": {"ALL_SLOW": 0.5},
    "noisy": {"CV": 0.3}, "refused": {"FAILED": 2}, "a window spoiled once": {"BUSY_RUNS": [2], "BUSY_ATTEMPTS": 1},
    "a window spoiled twice": {"BUSY_RUNS": [2]}, "cut short": {"SPOILED": "measure"}, "no warm-up": {"BROKEN": ["isl64-osl16-c1"]},
    "no start": {"DIES": True}, "another machine state": {"CANARY": {"1": 14.0, "2": 14.0, "3": 14.0}}, "upgraded": {"VERSION": "2.0", "ALL_SLOW": 1.6},
}  # fmt: skip


def figures(run):
    return {(v["block"], v["key"]): {k: v[k] for k in (*FIGURES, "outcome", "changed")} for v in run["verdicts"]}


def lower(told):
    return {k.lower(): v for k, v in told.items()}


@pytest.mark.parametrize("told", [pytest.param(lower(t), id=name) for name, t in STATES.items()])
def test_a_run_judged_again_has_the_same_verdicts_to_the_last_bit(recorded, told):
    measured = recorded.run(**told)
    shutil.rmtree(recorded.folder / "baselines")
    again = recorded.run(f"--kv-replay=report{recorded.calls}", runner=False)
    assert again.starts == [], "no engine is started"
    assert figures(again.run) == figures(measured.run)
    assert again.code == measured.code, again.out
    n = len(measured.run["verdicts"])
    assert f"{n} of {n} verdict(s) are those of" in again.out
    twice = recorded.run(f"--kv-replay=report{recorded.calls}/run.json", runner=False)
    assert figures(twice.run) == figures(measured.run)


def test_a_recording_is_judged_again_as_one(kv_project):
    kv_project.run("--kv-record=missing")
    again = kv_project.run("--kv-replay=report1", runner=False)
    assert set(again.verdicts.values()) == {"no-baseline"}
    assert "to the last digit" in again.out


@pytest.mark.parametrize("args", [("-n", "2"), ("-k", "c2"), ("--kv-gpu=cpu",)], ids=["xdist", "a part", "named"])
def test_the_way_of_running_changes_no_verdict(recorded, args):
    measured = recorded.run(all_slow=1.6)
    again = recorded.run("--kv-replay=report2", *args, runner=False)
    assert again.run["verdicts"]
    assert all(figures(measured.run)[where] == found for where, found in figures(again.run).items())


def test_the_report_of_a_run_judged_again_can_be_judged_again(recorded):
    recorded.run(all_slow=1.6)
    first = recorded.run("--kv-replay=report2", runner=False)
    assert first.run["replayed"]["session"]
    second = recorded.run(f"--kv-replay=report{recorded.calls}", runner=False)
    assert figures(first.run) == figures(second.run)
    old, new = (np.load(recorded.folder / f"report{n}" / "records.npz") for n in (2, recorded.calls))
    assert all(np.array_equal(old[name], new[name], equal_nan=old[name].dtype.kind == "f") for name in old.files if name != "about")


def test_another_profile_and_other_baselines_are_judged_by(recorded):
    recorded.run(cv=0.3)
    assert "inconclusive" in recorded.run("--kv-replay=report2", runner=False).verdicts.values()
    strict = recorded.run("--kv-replay=report2", "--kv-profile=acceptance", runner=False)
    assert strict.code == 1
    recorded.run("--kv-record=all", "--kv-baselines=slow", all_slow=1.6, seed=5)
    other = recorded.run("--kv-replay=report2", "--kv-baselines=slow", runner=False)
    assert "improvement" in other.verdicts.values()
    assert "-> improvement" in other.out


def test_tests_that_the_run_did_not_measure_are_left_out_and_those_by_hand_skipped(recorded):
    recorded.run("-k", "c2")
    (recorded.folder / "test_hand.py").write_text("def test_hand(kv_endpoint): pass\ndef test_drive(kv_drive): pass\n")
    again = recorded.run("--kv-replay=report2", "-rs", runner=False)
    assert {v["scenario"] for v in again.run["verdicts"]} == {"isl64-osl16-c2"}
    assert "3 deselected" in again.out
    assert "2 skipped" in again.out
    assert "--kv-replay starts none" in again.out


def test_a_gate_that_is_new_since_then_has_no_baseline(recorded):
    recorded.run()
    suite = recorded.folder / "test_fixed.py"
    suite.write_text(suite.read_text().replace('"tpot_ms.p50"', '"e2e_ms.p50"'))
    again = recorded.run("--kv-replay=report2", runner=False)
    new = [v for v in again.run["verdicts"] if v["metric"] == "e2e_ms.p50"]
    assert {v["verdict"] for v in new} == {"no-baseline"}
    assert all("without this gate" in v["reason"] and v["cure"] is None for v in new)


def edited(file, change):
    run = json.loads(file.read_text())
    change(run)
    file.write_text(json.dumps(run))


def tampered(folder):
    columns = dict(np.load(folder / "records.npz"))
    columns["last_s"] = columns["last_s"] * 0.5
    with (folder / "records.npz").open("wb") as f:
        np.savez(f, **columns)


DAMAGE = {
    "missing": (lambda f: shutil.rmtree(f), "cannot be read"),
    "no requests": (lambda f: (f / "records.npz").unlink(), "records.npz"),
    "faster requests": (tampered, "SHA-256 differs"),
    "cut": (lambda f: (f / "run.json").write_text((f / "run.json").read_text()[:500]), "not valid JSON"),
    "empty": (lambda f: (f / "run.json").write_text(""), "empty"),
    "another schema": (lambda f: edited(f / "run.json", lambda r: r.update(schema="other/1")), "$.schema"),
    "nothing measured": (lambda f: edited(f / "run.json", lambda r: r.update(blocks={})), "nothing was measured"),
    "a lost row": (lambda f: edited(f / "run.json", lambda r: r["traces"].pop()), "same number"),
    "a lost measurement": (lambda f: edited(f / "run.json", lambda r: next(iter(r["blocks"].values()))["measurements"].pop()), "same number"),
    "odd evidence": (
        lambda f: edited(f / "run.json", lambda r: next(iter(next(iter(r["blocks"].values()))["evidence"].values()))["base"].update(runs=3)),
        "evidence",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_one_clear_line(recorded, name):
    recorded.run()
    damage, words = DAMAGE[name]
    damage(recorded.folder / "report2")
    again = recorded.run("--kv-replay=report2", report=False, runner=False)
    assert again.code in (1, 4), again.out
    assert words in again.out, again.out
    assert "Traceback" not in again.out
    assert "INTERNALERROR" not in again.out


@pytest.mark.parametrize(("option", "words"), [
    ("--kv-gpu=h100", "is of cpu"), ("--kv-framework=vllm", "is of transformers"), ("--kv-record=all", "nothing to record"),
    ("--kv-model=llama-3.1-8b", "is of smollm2-135m"),
])  # fmt: skip
def test_an_option_that_contradicts_the_run_is_one_clear_line(recorded, option, words):
    recorded.run()
    again = recorded.run("--kv-replay=report2", option, report=False, runner=False)
    assert again.code == 4
    assert words in again.out
