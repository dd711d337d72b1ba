"""--kv-replay: a stored run is judged again, from its requests, without an engine."""

import json
import shutil

import numpy as np
import pytest

from pytest_kvcache.harness import traces
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


def test_another_margin_is_judged_by(recorded):
    """The one that the test declares by now."""
    measured = recorded.run("-k", "c2 and fixed", all_slow=1.3)
    assert set(measured.verdicts.values()) == {"regression"}
    suite = recorded.folder / "test_fixed.py"
    suite.write_text(
        suite.read_text().replace('"output_tok_s", "tpot_ms.p50"', 'Gate("output_tok_s", margin=0.45), Gate("tpot_ms.p50", margin=0.45)')
    )
    again = recorded.run(f"--kv-replay=report{recorded.calls}", "-k", "c2 and fixed", runner=False)
    assert set(again.verdicts.values()) == {"pass"}, again.out
    assert {v["margin"] for v in again.run["verdicts"]} == {0.45}


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


def block_of(run):
    return next(iter(run["blocks"].values()))


def base_of(run):
    return next(iter(block_of(run)["evidence"].values()))["base"]


DAMAGE = {
    "missing": (lambda f: shutil.rmtree(f), "cannot be read"),
    "no requests": (lambda f: (f / "records.npz").unlink(), "records.npz"),
    "faster requests": (tampered, "SHA-256 differs"),
    "cut": (lambda f: (f / "run.json").write_text((f / "run.json").read_text()[:500]), "not valid JSON"),
    "empty": (lambda f: (f / "run.json").write_text(""), "empty"),
    "another schema": (lambda f: edited(f / "run.json", lambda r: r.update(schema="other/1")), "$.schema"),
    "nothing measured": (lambda f: edited(f / "run.json", lambda r: r.update(blocks={})), "nothing was measured"),
    "a lost row": (lambda f: edited(f / "run.json", lambda r: r["traces"].pop()), "@ $.traces"),
    "a lost measurement": (lambda f: edited(f / "run.json", lambda r: block_of(r)["measurements"].pop()), "measurements, but the requests of"),
    "odd evidence": (lambda f: edited(f / "run.json", lambda r: base_of(r).update(runs=3)), "base.runs is unknown"),
    "evidence of another type": (lambda f: edited(f / "run.json", lambda r: base_of(r).update(sessions=[1.0])), "base.sessions"),
    "an empty session": (lambda f: edited(f / "run.json", lambda r: base_of(r).update(sessions=[[]])), "base.sessions"),
    "a canary of no time": (lambda f: edited(f / "run.json", lambda r: base_of(r).update(canary_ms={"memory": [5e-324]})), "base.canary_ms"),
    "no rows": (lambda f: edited(f / "run.json", lambda r: r.pop("traces")), "'traces' is a required property"),
    "a block without a name": (lambda f: edited(f / "run.json", lambda r: r["plan"]["blocks"][0].update(id="x")), "$.plan.blocks"),
    "no environment": (lambda f: edited(f / "run.json", lambda r: r["environments"].clear()), "$.environments"),
    "a nest": (lambda f: (f / "run.json").write_text("[" * 200_000), "nested"),
    "a trace of another block": (lambda f: edited(f / "run.json", lambda r: r["traces"][3].update(block="x/y/z")), "@ $.traces"),
    "a trace of another run": (lambda f: edited(f / "run.json", lambda r: r["traces"][3].update(run=9)), "@ $.traces[3]"),
    "a measurement of another run": (lambda f: edited(f / "run.json", lambda r: block_of(r)["measurements"][3].update(run=9)), "measurements[3]"),
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
    ("--kv-gpu=h100", "is of cpu"), ("--kv-framework=vllm", "vllm"), ("--kv-record=all", "nothing to record"),
    ("--kv-model=granite-3.3-8b", "is of smollm2-135m"),
])  # fmt: skip
def test_an_option_that_contradicts_the_run_is_one_clear_line(recorded, option, words):
    recorded.run()
    again = recorded.run("--kv-replay=report2", option, report=False, runner=False)
    assert again.code == 4
    assert words in again.out


def test_a_run_is_never_judged_against_itself(recorded):
    (recorded.folder / "pytest.ini").write_text("[pytest]\nkv_baselines = baselines\n")
    recorded.run(all_slow=1.6)
    recorded.run("--kv-record=all", all_slow=1.6, seed=3)
    own = recorded.run("--kv-replay=report3", runner=False)
    assert set(own.verdicts.values()) == {"no-baseline"}
    named = recorded.run("--kv-replay=report3", "--kv-baselines=baselines", runner=False)
    assert set(named.verdicts.values()) == {"no-baseline"}
    old = recorded.run("--kv-replay=report2", runner=False)
    assert "regression" in old.verdicts.values(), "an ini file's baselines are those of today, not those of the run"


def test_verdicts_that_lost_their_tests_are_told_and_fail_where_they_had_failed(recorded):
    measured = recorded.run(slow={"isl64-osl16-c2": 1.8})
    assert measured.code == 1
    for name in ("test_fixed.py", "test_other.py"):
        suite = recorded.folder / name
        suite.write_text(suite.read_text().replace("(1, 2, 4)", "(1, 4)").replace("(1, 2)", "(1,)"))
    again = recorded.run("--kv-replay=report2", runner=False)
    assert "regression" not in again.verdicts.values()
    assert again.code == 1
    assert "verdict(s) of" in again.out and "were not judged again" in again.out
    chosen = recorded.run("--kv-replay=report2", "-k", "c4", runner=False)
    assert chosen.code == 0, chosen.out
    assert "were not judged again" in chosen.out


def test_what_the_ini_file_asks_of_measuring_is_no_matter_for_a_stored_run(recorded):
    measured = recorded.run("--kv-profile=acceptance", cv=0.3)
    assert measured.code == 1
    (recorded.folder / "pytest.ini").write_text("[pytest]\nkv_profile = ci\nkv_gpu = h100\nkv_record = all\nkv_model = granite-3.3-8b\n")
    again = recorded.run("--kv-replay=report2", runner=False)
    assert again.code == 1, again.out
    assert figures(again.run) == figures(measured.run)


def test_the_stored_run_is_not_overwritten(recorded):
    recorded.run()
    before = (recorded.folder / "report2" / "run.json").read_bytes()
    again = recorded.run("--kv-replay=report2", "--kv-report=report2", report=False, runner=False)
    assert again.code == 4
    assert "would be overwritten" in again.out
    assert (recorded.folder / "report2" / "run.json").read_bytes() == before


def test_lost_requests_are_told(recorded):
    recorded.run()
    folder = recorded.folder / "report2"
    columns = traces.read(folder / "records.npz")
    blocks = traces.blocks_of(folder / "records.npz")
    parts = [None if i == 2 else traces.part_of(t) for i, t in enumerate(columns)]
    digest = traces.write(folder / "records.npz", parts, blocks)
    edited(folder / "run.json", lambda r: r["files"].update({"records.npz": digest}))
    again = recorded.run("--kv-replay=report2", report=False, runner=False)
    assert "1 of " in again.out and "their requests are lost" in again.out


def test_an_interrupted_run_stays_one(recorded):
    recorded.run(crashes=2, crash="KeyboardInterrupt")
    again = recorded.run("--kv-replay=report2", runner=False)
    assert again.run["complete"] is False
    assert again.run["interrupted"]
    assert "not measured to its end" in again.out


@pytest.mark.parametrize(("given", "gpu"), [("--kv-gpu=CPU", "cpu"), ("--kv-framework=Transformers", ""), ("--kv-model=SmolLM2-135M", "")])
def test_what_the_run_is_of_may_be_said_in_any_way(recorded, given, gpu):
    recorded.run()
    assert recorded.run("--kv-replay=report2", given, runner=False).code == 0


def test_an_option_that_names_nothing_is_one_clear_line(recorded):
    found = recorded.run("--kv-replay=", report=False)
    assert found.code == 4
    assert "--kv-replay= names nothing" in found.out


def test_a_recorded_run_passes_when_it_is_judged_again(kv_project):
    kv_project.run("-k", "fixed", "--kv-record=missing", report=False)
    mixed = kv_project.run("--kv-record=missing", seed=2)
    assert mixed.code == 0
    again = kv_project.run("--kv-replay=report2", runner=False)
    assert figures(again.run) == figures(mixed.run)
    assert again.code == 0, again.out


def test_a_smoke_run_and_a_judged_one_change_places(recorded):
    for name in ("test_fixed.py", "test_other.py"):
        suite = recorded.folder / name
        suite.write_text(suite.read_text().replace("concurrency=c)", "concurrency=c, profile='smoke')"))
    recorded.run("--kv-profile=smoke")
    full = recorded.run("--kv-replay=report2", "--kv-profile=ci", runner=False)
    assert {v["reason"].split(":")[0] for v in full.run["verdicts"]} == {"too few runs"}
    recorded.run(all_slow=1.6)
    smoke = recorded.run(f"--kv-replay=report{recorded.calls}", "--kv-profile=smoke", runner=False)
    assert smoke.code == 0
    assert {v["verdict"] for v in smoke.run["verdicts"]} == {"inconclusive"}


def test_only_showing_says_nothing_of_verdicts(recorded):
    recorded.run()
    shown = recorded.run("--kv-replay=report2", "--collect-only", report=False, runner=False)
    assert shown.code == 0
    assert "verdict(s)" not in shown.out
