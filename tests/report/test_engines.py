"""Several engines of one session in one table, on the terminal and in the report."""

import re

import pytest

from pytest_kvcache.report import engines, terminal
from pytest_kvcache.report.html import render
from pytest_kvcache.report.terminal import plain

from .test_html import TPOT, make_run, make_verdict

OSL = "fixed_length/isl128-osl32-c1/base"


def of(engine, value=40.0, **more):
    """A gate of an engine, `framework/model`."""
    return make_verdict(block=f"{engine}/base", value=value, **more)


def table(*verdicts):
    names, rows = engines.table(verdicts)
    return names, [(key, [plain(cell) for cell in cells]) for key, cells in rows]


@pytest.mark.parametrize(("found", "names"), [
    (["vllm/m", "sglang/m"], ["sglang", "vllm"]), (["vllm/b", "vllm/a"], ["a", "b"]), (["vllm/a", "sglang/b"], ["sglang/b", "vllm/a"]),
    (["vllm/a", "vllm/b", "sglang/a"], ["sglang/a", "vllm/a", "vllm/b"]),
])  # fmt: skip
def test_engines_are_called_by_what_they_differ_in(found, names):
    assert table(*map(of, found))[0] == names


@pytest.mark.parametrize(("verdicts", "rows"), [
    ([of("vllm/m", 50.0), of("sglang/m", 40.0)], [(f"{OSL}/output_tok_s", ["40.0 tok/s", "50.0 tok/s (+25.0 %)"])]),
    ([of("a/m"), of("b/m", None)], []), ([of("a/m", None), of("b/m")], []),
    ([of("a/m"), of("b/m"), of("a/m", 20.0, **{k: TPOT[k] for k in ("metric", "unit", "better")})],
     [(f"{OSL}/output_tok_s", ["40.0 tok/s", "40.0 tok/s (0.0 %)"])]),
    ([of("a/m"), of("b/m", 0.0), of("c/m", 80.0)], [(f"{OSL}/output_tok_s", ["40.0 tok/s", "0 tok/s (-100 %)", "80.0 tok/s (+100 %)"])]),
    ([of("a/m", 0.0), of("b/m", 8.0)], [(f"{OSL}/output_tok_s", ["0 tok/s", "8.00 tok/s"])]),
    ([of("a/m", None), of("b/m", 40.0), of("c/m", 80.0)], [(f"{OSL}/output_tok_s", ["", "40.0 tok/s", "80.0 tok/s (+100 %)"])]),
    ([of("a/m", against="half"), of("b/m", against="half")], []),
    ([of("a/m"), of("b/m", scenario="isl64-osl8-c1")], []),
    ([of("a/m"), of("a/m", 20.0, scenario="isl64-osl8-c1")], []), ([], []),
], ids=[
    "two", "one has no value", "the first has none", "a claim of one only", "a zero", "a first of zero", "the first has none of three", "arms against each other",
    "nothing shared", "one engine", "none",
])  # fmt: skip
def test_a_claim_that_several_have_is_a_row_with_the_difference_to_the_first(verdicts, rows):
    found = table(*verdicts)
    assert found[1] == rows
    assert bool(found[0]) is bool(rows), "no names without a row"


def test_the_terminal_has_one_aligned_table_and_names_the_engine_of_each_gate():
    verdicts = [of("vllm/m", 50.0), of("sglang/m", 40.0)]
    head, names, row = terminal.side_by_side(verdicts)
    assert head.startswith("engines side by side (") and "no verdict" in head
    assert names.split() == ["sglang", "vllm"] and row.split()[0] == f"{OSL}/output_tok_s"
    assert row.index("50.0") == names.index("vllm") and row.index("40.0") == names.index("sglang")
    assert {re.search(r"(\w+): " + OSL, line)[1] for colour, line in terminal.summary(verdicts) if colour} == {"sglang", "vllm"}


def test_the_name_of_a_model_stays_inside_its_line():
    """It is that of a folder, which may be called anything."""
    verdicts = [of("vllm/\x1b[2Km\npass  forged"), of("vllm/n")]
    lines = terminal.side_by_side(verdicts)
    assert len(lines) == 3 and all(line.isprintable() for line in lines)


def test_one_engine_has_no_table_and_no_name():
    verdicts = [of("vllm/m"), of("vllm/m", scenario="isl64-osl8-c1")]
    assert terminal.side_by_side(verdicts) == []
    assert not any("vllm" in line for _, line in terminal.summary(verdicts))
    assert "Engines side by side" not in render(make_run(verdicts)) and "#engines" not in render(make_run(verdicts))


@pytest.mark.parametrize("found", [["vllm/m", "sglang/m"], ["vllm/a", "vllm/b"]])
def test_the_report_has_a_section_that_the_navigation_leads_to(found):
    page = render(make_run([of(found[0], 50.0), of(found[1], 40.0)]))
    section = page.partition('<section id="engines">')[2].partition("</section>")[0]
    assert '<a href="#engines">' in page and "Engines side by side" in section
    names, ((key, cells),) = engines.table([of(found[0], 50.0), of(found[1], 40.0)])
    assert re.findall(r'<th scope="col">(.*?)</th>', section) == names
    assert f'<th scope="row" class="name">{key}</th>' in section and re.findall("<td>(.*?)</td>", section) == cells
