"""Quality of precisions in the report and in the terminal, on made-up scores: what it says, and that nothing odd breaks it."""

from __future__ import annotations

import copy
import html.parser
import importlib.resources
import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pytest_kvcache.report import trade
from pytest_kvcache.report.html import render
from pytest_kvcache.report.numbers import MINUS, NONE, THIN
from pytest_kvcache.report.quality_text import quality_table
from pytest_kvcache.report.trade import Level, Point

Plain = dict[str, Any]
BLOCK = "transformers/m/text:fp16+fp8+int8+int4"
LOAD = "transformers/m/load:fp16+int8"
SCENARIO = "text-w512-s512-f257-anybos-r32-n8"
KLD = {"fp16": 0.0, "fp8": 0.0131, "int8": 0.004, "int4": 0.049}
BYTES = {"fp16": 23040, "fp8": 11520, "int8": 12240, "int4": 6480}
EVIL = "<script>alert(1)</script>\x1b[2K\r{{ 7*7 }}\u202e]]></svg>\npass  forged"
CONTROLS = {
    "floor": {"ppl": [11.0, 0.1], "ppl_ratio": [1.0002, 1e-4], "kld.mean": [0.0037, 2e-4], "kld.p99": [0.02, None], "top1": [0.978, 0.002]},
    "negative": {"ppl": [25.4, 1.0], "ppl_ratio": [2.31, 0.1], "kld.mean": [1.71, 0.1], "kld.p99": [6.1, None], "top1": [0.42, 0.01]},
}


def make_text(arm: str, /, **more: Any) -> Plain:
    """A scored text; of the reference no divergence is stored."""
    k, reference = KLD[arm], arm == "fp16"
    metrics = {"ppl": 11 * (1 + k / 3), "ppl_ratio": 1 + k / 3, "top1": 1 - k}
    metrics |= {} if reference else {"kld.mean": k, "kld.p99": 9 * k, "kld.p999": 20 * k}
    load = {
        "corpus": "pydoc_topics", "corpus_hash": "c0ffee" * 10, "scheme": "w512-s512-f257-anybos-r32", "reads_back": True, "windows": 8,
        "seconds": 1.0, "cache_bytes": 512 * BYTES[arm], **({} if reference else {"controls": CONTROLS, "precision": f"kv_dtype={arm}"}),
    }  # fmt: skip
    return {
        "scenario": SCENARIO, "arm": arm, "run": 1, "valid": True, "invalid": None, "metrics": metrics,
        "bounds": {name: [0.87 * v, 1.14 * v] for name, v in metrics.items()}, "requests": 2048, "failed": 0,
        "load": load, "canary": None, **more,
    }  # fmt: skip


def make_gate(arm: str, metric: str, limit: float | None, word: str = "pass", /, **more: Any) -> Plain:
    """A gate on a limit; without one on a baseline of 0.003 nats."""
    value, against = make_text(arm)["metrics"][metric], limit or 0.003
    v: Plain = {
        "test": "t", "block": BLOCK, "family": "precision", "scenario": SCENARIO, "arm": arm, "metric": metric,
        "unit": "nats" if metric.startswith("kld") else "", "better": "higher" if metric == "top1" else "lower", "verdict": word,
        "outcome": "failed" if word == "regression" else "passed", "reason": "", "value": value, "baseline": against,
        "change": value / against - 1, "low": limit and 0.87 * value / limit - 1, "high": limit and 1.14 * value / limit - 1,
        "margin": 0.0 if limit else 0.25, "runs": [value], "baseline_runs": [] if limit else [0.003], "p_seq": None, "cure": None,
        "changed": [], "notes": [], "moved_with": [], "more_runs": None, "certifiable": None, **({"limit": limit} if limit else {}), **more,
    }  # fmt: skip
    return {"key": f"precision/{SCENARIO}/{arm}{'-limit' if limit else ''}/{metric}", **v}


def make_load(arm: str, /, **more: Any) -> Plain:
    """A gate of a load of the same engine."""
    v = make_gate("int8", "kld.mean", None, block=LOAD, family="load", scenario="isl128-osl32-c1", metric="output_tok_s", unit="tok/s")
    v |= {
        "key": f"load/isl128-osl32-c1/{arm}/output_tok_s",
        "arm": arm,
        "better": "higher",
        "value": 38.1,
        "baseline": 40.2,
        "change": -0.05,
    }
    return v | {"runs": [38.0, 38.1, 38.2], "baseline_runs": [40.2] * 3, **more}


def make_run(measurements: list[Plain] | None = None, verdicts: list[Plain] | None = None) -> Plain:
    block = {"complete": True, "error": None, "server_start_s": [], "spent_s": {}, "evidence": {}, "broken": []}
    measured = [make_text(a) for a in ("int8", "fp16", "fp8", "int4")] if measurements is None else measurements
    gates = [make_gate("int8", "kld.mean", 0.015), make_gate("int8", "ppl_ratio", 1.005), make_gate("int8", "top1", 0.93)]
    return {
        "schema": "pytest-kvcache/run/1", "complete": True, "interrupted": None, "session": "20261129-203700-ab12",
        "started": "2026-11-29T20:37:00Z", "seconds": 231.4, "command": "pytest suites", "exit_code": 0, "plugin": "0.1.0", "gpu": "cpu",
        "profile": "ci", "plan": {"blocks": []}, "environments": {}, "expected_false_alarms": 0.0,
        "blocks": {BLOCK: block | {"measurements": measured}}, "traces": [], "files": {}, "verdicts": gates if verdicts is None else verdicts,
    }  # fmt: skip


class Page(html.parser.HTMLParser):
    """The visible text of a page, each cell and line by itself; tags must close in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] not in ("style", "title", "desc"):
            self.cells.append(data.strip())


def section(run: Plain) -> str:
    """The part of the page that is about texts; empty without it."""
    found = re.search(r'<section id="quality">.*?</section>', render(run), re.DOTALL)
    return found[0] if found else ""


def rows(run: Plain) -> dict[str, list[str]]:
    """By the name of an arm or a control, the lines of its row."""
    table = re.search(r'<table class="gates quality">.*?</table>', section(run), re.DOTALL)
    assert table
    found = [Page(row).cells for row in re.findall(r"<tr>.*?</tr>", table[0], re.DOTALL)]
    return {cells[0]: cells[1:] for cells in found}


def check(run: Plain) -> None:
    """What holds for any run."""
    source = render(run)
    assert Page(source).open == []
    assert not re.search(r"\b(None|nan|inf|Undefined)\b", " ".join(Page(source).cells))
    for svg in re.findall(r"<svg.*?</svg>", source, re.DOTALL):
        ET.fromstring(svg)
    assert all(line.isprintable() for line in quality_table([b | {"id": k} for k, b in run["blocks"].items()]))


def test_without_a_text_there_is_no_section() -> None:
    assert section(make_run([], [make_load("int8")])) == ""
    assert quality_table([{"id": BLOCK, "measurements": []}]) == []


def test_the_run_is_one_that_the_schema_takes() -> None:
    schema = json.loads(importlib.resources.files("pytest_kvcache.schemas").joinpath("run.schema.json").read_text("utf-8"))
    assert [e.message for e in jsonschema.Draft202012Validator(schema).iter_errors(make_run())] == []
    check(make_run())


def test_the_reference_stands_first_and_the_controls_last() -> None:
    names = list(rows(make_run()))
    assert names[1:] == ["fp16", "int8", "fp8", "int4", "16 bits in one pass", "a cache made worse on purpose"]


def test_a_row_has_figures_interval_limits_and_size() -> None:
    found = rows(make_run())
    assert found["int8"] == [
        "11.01", "1.0013", "limit 1.005", "0.00400", "0.00348 to 0.00456", "limit 0.015", "0.0360", "0.0800", f"99.60{THIN}%",
        f"limit 93{THIN}%", f"12{THIN}240", "1.88×", f"87{THIN}724",
    ]  # fmt: skip
    assert found["fp16"] == ["the reference", "11.00", "1.0000", NONE, NONE, NONE, f"100.0{THIN}%", f"23{THIN}040", NONE, f"46{THIN}603"]
    assert found["a cache made worse on purpose"] == ["25.40", "2.3100", "1.71", "6.10", NONE, f"42.00{THIN}%", NONE, NONE, NONE]


def test_the_glyph_beside_a_figure_is_its_limit_s_and_drift_is_told_where_it_is_no_pass() -> None:
    gates = [make_gate("int8", "kld.mean", 0.015), make_gate("int8", "kld.mean", None, "regression"), make_gate("fp8", "kld.mean", None)]
    row = re.search(r">int8<.*?</tr>", section(make_run(verdicts=gates)), re.DOTALL)
    assert row
    assert row[0].count("v-pass") == 2 and "v-pass" in row[0][: row[0].index("0.00400")], "the span and the shape in it"
    assert f"33.3{THIN}% worse" in row[0]
    assert "worse" not in " ".join(rows(make_run(verdicts=gates))["fp8"])


def test_what_was_scored_stands_above_and_a_part_of_the_vocabulary_is_said() -> None:
    run = make_run()
    text = " ".join(Page(section(run)).cells)
    assert f"pydoc_topics (c0ffeec0ffee) Scheme w512-s512-f257-anybos-r32 Tokens scored 2{THIN}048 in 8 windows" in text
    assert "a lower bound" not in text
    for m in run["blocks"][BLOCK]["measurements"]:
        m["load"]["kld"] = "of the 64 likeliest tokens, the rest as one: a lower bound"
    assert "KLD of the 64 likeliest tokens, the rest as one: a lower bound." in Page(section(run)).cells
    assert "KLD of the 64 likeliest tokens" in quality_table([run["blocks"][BLOCK] | {"id": BLOCK}])[-1]


def test_speed_comes_from_gates_of_a_load_with_arms_of_the_same_names() -> None:
    run = make_run(verdicts=[make_load("int8", against="fp16"), make_load("int3"), make_load("fp8", verdict="invalid")])
    found = rows(run)
    assert (found["int8"][-1], found["fp16"][-1], found["fp8"][-1], found["16 bits in one pass"][-1]) == ("38.1", "40.2", NONE, NONE)
    assert "Speed: arms of the same names under load/isl128-osl32-c1." in Page(section(run)).cells
    assert "output tok/s" not in section(make_run(verdicts=[make_load("int8", block="vllm/m/load")])), "another engine's"


def test_what_servers_of_the_same_engine_hold_stands_in_the_same_row() -> None:
    run = make_run()
    assert "Tokens of<br>its pool" not in section(run)
    for block, tokens in ((BLOCK.replace("text:", "capacity:"), 11_212_352), ("vllm/m/capacity:fp16+int8", 7)):
        held = make_text("int8", scenario="capacity-isl448-osl16", metrics={"kv_tokens": float(tokens)})
        del held["bounds"], held["load"]["scheme"]
        run["blocks"][block] = run["blocks"][BLOCK] | {"measurements": [held, held | {"arm": "int4", "valid": False}]}
    found = rows(run)
    assert [found[name][-1] for name in ("int8", "fp16", "int4", "16 bits in one pass")] == [f"11{THIN}212{THIN}352", NONE, NONE, NONE]
    check(run)


def test_bytes_that_a_text_does_not_know_are_those_that_the_server_tells() -> None:
    run = make_run()
    for m in run["blocks"][BLOCK]["measurements"]:
        if m["arm"] != "fp8":
            m["load"]["cache_bytes"] = None
    sizes = {"fp16": 23040.0, "fp8": 1.0, "int8": 12247.0}
    held = [
        make_text(arm, scenario="capacity-isl448-osl16", metrics={"kv_tokens": 512.0, "kv_bytes_per_token": size})
        for arm, size in sizes.items()
    ]
    for one in held:
        del one["bounds"], one["load"]["scheme"]
    run["blocks"][BLOCK.replace("text:", "capacity:")] = run["blocks"][BLOCK] | {"measurements": held}
    found = rows(run)
    assert found["int8"][-4:] == [f"12{THIN}247", "1.88×", f"87{THIN}673", "512"]
    assert found["fp8"][-4] == f"11{THIN}520" and found["int4"][-4:] == [NONE] * 4, "its own are its own"
    check(run)


def test_an_arm_that_does_not_count_says_why_and_has_no_place_in_the_picture() -> None:
    bad = make_text("int4", valid=False, invalid="the probe does not see the cache\nmore", metrics={}, bounds={})
    run = make_run([make_text("fp16"), make_text("int8"), bad])
    cells = Page(section(run)).cells
    assert rows(run)["int4"][:3] == ["invalid", NONE, NONE]
    assert "the probe does not see the cache\nmore" in cells
    assert "Without a place here: int4" in cells
    assert any(
        re.search(r"int4 .*  invalid: the probe does not see the cache$", x) for x in quality_table([run["blocks"][BLOCK] | {"id": BLOCK}])
    )


def test_a_limit_reads_as_one_everywhere() -> None:
    worse = make_gate("int4", "kld.mean", 0.03, "regression", reason="the limit is 0.03")
    source = render(make_run(verdicts=[make_gate("int8", "top1", 0.93), worse]))
    cells = Page(source).cells
    assert f"limit 0.03{THIN}nats" in cells and "limit 0.93" in cells
    assert f"63.3{THIN}% above the limit" in cells and f"63.3{THIN}% above" in cells
    assert f"0.0426 to 0.0559{THIN}nats" in cells and f"7.1{THIN}% above" in cells
    assert "What changed since the baseline" not in source
    assert not re.search('class="(forest|strip)"|id="picture"|href="#picture"', source), "it is no change, and has no runs"
    assert "kld.mean.v1 = KL(reference || arm), whole vocabulary, mean of the scored tokens" in cells


def test_a_drift_of_one_run_against_one_is_in_the_forest_and_has_no_strip() -> None:
    source = render(make_run(verdicts=[make_gate("int8", "kld.mean", None), make_gate("int8", "kld.mean", 0.015), make_load("int8")]))
    forest = re.search(r'<svg class="forest".*?</svg>', source)
    assert forest and forest[0].count("<title>") == 2
    assert source.count('class="strip"') == 1


def test_the_terminal_s_table() -> None:
    assert quality_table([make_run()["blocks"][BLOCK] | {"id": BLOCK}]) == [
        "text-w512-s512-f257-anybos-r32-n8 (pydoc_topics, 8 windows, 2 048 tokens scored)",
        "  arm                              ppl   ratio  mean KLD     P99  same top token  bytes/token",
        "  fp16                           11.00  1.0000         -       -         100.0 %       23 040",
        "  int8                           11.01  1.0013   0.00400  0.0360         99.60 %       12 240",
        "  fp8                            11.05  1.0044    0.0131   0.118         98.69 %       11 520",
        "  int4                           11.18  1.0163    0.0490   0.441         95.10 %        6 480",
        "  16 bits in one pass            11.00  1.0002   0.00370  0.0200         97.80 %            -",
        "  a cache made worse on purpose  25.40  2.3100      1.71    6.10         42.00 %            -",
    ]


def test_several_engines_are_named_in_the_terminal() -> None:
    block = make_run()["blocks"][BLOCK]
    heads = [line for line in quality_table([block | {"id": BLOCK}, block | {"id": "vllm/m/text:fp16"}]) if not line.startswith(" ")]
    assert [h.partition(": ")[0] for h in heads] == ["transformers/m", "vllm/m"]


def test_markup_in_names_is_shown_and_never_obeyed() -> None:
    bad = [make_text(a) | {"arm": a + EVIL, "scenario": SCENARIO + EVIL} for a in KLD]
    for m in bad:
        m["load"] |= {"corpus": EVIL, "scheme": "w512-" + EVIL, "kld": EVIL, "precision": EVIL}
    run = make_run([*bad, make_text("int4", valid=False, invalid=EVIL, arm=EVIL)], [make_gate("int8", "kld.mean", 0.01, arm="int8" + EVIL)])
    check(run)
    assert not re.search("<script|[\x1b\u202e]", render(run))


odd = st.one_of(
    st.none(), st.floats(), st.integers(), st.just(10**400), st.just(""), st.text(max_size=5), st.lists(st.none() | st.floats(), max_size=4),
    st.dictionaries(st.sampled_from(["floor", "negative", "kld.mean", "x"]), st.none() | st.floats() | st.lists(st.floats(), max_size=2), max_size=3),
)  # fmt: skip
number = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 5e-324, 1e300, -1.0, 0.01])


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_odd_values_break_nothing(data: st.DataObject) -> None:
    measured = [make_text(a) for a in KLD]
    for m in measured:
        for name in data.draw(
            st.lists(st.sampled_from(["controls", "cache_bytes", "scheme", "corpus", "kld", "windows", "precision"]), unique=True)
        ):
            m["load"][name] = data.draw(odd)
        for name in data.draw(st.lists(st.sampled_from(list(m["metrics"])), unique=True)):
            m["metrics"][name] = data.draw(number)
            m["bounds"][name] = data.draw(st.lists(number, min_size=2, max_size=2))
        m["requests"] = data.draw(st.none() | st.integers(0))
    gates = [make_gate("int8", "kld.mean", 0.015, "inconclusive"), make_gate("int4", "top1", 0.9), make_gate("int4", "kld.mean", None)]
    for v in gates:
        for name in data.draw(st.lists(st.sampled_from(["value", "change", "low", "high", "baseline"]), unique=True)):
            v[name] = data.draw(number)
    before = copy.deepcopy(measured)
    check(make_run(measured, gates))
    assert repr(measured) == repr(before)


Box = tuple[float, float, float, float]


def texts_in(svg: str) -> list[Box]:
    """The least room that each text inside the frame takes."""
    found = []
    for x, y, kind, anchor, words in re.findall(r'<text x="(\S+)" y="(\S+)" class="([^"]*)" text-anchor="(\w+)">([^<]*)</text>', svg):
        if kind in ("name", "tick"):
            width = 6.0 * len(words)
            left = float(x) - (width if anchor == "end" else width / 2 if anchor == "middle" else 0)
            found.append((left, float(y) - 9, left + width, float(y) + 2))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.02, 1), st.floats(1e-4, 3)), min_size=1, max_size=9), st.floats(1e-5, 1e-2), st.floats(1e-3, 20), st.booleans()
)  # fmt: skip
def test_no_label_lies_on_another_or_on_a_mark(arms: list[tuple[float, float]], floor: float, negative: float, sized: bool) -> None:
    points = [Point(name="fp16", kind="", x=23040.0, y=None)]
    points += [
        Point(
            name=f"int{i}-rotated", kind="pass", x=23040 * x if sized else None, y=y, low=0.8 * y, high=None if i else 1.2 * y, limit=2 * y
        )
        for i, (x, y) in enumerate(arms)
    ]
    svg = trade.trade("t", "title", points, [Level(name="16 bits in one pass", y=floor), Level(name="made worse on purpose", y=negative)])
    boxes = texts_in(svg)
    assert len([b for b in boxes if b[2] < trade.RIGHT]) == 2 * len(points) + 1, "each arm is labelled, and the axis"
    apart = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]]
    assert apart == []
    marks = [(float(x), float(y)) for x, y in re.findall(r'class="mark v-pass" transform="translate\((\S+) (\S+)\)', svg)]
    assert len(marks) == len(arms)
    assert not [(m, b) for m in marks for b in boxes if b[0] - 4 < m[0] < b[2] + 4 and b[1] - 4 < m[1] < b[3] + 4]


def test_the_picture_puts_smaller_left_and_worse_up() -> None:
    points = [
        Point(name="fp16", kind="", x=100.0, y=None),
        Point(name="a", kind="pass", x=50.0, y=0.01),
        Point(name="b", kind="pass", x=25.0, y=0.1),
    ]
    (ax, ay), (bx, by) = re.findall(r'class="mark v-pass" transform="translate\((\S+) (\S+)\)', trade.trade("t", "t", points, []))
    assert float(ax) - trade.LEFT == pytest.approx(2 * (float(bx) - trade.LEFT), abs=0.1)
    assert float(by) < float(ay) < trade.BOTTOM


def test_there_is_no_picture_of_nothing() -> None:
    reference = Point(name="fp16", kind="", x=1.0, y=None)
    assert trade.trade("t", "t", [reference], [Level(name="floor", y=0.1)]) == ""
    assert trade.trade("t", "t", [reference, Point(name="a", kind="", x=1.0, y=1e300)], []) == ""
    assert MINUS not in trade.trade("t", "t", [Point(name="a", kind="", x=None, y=0.1)], [])


def test_what_each_precision_writes_is_shown_with_the_place_where_it_leaves_the_reference():
    said = {"answers": {"story": "Once upon <b>a time"}, "parts_at": {"story": None}, "tasks": {"needle": [20, 20]}}
    base, int4 = make_text("fp16"), make_text("int4")
    base["load"] |= said
    base["load"] = {k: v for k, v in base["load"].items() if k not in ("controls", "precision")}
    int4["load"] |= {"answers": {"story": "Once the the"}, "parts_at": {"story": 1}, "tasks": {"needle": [11, 20]}}
    page = render(make_run([base, int4]))
    assert "Once upon &lt;b&gt;a time" in page and "another from token 2 on" in page and "11 of 20" in page
