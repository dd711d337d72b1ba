"""A probe's script in another interpreter: its answer, its faults in one line, and nothing left running. And what a scorer makes of answers."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from pytest_kvcache.core.corpora import Corpus
from pytest_kvcache.core.framework import Probe
from pytest_kvcache.core.perplexity import scores_of, summarise
from pytest_kvcache.core.scenarios import Text
from pytest_kvcache.core.schemes import Scheme
from pytest_kvcache.core.spec import Arm, UserError
from pytest_kvcache.core.validity import trace_problem
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.harness import probe as probes
from pytest_kvcache.harness.texts import Scorer, against_top

GOOD = """
import json, sys, numpy as np
asked = json.load(open(sys.argv[1]))
np.savez(sys.argv[2], a=np.arange(3), told=json.dumps({"got": asked}))
"""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "PROBES", tmp_path)

    def run(source, request=None, *, timeout_s=30.0):
        (tmp_path / "script.py").write_text(source)
        env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p)}
        return probes.ask(sys.executable, "script.py", "name", request or {}, tmp_path / "folder", env=env, timeout_s=timeout_s)

    return run


def test_an_answer_is_arrays_and_what_is_told(ask):
    found = ask(GOOD, {"x": 1})
    assert found["a"].tolist() == [0, 1, 2]
    assert found["told"] == {"got": {"x": 1}}


@pytest.mark.parametrize(("source", "why"), [
    ("import sys; sys.exit('no such model')", "no such model"),
    ("raise RuntimeError('out of memory\\nwhile it grew')", "while it grew"),
    ("print('only words')", "only words"), ("pass", "its probe ended without a word (exit code 0)"),
    ("import os; os.kill(os.getpid(), 9)", "its probe ended without a word (exit code -9)"),
])  # fmt: skip
def test_a_probe_that_fails_is_one_line_with_its_last_words_and_its_log(ask, source, why):
    with pytest.raises(UserError) as caught:
        ask(source)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "name.log" in str(caught.value)


def test_an_old_answer_is_never_taken_for_a_new_one(ask):
    ask(GOOD)
    with pytest.raises(UserError):
        ask("pass")


def test_nothing_of_a_probe_is_left_running_after_its_time(ask, tmp_path):
    marker = tmp_path / "pid"
    source = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(marker)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    with pytest.raises(UserError, match="took longer than 3 s"):
        ask(source, timeout_s=3.0)
    pid, until = int(marker.read_text()), time.monotonic() + 10
    while time.monotonic() < until and subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()[
        :1
    ] not in ("", "Z"):
        time.sleep(0.05)
    assert time.monotonic() < until, "the child outlived its probe"


def test_a_probe_goes_with_a_pytest_that_is_killed(tmp_path):
    marker = tmp_path / "pid"
    (tmp_path / "script.py").write_text(f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    ours = f"""
from pathlib import Path
from pytest_kvcache.harness import probe
import os, sys
probe.PROBES = Path({str(tmp_path)!r})
probe.ask(sys.executable, "script.py", "name", {{}}, Path({str(tmp_path)!r}) / "folder", env=os.environ, timeout_s=600)
"""
    parent = subprocess.Popen([sys.executable, "-c", ours])
    until = time.monotonic() + 30
    while not (marker.exists() and marker.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    pid = marker.read_text()
    while subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()[:1] not in ("", "Z"):
        assert time.monotonic() < until, "the probe outlived the session that asked"
        time.sleep(0.05)


# -- a scorer over made-up answers ------------------------------------------------------------------------------------

ARMS = (Arm(name="fp16"), Arm(name="int8", kv_dtype="int8"), Arm(name="int4", kv_dtype="int4"))
TEXT = Text(windows=4, arms=ARMS, scheme=Scheme(window=64, first=1, step=8))
KLD = {"arm:fp16": 0.0, "arm:int8": 0.004, "arm:int4": 0.05, "control:floor": 1e-4, "control:negative": 2.0}


class MadeUp(Scorer):
    """A scorer whose engine is made up: what it was asked stands in `asked`."""

    def _ask(self, name, request):
        self.asked.append((name, request))
        if request.get("want") == "tokens":
            return {"tokens/corpus": np.arange(400), "told": {"bos": 7, "eos": 8}}
        arms = list(request["arms"])
        if self.dies & set(arms):
            raise UserError("vllm: ValueError: FP8 KV cache needs another processor (log: x)")
        prompts = request.get("prompts", {})
        written = {f"{a}/{p}": np.array(self.texts.get(a, range(100 * i, 100 * i + 40))) for a in arms for i, p in enumerate(prompts)}
        told = {"seconds": dict.fromkeys(arms, 1.0), "texts": {a: dict.fromkeys(prompts, "words") for a in arms if prompts}}
        if request.get("want") == "greedy":
            return written | {"told": told}
        rng = np.random.default_rng(1)
        n = sum(len(w["tokens"]) - w["first"] for w in request["windows"])
        nll, spread = rng.exponential(2.0, n), rng.exponential(1.0, n)
        chunk = np.concatenate([[i] * (len(w["tokens"]) - w["first"]) for i, w in enumerate(request["windows"])])
        found = {"chunk": chunk}
        for arm in arms:
            found |= {f"{arm}/nll": nll + KLD[arm] / 10, f"{arm}/kld": KLD[arm] * spread, f"{arm}/same": KLD[arm] * spread < 0.5}
            if self.probe.alone:
                ids = np.tile(np.arange(3), (n, 1))
                found |= {f"{arm}/top_ids": ids, f"{arm}/top_logprobs": np.log(np.tile([0.5 - KLD[arm] / 9, 0.3, 0.1], (n, 1)))}
        told |= {"compare_s": dict.fromkeys(arms, 0.1), "cache_bytes": dict.fromkeys(arms, 99), "engine": "1.0"}
        return found | written | {"told": told}


def scorer(tmp_path, alone=False, needs=None, **about):
    import dataclasses

    probe = Probe(script="x.py", kv={"auto": {}, "int8": {"b": 8}, "int4": {"b": 4}}, negative={"b": 2}, alone=alone, needs=needs or {})
    found = MadeUp(
        framework=dataclasses.replace(TRANSFORMERS, probe=probe), python=sys.executable, model="m", device="cpu", env={}, say=lambda line: None,
        corpus=lambda: Corpus(name="made up", text="words"), folder=tmp_path,
    )  # fmt: skip
    found.asked, found.dies, found.texts = [], about.get("dies", set()), about.get("texts", {})
    return found


@pytest.mark.parametrize("alone", [False, True])
def test_each_arm_has_a_trace_with_its_controls(tmp_path, alone):
    traces = scorer(tmp_path, alone).score(TEXT, ARMS)
    assert [t.arm for t in traces] == ["fp16", "int8", "int4"]
    assert [trace_problem(t) for t in traces] == [None] * 3
    assert "controls" not in traces[0].load
    assert traces[1].load["controls"]["negative"]["kld.mean"][0] > 0.01
    assert ("kld" in traces[1].load) == alone, "a lower bound is called one"
    figures = [summarise(scores_of(t.tokens))["kld.mean"].value for t in traces]
    assert figures[0] <= figures[1] < figures[2]
    json.dumps([t.load for t in traces])


def test_windows_are_cut_with_the_models_own_beginning_and_asked_for_once(tmp_path):
    one = scorer(tmp_path)
    text = Text(windows=4, arms=ARMS, scheme=Scheme(window=64, first=1, step=8, bos=None))
    one.score(text, ARMS)
    one.workload(text)
    assert [name for name, _ in one.asked].count("tokens") == 1
    asked = dict(one.asked)["scores"]
    assert [w["tokens"][0] for w in asked["windows"]] == [7] * 4
    assert asked["step"] == 8
    assert set(asked["arms"]) == set(KLD)


def test_a_corpus_of_one_window_says_so(tmp_path):
    with pytest.raises(UserError, match="400 tokens, 1 window\\(s\\) of 300; two are the least"):
        scorer(tmp_path).score(Text(windows=4, arms=ARMS, scheme=Scheme(window=300, step=8)), ARMS)


def test_a_module_that_is_missing_costs_its_own_arm_only(tmp_path):
    traces = scorer(tmp_path, needs={"kv_dtype=int4": ("no_such_module_1", "pip install it")}).score(TEXT, ARMS)
    problems = [trace_problem(t) for t in traces]
    assert problems[:2] == [None, None]
    assert "has no no_such_module_1, which kv_dtype=int4 needs; pip install it" in problems[2][0]


def test_alone_an_arm_that_does_not_start_costs_itself_only(tmp_path):
    traces = scorer(tmp_path, alone=True, dies={"arm:int8"}).score(TEXT, ARMS)
    assert "FP8 KV cache needs another processor" in trace_problem(traces[1])[0]
    assert trace_problem(traces[2]) is None


@pytest.mark.parametrize("name", ["arm:fp16", "control:floor", "control:negative"])
def test_without_the_reference_or_a_control_nothing_counts(tmp_path, name):
    with pytest.raises(UserError, match="FP8 KV cache"):
        scorer(tmp_path, alone=True, dies={name}).score(TEXT, ARMS)


@pytest.mark.parametrize("alone", [False, True])
def test_garbage_makes_an_arm_invalid_whatever_its_figures(tmp_path, alone):
    traces = scorer(tmp_path, alone, texts={"arm:int4": [5] * 40}).score(TEXT, ARMS)
    assert trace_problem(traces[1]) is None
    assert "the texts that int4 writes are garbage" in trace_problem(traces[2])[0]


def test_garbage_at_16_bits_too_is_no_reference(tmp_path):
    texts = dict.fromkeys(("arm:fp16", "arm:int8", "arm:int4"), [5] * 40)
    traces = scorer(tmp_path, texts=texts).score(TEXT, ARMS)
    assert all("garbage" in trace_problem(t)[0] for t in traces)


def test_tasks_are_counted_by_kind(tmp_path):
    traces = scorer(tmp_path).score(Text(windows=4, arms=ARMS, scheme=TEXT.scheme, tasks=3), ARMS)
    assert {kind: n for kind, (_, n) in traces[1].load["tasks"].items()} == {"needle": 3, "arithmetic": 3, "code": 3}


def test_the_likeliest_tokens_of_both_sides_make_divergence_and_agreement():
    found = {
        "a/top_ids": np.array([[1, 2], [1, 2]]), "a/top_logprobs": np.log([[0.6, 0.3], [0.6, 0.3]]),
        "b/top_ids": np.array([[1, 2], [2, 1]]), "b/top_logprobs": np.log([[0.6, 0.3], [0.6, 0.3]]),
    }  # fmt: skip
    got = against_top(found, "b", "a")
    assert got["b/same"].tolist() == [True, False]
    assert got["b/kld"][0] == pytest.approx(0.0, abs=1e-6)
    assert got["b/kld"][1] == pytest.approx(0.3 * np.log(2), abs=1e-6)
