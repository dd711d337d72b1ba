"""The report on made-up sessions: what it says, in which order, and that it needs nothing but itself."""

from __future__ import annotations

import copy
import html.parser
import importlib.resources
import json
import math
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import Any

import jsonschema
import pytest

from pytest_kvcache.core.gate import VERDICTS
from pytest_kvcache.report.html import render
from pytest_kvcache.report.numbers import THIN
from pytest_kvcache.report.plots import LEFT, RIGHT

Plain = dict[str, Any]
HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>]]>{{ 7*7 }}</style></svg>\x00\x1b[31m\ud800\u202e"
BLOCK = "transformers/smollm2-135m/base"
CURE = "pytest suites --kv-gpu=cpu --kv-record=all -k isl128"


def make_verdict(word: str = "pass", **more: Any) -> Plain:
    """A gate on output_tok_s, unless `more` says otherwise."""
    v: Plain = {
        "test": "suites/test_fixed_length.py::test_fixed_length[isl128-osl32-c1]", "block": BLOCK,
        "family": "fixed_length", "scenario": "isl128-osl32-c1", "arm": "base", "metric": "output_tok_s",
        "unit": "tok/s", "better": "higher",
        "verdict": word, "outcome": "failed" if word in ("regression", "invalid", "no-baseline") else "passed",
        "reason": "", "value": 40.1, "baseline": 41.0, "change": -0.022, "low": -0.09, "high": 0.05, "margin": 0.15,
        "runs": [40.2, 40.0, 40.1], "baseline_runs": [41.2, 40.7, 41.9, 40.2, 41.0], "p_seq": 0.8, "cure": None,
        "changed": [], "notes": [], "moved_with": [], "more_runs": None, "certifiable": None, **more,
    }  # fmt: skip
    return {"key": f"{v['family']}/{v['scenario']}/{v['arm']}/{v['metric']}", **v}


UNCOMPARED: Plain = {**dict.fromkeys(("change", "low", "high", "p_seq", "baseline")), "baseline_runs": []}
UNMEASURED: Plain = {**UNCOMPARED, "value": None, "runs": []}
TPOT = {
    "metric": "tpot_ms.p50",
    "unit": "ms",
    "better": "lower",
    "baseline": 23.36,
    "baseline_runs": [23.1, 23.6, 23.9, 22.8, 23.4],
}
C4 = {"scenario": "isl128-osl32-c4", "baseline": 123.0, "baseline_runs": [120.0, 127.0, 119.5, 125.1, 123.4]}


def make_measured(scenario: str, run: int) -> Plain:
    c, wobble = int(scenario.rpartition("c")[2]), 1 + 0.02 * run
    metrics = {
        "output_tok_s": 40.1 * c**0.8 * wobble, "total_tok_s": 200.4 * c**0.8, "req_s": 1.253,
        "ttft_ms.p50": 71.0 * c**0.9 * wobble, "ttft_ms.p95": 93.2 * c, "tpot_ms.p50": 23.4 * c**0.35 * wobble,
        "tpot_ms.p95": 25.91 * c**0.4, "e2e_ms.p50": 812.4,
    }  # fmt: skip
    load = {"foreign_cores": 0.02, "steal_share": 0.0013, "pressure": 0.4, "others": ["a process with a long name"] * 3}
    return {
        "scenario": scenario, "arm": "base", "run": run, "valid": True, "invalid": None, "metrics": metrics,
        "requests": 8 * c, "failed": 0, "load": load, "canary": None,
    }  # fmt: skip


ENVIRONMENT: Plain = {
    "identity": {
        "gpu": "cpu",
        "cpu_model": "AMD EPYC 9654 96-Core Processor",
        "cores": 2,
        "model.weights": "7c1f0e2b90aa41d3",
    },
    "subject": {
        "dist:transformers": "5.24.0",
        "dist:torch": "2.13.0",
        "python": "3.11.7",
        "serve_args": ["--continuous-batching"],
    },
    "context": {
        "host": "runner-17",
        "load_1m": 0.31,
        "governor": None,
        "kernel": "6.8.0-45",
        "started": "2026-11-29T20:37:00Z",
    },
}


def make_run(verdicts: list[Plain] | None = None, **more: Any) -> Plain:
    """A whole session of one block, by default with one gate that passes."""
    scenarios = ["isl128-osl32-c1", "isl128-osl32-c4"]
    return {
        "schema": "pytest-kvcache/run/1", "complete": True, "interrupted": None, "session": "20261129-203700-ab12",
        "started": "2026-11-29T20:37:00Z", "seconds": 231.4, "command": "pytest suites --kv-gpu=cpu --kv-report=out/",
        "exit_code": 0, "plugin": "0.1.0", "gpu": "cpu", "profile": "ci",
        "plan": {"blocks": [make_plan(BLOCK, scenarios)]},
        "environments": {BLOCK: copy.deepcopy(ENVIRONMENT)}, "expected_false_alarms": 0.02,
        "blocks": {BLOCK: make_block(scenarios)}, "traces": [], "files": {},
        "verdicts": [make_verdict()] if verdicts is None else verdicts, **more,
    }  # fmt: skip


def make_plan(block: str, scenarios: list[str]) -> Plain:
    framework, model, arm = block.split("/")
    return {
        "id": block, "framework": framework, "model": model, "arms": [arm], "scenarios": scenarios,
        "server_starts": [3, 5], "seconds": [100, 200],
    }  # fmt: skip


def make_block(scenarios: list[str], runs: int = 3) -> Plain:
    return {
        "complete": True, "error": None, "server_start_s": [5.2, 5.0, 5.1][:runs] + [5.3] * (runs - 3),
        "spent_s": {s: 30.1 * (i + 1) for i, s in enumerate(scenarios)},
        "measurements": [make_measured(s, r + 1) for r in range(runs) for s in scenarios], "evidence": {}, "broken": [],
    }  # fmt: skip


def mixed() -> Plain:
    """One gate of every verdict."""
    regression = make_verdict(
        "regression", value=31.2, change=-0.239, low=-0.29, high=-0.18, runs=[31.0, 31.9, 30.7, 31.1, 31.4], p_seq=4e-5,
        cure=CURE, reason="slower than the margin of 15 % allows",
        moved_with=["isl128-osl32-c4/base/output_tok_s -8 %"],
        changed=["dist:torch: 2.12.0 -> 2.13.0", "kernel: 6.8.0-31 -> 6.8.0-45"],
    )  # fmt: skip
    passed = make_verdict("pass", **TPOT, value=23.9, change=0.023, low=-0.04, high=0.09, runs=[24.1, 23.6, 24.0])
    open_gate = make_verdict(
        "inconclusive", **C4, change=-0.08, low=-0.19, high=0.05, value=113.2, runs=[105.0, 118.0, 117.0], more_runs=4,
        certifiable=0.19, reason="the interval reaches beyond the margin", cure="pytest suites --kv-profile=full",
    )  # fmt: skip
    better = make_verdict("improvement", **C4 | TPOT, value=17.9, change=-0.234, low=-0.31, high=-0.17, runs=[17.6, 18.2, 17.9], cure=CURE)
    reuse = {"family": "prefix_reuse", "scenario": "isl512-osl32-c1"}
    invalid = make_verdict("invalid", **reuse | TPOT | UNMEASURED, reason="other processes took 1.4 of 2 cores in run 2; 0.2 are allowed")
    absent = make_verdict(
        "no-baseline", **reuse, **UNCOMPARED, value=52.0, runs=[51.8, 52.3, 51.9],
        reason="no baseline is stored for this gate",
        cure="pytest suites --kv-gpu=cpu --kv-record=missing",
    )  # fmt: skip
    return make_run([regression, passed, open_gate, better, invalid, absent], exit_code=1)


def forty() -> Plain:
    """Two frameworks and forty gates, as from a GPU."""
    rng = random.Random(7)
    words = ["pass"] * 33 + ["regression"] * 3 + ["inconclusive"] * 3 + ["improvement"]
    rng.shuffle(words)
    blocks = ["vllm/qwen3-4b-instruct-2507/base", "sglang/qwen3-4b-instruct-2507/base"]
    scenarios = [f"isl{isl}-osl128-c{c}" for isl in (512, 4096) for c in (1, 8, 32, 128, 256)]
    verdicts = [make_noisy(rng, w, i % 2, block=blocks[i // 20], scenario=scenarios[i // 2 % 10]) for i, w in enumerate(words)]
    return make_run(
        verdicts, gpu="h100-sxm", seconds=7830.0, exit_code=1,
        command="pytest --kv-gpu=h100 --kv-framework=vllm --kv-framework=sglang",
        plan={"blocks": [make_plan(b, scenarios) for b in blocks]},
        blocks={b: make_block(scenarios, 5) for b in blocks},
        environments={b: {**ENVIRONMENT, "subject": {f"dist:{b.split('/')[0]}": "0.33.0"}} for b in blocks},
    )  # fmt: skip


def make_noisy(rng: random.Random, word: str, lower: int, **more: Any) -> Plain:
    """A gate of a machine with a CV of 1 %, on output_tok_s or, if `lower`, on tpot_ms.p50."""
    worse = {"pass": 0.0, "regression": 0.11, "inconclusive": 0.04, "improvement": -0.09}[word] + rng.gauss(0, 0.008)
    half, base = 0.05 if word == "inconclusive" else 0.03, 9.3 if lower else 4200.0
    change = worse if lower else -worse
    numbers = {
        "change": change, "low": change - half, "high": change + half, "value": base * (1 + change),
        "baseline": base, "margin": 0.05,
        "runs": [base * (1 + change) * rng.gauss(1, 0.01) for _ in range(5)],
        "baseline_runs": [base * rng.gauss(1, 0.01) for _ in range(10)],
        "p_seq": 0.0001 if word == "regression" else 0.4,
        "changed": ["driver: 570.86.15 -> 580.12.04"] if word == "regression" else [],
    }  # fmt: skip
    return make_verdict(word, **(TPOT if lower else {}) | numbers | more)


def empty() -> Plain:
    nothing: Plain = dict.fromkeys(("seconds", "exit_code", "expected_false_alarms"))
    return make_run([], plan={"blocks": []}, environments={}, blocks={}, **nothing)


def interrupted() -> Plain:
    run = mixed() | {"complete": False, "interrupted": "Ctrl-C", "exit_code": 2}
    run["verdicts"] = run["verdicts"][1:2]
    run["blocks"][BLOCK] |= {"complete": False, "server_start_s": [5.2, None]}
    return run


def broken() -> Plain:
    log = 'OSError: [Errno 98] address already in use\n  File "serve.py", line 12, in <module>\n\tif a < b & c:'
    verdicts = [
        make_verdict("invalid", **UNMEASURED, reason=log),
        make_verdict("invalid", **TPOT | UNMEASURED, reason=log),
    ]
    block = {"complete": True, "error": log, "server_start_s": [], "spent_s": {}, "measurements": [], "evidence": {}, "broken": []}
    return make_run(verdicts, blocks={BLOCK: block}, environments={BLOCK: {}}, exit_code=1)


def recorded() -> Plain:
    none = UNCOMPARED | {"outcome": "passed"}
    return make_run([make_verdict("no-baseline", **none), make_verdict("no-baseline", **TPOT | none)])


def nulls() -> Plain:
    words = ("pass", "regression", "inconclusive", "improvement", "invalid")
    run = make_run([make_verdict(w, **UNMEASURED | {"runs": [None], "margin": None}) for w in words])
    nothing = {"metrics": {"ttft_ms.p50": None}, "requests": None, "failed": None, "run": None}
    run["blocks"][BLOCK]["measurements"] = [make_measured("isl128-osl32-c1", 1) | nothing]
    run["plan"]["blocks"][0] |= {"server_starts": [None, None], "seconds": [None, None]}
    return run


def hostile() -> Plain:
    """Every free text and every open name of a session ends in what should never be obeyed."""
    open_maps = ("blocks", "environments", "spent_s", "metrics", "load", "identity", "subject", "context")
    fixed = ("schema", "verdict", "outcome", "better", "profile", "started")

    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k + HOSTILE * (key in open_maps): poison(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(v) for v in value]
        return value + HOSTILE if isinstance(value, str) and key not in fixed else value

    run: Plain = poison(mixed())
    run["plan"]["blocks"] = poison([make_plan(BLOCK, ["isl128-osl32-c1"])])
    run["blocks"] = {BLOCK + HOSTILE: next(iter(run["blocks"].values())) | {"error": HOSTILE}}
    return run


SESSIONS = {f.__name__: f for f in (make_run, mixed, forty, empty, interrupted, broken, recorded, nulls, hostile)}


@pytest.fixture(params=SESSIONS)
def session(request: pytest.FixtureRequest) -> Plain:
    return SESSIONS[request.param]()


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


LOADING_TAGS = {"script", "link", "img", "iframe", "object", "embed", "image", "use", "base", "form", "video", "audio"}
LOADING_ATTRIBUTES = {"src", "srcset", "xlink:href", "data", "poster", "background", "style"}


class TestEverySession:
    """Holds for any session, the hostile one included."""

    def test_is_well_formed_and_every_tag_is_closed(self, session: Plain) -> None:
        assert Page(render(session)).open == []

    def test_loads_nothing_and_runs_nothing(self, session: Plain) -> None:
        source = render(session)
        tags = Page(source).tags

        assert not LOADING_TAGS & {tag for tag, _ in tags}
        assert not [a for _, attrs in tags for a in attrs if a in LOADING_ATTRIBUTES or a.startswith("on")]
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
    before = source[source.index("<body") : source.index("<table")]

    assert before.index("1 of 6 gates regressed") < before.index("What failed, and why")
    assert all(f"<b>1</b> {word}</li>" in before for word in VERDICTS)


def test_a_failure_tells_its_cause_first() -> None:
    text = Page(render(mixed())).text
    told = ("dist:torch", f"23.9{THIN}% worse", "slower than", CURE)
    cause, amount, reason, cure = (text.index(words) for words in told)

    assert cause < amount < reason < cure < text.index("Every gate")
    assert re.search(r"dist:torch\s*2\.12\.0\s*→\s*2\.13\.0", text)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (make_run(), "1 of 1 gate passes"),
        (make_run([make_verdict(), make_verdict("improvement")]), "2 of 2 gates pass, 1 improved"),
        (make_run([make_verdict(), make_verdict("inconclusive")]), "1 of 2 gates passes, 1 inconclusive"),
        (make_run([make_verdict("invalid")] * 3), "3 of 3 gates invalid"),
        (make_run([make_verdict("regression"), make_verdict("no-baseline"), make_verdict()]), "1 of 3 gates regressed"),
        (recorded(), "2 of 2 gates recorded"),
        (make_run([*recorded()["verdicts"], make_verdict()]), "1 of 3 gates passes, 2 recorded"),
        (make_run([make_verdict("inconclusive")]), "1 of 1 gate inconclusive"),
        (empty(), "No gate was judged"),
        (interrupted(), "Incomplete: interrupted by Ctrl-C"),
        (make_run(complete=False, interrupted="interrupted"), "Incomplete: interrupted"),
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
    assert source.count("address already in use") == 1


def test_hostile_text_is_shown_and_never_obeyed() -> None:
    source = render(hostile())

    assert not re.search("<script|<img|</style></svg>", source)
    assert "&lt;script&gt;alert(1)" in source
    assert "{{ 7*7 }}" in source
    assert not re.search("[\x00\x1b\ud800\u202e]", source)


def test_the_forest_puts_worse_on_one_side() -> None:
    worse = [
        make_verdict("regression", change=-0.2, low=-0.25, high=-0.15),
        make_verdict("regression", **TPOT, change=0.2, low=0.15, high=0.25),
    ]
    drawn = re.search(r'<svg class="forest".*?</svg>', render(make_run(worse)))
    assert drawn
    places = re.findall(r'v-regression" transform="translate\((\S+) \S+\) scale', drawn[0])

    assert places[1] == places[3]
    assert float(places[1]) > (LEFT + RIGHT) / 2
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
    wild = (
        (1e300, 1e-300, 1e300),
        (5e-324, 1.0, -1.0),
        (0, 0, 0),
        (10**400, 3, -5.5),
        (1.0, 1.0000000000000002, 1e-17),
    )
    verdicts = [
        make_verdict("regression", value=v, baseline=b, change=c, low=c, high=c, runs=[v, v], baseline_runs=[b]) for v, b, c in wild
    ]

    assert Page(render(make_run(verdicts))).open == []


def test_an_open_gate_says_what_would_settle_it() -> None:
    text = Page(render(mixed())).text

    assert "About 4 more runs would settle it." in text
    assert f"The smallest margin these runs could certify is 19{THIN}%." in text


def test_a_regression_names_what_moved_with_it() -> None:
    assert re.search(r"Moved with it\s*isl128-osl32-c4/base/output_tok_s -8 %", Page(render(mixed())).text)


def test_jinja_is_imported_only_to_render() -> None:
    code = "import sys, pytest_kvcache.report.html; sys.exit('jinja2' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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

    traces = [{"block": BLOCK, "scenario": "isl128-osl32-c1", "arm": "base", "run": 1, "workload": "93ab11f0"}]
    optional = {"traces": traces, "columns": {"sent_s": "request sent"}, "files": {"records.npz": "0" * 64}}

    assert problems(mixed() | optional) == []
