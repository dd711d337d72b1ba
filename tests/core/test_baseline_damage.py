"""A baseline file in which anything was changed: a clear line, or verdicts that its own numbers bear out. Never anything else.

What is changed in the file may be a number, and then it is another baseline: nobody can tell. So this is what holds of every file:

* It is refused in one line, `file: what`, with the path into the document where there is one; or it is used.
* Where it is used, every gate has a verdict and says it in one line. `pass` and `improvement` are only given where the numbers in
  the file as they now stand show a loss below the margin, `regression` only where they show one above it. The loss is computed here
  once more, from the JSON alone.
* Where neither a run nor a unit nor a card was changed, the verdict is that of the whole file, or the comparison is refused.
"""

import copy
import functools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.core import baseline as stored
from pytest_kvcache.core.evidence import changes, from_plain, gather
from pytest_kvcache.core.gate import IMPROVEMENT, INCONCLUSIVE, INVALID, NO_BASELINE, PASS, REGRESSION, rule_for
from pytest_kvcache.core.metrics import find_metric
from pytest_kvcache.core.plan import Wanted, make_plan
from pytest_kvcache.core.progress import Orders, Progress, settle
from pytest_kvcache.core.scenarios import ClosedLoop
from pytest_kvcache.core.spec import Gate, UserError
from pytest_kvcache.core.units import factor
from pytest_kvcache.harness.baseline_shape import fits
from pytest_kvcache.harness.baselines import baseline_path, load_baseline, save_baseline
from pytest_kvcache.harness.files import schema_problem

RULE = rule_for("gpu", "full")
SCENARIO = ClosedLoop(isl=512, osl=128, concurrency=8, requests=64)
LEVELS = {"output_tok_s": 100.0, "ttft_ms.p90": 50.0}
(BLOCK,) = make_plan([Wanted(framework="f", model="m", family="s", scenario=SCENARIO, gates=tuple(map(Gate, LEVELS)))], RULE.margin)
GATES = BLOCK.tasks[0].gates
HERE = {
    "identity": {"gpu": "Test card", "model_sha": "1f"}, "subject": {"driver": "1", "server_argv": ["serve", "--port", "1"]},
    "context": {"gpu_uuids": ["GPU-here"], "host": "h"},
}  # fmt: skip
NOW = stored.Current(environment=HERE, workload="w")
TIMES = {"as stored": 1.0, "worse": 1.4, "better": 0.6}  # by which a session's runs are worse
NOISE = (0.0, 0.004, -0.003, 0.002, -0.004, 0.001, 0.003, -0.002, 0.0, 0.004, -0.001, -0.004)


def values(metric, times, n, first=0):
    better = find_metric(metric).better
    return [LEVELS[metric] * (times if better == "lower" else 1 / times) * (1 + NOISE[(first + i) % 12]) for i in range(n)]


def whole():
    """Five sessions of two runs after a first level that was superseded, the last of them on another card."""
    doc = stored.empty("gpu", "f", "m")
    for s in range(7):
        recordings = [
            stored.Recording(key=gate.key, metric=find_metric(gate.metric), workload="w", runs=tuple(
                {"value": v, "n": 64, "failed": 0, "canary": {"on": "2 cores", "ms": {"memory": 10.0 + 0.01 * s}}} for v in values(gate.metric, 1.0, 2, 2 * s)
            )) for gate in GATES
        ]  # fmt: skip
        environment = copy.deepcopy(HERE)
        if s == 6:
            environment["context"]["gpu_uuids"] = ["GPU-other"]
        about = {"started": f"2026-01-{s + 1:02}T00:00:00Z", "plugin": "0", "environment": environment}
        doc = stored.merge(doc, recordings, session=f"s{s}", about=about, now_iso="2026-02-01T00:00:00Z", replace=s == 1)
    return doc


WHOLE = whole()
TEXT = json.dumps(WHOLE, sort_keys=True, indent=1)


def session(times):
    """What a session has measured whose runs are so many times worse."""
    progress = Progress(block=BLOCK, environment=HERE)
    figures = {m: values(m, times, 12, 5) for m in LEVELS}
    progress.measurements = [
        {
            "run": i + 1, "scenario": str(SCENARIO), "arm": "base", "valid": True, "requests": 64, "canary": {"on": "2 cores", "ms": {"memory": 10.0}},
            "metrics": {m: figures[m][i] for m in LEVELS},
        } for i in range(12)
    ]  # fmt: skip
    return progress


SESSIONS = {name: session(times) for name, times in TIMES.items()}


@functools.cache
def verdict(name, key, plain):
    gate, evidence = next(g for g in GATES if g.key == key), from_plain(json.loads(plain))
    return settle(gate, SESSIONS[name], Orders(rule=RULE, needs={key: evidence.need}, bases={key: evidence.base}), final=True)


def judged(doc, name):
    """Every gate's verdict in a session; what a report keeps of the stored number is that number, so that a replay has the same."""
    found = {}
    for gate in GATES:
        evidence = gather(doc, gate, NOW, RULE)
        plain = json.dumps(evidence.plain())
        assert from_plain(json.loads(plain)) == evidence
        found[gate.key] = verdict(name, gate.key, plain)
    return found


def level_of(doc, gate):
    """The mean log of the stored runs that count for this card, and the margin that holds against them; from the JSON alone."""
    entry, sessions = doc["entries"][gate.key], {}
    cards = {s: about["environment"]["context"].get("gpu_uuids") for s, about in doc["sessions"].items()}
    known = {s: c for s, c in cards.items() if isinstance(c, list) and c and all(isinstance(u, str) for u in c)}
    own = [r for r in entry["runs"] if set(known.get(r["session"], ["GPU-here"])) == {"GPU-here"}]
    runs = own if len(own) >= 5 else entry["runs"]
    for run in runs:
        sessions.setdefault(run["session"], []).append(math.log(run["value"] * factor(entry["unit"], find_metric(gate.metric).unit)))
    return sum(sum(v) / len(v) for v in sessions.values()) / len(sessions), 0.05 if len(own) >= 5 else 0.10


BEFORE = {name: judged(WHOLE, name) for name in TIMES}


def test_the_whole_file_gives_the_verdicts_that_this_is_about():
    assert {name: {v.verdict for v in found.values()} for name, found in BEFORE.items()} == {
        "as stored": {PASS}, "worse": {REGRESSION}, "better": {IMPROVEMENT},
    }  # fmt: skip


def one_line(text):
    text.encode()  # what cannot be encoded cannot be shown
    return text.isprintable()


def check(folder, content, *, same=False):
    """What holds of every file; `same` where nothing was changed that a number rests on. True where the file was used."""
    path = baseline_path(folder, "gpu", "f", "m")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    said = ""
    try:
        doc = load_baseline(folder, "gpu", "f", "m")
    except UserError as e:
        said = str(e)
    if said:
        assert said.startswith(f"{path}: ")
        assert one_line(said), repr(said)
        assert path.read_bytes() == content
        return False
    assert schema_problem(doc, "baseline") == ""
    for name, verdicts in {name: judged(doc, name) for name in TIMES}.items():
        for gate in GATES:
            found = verdicts[gate.key]
            assert all(one_line(text) for text in (found.reason, *found.notes)), found
            if same:
                assert found.verdict in (BEFORE[name][gate.key].verdict, INVALID, NO_BASELINE), found
            if found.verdict in (PASS, IMPROVEMENT, REGRESSION):
                better = find_metric(gate.metric).better
                level, margin = level_of(doc, gate)
                mean = sum(map(math.log, found.runs)) / len(found.runs)
                worse = mean - level if better == "lower" else level - mean
                allowed = math.log1p(margin) if better == "lower" else -math.log1p(-margin)
                assert found.margin == pytest.approx(margin)
                assert (worse > allowed) == (found.verdict == REGRESSION), (found, worse, allowed)
            else:
                assert found.verdict in (INCONCLUSIVE, INVALID, NO_BASELINE)
    assert all(one_line(line) for gate in GATES for line in changes(doc, gate.key, HERE))
    about = {"started": "2026-03-01T00:00:00Z", "environment": HERE}
    more = stored.merge(doc, MORE, session="new", about=about, now_iso="2026-03-01T00:00:00Z", replace=False)
    save_baseline(folder, more)
    assert load_baseline(folder, "gpu", "f", "m") == more, "what was recorded onto it is read again"
    return True


MORE = [
    stored.Recording(key=g.key, metric=find_metric(g.metric), workload="w", runs=({"value": LEVELS[g.metric], "n": 64, "failed": 0},))
    for g in GATES
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("baselines")


def places(value, path=()):
    """Every path into a document."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def at(doc, path):
    for key in path:
        doc = doc[key]
    return doc


PLACES = list(places(WHOLE))
OBJECTS = [p for p in PLACES if isinstance(at(WHOLE, p), dict) and at(WHOLE, p)]
# One of each sort: the second session, the first run, both gates.
SORTS = [p for p in PLACES if all(k in ("s1", 0) or not (isinstance(k, int) or k in WHOLE["sessions"]) for k in p)]
# What stands between @ is in the file as it is.
VALUES = [
    None, True, False, 0, -1, 1, 1.5, 1e-12, 1e12, 1e150, 1e-150, 1e300, 5e-324, 10**30, 10**400, "", "x", "ms", "s", "tok/s", "GPU-other",
    "s0", "s6", "a\nb", "\ud800", "\x1b[31m", [], {}, [1], {"a": 1}, "@NaN@", "@-Infinity@", "@1e999@", f"@{'9' * 5000}@",
    f"@{'[' * 100_000}@", f"@{'[' * 900}{']' * 900}@", "lower", "higher", 63, 10**9,
]  # fmt: skip
NAMES = ["x", "", "a\nb", "\ud800", "gpu_uuids"]
odd = st.sampled_from(VALUES) | st.sampled_from(PLACES).map(lambda path: copy.deepcopy(at(WHOLE, path)))


def rests_on(path):
    """Whether a number rests on what lies at a path: a run, its unit, the card; or on something inside it."""
    sorts = ("entries", None, "runs"), ("entries", None, "unit"), ("sessions", None, "environment", "context", "gpu_uuids")
    return any(all(a in (None, b) for a, b in zip(sort, path, strict=False)) for sort in sorts)


@st.composite
def changed(draw):
    """A change at one place of the document: what it is then, and whether a number rests on it."""
    doc, path = copy.deepcopy(WHOLE), draw(st.sampled_from(SORTS[1:]) | st.sampled_from(PLACES[1:]))
    target, how = at(doc, path), draw(st.sampled_from(["delete", "replace", "insert"]))
    if how == "insert" and isinstance(target, list):
        target.insert(draw(st.integers(0, len(target))), draw(odd))
    elif how == "insert" and isinstance(target, dict):
        path = (*path, draw(st.sampled_from([*NAMES, *map(str, target)])))
        target[path[-1]] = draw(odd)
    elif how == "delete":
        del at(doc, path[:-1])[path[-1]]
    else:
        at(doc, path[:-1])[path[-1]] = draw(odd)
    return doc, rests_on(path)


def written(doc):
    text = json.dumps(doc)
    parts = text.split('"@')
    return "".join([parts[0], *("".join(p.split('@"', 1)) for p in parts[1:])]).encode()


@pytest.mark.parametrize("path", SORTS, ids=lambda path: ".".join(map(str, path)) or "whole")
def test_every_odd_value_at_every_sort_of_place(folder, path):
    for value in VALUES:
        doc = copy.deepcopy(WHOLE)
        if path:
            at(doc, path[:-1])[path[-1]] = value
        check(folder, written(doc if path else value), same=not rests_on(path))
    for name in NAMES if isinstance(at(WHOLE, path), dict) else ():
        for value in ("x", {}, [], {"a\nb": "\ud800"}):
            doc = copy.deepcopy(WHOLE)
            at(doc, path)[name] = value
            check(folder, written(doc), same=not rests_on((*path, name)))


@settings(max_examples=200)
@given(changed())
def test_a_change_at_any_place_of_the_document(folder, change):
    doc, figures = change
    check(folder, written(doc), same=not figures)


@settings(max_examples=150)
@given(
    st.sampled_from(GATES),
    st.floats(-1.5, 1.5) | st.sampled_from([-450.0, 450.0]),
    st.sampled_from(["", "s", "us", "min", "tok/s", "tok/min", "ktok/s"]),
    st.integers(0, 6),
)
def test_another_level_unit_or_card_of_all_runs_of_a_gate(folder, gate, shift, unit, elsewhere):
    """The loss that they show is another one: what was a regression may pass, and the other way about."""
    doc = copy.deepcopy(WHOLE)
    entry = doc["entries"][gate.key]
    for run in entry["runs"]:
        run["value"] *= math.exp(shift)
    entry["unit"] = unit or entry["unit"]
    for name in list(doc["sessions"])[:elsewhere]:
        doc["sessions"][name]["environment"]["context"]["gpu_uuids"] = ["GPU-other"]
    assert check(folder, written(doc))


@settings(max_examples=100)
@given(st.lists(changed(), min_size=2, max_size=3))
def test_several_documents_of_which_one_takes_parts_of_the_others(folder, several):
    """Sessions of one, entries of another: what two people make of a merge by hand."""
    docs = [d for d, _ in several if isinstance(d, dict)]
    parts = {key: docs[i % len(docs)].get(key) for i, key in enumerate(WHOLE)} if docs else {}
    check(folder, written(parts))


@st.composite
def damaged(draw):
    """The file's bytes cut, spliced, doubled, or with some of them replaced."""
    raw, size = bytearray(TEXT.encode()), len(TEXT)
    for _ in range(draw(st.integers(1, 3))):
        a, b = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        piece = raw[a : min(b, a + draw(st.sampled_from([1, 2, 40, 4000])))]
        how = draw(st.sampled_from(["cut", "remove", "double", "move", "replace", "digits"]))
        if how == "cut":
            del raw[b:]
        elif how == "remove":
            del raw[a : a + len(piece)]
        elif how == "double":
            raw[a:a] = piece
        elif how == "move":
            del raw[a : a + len(piece)]
            place = draw(st.integers(0, size))
            raw[place:place] = piece
        elif how == "replace":
            raw[a : a + 1] = draw(st.binary(max_size=3))
        else:
            numbers = [i for i, c in enumerate(raw) if chr(c).isdigit()]
            if numbers:
                raw[draw(st.sampled_from(numbers))] = ord(draw(st.sampled_from("0123456789.eE-")))
    return bytes(raw)


@settings(max_examples=200)
@given(damaged())
def test_damage_to_any_bytes_of_the_file(folder, content):
    check(folder, content)


@settings(max_examples=100)
@given(st.sampled_from(OBJECTS), odd)
def test_a_name_that_stands_twice_is_refused(folder, path, value):
    """Two values under one name: each reader takes another."""
    name = next(iter(at(WHOLE, path)))
    doc = copy.deepcopy(WHOLE)
    at(doc, path)["@twice@"] = value
    content = written(doc).replace(b"twice:", json.dumps(name).encode() + b":")
    assert not check(folder, content)


def test_the_whole_file_is_used(folder):
    assert fits(WHOLE)
    assert check(folder, TEXT.encode(), same=True)
