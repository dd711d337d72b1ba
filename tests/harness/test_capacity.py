"""A pool that is filled, on a small server whose every fault is asked for: what is sent, and what is told of each part."""

import contextlib
import json
import threading
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from pytest_kvcache.core.framework import Framework
from pytest_kvcache.core.readings import READINGS, Readings, Series
from pytest_kvcache.core.scenarios import Capacity
from pytest_kvcache.core.spec import Arm, Model, UserError
from pytest_kvcache.core.validity import trace_problem
from pytest_kvcache.harness import capacity
from pytest_kvcache.harness.capacity import config_reader
from pytest_kvcache.harness.running import RunningEngine

from ..core.test_capacity import SHAPE, SMOLLM2, head
from .pages import Quiet, in_a_thread

POOL, CONTEXT, BLOCK = 1000, 256, 10
WORDS = tuple(f"w{i:04d}" for i in range(1000))


def body(model, prompt, osl):
    return {"prompt": prompt, "max_tokens": osl, "stream": True, "stream_options": {"include_usage": True}}


def framework(**more):
    paged = {name: (Series(name=f"x:{name}"),) for name in ("kv_usage", "running", "preemptions")}
    return Framework(
        name="x", argv=lambda launch: [], body=body, needs=(), cure="", readings=paged, kv_dtypes={"auto": "", "int8": "q8_0"}, **more
    )


class Pool:
    """Takes what fits and lets the others wait; `faults` say what it does wrong."""

    def __init__(self, *faults):
        self.faults, self.used, self.running, self.preempted, self.most = set(faults), 0, 0, 0, 0
        self.room, self.asked, self.refused = threading.Condition(), [], []

    def take(self, tokens):
        with self.room:
            self.preempted += "preempts" in self.faults
            if self.used + tokens > POOL:
                if "fails above" in self.faults:
                    return False
                self.preempted += 1
            self.room.wait_for(lambda: self.used + tokens <= POOL, timeout=3)
            self.used, self.running = self.used + tokens, self.running + 1
            self.most = max(self.most, self.running)
        threading.Event().wait(1.0 if "fails above" in self.faults else 0.15)
        return True

    def give(self, tokens):
        with self.room:
            self.used, self.running = self.used - (tokens if "leaks" not in self.faults else tokens - 1), self.running - 1
            self.room.notify_all()

    def page(self):
        return f"x:kv_usage {self.used / POOL}\nx:running {self.running}\nx:preemptions_total {self.preempted}\nx:preemptions {self.preempted}\n"


@contextlib.contextmanager
def serving(pool):
    class Handler(Quiet):
        def do_GET(self):
            self.answer(200, pool.page().encode())

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            isl, osl, stream = len(asked["prompt"].split()), asked["max_tokens"], asked["stream"]
            pool.asked.append((isl, osl, stream))
            if isl + osl > CONTEXT:
                if "hangs" in pool.faults:
                    threading.Event().wait(3)
                if "breaks" in pool.faults:
                    return self.connection.close()
                if "takes all" not in pool.faults:
                    return self.answer(500 if "crude" in pool.faults else 400, b'{"error": "longer than the context"}')
            if "short context" in pool.faults and isl > CONTEXT - 20:
                return self.answer(400, b'{"error": "too long"}')
            tokens = -(-(isl + osl) // BLOCK) * BLOCK
            if not pool.take(tokens):
                return self.answer(503, b'{"error": "no blocks left"}')
            try:
                self.tell(isl, osl, stream)
            finally:
                pool.give(tokens)

        def tell(self, isl, osl, stream):
            usage = {"prompt_tokens": isl, "completion_tokens": osl, "total_tokens": isl + osl}
            if not stream:
                return self.answer(200, json.dumps({"choices": [{"text": "a" * osl}], "usage": usage}).encode())
            chunks = [{"choices": [{"index": 0, "text": " a", "finish_reason": "length" if i == osl - 1 else None}]} for i in range(osl)]
            events = [f"data: {json.dumps(c)}\n\n" for c in [*chunks, {"choices": [], "usage": usage}]]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(("".join(events) + "data: [DONE]\n\n").encode())

    class Server(ThreadingHTTPServer):
        request_queue_size, block_on_close = 64, False

    server = Server(("127.0.0.1", 0), Handler)
    with in_a_thread(server) as address:
        yield address


TOLD = {"kv_tokens": POOL, "kv_memory": POOL * 23040, "block_size": BLOCK, "kv_blocks": POOL // BLOCK, "max_model_len": CONTEXT}


@contextlib.contextmanager
def engine(pool, *, told=TOLD, arm=None, died=None, config=SMOLLM2, of=None):
    with serving(pool) as address:
        server = SimpleNamespace(base_url=address, start_s=0.1, pids=set, failure=lambda: died)
        yield RunningEngine(
            server=server, framework=of or framework(), model="m", words=WORDS, arm=arm or Arm(name="fp16"), run=1, workload=str,
            resolved=told, config=lambda: config,
        )  # fmt: skip


SCENARIO = Capacity(isl=90, osl=8, arms=(Arm(name="fp16"),))  # a hundred tokens each, in blocks


def measured(pool, scenario=SCENARIO, **more):
    with engine(pool, **more) as running:
        trace = running.measure(scenario)
    return trace, trace.load["capacity"]


def test_a_good_server_is_filled_overfilled_and_empty_again():
    pool = Pool()
    trace, told = measured(pool)
    assert trace_problem(trace) is None
    assert len(trace.records) == 9 and told["batch"] == {"requests": 9, "share": 0.9, "preempted": 0}
    assert told["above"] == {"requests": 15, "failed": 0, "share": 1.5, "preempted": told["above"]["preempted"]}
    assert told["drained"]["usage"] == told["drained"]["before"] == 0
    assert told["longest"]["fits"] == CONTEXT - 1 and told["longest"]["failed"] == 0
    assert told["longest"]["beyond"] == {
        "tokens": CONTEXT + 1,
        "became": "refused",
        "status": 400,
        "words": '{"error": "longer than the context"}',
    }
    assert pool.most > 1, "at once, not one after another"
    assert (247, 8, True) in pool.asked and (256, 1, False) in pool.asked
    assert told["expected_bytes_per_token"] == 23040 and told["not_told"] == {}


@pytest.mark.parametrize(("fault", "words"), [
    ("preempts", "requests at 90% of its pool; none may be"), ("fails above", "of 15 requests at once (150% of its pool) failed"),
    ("leaks", "of the pool was in use"), ("takes all", "was answered as if it fitted"), ("hangs", "hung"), ("breaks", "broke the connection"),
    ("crude", "no clear error but HTTP 500"), ("short context", "a request of 255 of its 256 tokens of context failed"),
])  # fmt: skip
def test_what_a_server_does_wrong_is_named(fault, words, monkeypatch):
    monkeypatch.setattr(capacity, "DRAIN_S", 0.3)
    monkeypatch.setattr(capacity, "REFUSAL_S", 1.0)
    monkeypatch.setattr("pytest_kvcache.harness.running.GONE_S", 0.1)
    trace, _ = measured(Pool(fault))
    problem, by_machine = trace_problem(trace)
    assert words in problem and not by_machine


@pytest.mark.parametrize(("more", "reasons"), [
    ({"told": {}}, {"kv_tokens": "kv_tokens and no kv_memory", "above": "told no tokens", "longest": "told no longest context"}),
    ({"told": {**TOLD, "kv_tokens": 200, "kv_blocks": 20}}, {"longest": "not known to hold a whole context of 256"}),
    ({"arm": Arm(name="fp16", max_requests=4)}, {"above": "max_requests=4 keeps it below its pool, which holds 10"}),
    ({"of": framework(one_at_a_time=True)}, {"above": "x answers one request at a time"}),
    ({"config": {}}, {"kv_size_ratio": "the model's configuration"}),
    ({"of": Framework(name="x", argv=lambda launch: [], body=body, needs=(), cure="", unsupported=dict.fromkeys(READINGS, "it has no page"))},
     {"batch.preempted": "it has no page", "above.preempted": "it has no page", "drained": "it has no page"}),
])  # fmt: skip
def test_a_part_that_cannot_be_asked_has_its_reason(more, reasons):
    trace, told = measured(Pool(), **more)
    assert trace_problem(trace) is None
    assert {name: reasons[name] in told["not_told"].get(name, "") for name in reasons} == dict.fromkeys(reasons, True)
    assert not {n for n in reasons if n in told}


def test_without_a_fill_one_request_is_sent_and_no_more_than_the_arm_serves():
    pool = Pool()
    trace, told = measured(pool, Capacity(isl=90, osl=8, fill=0))
    assert len(trace.records) == 1 and "above" not in told and pool.most == 1
    trace, _ = measured(Pool(), arm=Arm(name="few", max_requests=4))
    assert len(trace.records) == 4


def test_a_pool_that_is_not_the_one_asked_for_is_named():
    trace, _ = measured(Pool(), arm=Arm(name="fp16", kv_gib=1))
    assert "kv_gib=1 was not applied: the server's KV cache takes 0.02146 GiB" in trace_problem(trace)[0]


@pytest.mark.parametrize(("shares", "least"), [
    ([0.0], 0.0), ([0.04, 0.04, 0.0], 0.0), ([0.04, 0.02, 0.06, 0.02], 0.02), ([0.04, None, 0.0], 0.0), ([None], None),
])  # fmt: skip
def test_what_the_request_before_still_holds_is_no_measure_of_a_leak(shares, least, monkeypatch):
    def share(used):
        return {} if used is None else {"kv_usage": used}

    left = list(shares)
    clock = iter(range(100))
    monkeypatch.setattr(capacity.time, "monotonic", lambda: next(clock) / 5)
    monkeypatch.setattr(capacity.time, "sleep", lambda s: None)
    page = SimpleNamespace(readings=lambda: Readings(values=share(left.pop(0) if len(left) > 1 else left[0])))
    assert capacity._at_rest(page).values.get("kv_usage") == least


def test_measured_again_it_sends_other_prompts(monkeypatch):
    seen = []
    real = RunningEngine._load

    def noted(self, *args, **more):
        load = real(self, *args, **more)
        seen.extend(load.bodies)
        return load

    monkeypatch.setattr(RunningEngine, "_load", noted)
    with engine(Pool()) as running:
        running.measure(SCENARIO)
        first = set(seen)
        seen.clear()
        running.measure(SCENARIO)
    calibration = {b for b in first if b'"max_tokens": 2,' in b}
    assert first & set(seen) <= calibration


def test_a_server_that_died_is_the_reason():
    with engine(Pool(), died=UserError("x died (exit code 9)")) as running, pytest.raises(UserError, match="exit code 9"):
        running.measure(SCENARIO)


# -- the model's own configuration --------------------------------------------------------------------------------------


def test_the_shape_of_a_folder_a_file_a_row_in_this_order(tmp_path):
    row = Model(key="m", layers=30, kv_heads=3, head_dim=64)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "m.gguf").write_bytes(head(**SHAPE))
    (tmp_path / "odd.gguf").write_bytes(b"no such file")
    assert config_reader(row, str(tmp_path), "python")() == SMOLLM2
    assert config_reader(row, str(tmp_path / "m.gguf"), "python")() == SMOLLM2
    by_row = {"num_hidden_layers": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}
    assert config_reader(row, str(tmp_path / "odd.gguf"), "python")() == config_reader(row, "org/name", "python")() == by_row
    (tmp_path / "config.json").write_text("[no JSON")
    assert config_reader(row, str(tmp_path), "python")() == by_row


def test_a_shape_that_is_nowhere_is_empty(tmp_path):
    assert config_reader(Model(key="m"), str(tmp_path), "python")() == {}
    assert config_reader(Model(key="m", hub_id="org/name"), "org/name", str(tmp_path / "no python"))() == {}
    python = tmp_path / "python"
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    python.write_text(f"#!/bin/sh\necho {tmp_path / 'config.json'}\n")
    python.chmod(0o755)
    assert config_reader(Model(key="m", hub_id="org/name"), "org/name", str(python))() == SMOLLM2
