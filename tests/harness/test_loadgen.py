"""The load generator against servers: every request once, at its time, stamped as its bytes come; every fault a class.

Against the mock server the truth of each byte is known; a raw socket answers where exact bytes matter. No times are
asserted but in wide bounds; accuracy is measured in benchmarks/.
"""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.load import MAX_PLANNED_CORES, Load, Target, plan_workers
from pytest_kvcache.core.record import OK
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness.loadgen import Workers, run

from ..mockserver import MockServer

pytestmark = pytest.mark.clock

COMPLETIONS = "/v1/completions"


def body(tokens=8, **more):
    asked = {"model": "mock", "prompt": "a b c", "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**asked, **more}).encode()


def load(n, tokens=8, *, idle=20.0, **more):
    return Load(bodies=(body(tokens),) * n, osl=(tokens,) * n, idle_timeout_s=idle, first_timeout_s=idle, **more)


def target(url, **more):
    return Target(base_url=url, endpoint=COMPLETIONS, **more)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("shape", "n"), [({"concurrency": 1}, 5), ({"concurrency": 7}, 40), ({"due_s": tuple(i / 200 for i in range(60))}, 60)]
)
def test_every_request_is_sent_once_and_every_token_counted(shape, n, workers):
    with MockServer(mode="schedule", ttft=10, tpot=1, seed=1) as server:
        seen = run(target(server.url), load(n, **shape), workers=workers)
        truth = server.stop()
    assert [r.index for r in seen.records] == list(range(n))
    assert {r.outcome for r in seen.records} == {OK}
    assert len(truth) == n
    assert not any(t.aborted for t in truth)
    assert {(r.output_tokens, r.events) for r in seen.records} == {(8, 8)}
    assert sum(seen.arrivals["n"]) == 8 * n
    assert sum(seen.itl["n"]) == 7 * n


def test_the_stamps_are_those_of_the_bytes():
    with MockServer(mode="schedule", ttft=60, tpot=20, jitter_gap=5, seed=3) as server:
        seen = run(target(server.url), load(12, concurrency=3))
        truth = {(t.t_req, t.t[0], t.t[-1]) for t in server.stop()}
    for r in seen.records:
        sent, first, last = (seen.zero_ns + s * 1e9 for s in (r.sent_s, r.first_s, r.last_s))
        nearest = min(truth, key=lambda t: abs(t[1] - first))
        assert sent == pytest.approx(nearest[0], abs=25e6)
        assert first == pytest.approx(nearest[1], abs=25e6)
        assert last == pytest.approx(nearest[2], abs=25e6)


def test_a_closed_loop_keeps_its_streams_busy_and_no_more():
    with MockServer(mode="schedule", ttft=20, tpot=2) as server:
        seen = run(target(server.url), load(30, concurrency=5))
        truth = server.stop()
    assert max(t.open for t in truth) == 5
    assert seen.client["slot_gap_ms"]["p50"] < 20
    assert len({t.conn for t in truth}) == 5, "connections are kept"


def test_an_open_loop_sends_on_time_whatever_is_still_open():
    due = tuple(i * 0.02 for i in range(25))
    with MockServer(mode="schedule", ttft=400, tpot=1) as server:
        seen = run(target(server.url), load(25, due_s=due))
        truth = sorted(t.t_req for t in server.stop())
    assert [r.scheduled_s for r in seen.records] == pytest.approx(due, abs=1e-6)
    assert all(-1e-6 <= r.sent_s - r.scheduled_s < 0.1 for r in seen.records)
    assert [(t - seen.zero_ns) / 1e9 for t in truth] == pytest.approx(due, abs=0.1)
    assert seen.client["send_lag_ms"]["p50"] < 20


def test_several_tokens_an_event_and_late_usage_move_no_count():
    with MockServer(mode="schedule", ttft=10, tpot=1, k=4, finish_separate=True, usage_delay=30) as server:
        seen = run(target(server.url), load(4, tokens=16, concurrency=2))
    for r in seen.records:
        assert (r.output_tokens, r.events) == (16, 4)
        assert "multi_token_events" in r.notes
        assert r.end_s - r.last_s > 0.02
    assert seen.itl["n"] == [], "how many tokens an event held is not known"
    assert sum(seen.arrivals["n"]) == pytest.approx(64)


# --- servers that misbehave, byte by byte ---

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
CLOSING = HEAD + b"connection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a","index":0,"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"text":"a","index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
RESET = object()


def framed(*events):
    return b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events)


@contextlib.contextmanager
def raw_server(*answers, wrap=lambda s: s):
    """One connection after another; each is answered by its parts: bytes, seconds to wait, RESET. Every part may come in a
    request of its own on the same connection when the parts are lists."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)

    def play(peer, parts):
        for part in parts:
            if part is RESET:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            elif isinstance(part, bytes):
                peer.sendall(part)
            elif callable(part):
                part(peer)
            else:
                time.sleep(part)

    def serve():
        with contextlib.suppress(OSError):
            listener.accept()[0].close()  # the look for an address that answers
        for answer in answers:
            with contextlib.suppress(OSError), wrap(listener.accept()[0]) as peer:
                if peer.family == socket.AF_INET:
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as every real server does
                for parts in answer if isinstance(answer[0], list) else [answer]:
                    if peer.recv(65536):
                        play(peer, parts)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)  # an answer nobody came for is no fault
    thread.join(10)
    listener.close()


@pytest.fixture(scope="module", autouse=True)
def pool():
    """One load process for all single requests: starting one takes longer than most answers."""
    with Workers() as workers:
        ask.workers = workers
        yield


def ask(url, **more):
    (record,) = ask.workers.run(target(url, **more), load(1, tokens=2, concurrency=1, idle=1.0)).records
    return record


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"], capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    return folder / "cert.pem", folder / "key.pem"


def over_tls(certificate, *answers, clients=False):
    """A raw server that speaks TLS, to `clients` with a certificate only where that is set."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    if clients:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate[0])
    return raw_server(*answers, wrap=lambda s: context.wrap_socket(s, server_side=True))


@pytest.fixture(params=["http", "https"])
def asked(request):
    """What a request to a raw server with this answer comes to, plain and over TLS."""

    def one(answer):
        if request.param == "http":
            with raw_server(answer) as url:
                return ask(url)
        certificate = request.getfixturevalue("certificate")
        with over_tls(certificate, answer) as url:
            return ask(url.replace("http:", "https:"), ca_file=str(certificate[0]))

    return one


@pytest.mark.parametrize(("answer", "outcome", "words"), [
    ([b"HTTP/1.1 503 Busy\r\ncontent-length: 9\r\n\r\noverload!"], "http_status", "HTTP 503: overload!"),
    ([b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 7\r\n\r\n<p>hi<p"], "not_event_stream", "<p>hi"),
    ([CHUNKED + framed(TOKEN), 0.05, RESET], "connection_reset", "after 1 token events"),
    ([b""], "connection_reset", "without an answer"),
    ([HEAD], "connection_reset", "before its headers were complete"),
    ([CLOSING + TOKEN], "truncated_stream", "after 1 token events"),
    ([CHUNKED + framed(TOKEN)], "truncated_stream", ""),
    ([CHUNKED + b"zz\r\n" + TOKEN, 1.0], "not_event_stream", "not the size of a chunk"),
    ([b"SSH-2.0-OpenSSH_9.6\r\n", 1.0], "not_event_stream", "not HTTP/1.1"),
    ([CLOSING + b"data: {oops\n\n" + DONE], "bad_json", "{oops"),
    ([CHUNKED + framed(TOKEN), 1.8], "stall_timeout", "nothing for 1 s"),
    ([1.8], "stall_timeout", "nothing for 1 s"),
    ([HEAD + b"content-encoding: gzip\r\nconnection: close\r\n\r\n\x1f\x8b"], "not_event_stream", "compressed (gzip)"),
])  # fmt: skip
def test_failures_keep_their_class_and_the_first_words(asked, answer, outcome, words):
    record = asked(answer)
    assert record.outcome == outcome
    assert words in record.error


@pytest.mark.parametrize("answer", [
    [CHUNKED + framed(TOKEN, LAST, DONE) + b"0\r\n\r\n"], [CLOSING + TOKEN + LAST + DONE], [CLOSING + TOKEN + LAST],
    [CHUNKED + framed(TOKEN, LAST, DONE), 1.2], [CLOSING + TOKEN + LAST + DONE, 1.2], [CHUNKED + framed(TOKEN, LAST, DONE), RESET],
    [CHUNKED + framed(TOKEN + LAST + DONE) + b"0;x=y\r\nTrailer: 1\r\n\r\n"],
    [HEAD + b"content-length: %d\r\n\r\n" % len(TOKEN + LAST) + TOKEN + LAST, 1.2],
    [*(bytes([b]) for b in CHUNKED + framed(TOKEN, LAST, DONE) + b"0\r\n\r\n"), 1.2],
    [b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + framed(TOKEN, LAST, DONE) + b"0\r\n\r\n"],
    [CHUNKED + framed(*(e.replace(b"\n", b"\r\n") for e in (TOKEN, LAST, DONE))) + b"0\r\n\r\n", 1.2],
])  # fmt: skip
def test_whole_answers_however_they_are_framed(asked, answer):
    record = asked(answer)
    assert (record.outcome, record.output_tokens, record.events) == (OK, 2, 2)
    assert record.end_s - record.sent_s < 1.0, "an answer ends with its [DONE], not with the connection"


def test_a_connection_is_kept_though_the_end_of_the_body_comes_after_its_done():
    parts = [CHUNKED + framed(TOKEN, LAST, DONE), 0.001, b"0\r\n\r\n"]
    with raw_server([parts] * 8, [parts] * 8) as url:  # two connections, in case this machine takes a nap
        seen = run(target(url), load(8, tokens=2, concurrency=1))
    assert [r.outcome for r in seen.records] == [OK] * 8
    assert seen.client["slot_gap_ms"]


def test_a_server_that_holds_its_answers_open_is_soon_not_waited_for():
    with raw_server(*[[CHUNKED + framed(TOKEN, LAST, DONE), 0.1]] * 12) as url:
        seen = run(target(url), load(12, tokens=2, concurrency=1))
    assert [r.outcome for r in seen.records] == [OK] * 12


def test_comments_do_not_keep_a_stalled_stream_alive_and_nothing_more_is_sent():
    ping = framed(b": ping\n\n")
    with raw_server([CHUNKED + framed(TOKEN), *[0.1, ping] * 30]) as url:
        seen = run(target(url), load(9, tokens=2, concurrency=1, progress_timeout_s=1.0))
    (record,) = seen.records
    assert record.outcome == "stall_timeout"
    assert "; 8 more were not sent" in record.error
    assert 1.0 <= record.end_s - record.sent_s < 2.5


def test_comments_keep_a_slow_stream_alive():
    ping = framed(b": ping\n\n")
    with raw_server([CHUNKED + framed(TOKEN, TOKEN), *[0.3, ping] * 5, framed(LAST, DONE) + b"0\r\n\r\n"]) as url:
        (record,) = run(target(url), load(1, tokens=2, concurrency=1, idle=1.0)).records
    assert record.outcome == OK


def test_an_answer_that_has_said_everything_is_complete_though_nothing_ends_it():
    with raw_server([CHUNKED + framed(TOKEN, LAST), 1.2]) as url:
        (record,) = run(target(url), load(1, tokens=2, concurrency=1, idle=30.0)).records
    assert (record.outcome, "missing_done" in record.notes) == (OK, True)
    assert record.end_s - record.sent_s < 0.3, "its last byte was its end"


def test_a_long_prefill_is_no_stall():
    with raw_server([1.5, CHUNKED + framed(TOKEN, LAST, DONE) + b"0\r\n\r\n"]) as url:
        patient = Load(bodies=(body(2),), osl=(2,), concurrency=1, idle_timeout_s=0.5, first_timeout_s=10)
        (record,) = run(target(url), patient).records
    assert record.outcome == OK


def test_a_refusal_that_comes_while_the_prompt_is_still_sent_keeps_its_words():
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 11\r\nconnection: close\r\n\r\nprompt long"
    with raw_server([refusal]) as url:
        (record,) = run(target(url), Load(bodies=(body(prompt="x" * 8_000_000),), osl=(8,), concurrency=1)).records
    assert (record.outcome, record.status) == ("http_status", 413)
    assert "prompt long" in record.error


def test_a_server_that_drops_free_connections_is_not_stormed():
    accepted = []

    def dropping(peer):
        accepted.append(1)
        if len(accepted) % 2:
            peer.close()
            raise OSError("dropped")
        return peer

    good = [CHUNKED + framed(TOKEN, LAST, DONE) + b"0\r\n\r\n"]
    with raw_server(*[good] * 60, wrap=lambda s: dropping(s)) as url:
        run(target(url), load(3, tokens=2, due_s=(0.1, 0.4, 0.8)))
    assert len(accepted) < 30


def test_nothing_is_retried_and_a_kept_connection_that_closes_is_a_failure_of_its_request():
    good = CHUNKED + framed(TOKEN, LAST, DONE) + b"0\r\n\r\n"
    with raw_server([[good], [0.02, RESET]], [[good], [good]]) as url:
        seen = run(target(url), load(4, tokens=2, concurrency=1))
    assert [r.outcome for r in seen.records] == [OK, "connection_reset", OK, OK]


def test_nobody_listening_fails_every_request_and_ends():
    with socket.create_server(("127.0.0.1", 0)) as s:
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    seen = run(target(url), load(5, concurrency=2))
    assert [r.outcome for r in seen.records] == ["connection_reset"] * 5
    assert "cannot connect to 127.0.0.1" in seen.records[0].error
    seen = run(target(url), load(3, due_s=(0.0, 0.01, 0.02)))
    assert [r.outcome for r in seen.records] == ["connection_reset"] * 3


def test_a_name_that_does_not_exist_is_a_failure_not_a_crash():
    seen = run(target("http://no-such-host.invalid:1"), load(2, concurrency=1))
    assert [r.outcome for r in seen.records] == ["connection_reset"] * 2


def test_localhost_that_listens_on_one_family_only_is_found():
    with MockServer(mode="schedule", ttft=1, tpot=1) as server:
        seen = run(target(server.url.replace("127.0.0.1", "localhost")), load(2, concurrency=1))
    assert {r.outcome for r in seen.records} == {OK}


def test_a_large_prompt_is_sent_whole():
    n = 3_000_000
    with MockServer(mode="schedule", ttft=1, tpot=1) as server:
        big = Load(bodies=(body(prompt="x" * n),) * 2, osl=(8, 8), concurrency=2)
        seen = run(target(server.url), big)
    assert {r.outcome for r in seen.records} == {OK}


def test_a_proxy_from_the_environment_is_not_used_and_one_that_is_named_is(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with raw_server([CLOSING + TOKEN + LAST + DONE]) as url:
        assert ask(url).outcome == OK
    with MockServer(mode="schedule", ttft=1, tpot=1) as proxy:  # answers whatever path it is asked for, as a proxy would
        named = ask("http://model.invalid:80", proxy=proxy.url)
        assert named.outcome == "http_status"  # a mock is no proxy: it was asked, and answered 404 for the absolute URL
    assert ask("http://model.invalid:80", proxy="http://127.0.0.1:9").outcome == "connection_reset"


def test_tls_is_checked_against_the_named_authority(certificate):
    answer = [CHUNKED + framed(TOKEN), 0.05, framed(LAST * 1, DONE) + b"0\r\n\r\n"]

    def asked(**more):
        with over_tls(certificate, answer, answer) as url:
            return ask(url.replace("http:", "https:"), **more)

    assert asked(ca_file=str(certificate[0])).outcome == OK
    assert asked(insecure=True).outcome == OK
    refused = asked()
    assert refused.outcome == "connection_reset"
    assert "certificate verify failed" in refused.error


def goodbye(peer):
    """The end of TLS, which is not the end of the connection."""
    peer.settimeout(0.1)
    with contextlib.suppress(OSError):
        peer.unwrap()


def forged(peer):
    os.write(peer.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))


@pytest.mark.parametrize(("answer", "outcome"), [
    ([CHUNKED + framed(*[TOKEN] * 4998, LAST.replace(b":2}", b":4999}"), DONE) + b"0\r\n\r\n"], OK),
    ([CLOSING + TOKEN + LAST, goodbye, 1.2], OK), ([CLOSING + TOKEN, goodbye, 1.2], "truncated_stream"),
    ([CHUNKED + framed(TOKEN), forged, 1.2], "connection_reset"), ([CHUNKED + framed(TOKEN), 0.1, forged, 1.2], "connection_reset"),
])  # fmt: skip
def test_answers_over_tls_end_where_it_ends(certificate, answer, outcome):
    with over_tls(certificate, answer) as url:
        record = ask(url.replace("http:", "https:"), ca_file=str(certificate[0]))
    assert record.outcome == outcome, record
    assert record.end_s - record.sent_s < 1.0


def test_a_certificate_that_the_server_asks_for_is_shown_or_its_lack_told(certificate):
    cert, key = map(str, certificate)
    answer = [CLOSING + TOKEN + LAST + DONE]
    with over_tls(certificate, answer, clients=True) as url:
        assert ask(url.replace("http:", "https:"), ca_file=cert, cert_file=cert, key_file=key).outcome == OK
    with over_tls(certificate, answer, clients=True) as url:
        record = ask(url.replace("http:", "https:"), ca_file=cert)
    assert record.outcome == "connection_reset"
    assert "certificate required" in record.error.lower().replace("_", " ")


@pytest.mark.parametrize("url", ["https://.x", "http://" + "a" * 70 + ".x", "ftp://x", "http://", "http://u:p@x"])
def test_an_address_that_cannot_be_one_is_refused_at_once(url):
    with pytest.raises(ValueError, match=r"address|host name"):
        target(url)


# --- the processes ---


def test_a_worker_that_is_killed_is_one_clear_line():
    with raw_server([3.0]) as url, Workers() as workers:
        (pid,) = workers.pids()
        with pytest.raises(UserError, match=rf"the load generator \(pid {pid}\) was killed by SIGKILL"):
            workers.run(target(url), load(1, concurrency=1), glance=lambda: os.kill(pid, signal.SIGKILL), glance_s=0.2)


def test_a_glance_may_end_the_load_and_no_worker_survives():
    class Enough(Exception):
        pass

    def glance():
        raise Enough

    with raw_server([1.0]) as url:
        with pytest.raises(Enough), Workers(2) as workers:
            pids = workers.pids()
            workers.run(target(url), load(1, concurrency=1), glance=glance, glance_s=0.1)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_workers_end_with_the_process_that_wanted_them():
    script = (
        "import sys, time; sys.path[:] = %r\n"
        "from pytest_kvcache.harness.loadgen import Workers\n"
        "from pytest_kvcache.core.load import Load, Target\n"
        "w = Workers(); print(*w.pids(), flush=True)\n"
        "w.run(Target(base_url=%r, endpoint='/v1/completions'), Load(bodies=(b'{}',), osl=(1,), concurrency=1))"
    )
    with raw_server([3.0]) as url:
        child = subprocess.Popen([sys.executable, "-c", script % (sys.path, url)], stdout=subprocess.PIPE, text=True)
        worker = int(child.stdout.readline())
        time.sleep(0.5)
        child.kill()
        child.wait()
        child.stdout.close()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                os.kill(worker, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the worker lives on")


def test_the_replay_says_what_the_client_needs():
    with Workers() as workers:
        needs = workers.replay(8, 8)
    assert 0 < needs["event_us"] < 10_000
    assert 0 < needs["request_us"] < 100_000


@given(st.floats(0, 1e7), st.floats(0, 1e6), st.integers(1, 256))
def test_workers_are_planned_by_the_rate(tokens_s, requests_s, cores):
    workers, each = plan_workers(tokens_s, requests_s, {"event_us": 10.0, "request_us": 50.0}, cores)
    assert 1 <= workers <= max(1, cores // 2)
    assert each * workers == pytest.approx((tokens_s * 10 + requests_s * 50) / 1e6)
    assert workers == 1 or each * workers / (workers - 1) > MAX_PLANNED_CORES - 1e-9, "no more processes than are needed"
    assert each <= MAX_PLANNED_CORES + 1e-9 or workers == max(1, cores // 2)


@pytest.mark.parametrize(("n", "parts"), [(10, 1), (10, 3), (3, 5)])
def test_shares_of_a_load_are_the_load(n, parts):
    whole = Load(bodies=tuple(b"%d" % i for i in range(n)), osl=tuple(range(n)), concurrency=parts + 1)
    shares = [whole.share(p, parts) for p in range(parts)]
    assert sorted(i for index, _ in shares for i in index) == list(range(n))
    assert sum(s.concurrency for _, s in shares) == parts + 1
    for index, share in shares:
        assert share.bodies == tuple(b"%d" % i for i in index)


@pytest.mark.parametrize("wrong", [
    {"base_url": "127.0.0.1:8000"}, {"base_url": "ftp://x"}, {"base_url": "http://user:secret@x"}, {"headers": {"Authorization": "Bearer x\n"}},
    {"headers": {"X-ü": "1"}},
])  # fmt: skip
def test_a_target_that_cannot_be_sent_to_is_refused(wrong):
    with pytest.raises(ValueError, match=r"address|header"):
        Target(**{"base_url": "http://x", "endpoint": "/", **wrong})


@pytest.mark.parametrize(
    "wrong", [{}, {"concurrency": 1, "due_s": (0.0,)}, {"due_s": (0.0, 1.0)}, {"bodies": (b"{}",) * 2, "osl": (1, 1), "due_s": (1.0, 0.0)}]
)
def test_a_load_is_closed_or_open_and_complete(wrong):
    with pytest.raises(ValueError, match=r"loop|length|ascend"):
        Load(**{"bodies": (b"{}",), "osl": (1,), **wrong})
