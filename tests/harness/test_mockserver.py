"""The server that the load client is tested and measured against: its own counts and times must be right."""

import http.client
import itertools
import json
import os
import shutil
import socket
import ssl
import time

import pytest

from pytest_kvcache.core.load import Load, Target
from pytest_kvcache.core.record import OK
from pytest_kvcache.harness.loadgen import run

from ..mockserver import MockServer, NoOpenSSL, Truth, build

pytestmark = [pytest.mark.clock, pytest.mark.skipif(not shutil.which("cc") and "CI" not in os.environ, reason="needs a C compiler (cc)")]
FAST = {"mode": "schedule", "ttft": 5, "tpot": 1, "jitter_ttft": 2, "jitter_gap": 0.5}


def connected(server: MockServer) -> http.client.HTTPConnection:
    if server.ca_file:
        trusting = ssl.create_default_context(cafile=server.ca_file)
        return http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=trusting)
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)


def ask(server: MockServer, path="/v1/completions", tokens=8, xid="", **more):
    """The events of one streamed answer, without [DONE]."""
    body = {"model": "mock", "stream": True, "max_tokens": tokens, "stream_options": {"include_usage": True}, **more}
    connection = connected(server)
    try:
        connection.request("POST", path, json.dumps(body), {"X-Request-Id": xid})
        answer = connection.getresponse()
        assert answer.status == 200
        *events, done, rest = answer.read().decode().split("\n\n")
    finally:
        connection.close()
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def get(server: MockServer, path: str) -> str:
    connection = connected(server)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def metrics(server: MockServer) -> dict[str, float]:
    lines = [line.split() for line in get(server, "/metrics").splitlines() if not line.startswith("#")]
    return {name.removeprefix("vllm:").replace('model_name="mock"', "").replace("{}", "").replace("{,", "{"): float(v) for name, v in lines}


def test_every_token_is_sent_logged_and_counted():
    with MockServer(prompt_tokens=7, **FAST) as server:
        for tokens in (1, 8, 20):
            *texts, usage = ask(server, tokens=tokens, xid=f"r{tokens}")
            assert sum(len(e["choices"][0]["text"].split()) for e in texts) == len(texts) == tokens
            assert usage["usage"]["completion_tokens"] == tokens and usage["usage"]["prompt_tokens"] == 7
        found = metrics(server)
        truths = server.stop()
    assert [(t.xid, t.n_tok, len(t.t), t.aborted, t.chat) for t in truths] == [(f"r{n}", n, n, False, False) for n in (1, 8, 20)]
    assert found == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "prompt_tokens_total": 21,
        "generation_tokens_total": 29,
        'request_success_total{finished_reason="length"}': 3,
        'request_success_total{finished_reason="abort"}': 0,
    }


@pytest.mark.parametrize("burst", [0, 1])
def test_flood_counts_too(burst):
    with MockServer(mode="flood", burst=burst) as server:
        assert len(ask(server, tokens=50)) == 51
        found = metrics(server)
        (truth,) = server.stop()
    assert (truth.n_tok, truth.t) == (50, ()) and truth.t_req <= truth.t_end
    assert found["generation_tokens_total"] == 50 and found['request_success_total{finished_reason="length"}'] == 1


def test_truth_is_in_order_and_within_what_the_client_saw():
    with MockServer(**FAST) as server:
        before = time.perf_counter_ns()
        ask(server, tokens=16)
        after = time.perf_counter_ns()
        (truth,) = server.stop()
        assert server.stop() == [truth]
    stamps = [before, truth.t_req, truth.t_hdr, *truth.t]
    assert all(a <= b for a, b in itertools.pairwise([*stamps, after]))
    assert truth.t[-1] <= truth.t_end, "stamped after the write, so perhaps after the client had it"
    assert truth.ttft_ms >= 3 and len(truth.gaps_ms) == 15
    assert truth.ttft_ms + sum(truth.gaps_ms) == pytest.approx(truth.e2e_ms) and truth.tpot_ms == pytest.approx(sum(truth.gaps_ms) / 15)


def test_a_chat_may_begin_with_its_role_and_end_without_text():
    with MockServer(role_first=True, role_at=1, finish_separate=True, usage_delay=3, **FAST) as server:
        role, *texts, finish, usage = ask(server, "/v1/chat/completions", tokens=4, messages=[])
        (truth,) = server.stop()
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["finish_reason"] for e in texts] == [None] * 4 and len(truth.t) == 4
    assert finish["choices"][0]["delta"] == {} and finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert truth.chat and truth.t_hdr <= truth.t_role < truth.t[0] and truth.t[-1] < truth.t_end
    assert truth.t_end - truth.t_req >= (3 + 3 * 0.5 + 3) * 1e6, "by its schedule: a late token brings the usage no later"


def test_several_tokens_in_a_chunk():
    with MockServer(k=4, **FAST) as server:
        *texts, _ = ask(server, tokens=10, stream_options={"include_usage": True, "continuous_usage_stats": True})
        (truth,) = server.stop()
    assert [e["usage"]["completion_tokens"] for e in texts] == [4, 8, 10] and (truth.k, truth.n_tok, len(truth.t)) == (4, 10, 3)
    assert truth.tpot_ms == pytest.approx((truth.t[2] - truth.t[0]) / 6e6)


def test_the_same_seed_gives_the_same_schedule():
    def delays(seed: int) -> list[int]:
        with MockServer(seed=seed, **FAST) as server:
            for _ in range(4):
                ask(server, tokens=1)
            return [t.sched_ttft for t in server.stop()]

    first = delays(1)
    assert first == delays(1) != delays(2) and all(3e6 <= d <= 7e6 for d in first)


@pytest.mark.parametrize("tls", [False, True])
def test_an_answer_nobody_waits_for_is_aborted(tls):
    with MockServer(tls=tls, mode="schedule", ttft=1, tpot=20) as server:
        connection = connected(server)
        connection.request("POST", "/v1/completions", json.dumps({"stream": True, "max_tokens": 500}))
        answer = connection.getresponse()
        assert answer.read(5) == b"data:" and metrics(server)["num_requests_running"] == 1
        answer.close()
        connection.close()
        deadline = time.monotonic() + 5
        while metrics(server)["num_requests_running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert metrics(server)['request_success_total{finished_reason="abort"}'] == 1
        (truth,) = server.stop()
    assert truth.aborted and 1 <= len(truth.t) < 500


# --- over TLS ---

SLACK_NS = 100_000  # a stamp of the kernel is of the wall clock, known in terms of ours to some microseconds


def driven(server: MockServer, tokens: list[int], prompt="a b c"):
    """What our client saw of one answer of each length, 8 at a time."""
    asked = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    bodies = tuple(json.dumps({**asked, "max_tokens": n}).encode() for n in tokens)
    target = Target(base_url=server.url, endpoint="/v1/completions", ca_file=server.ca_file)
    return run(target, Load(bodies=bodies, osl=tuple(tokens), concurrency=8))


def test_over_tls_the_truth_is_within_what_our_client_saw():
    lengths = list(range(3, 43))  # each its own, by which an answer's truth is found
    with MockServer(tls=True, **FAST) as server:
        seen = driven(server, lengths, prompt="x" * 100_000)  # several TLS records
        truths = {t.n_tok: t for t in server.stop()}
    assert sorted(truths) == lengths and not any(t.aborted for t in truths.values())
    assert len({t.conn for t in truths.values()}) == 8, "connections are kept"
    for r in seen.records:
        truth = truths[r.output_tokens]
        assert (r.outcome, r.output_tokens, r.events, len(truth.t)) == (OK, *[lengths[r.index]] * 3)
        sent, first, last = (seen.zero_ns + s * 1e9 for s in (r.sent_s, r.first_s, r.last_s))
        assert sent <= truth.t_req < truth.t[0] <= first + SLACK_NS and truth.t[-1] <= last + SLACK_NS
        assert truth.ttft_ms <= (first - sent + SLACK_NS) / 1e6


@pytest.mark.parametrize(("burst", "tokens"), [(0, 20_000), (1, 1_000)])
def test_over_tls_a_flood_comes_whole(burst, tokens):
    with MockServer(tls=True, mode="flood", burst=burst) as server:
        seen = driven(server, [tokens] * 16)
        truths = server.stop()
    assert [(r.outcome, r.output_tokens, r.events) for r in seen.records] == [(OK, tokens, tokens)] * 16
    assert [(t.n_tok, t.aborted) for t in truths] == [(tokens, False)] * 16


@pytest.mark.parametrize("mode", [{"mode": "flood"}, {"mode": "flood", "burst": 8}, {"mode": "schedule", "ttft": 0, "tpot": 0}])
def test_over_tls_it_waits_for_one_who_reads_late(mode):
    tokens, asked = 20_000, b'POST /v1/completions HTTP/1.1\r\nContent-Length: 37\r\n\r\n{"stream": true, "max_tokens": 20000 }'
    with MockServer(tls=True, **mode) as server:
        with socket.socket() as late:
            late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            late.settimeout(10)
            late.connect(("127.0.0.1", server.port))
            with ssl.create_default_context(cafile=server.ca_file).wrap_socket(late, server_hostname="127.0.0.1") as stream:
                stream.sendall(asked)
                assert metrics(server)["num_requests_running"] == 1, "blocked, and others are served"
                answer = b""
                while not answer.endswith(b"\r\n0\r\n\r\n"):
                    answer += stream.recv(65536)
        (truth,) = server.stop()
    assert answer.count(b"data: {") == tokens and b"data: [DONE]" in answer[-40:] and not truth.aborted


def test_a_certificate_without_its_key_is_refused_and_so_are_both_without_tls():
    with pytest.raises(RuntimeError, match="--tls-cert and --tls-key go together"), MockServer(tls_cert="a"):
        pass
    with pytest.raises(RuntimeError, match="built without TLS"), MockServer(tls_cert="a", tls_key="b"):
        pass


def test_without_the_headers_of_openssl_it_is_skipped_but_not_in_ci(tmp_path, monkeypatch):
    for name, says in (("cc", "fatal error: openssl/err.h: No such file or directory"), ("openssl", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="libssl-dev"), MockServer(tls=True):
        pass
    monkeypatch.setenv("CI", "true")
    with pytest.raises(NoOpenSSL, match="libssl-dev"), MockServer(tls=True):
        pass


# --- what it says ---


def test_what_it_does_not_understand_is_said():
    with pytest.raises(RuntimeError, match=r"exit code 2(?s:.*)--jitter-ttft"), MockServer(no_such_flag=1):
        pass


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs a C compiler \(cc\)"):
        build()


def test_a_truth_is_plain_arithmetic():
    ms = 1_000_000
    truth = Truth(
        t_req=0,
        t_hdr=1,
        t_role=0,
        sched_ttft=50 * ms,
        t=(50 * ms, 90 * ms, 130 * ms),
        t_end=140 * ms,
        n_tok=12,
        k=4,
        xid="",
        chat=False,
        stream=True,
        conn=0,
        open=1,
        aborted=False,
    )
    assert (truth.ttft_ms, truth.e2e_ms, truth.tpot_ms, truth.gaps_ms) == (50, 130, 10, (40, 40))
