"""The parts of the simulation of the gate, in seconds; the long run is `python -m benchmarks.gate_simulation`."""

import dataclasses
import math

import numpy as np
import pytest

from pytest_kvcache.core import gate, stats

from . import gate_rules
from .gate_noise import BLOCK, Noise, as_figures, draw, gate_cvs, restarts, sessions
from .gate_rules import (
    CAUGHT,
    CI,
    CODES,
    FULL,
    MARGIN,
    OPEN,
    PASSED,
    RULES,
    Tally,
    condition,
    mean_error,
    rate_bounds,
    session,
    tally,
    threshold,
)
from .gate_simulation import main, studies
from .gate_table import MUSTS, failed

QUIET = Noise(cv=0.02, spread=0.0, common_sd=0.0, own_sd=0.0, drift=0.0)


def draw_new(seed=1, gates=3000, count=1, runs=12, **changes):
    noise = dataclasses.replace(QUIET, **changes)
    rng = np.random.default_rng(seed)
    return sessions(rng, noise, gate_cvs(rng, noise, gates), count, runs)


# --- the noise ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "beyond_four_sd"), [("normal", 6.3e-5), ("t4", 4.81e-3)])
def test_restart_noise_has_sd_one_and_only_t4_has_heavy_tails(kind, beyond_four_sd):
    noise = restarts(np.random.default_rng(1), kind, (400_000,))
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert np.mean(np.abs(noise) > 4) == pytest.approx(beyond_four_sd, rel=0.3)


def test_an_unknown_restart_noise_is_refused():
    with pytest.raises(ValueError, match="known are normal, t4"):
        restarts(np.random.default_rng(1), "cauchy", (3,))


def test_cvs_are_log_normal_about_their_median_and_cut_off():
    cvs = gate_cvs(np.random.default_rng(1), Noise(cv=0.035), 100_000)
    assert np.median(cvs) == pytest.approx(0.035, rel=0.01)
    assert (cvs.min(), cvs.max()) == (pytest.approx(0.005, rel=0.5), 0.05)
    free = np.log(gate_cvs(np.random.default_rng(1), Noise(cv=0.035, least=0, most=math.inf), 100_000))
    assert (free.mean(), free.std()) == (pytest.approx(math.log(0.035), abs=0.01), pytest.approx(0.4, abs=0.01))


def test_each_part_of_the_noise_has_the_size_that_it_is_given():
    assert draw_new().std() == pytest.approx(0.02, rel=0.05)
    assert draw_new(cv=1e-9, least=0.0, own_sd=0.004)[:, 0, 0].std() == pytest.approx(0.004, rel=0.05)
    common = draw_new(cv=1e-9, least=0.0, common_sd=0.003, gates=2, count=5000)
    assert common[0] == pytest.approx(common[1], abs=1e-6)
    assert common[0, :, 0].std() == pytest.approx(0.003, rel=0.05)
    drift = draw_new(cv=1e-9, least=0.0, drift=0.02)
    assert np.abs(drift[:, 0, -1] - drift[:, 0, 0]) == pytest.approx(0.02, abs=1e-6)
    assert drift.mean() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_the_gates_of_a_block_share_as_much_of_their_restart_noise_as_is_said(shared):
    new = draw_new(restart="normal", gates=2 * BLOCK, count=1000, shared=shared)
    first, other_block = new[0].ravel(), new[BLOCK].ravel()
    assert np.corrcoef(first, new[1].ravel())[0, 1] == pytest.approx(shared, abs=0.03)
    assert np.corrcoef(first, other_block)[0, 1] == pytest.approx(0, abs=0.03)
    assert first.std() == pytest.approx(0.02, rel=0.05)


def test_the_same_seed_is_the_same_noise():
    one, same, other = (draw((1, i), Noise(cv=0.02), gates=30, runs=12) for i in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert [part.shape for part in one] == [(30, 5, 2), (30, 12)]


@pytest.mark.parametrize(("better", "worse_by_a_fifth"), [("lower", 120.0), ("higher", 80.0)])
def test_a_loss_is_a_fraction_of_the_figures_own_value(better, worse_by_a_fifth):
    assert as_figures(np.array([0.0, stats.log_margin(0.2, better)]), better) == pytest.approx([100, worse_by_a_fifth])


# --- the rules ---------------------------------------------------------------------------------------------------------


def look_by_look(base, new, better, rule):
    """What a session that measures does: judge at each look, stop as soon as the gate is decided or given up."""
    for runs in rule.looks:
        v = gate.judge(base, new[:runs], better=better, margin=MARGIN, rule=rule)
        if v.settled:
            break
    return CODES[v.verdict], runs


@pytest.mark.parametrize(("rule", "profile"), [(FULL, "full"), (CI, "ci")])
@pytest.mark.parametrize("better", ["lower", "higher"])
def test_our_verdicts_and_runs_are_those_of_a_session_that_measures_look_by_look(rule, profile, better):
    decided = set()
    for loss in (0.0, 0.05, 0.10):
        base, new = draw((3, 3), Noise(cv=0.03), gates=150, runs=12)
        new = new + stats.log_margin(loss, better)
        found = zip(*RULES[rule](base, new, better), strict=True)
        figures = zip(as_figures(base, better), as_figures(new, better), strict=True)
        wanted = [look_by_look(gate.Base(sessions=tuple(map(tuple, b))), n, better, gate.rule_for("gpu", profile)) for b, n in figures]
        assert list(found) == wanted
        decided |= set(wanted)
    assert {code for code, _ in decided} == {CAUGHT, PASSED, OPEN}
    assert {runs for _, runs in decided} == set(gate.rule_for("gpu", "full").looks)


def test_a_verdict_that_is_not_about_the_numbers_is_a_fault_of_the_simulation():
    base, new = draw((1, 0), Noise(cv=0.02), gates=1, runs=12)
    with pytest.raises(KeyError, match=gate.INVALID):
        RULES[FULL](base, new, "sideways")


@pytest.mark.parametrize(
    ("better", "new", "base_runs", "new_runs", "found"),
    [
        ("lower", [106, 90, 90], 1, 1, CAUGHT),
        ("lower", [104, 120, 120], 1, 1, PASSED),
        ("lower", [98, 110, 113], 1, 3, CAUGHT),
        ("lower", [106, 100, 100], 1, 3, PASSED),
        ("higher", [94, 110, 110], 1, 1, CAUGHT),
        ("higher", [96, 80, 80], 1, 1, PASSED),
        ("higher", [120, 120, 120], 1, 3, PASSED),
        ("lower", [106, 106, 106], 2, 3, PASSED),  # the run before the last was slower
    ],
)
def test_the_naive_rule_compares_two_means_with_a_margin(better, new, base_runs, new_runs, found):
    sign = 1 if better == "lower" else -1
    base, new = (sign * np.log(np.array([values]) / 100) for values in ([[150.0, 110.0], [110.0, 100.0]], new))
    codes, used = threshold(base, new, better, margin=0.05, base_runs=base_runs, new_runs=new_runs)
    assert (codes.tolist(), used.tolist()) == ([found], [new_runs])


def test_every_rule_judges_every_gate(monkeypatch):
    monkeypatch.setattr(gate_rules, "GATES", BLOCK)
    found = session(condition(0.05, 0.035), RULES, (1, 0))
    assert list(found) == list(RULES)
    assert {(len(codes), len(runs)) for codes, runs in found.values()} == {(BLOCK, BLOCK)}


# --- counting ----------------------------------------------------------------------------------------------------------


def test_a_block_takes_as_many_runs_as_the_longest_of_its_gates():
    codes = np.array([CAUGHT] * 6 + [PASSED] * 30 + [OPEN] * 24)
    runs = np.full(60, 3)
    runs[29], runs[30] = 8, 12
    found = tally([(codes, runs), (codes, np.full(60, 5))])
    assert found.counts.tolist() == [[6, 30, 24]] * 2
    assert found.runs == pytest.approx([(58 * 3 + 8 + 12) / 60, 5])
    assert found.block_runs == pytest.approx([10, 5])
    assert found.shares(PASSED) == pytest.approx([0.5, 0.5])


def test_the_error_is_that_of_the_sessions():
    assert mean_error(np.array([0.0, 0.2, 0.4, 0.6])) == pytest.approx((0.3, np.std([0, 0.2, 0.4, 0.6], ddof=1)))


@pytest.mark.parametrize(("events", "low", "high"), [(0, 0.0, 3.6889), (1, 0.0253, 5.5716), (10, 4.7954, 18.3904)])
def test_bounds_of_rare_events_are_those_of_the_poisson_tables(events, low, high):
    assert rate_bounds(events, 100) == pytest.approx((low / 100, high / 100), abs=1e-6)


# --- what must hold ----------------------------------------------------------------------------------------------------


def counted(share, code, sessions=50):
    """A tally in which so many of 1000 gates got `code` and the rest were open."""
    counts = np.zeros((sessions, 3), dtype=int)
    counts[:, code], counts[:, OPEN] = round(1000 * share), 1000 - round(1000 * share)
    return Tally(counts=counts, runs=np.full(sessions, 3.0), block_runs=np.full(sessions, 5.0))


def just(must, side):
    """A result on one side of its limit: +1 on the right one."""
    beyond = 0.002 if must.least else -0.002
    return counted(must.limit + side * beyond if must.loss else (0.0 if side > 0 else 0.001), must.code)


@pytest.mark.parametrize("broken", range(len(MUSTS)), ids=[f"{m.name}-{m.cv}" for m in MUSTS])
@pytest.mark.parametrize("rule", [FULL, CI])
def test_each_figure_that_must_hold_fails_alone(broken, rule):
    results = {condition(m.loss, m.cv): {r: just(m, 1) for r in (FULL, CI)} for m in MUSTS}
    assert failed(results) == []
    must = MUSTS[broken]
    results[condition(must.loss, must.cv)][rule] = just(must, -1)
    assert failed(results) == [f"{must.name}, median CV {100 * must.cv:g} %, {rule}"]
    assert "does not hold" in " ".join(must.row(results, rule))


def test_our_rule_holds_on_a_few_sessions():
    """A gross fault of the rule shows here; the figures themselves need the long run."""

    def few(loss, cv):
        return tally([session(condition(loss, cv), [FULL], (1, i))[FULL] for i in range(5)])

    assert few(0.0, 0.02).counts[:, CAUGHT].sum() == 0
    assert few(0.10, 0.02).shares(CAUGHT).mean() > 0.94
    assert few(0.10, 0.035).shares(CAUGHT).mean() > 0.73
    assert few(0.05, 0.02).shares(PASSED).mean() < 0.04


# --- the command -------------------------------------------------------------------------------------------------------


def test_a_rule_that_passes_everything_exits_1_and_says_what_does_not_hold(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gate_rules, "GATES", BLOCK)
    monkeypatch.setattr(gate, "judge", lambda base, new, **_: gate.Verdict(verdict=gate.PASS, runs=tuple(new[:3])))
    assert main(["--sessions", "2", "--processes", "1", "--table", str(tmp_path / "t.md")]) == 1
    printed = capsys.readouterr()
    assert "does not hold: 10 % worse, caught, median CV 2 %, ours\n" in printed.err
    assert "does not hold: 5 % worse, passed, median CV 3.5 %, ours" in printed.err
    assert "false alarms" not in printed.err
    page = (tmp_path / "t.md").read_text()
    assert printed.out.strip() == page.strip()
    assert "`python -m benchmarks.gate_simulation --sessions 2 --processes 1" in page
    assert page.count("\n### ") == 7


def test_the_same_seed_prints_the_same_tables(monkeypatch, capsys):
    monkeypatch.setattr(gate_rules, "GATES", BLOCK)
    codes, pages = [], []
    for seed in ("5", "5", "6"):
        codes.append(main(["--sessions", "2", "--processes", "1", "--seed", seed]))
        pages.append(capsys.readouterr().out.partition("###")[2])
    assert pages[0] == pages[1] != pages[2]
    assert codes == [1 if "does not hold" in page else 0 for page in pages]


def test_rare_events_get_more_sessions():
    planned = {truth: count for truth, _, count in studies(90)}
    assert (planned[condition(0.0, 0.02)], planned[condition(0.10, 0.02)], planned[condition(0.0, 0.02, "no drift")]) == (360, 90, 30)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--sessions", "1"], "--sessions 1: at least 2"),
        (["--seed", "-1"], "--seed -1: at least 0"),
        (["--processes", "0"], "--processes 0: at least 1"),
        (["--table", "nowhere/t.md"], "--table nowhere/t.md: No such file or directory; name a file that can be written"),
        (["--table", "."], "--table .: Is a directory; name a file that can be written"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(argv, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert capsys.readouterr().err.endswith(f"{says}\n")
