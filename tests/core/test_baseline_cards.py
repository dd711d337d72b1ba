"""Stored runs of other cards of the same model: left aside once this card has its own, until then a reference with wider terms."""

import math

import pytest

from pytest_kvcache.core import baseline as stored
from pytest_kvcache.core.evidence import REFERENCE_MARGIN, REFERENCE_PRIOR, as_judged, changes, from_plain, gather
from pytest_kvcache.core.gate import INVALID, PASS, REGRESSION, rule_for
from pytest_kvcache.core.metrics import find_metric
from pytest_kvcache.core.plan import Wanted, make_plan
from pytest_kvcache.core.progress import Orders, Progress, settle
from pytest_kvcache.core.scenarios import ClosedLoop
from pytest_kvcache.core.spec import Gate

RULE = rule_for("gpu", "full")
METRIC = find_metric("output_tok_s")
SCENARIO = ClosedLoop(isl=512, osl=128, concurrency=8, requests=64)
HERE, OTHER = ["GPU-here"], ["GPU-other"]


def block_of(margin=None):
    gate = Gate("output_tok_s", margin=margin)
    (block,) = make_plan([Wanted(framework="f", model="m", family="s", scenario=SCENARIO, gates=(gate,))], RULE.margin)
    return block


def spec_of(margin=None):
    return block_of(margin).tasks[0].gates[0]


KEY = spec_of().key


def environment(uuids, driver="1", **context):
    known = context if uuids is None else {"gpu_uuids": uuids, **context}
    return {"identity": {"gpu": "Test card"}, "subject": {"driver": driver}, "context": known}


def document(*sessions, level=100.0):
    """Two runs of a session for each list of UUIDs, or (UUIDs, driver)."""
    doc = stored.empty("gpu", "f", "m")
    for n, cards in enumerate(sessions):
        uuids, driver = cards if isinstance(cards, tuple) else (cards, "1")
        runs = tuple({"value": level * (1 + 0.001 * (2 * n + i)), "n": 64, "failed": 0} for i in range(2))
        recording = stored.Recording(key=KEY, metric=METRIC, workload="w", runs=runs)
        about = {"started": f"2026-01-{n + 1:02}T00:00:00Z", "environment": environment(uuids, driver)}
        doc = stored.merge(doc, [recording], session=f"s{n}", about=about, now_iso="2026-02-01T00:00:00Z", replace=False)
    return doc


def lookup(doc, uuids):
    return stored.lookup(doc, KEY, METRIC, stored.Current(environment=environment(uuids), workload="w"))


@pytest.mark.parametrize(("sessions", "now", "runs", "others", "reference"), [
    ([HERE] * 5, HERE, 10, 0, False), ([OTHER] * 5, HERE, 10, 10, True), ([OTHER] * 3 + [HERE] * 2, HERE, 10, 6, True),
    ([OTHER] * 5 + [HERE] * 3, HERE, 6, 10, False), ([HERE] * 3 + [OTHER], HERE, 6, 2, False),
    ([["a", "b"]] * 5, ["b", "a"], 10, 0, False), ([["a", "b"]] * 5, ["a", "c"], 10, 10, True), ([["a"]] * 5, ["a", "b"], 10, 10, True),
    ([OTHER], HERE, 2, 2, True), ([None] * 5, None, 10, 0, False),
])  # fmt: skip
def test_runs_of_this_very_card_count_as_soon_as_there_are_five(sessions, now, runs, others, reference):
    found = lookup(document(*sessions), now)
    assert (len(found.runs), found.others, found.reference) == (runs, others, reference)
    assert len(found.samples) == len(found.sessions) == runs / 2


@pytest.mark.parametrize("unknown", [None, [], "GPU-other", [1], {"GPU-other": 1}, [["GPU-other"]]])
def test_a_card_that_is_not_known_is_taken_for_this_one(unknown):
    for stored_as, now in ((unknown, HERE), (HERE, unknown), (unknown, unknown)):
        found = lookup(document(*[stored_as] * 5), now)
        assert (len(found.runs), found.others, found.reference) == (10, 0, False)


def judged(doc, times, uuids=HERE, *, margin=None, need="judge"):
    """The verdict on 12 runs that are `times` the stored level."""
    block, now = block_of(margin), stored.Current(environment=environment(uuids), workload="w")
    (gate,) = block.tasks[0].gates
    progress = Progress(block=block, environment=environment(uuids))
    progress.measurements = [
        {
            "run": i, "scenario": str(SCENARIO), "arm": "base", "valid": True, "requests": 64, "canary": None,
            "metrics": {"output_tok_s": 100.0 * times * (1 + 0.001 * (i % 3))},
        } for i in range(12)
    ]  # fmt: skip
    evidence = gather(doc, gate, now, RULE, smoke=need == "report")
    again = from_plain(evidence.plain())
    found = [settle(gate, progress, Orders(rule=RULE, needs={KEY: e.need}, bases={KEY: e.base}), final=True) for e in (evidence, again)]
    assert found[0] == found[1], "what a run stores of it gives the same verdict"
    return found[0]


def test_a_loss_that_this_cards_own_baseline_shows_is_within_the_margin_of_a_reference():
    own, reference = document(*[HERE] * 5), document(*[OTHER] * 5)
    assert judged(own, 0.93).verdict == REGRESSION
    found = judged(reference, 0.95)
    assert found.verdict == PASS
    assert found.margin == REFERENCE_MARGIN
    (note,) = found.notes
    assert "another card of this model (10 of 10 stored runs): margin 10 % instead of 5 %, session spread 2 %" in note
    lost = judged(reference, 0.80)
    assert (lost.verdict, lost.margin) == (REGRESSION, REFERENCE_MARGIN)


def test_a_wider_margin_stays_and_a_wider_prior_too():
    base = lookup(document(*[OTHER] * 5), HERE)
    for margin, expected in ((0.03, 0.10), (0.10, 0.10), (0.25, 0.25)):
        gate, rule, notes = as_judged(spec_of(margin), base, RULE)
        assert (gate.margin, rule.session_prior) == (expected, REFERENCE_PRIOR)
        assert len(notes) == 1
    assert as_judged(spec_of(), base, rule_for("cpu", "ci"))[1].session_prior == REFERENCE_PRIOR
    own = lookup(document(*[HERE] * 5), HERE)
    assert as_judged(spec_of(), own, RULE) == (spec_of(), RULE, ())


def test_runs_of_other_cards_that_are_left_aside_change_no_figure_and_are_named():
    alone, beside = (judged(document(*sessions), 0.98) for sessions in ([HERE] * 5, [HERE] * 5 + [OTHER] * 4))
    assert beside.notes == ("8 stored runs of other cards of this model are left aside",)
    assert (alone.notes, alone.margin) == ((), RULE.margin)
    assert (beside.verdict, beside.change, beside.low, beside.high) == (alone.verdict, alone.change, alone.low, alone.high)


def test_a_reference_is_less_sure_than_a_baseline():
    """The session prior of 2 % stands in the interval."""
    own, reference = (judged(document(*[cards] * 5), 1.0) for cards in (HERE, OTHER))
    width = {f.margin: math.log1p(f.high) - math.log1p(f.low) for f in (own, reference)}
    assert width[REFERENCE_MARGIN] > 1.5 * width[RULE.margin]


def test_smoke_names_the_reference_as_well_and_an_invalid_gate_does_not():
    reference = document(*[OTHER] * 5)
    assert "another card" in judged(reference, 1.0, need="report").notes[0]
    assert (judged(reference, math.nan).verdict, judged(reference, math.nan).notes) == (INVALID, ())


def test_differences_are_shown_against_the_runs_that_count():
    doc = document(*[(HERE, "2")] * 3, *[(OTHER, "9")] * 2)
    assert changes(doc, KEY, environment(HERE, "3")) == ["driver: 2 -> 3"]
    assert changes(document((HERE, "2"), (OTHER, "9")), KEY, environment(HERE, "3"))[0] == "driver: 9 -> 3"


def test_a_reference_gathers_runs_of_this_card_until_it_has_its_own():
    for sessions, expected in (
        ([OTHER] * 5, True),
        ([OTHER] * 5 + [HERE] * 2, True),
        ([OTHER] * 5 + [HERE] * 3, True),
        ([HERE] * 5, False),
    ):
        assert stored.incomplete(lookup(document(*sessions), HERE), RULE) is expected
    assert not stored.incomplete(lookup(document(*[OTHER] * 2, *[HERE] * 5), HERE), RULE)
