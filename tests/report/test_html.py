"""The report on made-up sessions: what it says, in which order, and that it needs nothing but itself."""

from __future__ import annotations

import copy
import html.parser
import importlib.resources
import json
import math
import random
import re
import xml.etree.ElementTree as ET
from typing import Any

import jsonschema
import pytest

from pytest_kvcache.report import numbers, plots
from pytest_kvcache.report.html import render

Plain = dict[str, Any]
HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>]]>{{ 7*7 }}</style></svg>\x00\x1b[31m\ud800\u202e"
BLOCK = "transformers/smollm2-135m/base"
CURE = "pytest suites --kv-gpu=cpu --kv-record=all -k isl128"


def make_verdict(word: str = "pass", **more: Any) -> Plain:
    v: Plain = {
        "test": "suites/test_fixed_length.py::test_fixed_length[isl128-osl32-c1]", "block": BLOCK, "family": "fixed_length",
        "scenario": "isl128-osl32-c1", "arm": "base", "metric": "output_tok_s", "unit": "tok/s", "better": "higher",
        "verdict": word, "outcome": "failed" if word in ("regression", "invalid", "no-baseline") else "passed", "reason": "",
        "value": 40.1, "baseline": 41.0, "change": -0.022, "low": -0.09, "high": 0.05, "margin": 0.15, "runs": [40.2, 40.0, 40.1],
        "baseline_runs": [41.2, 40.7, 41.9, 40.2, 41.0], "p_seq": 0.8, "cure": None, "changed": [], "notes": [],
    }  # fmt: skip
    v |= more
    return {"key": f"{v['family']}/{v['scenario']}/{v['arm']}/{v['metric']}", **v}


def make_measured(scenario: str, run: int, **more: Any) -> Plain:
    c = int(m[1]) if (m := re.search(r"c(\d+)", scenario)) else 1
    wobble = 1 + 0.02 * run
    metrics = {"output_tok_s": 40.1 * c**0.8 * wobble, "total_tok_s": 200.4 * c**0.8, "req_s": 1.253, "ttft_ms.p50": 71.0 * c**0.9 * wobble,
               "ttft_ms.p95": 93.2 * c, "tpot_ms.p50": 23.4 * c**0.35 * wobble, "tpot_ms.p95": 25.91 * c**0.4, "e2e_ms.p50": 812.4}  # fmt: skip
    plain: Plain = {"scenario": scenario, "arm": "base", "run": run, "valid": True, "invalid": None, "metrics": metrics,
                    "requests": 8 * c, "failed": 0, "load": {"foreign_cores": 0.02, "steal_share": 0.0013, "pressure": 0.4}}  # fmt: skip
    return plain | more


def make_run(verdicts: list[Plain] | None = None, **more: Any) -> Plain:
    scenarios = ["isl128-osl32-c1", "isl128-osl32-c4"]
    run: Plain = {
        "schema": "pytest-kvcache/run/1", "complete": True, "interrupted": None, "session": "20261129-203700-ab12",
        "started": "2026-11-29T20:37:00Z", "seconds": 231.4, "command": "pytest suites --kv-gpu=cpu --kv-report=out/", "exit_code": 0,
        "plugin": "0.1.0", "gpu": "cpu", "profile": "ci",
        "plan": {"blocks": [{"id": BLOCK, "framework": "transformers", "model": "smollm2-135m", "arms": ["base"], "scenarios": scenarios,
                             "server_starts": [3, 5], "seconds": [100, 200]}]},
        "environments": {BLOCK: {
            "identity": {"gpu": "cpu", "cpu_model": "AMD EPYC 9654 96-Core Processor", "cores": 2, "model.weights": "7c1f0e2b90aa41d3",
                         "tokenizer": "93ab11f0c2d4e5f6", "kv_dtype": "auto", "weight_dtype": "auto"},
            "subject": {"dist:transformers": "5.24.0", "dist:torch": "2.13.0", "dist:tokenizers": "0.25.1", "python": "3.11.7",
                        "serve_args": ["--continuous-batching"], "kernel": "6.8.0-45"},
            "context": {"host": "runner-17", "load_1m": 0.31, "governor": None, "started": "2026-11-29T20:37:00Z"}}},
        "blocks": {BLOCK: {"complete": True, "error": None, "server_start_s": [5.2, 5.0, 5.1],
                           "spent_s": {"isl128-osl32-c1": 30.1, "isl128-osl32-c4": 61.7},
                           "measurements": [make_measured(s, r) for r in (1, 2, 3) for s in scenarios]}},
        "verdicts": [make_verdict()] if verdicts is None else verdicts, "expected_false_alarms": 0.02,
    }  # fmt: skip
    return run | more


def mixed() -> Plain:
    tpot = {"metric": "tpot_ms.p50", "unit": "ms", "better": "lower", "baseline_runs": [23.1, 23.6, 23.9, 22.8, 23.4], "baseline": 23.36}
    c4 = {"scenario": "isl128-osl32-c4"}
    run = make_run([
        make_verdict("regression", value=31.2, change=-0.239, low=-0.29, high=-0.18, runs=[31.0, 31.9, 30.7, 31.1, 31.4], p_seq=0.00004,
                     reason="worse by 23.9 %, beyond the margin of 15 %; moved with it: tpot_ms.p50", cure=CURE,
                     changed=["dist:torch: 2.12.0 -> 2.13.0", "kernel: 6.8.0-31 -> 6.8.0-45"]),
        make_verdict("pass", **tpot, value=23.9, change=0.023, low=-0.04, high=0.09, runs=[24.1, 23.6, 24.0]),
        make_verdict("inconclusive", **c4, reason="the interval reaches beyond the margin; about 4 more runs would settle it",
                     change=-0.08, low=-0.19, high=0.05, value=113.2, baseline=123.0, runs=[105.0, 118.0, 117.0], baseline_runs=[120.0, 127.0, 119.5, 125.1, 123.4],
                     cure="pytest suites --kv-gpu=cpu --kv-profile=full"),
        make_verdict("improvement", **c4, **tpot, value=17.9, change=-0.234, low=-0.31, high=-0.17, runs=[17.6, 18.2, 17.9], cure=CURE),
        make_verdict("invalid", family="prefix_reuse", metric="ttft_ms.p50", unit="ms", better="lower", value=None, baseline=88.0, change=None, low=None,
                     high=None, runs=[], baseline_runs=[88.0, 87.1, 90.0, 86.9, 88.8], p_seq=None,
                     reason="other processes took 1.4 of 2 cores during run 2; allowed is 0.2"),
        make_verdict("no-baseline", family="prefix_reuse", value=52.0, baseline=None, change=None, low=None, high=None, baseline_runs=[], p_seq=None,
                     reason="baselines/cpu/transformers/smollm2-135m.json has no entry for this gate", cure="pytest suites --kv-gpu=cpu --kv-record=missing"),
    ], exit_code=1)  # fmt: skip
    return run


def forty() -> Plain:
    """A session of two frameworks and forty gates, as it would come from a GPU."""
    rng = random.Random(7)
    words = ["pass"] * 33 + ["regression"] * 3 + ["inconclusive"] * 3 + ["improvement"]
    rng.shuffle(words)
    verdicts, shift = [], {"pass": 0.0, "regression": 0.11, "inconclusive": 0.04, "improvement": -0.09}
    blocks = ["vllm/qwen3-4b-instruct-2507/base", "sglang/qwen3-4b-instruct-2507/base"]
    for i, word in enumerate(words):
        block, family, scenario = blocks[i // 20], ("fixed_length", "context_length")[i // 10 % 2], f"isl{512 << (i // 4 % 3)}-osl128-c{(1, 8)[i // 2 % 2]}"
        higher = i % 2 == 0
        worse = shift[word] + rng.gauss(0, 0.008)
        half = 0.05 if word == "inconclusive" else 0.03
        sign, base = (-1, 4200.0) if higher else (1, 9.3)
        ends = sorted((sign * (worse - half), sign * (worse + half)))
        verdicts.append(make_verdict(
            word, block=block, family=family, scenario=scenario, metric="output_tok_s" if higher else "tpot_ms.p50", unit="tok/s" if higher else "ms",
            better="higher" if higher else "lower", margin=0.05, change=sign * worse, low=ends[0], high=ends[1], baseline=base, value=base * (1 + sign * worse),
            runs=[base * (1 + sign * worse) * (1 + rng.gauss(0, 0.01)) for _ in range(5)], baseline_runs=[base * (1 + rng.gauss(0, 0.01)) for _ in range(10)],
            changed=["driver: 570.86.15 -> 580.12.04"] if word == "regression" else [], p_seq=0.0001, reason="beyond the margin" if word == "regression" else "",
        ))  # fmt: skip
    return make_run(verdicts, gpu="h100-sxm")


def empty() -> Plain:
    return make_run([], plan={"blocks": []}, environments={}, blocks={}, seconds=None, exit_code=None, expected_false_alarms=None)


def interrupted() -> Plain:
    run = mixed() | {"complete": False, "interrupted": "Ctrl-C", "exit_code": 2}
    run["verdicts"] = run["verdicts"][1:2]
    run["blocks"][BLOCK] |= {"complete": False, "server_start_s": [5.2, None]}
    return run


def broken() -> Plain:
    log = "OSError: [Errno 98] address already in use\n  File \"serve.py\", line 12, in <module>\n\tif a < b & c:"
    run = make_run([make_verdict("invalid", metric=m, value=None, baseline=None, change=None, low=None, high=None, runs=[], baseline_runs=[], p_seq=None,
                                 reason="the server did not start") for m in ("output_tok_s", "tpot_ms.p50")], exit_code=1)  # fmt: skip
    run["blocks"][BLOCK] |= {"complete": False, "error": log, "server_start_s": [], "spent_s": {}, "measurements": []}
    return run


def nulls() -> Plain:
    none = dict.fromkeys(("value", "baseline", "change", "low", "high", "margin", "p_seq"))
    run = make_run([make_verdict(w, **none, runs=[None], baseline_runs=[]) for w in ("pass", "regression", "inconclusive", "improvement", "invalid")])
    run["blocks"][BLOCK]["measurements"] = [make_measured("isl128-osl32-c1", 1) | {"metrics": {"ttft_ms.p50": None}, "requests": None, "failed": None, "run": None}]
    run["plan"]["blocks"][0] |= {"server_starts": [None, None], "seconds": [None, None]}
    return run


def hostile() -> Plain:
    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            fixed = key in ("blocks", "environments", "spent_s", "metrics", "load", "identity", "subject", "context")
            return {(k + HOSTILE if fixed else k): poison(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(v) for v in value]
        keep = ("schema", "verdict", "outcome", "better", "profile", "started")
        return value + HOSTILE if isinstance(value, str) and key not in keep else value

    run: Plain = poison(mixed())
    run["blocks"] = {BLOCK + HOSTILE: next(iter(run["blocks"].values())) | {"error": HOSTILE}}
    return run


SESSIONS = {f.__name__: f for f in (make_run, mixed, forty, empty, interrupted, broken, nulls, hostile)}


@pytest.fixture(params=SESSIONS.values(), ids=SESSIONS.keys())
def session(request: pytest.FixtureRequest) -> Plain:
    return request.param()  # type: ignore[no-any-return]


class Page(html.parser.HTMLParser):
    """What a browser would see: tags with attributes, and the visible text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "title", "desc"):
            self.text += data


def schema() -> Plain:
    source = importlib.resources.files("pytest_kvcache.schemas").joinpath("run.schema.json")
    return json.loads(source.read_text("utf-8"))  # type: ignore[no-any-return]


def problems(run: Plain) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema())
    return [f"{e.message} @ {e.json_path}" for e in validator.iter_errors(run)]


def headline(run: Plain) -> str:
    found = re.search(r"<h1[^>]*>(?:<svg.*?</svg>)?<span>(.*?)</span></h1>", render(run))
    assert found
    return found[1]


class TestEverySession:
    """Holds for any session, the hostile one included."""

    def test_is_well_formed_and_every_tag_is_closed(self, session: Plain) -> None:
        assert Page(render(session)).open == []

    def test_loads_nothing_and_runs_nothing(self, session: Plain) -> None:
        source = render(session)
        tags = Page(source).tags

        assert not {"script", "link", "img", "iframe", "object", "embed", "image", "use", "base", "form"} & {t for t, _ in tags}
        assert not [a for _, attrs in tags for a in attrs if a in ("src", "srcset", "xlink:href", "data", "poster") or a.startswith("on")]
        assert all((attrs["href"] or "").startswith("#") for _, attrs in tags if "href" in attrs)
        assert not re.search(r"url\(|@import|https?:|//[a-z]", re.sub(r"<pre.*?</pre>", "", source, flags=re.DOTALL))

    def test_every_picture_is_xml_with_title_and_description(self, session: Plain) -> None:
        pictures = [ET.fromstring(s) for s in re.findall(r"<svg.*?</svg>", render(session), re.DOTALL)]
        named = [p for p in pictures if p.get("aria-hidden") != "true"]

        assert all(p.find("title") is not None and p.find("desc") is not None for p in named)

    def test_ids_are_unique_and_anchors_lead_somewhere(self, session: Plain) -> None:
        tags = Page(render(session)).tags
        ids = [attrs["id"] for _, attrs in tags if "id" in attrs]

        assert len(ids) == len(set(ids))
        assert {(attrs["href"] or "")[1:] for _, attrs in tags if "href" in attrs} <= set(ids)
        assert {attrs["aria-labelledby"] for _, attrs in tags if "aria-labelledby" in attrs} <= set(ids)

    def test_table_headers_have_a_scope(self, session: Plain) -> None:
        assert all("scope" in attrs for tag, attrs in Page(render(session)).tags if tag == "th")

    def test_is_the_same_every_time_and_leaves_the_run_alone(self, session: Plain) -> None:
        before = copy.deepcopy(session)

        assert render(session) == render(copy.deepcopy(session))
        assert session == before

    def test_can_be_written_as_utf8(self, session: Plain) -> None:
        assert render(session).encode("utf-8").startswith(b"<!doctype html>")

    def test_never_shows_python_in_place_of_a_number(self, session: Plain) -> None:
        assert not re.search(r"\b(None|nan|inf|NaN|Infinity|Undefined)\b", Page(render(session)).text)

    def test_validates(self, session: Plain) -> None:
        assert problems(session) == []


def test_words_of_the_verdict_come_before_the_table() -> None:
    source = render(mixed())

    assert source.index("1 of 6 gates regressed") < source.index("What failed, and why") < source.index("<table")
    assert all(word in source[: source.index("<table")] for word in ("regression", "invalid", "no-baseline", "inconclusive", "improvement", "pass"))


def test_a_failure_tells_its_cause_first() -> None:
    text = Page(render(mixed())).text
    cause, amount, reason, cure = (text.index(w) for w in ("dist:torch", "23.9\N{NARROW NO-BREAK SPACE}% worse", "moved with it", CURE))

    assert cause < amount < reason < cure < text.index("Every gate")
    assert re.search(r"dist:torch\s*2\.12\.0\s*→\s*2\.13\.0", text)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (make_run(), "1 of 1 gate passes"),
        (make_run([make_verdict(), make_verdict("improvement")]), "2 of 2 gates pass, 1 improved"),
        (make_run([make_verdict(), make_verdict("inconclusive")]), "1 of 2 gates pass, 1 inconclusive"),
        (make_run([make_verdict("invalid")] * 3), "3 of 3 gates invalid"),
        (make_run([make_verdict("regression"), make_verdict("no-baseline"), make_verdict()]), "1 of 3 gates regressed"),
        (empty(), "No gate was judged"),
        (interrupted(), "Incomplete: interrupted by Ctrl-C"),
        (make_run(complete=False, interrupted=None), "Incomplete: the session did not finish"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_headline(run: Plain, words: str) -> None:
    assert headline(run) == words


def test_an_incomplete_session_still_says_what_it_found() -> None:
    assert "So far: 1 of 1 gate passes." in render(interrupted())


def test_a_failed_pytest_without_a_failed_gate_is_pointed_out() -> None:
    assert "ended with exit code 1" in render(make_run(exit_code=1))
    assert "ended with exit code" not in render(mixed())


def test_a_server_that_died_is_shown_as_it_spoke() -> None:
    source = render(broken())

    assert '<pre class="log">OSError: [Errno 98] address already in use\n  File' in source
    assert "if a &lt; b &amp; c:" in source
    assert source.index("address already in use") < source.index("<table")


def test_failures_of_one_cause_share_a_card() -> None:
    source = render(broken())

    assert "2 gates for one reason" in source
    assert source.count("the server did not start") == 1


def test_hostile_text_is_shown_and_never_obeyed() -> None:
    source = render(hostile())

    assert "<script" not in source and "<img" not in source and "</style></svg>" not in source
    assert "&lt;script&gt;alert(1)" in source and "{{ 7*7 }}" in source
    assert not re.search("[\x00\x1b\ud800\u202e]", source)


def test_the_forest_puts_worse_on_one_side() -> None:
    worse = [make_verdict("regression", change=-0.2, low=-0.25, high=-0.15),
             make_verdict("regression", change=0.2, low=0.15, high=0.25, metric="tpot_ms.p50", unit="ms", better="lower")]  # fmt: skip
    drawn = re.search(r'<svg class="forest".*?</svg>', render(make_run(worse)))
    assert drawn
    places = re.findall(r'v-regression" transform="translate\((\S+) \S+\) scale', drawn[0])

    assert places[1] == places[3] and float(places[1]) > plots.LEFT
    assert "worse \N{RIGHTWARDS ARROW}" in drawn[0]


def test_forty_gates_each_have_a_row_and_a_strip() -> None:
    source = render(forty())

    assert source.count('class="strip"') == 40 + 3
    assert source.count('class="limit"') == 40 + 43


def test_curves_appear_only_for_several_concurrencies() -> None:
    one = make_run()
    one["blocks"][BLOCK]["measurements"] = [make_measured("isl128-osl32-c1", 1)]

    assert render(make_run()).count('class="curves"') == 2
    assert 'class="curves"' not in render(one)


def test_an_invalid_run_is_marked_with_its_reason() -> None:
    run = make_run()
    run["blocks"][BLOCK]["measurements"][0] |= {"valid": False, "invalid": "steal 12 % of the cores"}

    assert "steal 12 % of the cores" in render(run)


def test_environment_shows_what_the_baseline_had() -> None:
    assert re.search(r"dist:torch</th><td>2\.13\.0<span class=\"was\">was 2\.12\.0", render(mixed()))


def test_extreme_values_do_not_break_the_pictures() -> None:
    wild = [make_verdict("regression", value=v, baseline=b, change=c, low=c, high=c, runs=[v, v], baseline_runs=[b])
            for v, b, c in ((1e300, 1e-300, 1e300), (5e-324, 1.0, -1.0), (0, 0, 0), (10**400, 3, -5.5), (1.0, 1.0000000000000002, 1e-17))]  # fmt: skip

    assert render(make_run(wild))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("seconds",), math.nan),
        (("seconds",), math.inf),
        (("seconds",), -1),
        (("started",), "yesterday"),
        (("surprise",), 1),
        (("profile",), "nightly"),
        (("files",), {"records.npz": "not a hash"}),
        (("verdicts", 0, "change"), -math.inf),
        (("verdicts", 0, "runs"), [40.0, math.nan]),
        (("verdicts", 0, "verdict"), "fine"),
        (("verdicts", 0, "p_seq"), 1.5),
        (("verdicts", 0, "surprise"), 1),
        (("plan", "blocks", 0, "server_starts"), [3]),
        (("blocks", BLOCK, "measurements", 0, "metrics", "x"), math.inf),
        (("blocks", BLOCK, "measurements", 0, "load", "x"), [math.nan]),
        (("blocks", BLOCK, "measurements", 0, "requests"), 1.5),
        (("environments", BLOCK, "identity", "x"), {"deep": 1}),
    ],
    ids=str,
)
def test_the_schema_refuses(path: tuple[Any, ...], value: Any) -> None:
    run = make_run()
    place: Any = run
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value

    assert problems(run)


def test_the_schema_is_itself_valid_and_takes_what_is_optional() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())

    assert problems(mixed() | {"columns": {"sent_s": "request sent"}, "files": {"records.npz": "0" * 64}}) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(41, "41"), (41.0, "41.0"), (23.37, "23.4"), (0.02131, "0.0213"), (99.96, "100"), (12345.6, "12 346"), (919824, "919 824"),
     (0.0, "0"), (-3.14159, "−3.14"), (1.5e-7, "1.50e−7"), (2e18, "2.00e18"), (None, "—"), (math.nan, "—"), (True, "—")],
)  # fmt: skip
def test_numbers_have_three_digits(value: Any, text: str) -> None:
    assert numbers.number(value).replace(numbers.THIN, " ") == text.replace("−", numbers.MINUS)


@pytest.mark.parametrize(
    ("value", "text"),
    [(-0.123, "−12.3 %"), (0.05, "+5.0 %"), (0.0, "0.0 %"), (-1e-9, "0.0 %"), (0.0002, "+0.02 %"), (2.5, "+250 %"), (None, "—")],
)
def test_percentages_have_a_sign(value: Any, text: str) -> None:
    assert numbers.percent(value).replace(numbers.THIN, " ") == text.replace("−", numbers.MINUS)


@pytest.mark.parametrize(("value", "text"), [(5.2, "5.2 s"), (30.14, "30 s"), (231.4, "3 min 51 s"), (7330, "2 h 2 min"), (None, "—")])
def test_durations_are_said_as_one_would(value: Any, text: str) -> None:
    assert numbers.duration(value).replace(numbers.THIN, " ") == text


def test_long_text_keeps_both_ends() -> None:
    assert numbers.elide("isl128-osl32-c1-very-long", 11) == "isl12\N{HORIZONTAL ELLIPSIS}-long"[:11]
