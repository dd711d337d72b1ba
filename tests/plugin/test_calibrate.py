"""--kv-calibrate: the noise of a machine, kept for its gates."""

import json
import math

import pytest


def noise_file(project):
    return project.baseline.with_name("smollm2-135m.noise.json")


def test_a_session_tells_the_spread_of_restarts_and_what_it_certifies(kv_project):
    found = kv_project.run("--kv-calibrate", "-k", "fixed", cv=0.05)
    assert found.code == 0, found.out
    assert "noise of this machine by 1 session(s)" in found.out
    assert "calibrate again at another hour" in found.out
    assert not kv_project.baseline.exists(), "it is no baseline"
    assert {n["sessions"] for n in found.run["noise"]} == {1}
    assert all(0.01 < n["restart_sd"] < 0.12 and n["session_sd"] == 0.02 for n in found.run["noise"])
    assert "Noise of this machine" in (kv_project.folder / "report1" / "report.html").read_text()
    entries = json.loads(noise_file(kv_project).read_text())["entries"]
    assert {len(e["runs"]) for e in entries.values()} == {5}


def test_sessions_add_up_and_what_they_differ_by_becomes_the_prior_of_the_gate(kv_project):
    for seed, shift in enumerate((1.0, 1.3, 0.8, 1.2)):
        kv_project.run("--kv-calibrate", "-k", "fixed", seed=seed, all_slow=shift, cv=0.01)
    noise = json.loads(noise_file(kv_project).read_text())["entries"]
    assert {len(e["runs"]) for e in noise.values()} == {20}
    kv_project.run("--kv-record=missing", "-k", "fixed", cv=0.01)
    slower = kv_project.run("-k", "fixed", all_slow=1.25, cv=0.01, seed=9)
    assert set(slower.verdicts.values()) == {"inconclusive"}, "sessions of this machine differ by as much by themselves"
    evidence = [e for b in slower.run["blocks"].values() for e in b["evidence"].values()]
    assert all(0.08 < e["base"]["session_sd"] < 0.25 for e in evidence)
    again = kv_project.run(f"--kv-replay=report{kv_project.calls}", runner=False)
    assert "to the last digit" in again.out
    noise_file(kv_project).unlink()
    assert set(kv_project.run("-k", "fixed", all_slow=1.25, cv=0.01, seed=9).verdicts.values()) == {"regression"}


def test_noise_of_another_machine_is_left_aside(kv_project):
    for seed, shift in enumerate((1.0, 1.4)):
        kv_project.run("--kv-calibrate", "-k", "fixed", seed=seed, all_slow=shift, cv=0.01, cpu="Other CPU")
    kv_project.run("--kv-record=missing", "-k", "fixed", cv=0.01)
    assert set(kv_project.run("-k", "fixed", all_slow=1.25, cv=0.01).verdicts.values()) == {"regression"}


def test_a_machine_that_repeats_itself_is_judged_a_little_more_sharply(kv_project):
    kv_project.run("--kv-calibrate", "-k", "fixed and c2", cv=0.002)
    found = kv_project.run("--kv-calibrate", "-k", "fixed and c2", seed=9, cv=0.002)
    assert all(math.isclose(n["session_sd"], 0.02 * math.sqrt(8 / 9), rel_tol=0.05) for n in found.run["noise"])


@pytest.mark.parametrize("args", [("--kv-record=all",), ("--kv-replay=report1",)])
def test_it_stands_alone(kv_project, args):
    kv_project.run("-k", "fixed and c2")
    found = kv_project.run("--kv-calibrate", *args)
    assert found.code == 4
    assert "kv-calibrate" in found.out


def test_a_damaged_file_is_one_line(kv_project):
    kv_project.run("--kv-calibrate", "-k", "fixed and c2")
    noise_file(kv_project).write_text("{")
    found = kv_project.run("-k", "fixed and c2")
    assert found.code == 4
    assert "smollm2-135m.noise.json" in found.out


def test_what_was_not_measured_whole_is_not_kept(kv_project):
    kv_project.run("--kv-calibrate", "-k", "fixed and c2", busy_runs=[2])
    assert not noise_file(kv_project).exists()


def test_workers_of_xdist_tell_the_noise_too_and_a_new_folder_is_made(kv_project):
    found = kv_project.run("--kv-calibrate", "--kv-baselines=new", "-k", "fixed and c2", "-n", "2")
    assert found.code == 0, found.out
    assert len(found.run["noise"]) == 2
    assert "noise of this machine by 1 session(s)" in found.out
    assert "to cure it" not in found.out
    assert (kv_project.folder / "new/cpu/transformers/smollm2-135m.noise.json").exists()
    again = kv_project.run(f"--kv-replay=report{kv_project.calls}", runner=False)
    assert again.run["noise"] == found.run["noise"]


def test_claims_between_arms_have_no_part_in_it(kv_project):
    (kv_project.folder / "test_arms.py").write_text("""
import pytest
from pytest_kvcache import ClosedLoop, Gate
from pytest_kvcache.core.spec import Arm

GRID = [ClosedLoop(isl=64, osl=16, concurrency=2, arms=(Arm(name="whole"), Arm(name="half", block_size=8)))]

@pytest.mark.kv_gates(Gate("output_tok_s", arm="half", against="whole"))
@pytest.mark.parametrize("kv_scenario", GRID, ids=str)
def test_arms(kv_result, kv_gate):
    kv_gate(kv_result)

@pytest.mark.kv_gates("req_s", Gate("output_tok_s", arm="half", against="whole"))
@pytest.mark.parametrize("kv_scenario", GRID, ids=str)
def test_both(kv_result, kv_gate):
    kv_gate(kv_result)
""")
    found = kv_project.run("--kv-calibrate", "test_arms.py", "-o", "kv_strict=true", arm_slow={"half": 1.5})
    assert found.code == 0, found.out
    assert set(found.verdicts) == {f"both/isl64-osl16-c2/{arm}/req_s" for arm in ("whole", "half")}
