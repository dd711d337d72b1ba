"""--kv-endpoint: a server that runs already is measured and reported, and judged once a command gives it fresh starts."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager, suppress
from socket import create_server

import pytest

from . import served

SUITE = """
import pytest
from pytest_kvcache import Arm, ClosedLoop

@pytest.mark.kv_gates("output_tok_s")
@pytest.mark.parametrize("kv_scenario", [ClosedLoop(isl=16, osl=8, concurrency=2, requests=6{arms})], ids=str)
def test_small(kv_result, kv_gate):
    kv_gate(kv_result)
"""


@pytest.fixture
def port():
    with closing(create_server(("127.0.0.1", 0))) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def ask(tmp_path):
    """A session on an endpoint: exit code, output, run.json."""
    served.model_folder(tmp_path / "model")
    (tmp_path / "test_suite.py").write_text(SUITE.format(arms=""))

    def one(url, *args, ini="", env=()):
        (tmp_path / "pytest.ini").write_text("[pytest]\n" + ini)
        words = ["--kv-gpu=h100", f"--kv-endpoint={url}", f"--kv-model={tmp_path / 'model'}", f"--kv-report={tmp_path / 'out'}", *args]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and "proxy" not in k.lower()}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *words], cwd=tmp_path, env=clean | dict(env),
            capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        file = tmp_path / "out" / "run.json"
        run = json.loads(file.read_text()) if file.exists() and done.returncode in (0, 1) else None
        return done.returncode, done.stdout + done.stderr, run

    return one


@pytest.mark.parametrize("form", ["http://127.0.0.1:{}", "http://localhost:{}/v1/", " http://127.0.0.1:{}/v1/completions"])
def test_it_is_measured_once_and_reported_not_judged(ask, port, form):
    """Whatever the form of the address; a proxy that the variables name is not asked for a server on this machine."""
    with served.process(port):
        code, out, run = ask(form.format(port), env={"HTTP_PROXY": "http://127.0.0.1:9"})
    assert code == 0, out
    (verdict,) = run["verdicts"]
    assert verdict["verdict"] == "inconclusive" and "an attached server is not restarted" in verdict["reason"]
    assert 0 < verdict["value"] < 2 / 0.002
    (environment,) = run["environments"].values()
    assert environment["identity"]["model_served"] == "org/model"
    assert environment["identity"]["gpu"] == "h100-sxm, as it was named"


def test_a_server_on_ipv6_is_measured(ask, port):
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        with served.process(port, host="::1"):
            code, out, run = ask(f"http://[::1]:{port}/v1")
        assert code == 0, out
        assert run["verdicts"][0]["value"] > 0
        return
    pytest.skip("this machine has no IPv6")


def test_a_server_elsewhere_is_reached_by_the_proxy_of_the_environment_which_is_said(ask, port):
    with served.process(port), served.http_proxy(port) as (proxy, hosts):
        _, out, run = ask("http://engine.test:8000", env={"HTTP_PROXY": proxy})
    assert set(hosts) == {"engine.test"} and len(hosts) > 6
    assert f"measured through the proxy {proxy}, which may hold back parts of a stream" in out
    (environment,) = run["environments"].values()
    assert environment["identity"]["endpoint"] == "attached, through a proxy" and environment["subject"]["through_proxy"] == proxy
    ((measured,),) = (block["measurements"] for block in run["blocks"].values())
    assert (measured["requests"], measured["failed"]) == (6, 0) and measured["load"]["client"]["stamps"] == "read"


def test_with_a_restart_command_it_is_recorded_and_judged(ask, port, tmp_path):
    """Each run begins with the command; the server is waited for until it gives a token."""
    pids = tmp_path / "pids"
    script = tmp_path / "restart.sh"
    script.write_text(
        f"#!/bin/sh\n[ -e {pids} ] && kill -9 $(tail -1 {pids}) && sleep 0.2\n"
        f"{sys.executable} {served.FAKE} --port {port} --model org/model --tpot-ms 2 --ttft-ms 5 --one-token-delay 0.3 >/dev/null 2>&1 &\n"
        f"echo $! >> {pids}\n"
    )
    script.chmod(0o755)
    with _reaped(pids):
        for n in range(3):
            code, out, _ = ask(f"http://127.0.0.1:{port}", f"--kv-restart={script}", "--kv-record=missing")
            assert code == 0, out
            assert len(pids.read_text().split()) == 1 + 2 * (n + 1)  # once more at the very first, to be asked what it is
        code, out, run = ask(f"http://127.0.0.1:{port}", f"--kv-restart={script}")
    assert code == 0, out
    (verdict,) = run["verdicts"]
    assert len(verdict["runs"]) >= 3 and len(verdict["baseline_runs"]) == 6
    assert (tmp_path / "baselines" / "h100-sxm" / "openai").is_dir()


@contextmanager
def _reaped(pids):
    try:
        yield
    finally:
        for pid in pids.read_text().split() if pids.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def test_a_restart_command_that_restarts_nothing_is_not_believed(ask, port):
    with served.process(port):
        code, out, _ = ask(f"http://127.0.0.1:{port}", "--kv-restart=true", "--kv-record=missing")
    assert code == 1 and "nothing shows that the server was restarted: it was not seen to be gone" in out


def test_the_address_of_a_chat_is_asked_as_a_chat_and_a_key_is_told_to_nobody(ask, tmp_path):
    """The fake engine knows no chat: what it answers to one shows how it was asked; an echo of the key is masked."""
    with served.over_tls(tmp_path, key="s3cr3t-key") as (url, cert):
        ini = f"kv_ca_file = {cert}\n"
        code, out, _ = ask(f"{url}/v1/chat/completions", ini=ini, env={"KV_API_KEY": "s3cr3t-key"})
        assert code == 1 and "POST /v1/chat/completions answered 404" in out
        code, out, _ = ask(f"{url}/v1?token=abcdef123", ini=ini, env={"KV_API_KEY": "wrong-key-17"})
    assert code == 1 and "answered 401" in out
    assert "wrong-key-17" not in out and "abcdef123" not in out


def test_a_certificate_of_its_own_is_refused_by_name_and_taken_as_the_user_says(ask, tmp_path):
    with served.over_tls(tmp_path, key="s3cr3t-key") as (url, cert):
        code, out, _ = ask(url, env={"KV_API_KEY": "s3cr3t-key"})
        assert code == 1 and "certificate is not trusted" in out and "kv_ca_file" in out and "kv_insecure" in out and "Traceback" not in out
        code, out, _ = ask(url, ini=f"kv_ca_file = {cert}\n", env={"KV_API_KEY": "s3cr3t-key"})
        assert code == 0, out
        code, out, run = ask(url, ini="kv_insecure = true\n", env={"KV_API_KEY": "s3cr3t-key"})
        assert code == 0 and "no certificate is checked (kv_insecure)" in out
        assert next(iter(run["environments"].values()))["subject"]["tls_verification"] == "off"
        code, out, _ = ask(url, ini=f"kv_ca_file = {cert}\n")
        assert code == 1 and "answered 401" in out and "KV_API_KEY" in out
        code, out, _ = ask(url, ini=f"kv_ca_file = {cert}\nkv_headers =\n    Authorization: Bearer s3cr3t-key\n    X-Team: a\n")
        assert code == 0, out
    assert "s3cr3t-key" not in "".join(p.read_text(errors="replace") for p in (tmp_path / "out").rglob("*") if p.is_file())


@pytest.mark.parametrize(("url", "args", "ini", "words"), [
    ("127.0.0.1:8000", (), "", "write http://host:port"),
    ("http://127.0.0.1:1", ("--kv-record=missing",), "", "a baseline is made of fresh starts"),
    ("http://127.0.0.1:1", ("--kv-calibrate",), "", "--kv-calibrate: nothing is started with --kv-endpoint"),
    ("http://127.0.0.1:1", ("--kv-serve-arg=--x",), "", "--kv-serve-arg: nothing is started with --kv-endpoint"),
    ("http://127.0.0.1:1", ("--kv-framework=vllm", "--kv-framework=sglang"), "", "one server is one framework"),
    ("http://127.0.0.1:1", (), "kv_headers = nonsense\n", "a line is no header"),
    ("http://127.0.0.1:1", (), "kv_ca_file = /no/such.pem\n", "kv_ca_file=/no/such.pem: no such file"),
    ("http://127.0.0.1:1", (), "kv_ca_file = pytest.ini\n", "kv_ca_file: --kv-endpoint is an http address, which has no certificate; write https"),
    ("http://127.0.0.1:1", (), "kv_cert_file = pytest.ini\n", "kv_cert_file: --kv-endpoint is an http address"),
    ("http://127.0.0.1:1", (), "kv_key_file = pytest.ini\n", "kv_key_file: --kv-endpoint is an http address"),
    ("http://127.0.0.1:1", (), "kv_insecure = true\n", "kv_insecure: --kv-endpoint is an http address"),
    ("https://127.0.0.1:1", (), "kv_key_file = pytest.ini\n", "kv_key_file: it is the key of a certificate; name that by kv_cert_file"),
])  # fmt: skip
def test_what_cannot_be_right_is_one_line(ask, url, args, ini, words):
    code, out, _ = ask(url, *args, ini=ini)
    assert code == 4 and words in out and "Traceback" not in out


def test_a_server_that_does_not_answer_a_restart_that_fails_and_an_arm_it_cannot_be_told(ask, port, tmp_path):
    code, out, _ = ask(f"http://127.0.0.1:{port}")
    assert code == 1 and "does not answer: [Errno 111]" in out and "Traceback" not in out
    code, out, _ = ask(f"http://127.0.0.1:{port}", "--kv-restart=echo no such unit >&2; exit 5")
    assert code == 1 and "the command ended with exit code 5: no such unit" in out
    (tmp_path / "test_suite.py").write_text(SUITE.format(arms=", arms=(Arm(name='small', block_size=32),)"))
    code, out, _ = ask(f"http://127.0.0.1:{port}")
    assert code == 0 and "a server that runs already cannot be told block_size of the arm small" in out


@pytest.fixture
def one_at_a_time(ask, tmp_path):
    """A session on a server that is said to be llama.cpp's."""
    (tmp_path / "test_suite.py").write_text(SUITE.format(arms="").replace("concurrency=2", "concurrency=1"))
    return lambda port, *args: ask(f"http://127.0.0.1:{port}", "--kv-framework=llama_cpp", *args)


def test_streams_without_token_counts_are_counted_by_a_plain_answer(one_at_a_time, port):
    with served.process(port, "--no-usage"):
        code, out, run = one_at_a_time(port)
    assert code == 0, out
    ((measured,),) = (block["measurements"] for block in run["blocks"].values())
    assert measured["valid"] and measured["load"]["answers"]["counted_by_length"] == 6
    assert measured["metrics"]["total_tok_s"] == pytest.approx(measured["metrics"]["output_tok_s"] * 3, rel=0.3)


def test_an_answer_that_a_short_context_cuts_is_never_taken_for_a_whole_one(one_at_a_time, port):
    with served.process(port, "--no-usage", "--context", "20"):
        code, out, run = one_at_a_time(port)
    assert code == 1
    assert run["verdicts"][0]["verdict"] == "invalid"
    assert "the server made 16 input and 4 output tokens of a request for 16 and 8: is its context too short?" in out


def test_what_needs_two_requests_at_once_is_not_judged_and_the_summary_says_why(ask, port):
    with served.process(port, "--no-usage"):
        code, out, _ = ask(f"http://127.0.0.1:{port}", "--kv-framework=llama_cpp")
    assert code == 0, out
    assert "not judged: 1 test(s): llama_cpp answers one request at a time: concurrency=2 would measure its queue" in out
