"""What differs between two builds, and the plan that measures them in turns."""

import dataclasses

import pytest

from pytest_kvcache.core.builds import changes, distributions
from pytest_kvcache.core.plan import Wanted, block_id, gate_specs, make_plan, on_two_builds
from pytest_kvcache.core.scenarios import ClosedLoop, OpenLoop
from pytest_kvcache.core.spec import BASE, OTHER, Arm, Gate, SpecError

OLD = {"python": "3.11.7", "distributions": {"torch": "2.12.0", "gone": "1", "transformers": "5.23.0", "same": "1"}}
NEW = {"python": "3.12.1", "distributions": {"torch": "2.13.0", "come": "2@abc", "transformers": "5.24.0", "same": "1"}}


def test_every_distribution_that_differs_is_told_the_interpreter_and_the_framework_first():
    assert distributions(OLD, NEW, ("transformers", "torch")) == [
        "python: 3.11.7 -> 3.12.1", "transformers: 5.23.0 -> 5.24.0", "torch: 2.12.0 -> 2.13.0", "come: absent -> 2@abc", "gone: 1 -> absent",
    ]  # fmt: skip
    assert distributions(NEW, NEW) == []


def test_the_other_builds_environment_is_compared_with_what_its_own_servers_resolved():
    arms = (Arm(), Arm(name=f"base.{OTHER}", build=OTHER), Arm(name="int8"), Arm(name=f"int8.{OTHER}", build=OTHER))
    own = {"subject": {
        "dist:torch": "2.13.0", "resolved:backend": "FLASH", f"resolved:base.{OTHER}:backend": "EAGER", "resolved:int8:block_size": 16,
        f"resolved:int8.{OTHER}:block_size": 16,
    }}  # fmt: skip
    assert changes({"subject": {"dist:torch": "2.12.0"}}, own, arms) == ["resolved:backend: EAGER -> FLASH", "dist:torch: 2.12.0 -> 2.13.0"]


def want(*gates, arms=BASE):
    return Wanted(framework="f", model="m", family="s", scenario=ClosedLoop(isl=8, osl=4, concurrency=4, arms=arms), gates=gates)


def test_on_two_builds_each_gate_is_against_the_other_and_asks_no_baseline():
    pair = on_two_builds(want(Gate("output_tok_s"), Gate("tpot_ms.p50", margin=0.05, floor=0.2)))
    assert [(a.name, a.build) for a in pair.scenario.arms] == [("base", ""), ("base.other", OTHER)]
    found = {s.key: (s.arm, s.against, s.margin, s.floor) for s in gate_specs(pair, 0.15)}
    assert found == {
        "s/isl8-osl4-c4/base/output_tok_s": ("base", "base.other", 0.03, 0.0),
        "s/isl8-osl4-c4/base/tpot_ms.p50": ("base", "base.other", 0.05, 0.2),
    }
    assert block_id(pair) == "f/m/base+base.other"


def test_arms_of_a_test_are_paired_each_with_itself_and_their_own_claims_stay():
    two = (Arm(name="a"), Arm(name="b", block_size=8))
    pair = on_two_builds(want(Gate("output_tok_s"), Gate("tpot_ms.p50", arm="b", against="a", at_least=1.1), arms=two))
    assert {(s.key.split("/")[2], s.arm, s.against) for s in gate_specs(pair, 0.15)} == {
        ("a", "a", "a.other"), ("b", "b", "b.other"), ("b-vs-a", "b", "a"),
    }  # fmt: skip


def test_servers_live_side_by_side_only_where_two_arms_are_compared_and_the_device_holds_both():
    pair, four = want(Gate("output_tok_s", arm="a", against="b"), arms=(Arm(name="a"), Arm(name="b"))), (Arm(name=n) for n in "abcd")
    (block,) = make_plan([pair], 0.15, side_by_side=True)
    assert block.together
    assert {a.memory_share for a in block.arms} == {0.25}
    assert block.id == block_id(pair), "what the plan adds is no part of an arm's name"
    (block,) = make_plan([pair], 0.15)
    assert (block.together, {a.memory_share for a in block.arms}) == (False, {1.0})
    many = want(Gate("output_tok_s", arm="a", against="b"), arms=tuple(four))
    assert not make_plan([many], 0.15, side_by_side=True)[0].together
    beside = want(Gate("output_tok_s", arm="a", against="b"), Gate("req_s"), arms=(Arm(name="a"), Arm(name="b")))
    assert not make_plan([beside], 0.15, side_by_side=True)[0].together, "a baseline's number is measured alike in every session"
    scenario = OpenLoop(isl=8, osl=4, rate=4, arms=(Arm(name="a"), Arm(name="b")))
    queue = dataclasses.replace(pair, scenario=scenario)
    assert not make_plan([queue], 0.15, side_by_side=True)[0].together, "bursts build up no queue"
    alone = want(Gate("output_tok_s"), arms=(Arm(name="a"), Arm(name="b")))
    assert not make_plan([alone], 0.15, side_by_side=True)[0].together


def test_what_the_plan_sets_of_an_arm_is_not_what_the_arm_asks_for():
    assert Arm(name=f"base.{OTHER}", build=OTHER, memory_share=0.25).asked() == {}


def test_a_gate_of_one_arm_is_no_gate_of_the_others():
    specs = gate_specs(want(Gate("output_tok_s", arm="b"), Gate("req_s"), arms=(Arm(name="a"), Arm(name="b"))), 0.05)
    assert {s.key.split("/", 2)[2] for s in specs} == {"b/output_tok_s", "a/req_s", "b/req_s"}


@pytest.mark.parametrize(("gate", "words"), [
    ({"against": "a"}, "needs arm=NAME"), ({"arm": "a", "against": "a"}, "needs arm=NAME"), ({"at_least": 1.2}, "goes with arm and against"),
    ({"arm": "a", "against": "b", "at_least": 1.2, "margin": 0.1}, "without margin"),
    ({"arm": "a", "against": "b", "at_least": 1.2, "floor": 1.0}, "without margin or floor"),
    ({"arm": "a", "against": "b", "at_least": 0.0}, "must be a factor"), ({"arm": "a", "against": "b", "at_least": float("nan")}, "must be a factor"),
    ({"arm": "a", "against": "b", "at_least": True}, "must be a factor"),
])  # fmt: skip
def test_a_gate_between_arms_that_says_nothing_is_refused(gate, words):
    with pytest.raises(SpecError, match=words):
        Gate("output_tok_s", **gate)


def test_two_tests_that_claim_different_gains_are_refused():
    arms = (Arm(name="a"), Arm(name="b"))
    asked = [want(Gate("output_tok_s", arm="b", against="a", at_least=g), arms=arms) for g in (1.1, 1.2)]
    with pytest.raises(SpecError, match=r"two tests claim it, one with at_least=1.1, one with at_least=1.2"):
        make_plan(asked, 0.05)


def test_no_arm_of_a_test_is_named_as_the_other_build_is():
    with pytest.raises(SpecError, match="that of the other build of --kv-ab"):
        Arm(name="a.other")
