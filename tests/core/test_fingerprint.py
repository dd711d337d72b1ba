"""What changed between two environments, as lines."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.fingerprint import ALWAYS_DIFFERENT, differences, identity_differences

words = st.text("ab-1 ", max_size=6)
values = st.one_of(words, st.integers(), st.floats(allow_nan=False), st.booleans(), st.lists(words, max_size=5))
sections = st.dictionaries(st.sampled_from(["a", "b", "dist:torch", "server_argv", "date", "load_average"]), values)
prints = st.fixed_dictionaries({}, optional={"identity": sections, "subject": sections, "context": sections})


@given(prints)
def test_nothing_differs_from_itself(x: dict[str, Any]) -> None:
    assert differences(x, x) == [] == identity_differences(x, x)


@given(prints, prints)
def test_one_line_for_each_changed_key_and_none_for_the_others(x: dict[str, Any], y: dict[str, Any]) -> None:
    def changed(name: str) -> list[str]:
        a, b = x.get(name, {}), y.get(name, {})
        return sorted(k for k in {*a, *b} - ALWAYS_DIFFERENT if a.get(k) != b.get(k))

    expected = changed("subject") + changed("context")
    lines = differences(x, y)
    assert [line.partition(": ")[0] for line in lines] == expected
    assert len(identity_differences(x, y)) == len(changed("identity"))
    assert len(differences(y, x)) == len(lines)


def test_subjects_come_first_and_missing_values_are_absent() -> None:
    old = {"subject": {"dist:torch": "2.12.0", "env:OMP_NUM_THREADS": "2"}, "context": {"host": "a", "kernel": "6.1"}}
    new = {"subject": {"dist:torch": "2.13.0", "cpu_quota_cores": 1.5}, "context": {"host": "b", "kernel": "6.1"}}
    assert differences(old, new) == [
        "cpu_quota_cores: absent -> 1.5",
        "dist:torch: 2.12.0 -> 2.13.0",
        "env:OMP_NUM_THREADS: 2 -> absent",
        "host: a -> b",
    ]


def test_what_always_differs_and_the_identity_are_left_out() -> None:
    old = {"identity": {"gpu": "A"}, "context": dict.fromkeys(ALWAYS_DIFFERENT, "1")}
    new = {"identity": {"gpu": "B"}, "context": dict.fromkeys(ALWAYS_DIFFERENT, "2")}
    assert differences(old, new) == []
    assert identity_differences(old, new) == ["gpu: A -> B"]


def argv_change(old: list[str], new: list[str]) -> list[str]:
    return differences({"subject": {"server_argv": old}}, {"subject": {"server_argv": new}})


def test_an_option_changes_together_with_its_value() -> None:
    assert argv_change(["serve", "--batch", "4", "--eager"], ["serve", "--batch", "8", "--eager", "--seed", "-1"]) == [
        "server_argv: added --batch 8, --seed -1; removed --batch 4"
    ]
    assert argv_change(["--a", "--b"], ["--b", "--a"]) == ["server_argv: same words in another order"]
    assert argv_change(["--a", "--a"], ["--a"]) == ["server_argv: removed --a"]


def test_a_list_that_appears_is_shown_in_full() -> None:
    assert differences({}, {"subject": {"server_argv": ["serve", "--x"]}}) == ["server_argv: absent -> serve --x"]
