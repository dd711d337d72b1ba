"""What a session leaves in the stored numbers, and what it says of them: gradual recording, other cards, a stale baseline."""

import fcntl
import json
import os
import subprocess
import time
from contextlib import contextmanager

import pytest

from .conftest import make_project

GPU = ("--kv-gpu=h100", "--kv-framework=transformers", "--kv-model=smollm2-135m")
KEY = "fixed_length/isl64-osl16-c1/base/output_tok_s"
ONE = "fixed and c1"  # two gates, output_tok_s and tpot_ms.p50
STALE = "have a stale baseline"

# A card whose UUID is told, in place of NVML's.
CARD = """
import pytest_kvcache.harness.nvml as nvml

nvml.gpus_in_use = lambda env: [{"uuid": told("CARD", "GPU-here")}]
plain_environment = Runner.environment

def with_card(self, arms):
    found = plain_environment(self, arms)
    return found | {"context": {"gpu_uuids": [told("CARD", "GPU-here")]}}

Runner.environment = with_card
"""


@pytest.fixture
def on_a_gpu(kv_project):
    with (kv_project.folder / "conftest.py").open("a") as f:
        f.write(CARD)
    return kv_project


def stored(project):
    """The file of the GPU."""
    return project.folder / "baselines" / "h100-sxm" / "transformers" / "smollm2-135m.json"


def runs(project, key=KEY):
    return json.loads(stored(project).read_text())["entries"][key]["runs"]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The file that one session records."""
    project = make_project(tmp_path_factory.mktemp("gpu"))
    with (project.folder / "conftest.py").open("a") as f:
        f.write(CARD)
    done = project.run(*GPU, "-k", ONE, "--kv-record=missing", report=False, cv=0.002)
    assert done.code == 0, done.out
    return stored(project).read_text()


@pytest.fixture
def gathering(on_a_gpu, two_runs):
    """A project whose GPU has a baseline of some sessions of two runs, as if they had been on as many days."""

    def fill(sessions=3, card="GPU-here"):
        doc = json.loads(two_runs.replace("GPU-here", card))
        (name,) = doc["sessions"]
        for n in range(1, sessions):
            doc["sessions"][f"day{n}"] = doc["sessions"][name]
            for entry in doc["entries"].values():
                entry["runs"] += [r | {"session": f"day{n}", "value": r["value"] * (1 + 0.001 * n)} for r in entry["runs"][:2]]
        stored(on_a_gpu).parent.mkdir(parents=True)
        stored(on_a_gpu).write_text(json.dumps(doc))
        return on_a_gpu

    return fill


def test_on_a_gpu_a_session_records_two_runs_and_says_how_many_are_still_needed(on_a_gpu):
    first = on_a_gpu.run(*GPU, "-k", ONE, "--kv-record=missing")
    assert (first.code, set(first.verdicts.values()), len(first.starts)) == (0, {"no-baseline"}, 2)
    assert "note on 2 gate(s): 2 runs are stored: judged once there are 5" in first.out
    again = on_a_gpu.run(*GPU, "-k", ONE, "--kv-record=missing", seed=1)
    assert len(again.starts) == 2
    assert len(runs(on_a_gpu)) == 4
    assert len({r["session"] for r in runs(on_a_gpu)}) == 2


def test_a_usable_baseline_that_gathers_runs_is_judged_first_and_takes_two_runs_of_a_pass(gathering):
    on_a_gpu = gathering()
    before = runs(on_a_gpu)
    result = on_a_gpu.run(*GPU, "-k", ONE, "--kv-record=missing", "-n", "2", seed=1, cv=0.002)
    assert result.code == 0, result.out
    assert set(result.verdicts.values()) == {"pass"}
    assert len(result.starts) == 3
    assert runs(on_a_gpu)[:6] == before
    assert [r["value"] for r in runs(on_a_gpu)[6:]] == next(v for v in result.run["verdicts"] if v["key"] == KEY)["runs"][:2]
    words = "it passed: its first 2 runs were added to the baseline, which has 8 now"
    assert {tuple(v["remarks"]) for v in result.run["verdicts"]} == {(words,)}
    assert f"note on 2 gate(s): {words}" in result.out
    assert "added runs to 2 gate(s) of transformers/smollm2-135m/base in " in result.out
    again = on_a_gpu.run("--kv-replay=report1", "-k", ONE, runner=False)
    assert "2 of 2 verdict(s) are those of" in again.out


@pytest.mark.parametrize(("told", "word", "code"), [
    ({"all_slow": 1.5}, "regression", 1), ({"all_slow": 0.5}, "improvement", 0), ({"cv": 0.2}, "inconclusive", 0), ({"failed": 1}, "invalid", 1),
])  # fmt: skip
def test_nothing_but_a_pass_is_added_to_a_baseline_that_gathers_runs(gathering, told, word, code):
    on_a_gpu = gathering()
    before = stored(on_a_gpu).read_bytes()
    result = on_a_gpu.run(*GPU, "-k", ONE, "--kv-record=missing", **{"seed": 1, "cv": 0.002} | told)
    assert (result.code, set(result.verdicts.values())) == (code, {word}), result.out
    assert stored(on_a_gpu).read_bytes() == before
    assert "note on 2 gate(s): no run of it was added to the incomplete baseline: only those of a pass against it are" in result.out


def test_a_complete_baseline_takes_no_more_runs(gathering):
    on_a_gpu = gathering(sessions=5)
    before = stored(on_a_gpu).read_bytes()
    result = on_a_gpu.run(*GPU, "-k", ONE, "--kv-record=missing", seed=1, cv=0.002)
    assert set(result.verdicts.values()) == {"pass"}
    assert stored(on_a_gpu).read_bytes() == before
    assert {tuple(v["remarks"]) for v in result.run["verdicts"]} == {()}


def test_without_the_option_nothing_is_added(gathering):
    on_a_gpu = gathering()
    before = stored(on_a_gpu).read_bytes()
    assert set(on_a_gpu.run(*GPU, "-k", ONE, seed=1, cv=0.002).verdicts.values()) == {"pass"}
    assert stored(on_a_gpu).read_bytes() == before


def test_a_baseline_of_another_card_is_a_reference_with_a_wider_margin(gathering):
    on_a_gpu = gathering(sessions=5, card="GPU-other")
    told = {"seed": 1, "cv": 0.002, "all_slow": 1.04}
    result = on_a_gpu.run(*GPU, "-k", ONE, "--kv-record=missing", **told)
    assert set(result.verdicts.values()) == {"pass"}, result.out
    assert {v["margin"] for v in result.run["verdicts"]} == {0.1}
    assert "margin 10 %; 3 runs against 10" in result.out
    assert "note on 2 gate(s): compared with another card of this model (10 of 10 stored runs): margin 10 % instead of 5 %" in result.out
    assert len(runs(on_a_gpu)) == 12, "this card's own are added beside"
    lost = on_a_gpu.run(*GPU, "-k", ONE, **told | {"all_slow": 1.4})
    assert set(lost.verdicts.values()) == {"regression"}
    assert "gpu_uuids" not in lost.out, "the newest that count are this card's own"


def test_a_card_with_runs_of_its_own_is_judged_by_them_alone(gathering):
    on_a_gpu = gathering()
    doc = json.loads(stored(on_a_gpu).read_text())
    (name,) = {r["session"] for r in doc["entries"][KEY]["runs"]} - {"day1", "day2"}
    doc["sessions"]["other"] = json.loads(json.dumps(doc["sessions"][name]).replace("GPU-here", "GPU-other"))
    for entry in doc["entries"].values():
        entry["runs"] += [r | {"session": "other", "value": r["value"] * 3} for r in entry["runs"][:4]]
    stored(on_a_gpu).write_text(json.dumps(doc))
    result = on_a_gpu.run(*GPU, "-k", ONE, seed=1, cv=0.002)
    assert set(result.verdicts.values()) == {"pass"}, result.out
    assert {v["margin"] for v in result.run["verdicts"]} == {0.05}
    assert "note on 2 gate(s): 4 stored runs of other cards of this model are left aside" in result.out


# --- what is never stored ------------------------------------------------------------------------------------------------


def test_a_gate_that_was_measured_in_part_is_not_stored(kv_project):
    result = kv_project.run("-k", ONE, "--kv-record=missing", "--kv-budget=0.5s", sleep=0.3)
    assert result.code == 1, result.out
    assert 1 <= len(result.starts) < 5
    assert f"only {len(result.starts)} of 5 runs were made" in result.out
    assert not kv_project.baseline.exists()


def test_the_gates_of_a_broken_scenario_are_not_stored_and_the_others_are(kv_project):
    result = kv_project.run("-k", "fixed and (c1 or c2)", "--kv-record=missing", broken=["isl64-osl16-c1"])
    assert result.code == 1
    entries = json.loads(kv_project.baseline.read_text())["entries"]
    assert {key.split("/")[1] for key in entries} == {"isl64-osl16-c2"}
    assert {len(e["runs"]) for e in entries.values()} == {5}


@contextmanager
def held_back(project, sessions, stops, *args, **told):
    """Sessions that have measured and wait for the folder of baselines while the block runs; their ends when it has run."""
    folder, log = project.folder / "baselines", project.folder / "starts.log"
    folder.mkdir(exist_ok=True)
    hold = os.open(folder, os.O_RDONLY)
    fcntl.flock(hold, fcntl.LOCK_EX)
    command = project.command(*GPU, "-k", ONE, *args)
    begun = [
        subprocess.Popen(command, cwd=project.folder, env=project.environment(told | {"seed": n}), stdout=subprocess.PIPE, text=True)
        for n in range(1, sessions + 1)
    ]
    end = time.monotonic() + 60
    while not log.exists() or log.read_text().count("stop") < stops:
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)
    printed = []
    yield printed
    os.close(hold)
    printed += [p.communicate(timeout=60)[0] for p in begun]
    assert [p.returncode for p in begun] == [0] * sessions, printed


def test_two_sessions_that_end_together_keep_the_runs_of_both(on_a_gpu):
    with held_back(on_a_gpu, 2, 4, "--kv-record=missing"):
        assert not stored(on_a_gpu).exists()
    kept = runs(on_a_gpu)
    assert len(kept) == len({r["value"] for r in kept}) == 4
    assert len({r["session"] for r in kept}) == 2


def test_a_pass_is_not_added_to_numbers_that_another_session_has_stored_meanwhile(gathering):
    project = gathering()
    with held_back(project, 1, 3, "--kv-record=missing", cv=0.002) as printed:
        doc = json.loads(stored(project).read_text())
        for run in doc["entries"][KEY]["runs"]:
            run["value"] *= 1.5
        stored(project).write_text(json.dumps(doc))
    assert len(runs(project)) == 6
    assert len(runs(project, KEY.replace("output_tok_s", "tpot_ms.p50"))) == 8
    assert "note on 1 gate(s): it passed, but no run of it was added: another session has changed its baseline meanwhile" in printed[0]


# --- a stale baseline ----------------------------------------------------------------------------------------------------


def better(project, *args):
    result = project.run("-k", ONE, "--keep", *args, seed=1, all_slow=0.5)
    assert set(result.verdicts.values()) == {"improvement"}, result.out
    return result


def count_file(project):
    return project.folder / ".pytest_cache" / "v" / "kvcache" / "improvements"


def counts(project):
    return [c["sessions"] for c in json.loads(count_file(project).read_text()).values()]


def as_if_counted(project, sessions):
    found = json.loads(count_file(project).read_text())
    count_file(project).write_text(json.dumps({name: c | {"sessions": sessions} for name, c in found.items()}))


def test_the_third_improvement_in_a_row_says_that_the_baseline_is_stale_until_it_is_recorded_anew(recorded):
    assert STALE not in better(recorded).out
    assert STALE not in better(recorded, "-n", "2").out, "one session is one, however many workers it has"
    assert counts(recorded) == [2, 2]
    third = better(recorded)
    assert f"2 gate(s) {STALE}; to store the better level: pytest" in third.out
    words = "stale baseline: an improvement in 3 sessions in a row; a later loss of the same size would pass"
    assert {tuple(v["remarks"]) for v in third.run["verdicts"]} == {(words,)}
    assert words in (recorded.folder / f"report{recorded.calls}" / "report.html").read_text()
    assert third.code == 0
    (command,) = {line.split("level: pytest ")[1] for line in third.out.splitlines() if STALE in line}
    assert "--kv-record=all" in command.split()
    recorded.run("-k", ONE, "--keep", "--kv-record=all", seed=1, all_slow=0.5)
    assert counts(recorded) == [3, 3]
    after = recorded.run("-k", ONE, "--keep", seed=2, all_slow=0.25)
    assert set(after.verdicts.values()) == {"improvement"}
    assert STALE not in after.out
    assert counts(recorded) == [1, 1]


def test_a_session_that_judges_nothing_new_neither_counts_nor_ends_the_row_and_a_pass_ends_it(recorded):
    better(recorded)
    as_if_counted(recorded, 5)
    replayed = recorded.run(f"--kv-replay=report{recorded.calls}", "-k", ONE, "--keep", runner=False)
    assert set(replayed.verdicts.values()) == {"improvement"}
    suite = recorded.folder / "test_fixed.py"
    ci = suite.read_text()
    suite.write_text(ci.replace("concurrency=c)", "concurrency=c, profile='smoke')"))
    smoke = recorded.run("-k", ONE, "--keep", "--kv-profile=smoke", all_slow=0.5)
    suite.write_text(ci)
    invalid = recorded.run("-k", ONE, "--keep", failed=1)
    assert (smoke.code, invalid.code) == (0, 1)
    assert STALE not in replayed.out + smoke.out + invalid.out
    assert counts(recorded) == [5, 5]
    assert set(recorded.run("-k", ONE, "--keep", seed=1).verdicts.values()) == {"pass"}
    assert counts(recorded) == []


def test_without_a_cache_there_is_neither_warning_nor_error(recorded):
    better(recorded)
    as_if_counted(recorded, 5)
    off = recorded.run("-k", ONE, "-W", "error", seed=1, all_slow=0.5)
    assert (off.code, set(off.verdicts.values())) == (0, {"improvement"}), off.out
    assert STALE not in off.out
    assert counts(recorded) == [5, 5]
    count_file(recorded).unlink()
    count_file(recorded).mkdir()
    assert STALE not in better(recorded, "-W", "error").out


def test_a_damaged_count_is_no_count(recorded):
    count_file(recorded).parent.mkdir(parents=True)
    count_file(recorded).write_text('{"cpu')
    assert STALE not in better(recorded).out
    assert counts(recorded) == [1, 1]


def test_a_stored_number_that_no_test_claims_any_more_is_told_where_all_tests_were_asked_for(recorded):
    suite = recorded.folder / "test_fixed.py"
    suite.write_text(suite.read_text().replace("(1, 2, 4)", "(1, 2)"))
    words = "no test claims fixed_length/isl64-osl16-c4/base/output_tok_s and 1 more any more, stored for transformers/smollm2-135m"
    assert words in recorded.run("--kv-profile=full").out
    assert "no test claims" not in recorded.run("--kv-profile=full", "-k", "fixed").out
    assert "no test claims" not in recorded.run().out
