"""The cases about stored numbers: files that are none, and recipes done to a good baseline."""

import pytest

from pytest_kvcache.core import baseline as stored
from pytest_kvcache.harness.baselines import load_baseline, save_baseline

from .baseline_case import RECIPE_TESTS, TESTS, WHERE, Bench, carried, do, found_of, put, read, said, with_alternatives
from .catalogue import EXACT, body, cases, problems

FILES, RECIPES = cases("baseline_file"), cases("baseline_recipe")


@pytest.mark.parametrize("case", FILES)
def test_case_file(case, tmp_path):
    assert not problems(with_alternatives(case), read(tmp_path, body(case)), TESTS, EXACT)


@pytest.mark.parametrize("case", [p for p in FILES if p.values[0]["expected"]["outcome"] == "ok"])
def test_case_what_is_harmless_in_a_file_is_so_in_a_good_baseline(case, tmp_path):
    good = stored.empty(*WHERE)
    text = save_baseline(tmp_path, good).read_text()
    put(tmp_path, carried(body(case), text))
    assert load_baseline(tmp_path, *WHERE) == good


def one_of_each_kind():
    """The first case of each class of error: how a session says it is the same for all of a class."""
    first = {}
    for p in FILES:
        first.setdefault(p.values[0]["expected"].get("error_class"), p)
    return [p for name, p in first.items() if name]


@pytest.mark.parametrize("case", one_of_each_kind())
def test_case_file_in_a_session(case, tmp_path):
    bench, content = Bench(tmp_path), body(case)
    path = put(tmp_path / "baselines", content)
    result = bench.project.run(report=False)
    assert result.code == 4, result.out
    assert result.log == [], "nothing is measured"
    assert " passed" not in result.out
    (line,) = (x.removeprefix("ERROR: ") for x in result.out.splitlines() if x.startswith("ERROR: "))
    assert path == bench.project.baseline
    found = said(line, path) | {"no_traceback": "Traceback" not in result.out, "file_unchanged": path.read_bytes() == content}
    assert not problems(with_alternatives(case), found, TESTS, EXACT)


def followed(steps, expected, folder):
    """What does not hold after the steps of a recipe."""
    bench = Bench(folder)
    for step in steps:
        do(bench, step)
    case = with_alternatives({"expected": expected})
    return problems(case, found_of(bench, expected), RECIPE_TESTS, EXACT)


@pytest.mark.parametrize("case", RECIPES)
def test_case_recipe(case, tmp_path):
    assert not followed(case["steps"], case["expected"], tmp_path)


@pytest.mark.parametrize(("steps", "expected"), [
    (["set the unit to 'W'"], {"outcome": "not_comparable", "never": ["pass", "regression"], "no_traceback": True}),
    (["delete the field 'workload'"], {"outcome": "error", "must_name_file": True, "file_unchanged": True}),
    (["save the baseline", "delete the baseline file"], {"outcome": "no_baseline", "exit_code": 0, "strict_exit_code_not": 0}),
    (["save the baseline"], {"outcome": "pass", "exit_code": 0}),
], ids=lambda v: v[-1] if isinstance(v, list) else "")  # fmt: skip
def test_the_steps_of_a_recipe_do_what_they_say(steps, expected, tmp_path):
    assert not followed([*steps, "run the comparison"], expected, tmp_path)


def test_a_step_or_a_field_that_is_not_known_fails(tmp_path):
    with pytest.raises(AssertionError, match="does not know the step 'shake the baseline'"):
        do(Bench(tmp_path), "shake the baseline")
    assert problems({"expected": {"outcome": "x"}}, {}, RECIPE_TESTS, EXACT) == [
        "outcome: this runner does not know the field, it expects 'x'"
    ]


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_answer_to_a_file_is_told_from_a_right_one(case, tmp_path):
    found = read(tmp_path, body(case))
    classes = {"unreadable", "non_finite_value", "bad_schema", "schema_unsupported"} - found["error_class"]
    wrong = [{"error_class": name} for name in classes] + [
        {"file_unchanged": False},
        {"no_traceback": False},
        {"hint_contains": "nothing of it"},
    ]
    assert all(problems({"expected": one}, found, TESTS, EXACT) for one in wrong)
