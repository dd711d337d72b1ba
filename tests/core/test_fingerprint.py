"""What changed between two environments, as lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.fingerprint import ALWAYS_DIFFERENT, SHOWN, differences, identity_differences

words = st.text("ab-1 ", max_size=6)
values = st.one_of(words, st.integers(), st.floats(allow_nan=False), st.booleans(), st.lists(words, max_size=5))
KEYS = ["a", "b", "dist:torch", "dist:nvidia-x", "driver", "server_argv", "resolved:x", "env:A", "date", "load_average"]
sections = st.dictionaries(st.sampled_from(KEYS), values)
prints = st.fixed_dictionaries({}, optional={"identity": sections, "subject": sections, "context": sections})

# Whatever JSON can hold, also where a section belongs: files of another version, or mended by hand.
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=200))
plain = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8
)
open_sections = st.dictionaries(st.sampled_from([*KEYS, "framework", "x\ny", ""]) | st.text(max_size=8), plain, max_size=5)
anything = plain | st.dictionaries(st.sampled_from(["identity", "subject", "context", "more"]), open_sections | plain)


@given(prints)
def test_nothing_differs_from_itself(x: dict[str, Any]) -> None:
    assert differences(x, x) == [] == identity_differences(x, x)


@given(anything, anything)
def test_any_two_files_give_lines_and_never_a_traceback(x: Any, y: Any) -> None:
    for find in (differences, identity_differences):
        assert find(x, x) == []
        assert find(json.loads(json.dumps(x)), x) == []
        lines, back = find(x, y), find(y, x)
        assert len(lines) == len(back), "what differs one way differs the other way"
        assert all(line.isprintable() for line in lines), "one line each"
        assert all(old != new for old, sep, new in (line.partition(": ")[2].partition(" -> ") for line in lines) if sep)


@given(prints, prints)
def test_one_line_for_each_changed_key_and_none_for_the_others(x: dict[str, Any], y: dict[str, Any]) -> None:
    def changed(name: str) -> set[str]:
        a, b = x.get(name, {}), y.get(name, {})
        return {
            k for k in {*a, *b} - ALWAYS_DIFFERENT if a.get(k) != b.get(k) or isinstance(a.get(k), bool) is not isinstance(b.get(k), bool)
        }

    def named(lines: list[str]) -> set[str]:
        return {next(k for k in KEYS if line.startswith(k + ": ")) for line in lines}

    lines, subjects = differences(x, y), len(changed("subject"))
    assert named(lines[:subjects]) == changed("subject")
    assert named(lines[subjects:]) == changed("context")
    assert len(lines) == subjects + len(changed("context"))
    assert len(identity_differences(x, y)) == len(changed("identity"))


def test_subjects_come_first_and_missing_values_are_absent() -> None:
    old = {"subject": {"dist:torch": "2.12.0", "env:OMP_NUM_THREADS": "2"}, "context": {"host": "a", "kernel": "6.1"}}
    new = {"subject": {"dist:torch": "2.13.0", "cpu_quota_cores": 1.5}, "context": {"host": "b", "kernel": "6.1"}}
    assert differences(old, new) == [
        "dist:torch: 2.12.0 -> 2.13.0",
        "cpu_quota_cores: absent -> 1.5",
        "env:OMP_NUM_THREADS: 2 -> absent",
        "host: a -> b",
    ]


ORDER = [
    *("dist:vllm", "dist:torch", "cuda_driver", "driver", "resolved:attention_backend", "server_argv"),
    *("dist:numpy", "python", "cpus_allowed", "env:OMP_NUM_THREADS", "gpu_vbios", "dist:nvidia-nccl-cu13"),
]


@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)])
def test_the_framework_comes_before_what_it_depends_on_and_both_before_the_rest(sides: tuple[bool, bool]) -> None:
    def side(value: str, named: bool) -> dict[str, Any]:
        return {"subject": {**dict.fromkeys(reversed(ORDER), value), **({"framework": ["vllm", "torch"]} if named else {})}}

    lines = differences(side("1", sides[0]), side("2", sides[1]))
    assert [line.partition(": ")[0] for line in lines] == ORDER


def test_a_framework_that_nobody_names_is_a_distribution_among_others() -> None:
    old, new = ({"subject": {"dist:a": v, "driver": v, "framework": 7}} for v in "12")
    assert [line.partition(": ")[0] for line in differences(old, new)] == ["driver", "dist:a"]


def test_what_always_differs_and_the_identity_are_left_out() -> None:
    old = {"identity": {"gpu": "A"}, "context": dict.fromkeys(ALWAYS_DIFFERENT, "1")}
    new = {"identity": {"gpu": "B"}, "context": dict.fromkeys(ALWAYS_DIFFERENT, "2")}
    assert differences(old, new) == []
    assert identity_differences(old, new) == ["gpu: A -> B"]


@pytest.mark.parametrize("part", [{}, {"mig": "1g.18gb"}, {"mig": "unknown"}])
def test_a_slice_is_another_thing_than_its_card(part: dict[str, str]) -> None:
    whole = {"identity": {"gpu": "NVIDIA H200"}}
    assert bool(identity_differences(whole, {"identity": {"gpu": "NVIDIA H200", **part}})) == bool(part)


def test_another_card_of_the_model_is_shown_and_the_link_that_shrank() -> None:
    old = {"context": {"gpu_uuids": ["GPU-a"], "gpu_pcie_width": 16}}
    new = {"context": {"gpu_uuids": ["GPU-b"], "gpu_pcie_width": 8}}
    assert differences(old, new) == ["gpu_pcie_width: 16 -> 8", "gpu_uuids: added GPU-b; removed GPU-a"]


def argv_change(old: list[Any], new: list[Any]) -> list[str]:
    return differences({"subject": {"server_argv": old}}, {"subject": {"server_argv": new}})


def test_an_option_changes_together_with_its_value() -> None:
    assert argv_change(["serve", "--batch", "4", "--eager"], ["serve", "--batch", "8", "--eager", "--seed", "-1"]) == [
        "server_argv: added --batch 8, --seed -1; removed --batch 4"
    ]
    assert argv_change(["--a", "--b"], ["--b", "--a"]) == ["server_argv: same words in another order"]
    assert argv_change(["--a", "--a"], ["--a"]) == ["server_argv: removed --a"]
    assert argv_change([1], ["1"]) == ['server_argv: [1] -> ["1"]']


def test_a_list_that_appears_is_shown_in_full() -> None:
    assert differences({}, {"subject": {"server_argv": ["serve", "--x"]}}) == ["server_argv: absent -> serve --x"]


def change(old: Any, new: Any) -> str:
    (line,) = differences({"subject": {"k": old}}, {"subject": {"k": new}})
    return line


def test_long_values_are_cut_around_what_differs() -> None:
    common = "x" * 500
    line = change(common + "old" + common, common + "new" + common)
    assert line == f"k: …{'x' * 12}old{'x' * 65}… -> …{'x' * 12}new{'x' * 65}…"
    assert change("a" * SHOWN, "b") == f"k: {'a' * SHOWN} -> b"
    assert change(common, common + "y") == f"k: …{'x' * 12} -> …{'x' * 12}y"


def test_a_long_option_that_changed_inside_is_cut_around_it() -> None:
    old, new = (["--config", '{"sizes": [' + "1, " * 100 + f'{n}], "z": 1' + "}"] for n in (7, 8))
    (line,) = argv_change(old, new)
    assert line == 'server_argv: added --config …1, 1, 1, 1, 8], "z": 1}; removed --config …1, 1, 1, 1, 7], "z": 1}'


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (1, "1", 'k: 1 -> "1"'),
        (True, 1, "k: true -> 1"),
        (None, "absent", 'k: null -> "absent"'),
        ("a b", "a\nb", "k: a b -> a\\nb"),
        ("a", "a\u200b", "k: a -> a\\u200b"),
        ({"x": 1}, {"x": 2}, 'k: {"x": 1} -> {"x": 2}'),
        (["a"], "a", 'k: ["a"] -> "a"'),
        (1.0, 2, "k: 1.0 -> 2"),
    ],
)
def test_values_that_differ_look_different(old: Any, new: Any, line: str) -> None:
    assert change(old, new) == line


def test_a_whole_number_is_the_same_number_as_a_float() -> None:
    assert differences({"subject": {"k": 700}}, {"subject": {"k": 700.0}}) == []
