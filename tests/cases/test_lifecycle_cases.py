"""The cases about a server's life: what its log says, when it is ready, how it fails, what is left of it."""

from contextlib import nullcontext

import pytest

from pytest_kvcache.frameworks.vllm import VLLM
from pytest_kvcache.harness import engine, ready, server

from .catalogue import EXACT, cases, problems
from .lifecycle_case import TESTS, classes, of_log, of_processes, of_server, order_of_a_stop, waits_for_gpu_memory

# What a case has that no other has.
FORMS = {"log": {"log_text"}, "server": {"probes", "process"}, "processes": {"before"}}
LIFE = cases("lifecycle")


def form(case):
    found = [name for name, keys in FORMS.items() if keys & set(case)]
    assert len(found) == 1, f"this runner does not know the form of {case['case']}"
    return found[0]


def of_form(name):
    return [p for p in LIFE if {n for n, keys in FORMS.items() if keys & set(p.values[0])} == {name}]


@pytest.mark.parametrize("case", LIFE)
def test_case_has_a_form_that_is_known(case):
    form(case)


@pytest.mark.parametrize("case", of_form("log"))
def test_case_log(case, tmp_path):
    assert not problems(case, of_log(case, tmp_path), TESTS, EXACT)


@pytest.mark.parametrize("taken", ["before", "between"])
@pytest.mark.parametrize("case", of_form("server"))
def test_case_server(case, taken, tmp_path):
    if taken == "between" and not any("model_ids" in probe for probe in case.get("probes", ())):
        pytest.skip("nobody else is on its port")
    found = of_server(case, tmp_path, taken)
    assert not problems(case, found, TESTS, EXACT)
    assert found.get("leftover_lives", True), "somebody else's server is left alone"
    if found["flag"]:
        assert VLLM.history[found["flag"]] in found["message"], "it is said which version has the flag"


@pytest.mark.parametrize("victim", ["engine", "supervisor"])
@pytest.mark.parametrize("case", of_form("processes"))
def test_case_processes(case, victim, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "GRACE_S", 0.5)
    found = of_processes(case, tmp_path, victim) | {"order": order_of_a_stop(case, tmp_path)}
    found["next_launch_waits_for_gpu_memory"] = waits_for_gpu_memory(case, tmp_path, victim, monkeypatch)
    assert not problems(case, found, TESTS, EXACT)


@pytest.mark.parametrize("case", of_form("processes"))
def test_a_start_that_does_not_wait_for_the_memory_is_told(case, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "GRACE_S", 0.5)
    monkeypatch.setattr(engine, "given_back", lambda env, say, count: nullcontext())
    assert not waits_for_gpu_memory(case, tmp_path, "engine", monkeypatch)


def test_a_server_that_is_called_ready_too_early_is_told(tmp_path, monkeypatch):
    """By its health alone, and by its list of models alone: the wrong answers of the case."""
    case = {
        "probes": [{"t_s": 5, "health": 503, "models": 200}, {"t_s": 20, "health": 200, "models": 200, "one_token": 503},
                   {"t_s": 60, "health": 200, "models": 200, "one_token": 200}],
        "expected": {"ready_at_s": 60},
    }  # fmt: skip
    monkeypatch.setattr(ready, "_one_token", lambda engine, timeout_s: "")
    assert of_server(case, tmp_path)["ready_at_s"] == 20
    asked = ready._request
    monkeypatch.setattr(ready, "_request", lambda *args: (200, asked(*args)[1]))
    found = of_server(case, tmp_path)
    assert problems(case, found, TESTS, EXACT) == ["ready_at_s: 5 instead of 60"]


@pytest.mark.parametrize(("text", "wanted"), [
    ("INFO: all is well", {"outcome": "ok", "error_class": None, "warnings": [], "needs_tokens": None}),
    ("ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than "
     "the available KV cache memory (8.25 GiB).",
     {"error_class": "kv_cache_too_small", "needs_tokens": 131072, "needs_gib": 16.0, "has_gib": 8.25}),
    ("WARNING KV cache quantization fallback to auto", {"error_class": "kv_dtype_not_applied", "outcome": "error"}),
    ("error: unrecognized arguments: --num-scheduler-steps=8", {"error_class": "unknown_flag", "flag": "--num-scheduler-steps"}),
    ("INFO max_model_len 4096\n[Errno 98] bind on ('0.0.0.0', 43117): address already in use", {"error_class": "port_in_use", "port": 43117}),
    ("RuntimeError: odd", {"outcome": "error", "error_class": None, "reason": "RuntimeError: odd"}),
], ids=lambda v: v[:20] if isinstance(v, str) else "")  # fmt: skip
def test_what_else_a_log_says(text, wanted, tmp_path):
    assert not problems({"expected": wanted}, of_log({"log_text": text}, tmp_path), TESTS, EXACT)


def test_only_the_reason_tells_the_class_and_not_the_log_below_it():
    assert classes("vllm: the engine ended\n  this version does not know the argument --x") == set()


def test_what_is_not_known_fails(tmp_path):
    found = of_log({"log_text": ""}, tmp_path)
    assert problems({"expected": {"colour": 1}}, found, TESTS, EXACT) == ["colour: this runner does not know the field, it expects 1"]
    with pytest.raises(AssertionError, match="does not know the form of life-x"):
        form({"case": "life-x", "moon": 1})
    with pytest.raises(AssertionError, match="does not know colour"):
        of_server({"probes": [{"t_s": 1, "colour": 200}]}, tmp_path)
    with pytest.raises(AssertionError, match="does not know the engine lmdeploy"):
        of_log({"log_text": "", "engine": "lmdeploy"}, tmp_path)
