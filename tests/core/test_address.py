"""Servers of this machine in every spelling of its address: reached without a proxy, and called where they listen."""

import pytest

from pytest_kvcache.core.address import called, is_loopback, parse, proxy_for

PROXIES = {"http_proxy": "http://proxy.test:3128", "https_proxy": "http://proxy.test:3128"}
HERE = (
    "localhost", "LOCALHOST", "localhost.", "engine.localhost", "engine.localhost.", "127.0.0.1", "127.0.0.1.", "127.255.0.3", "127.1", "127.0.1",
    "0x7f.1", "0x7F000001", "2130706433", "0177.0.0.1", "[::1]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "0.0.0.0", "0", "0.0",
    "[::]", "[0::0]", "[::ffff:0.0.0.0]",
)  # fmt: skip
ELSEWHERE = (
    "engine.test", "localhost.test", "notlocalhost", "10.0.0.5", "10.1", "128.1", "192.168.0.1", "[fd00::1]", "[::ffff:10.0.0.5]", "127.1.test",
    "127.0.0.0.1", "127.0.0.256", "127.x", "0x7f", "0128.0.0.1", "127.", "4294967296", "1" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("host", HERE)
def test_a_server_of_this_machine_is_never_asked_through_a_proxy(host):
    for scheme in ("http", "https"):
        assert proxy_for(f"{scheme}://{host}:8000", PROXIES) is None
        assert proxy_for(parse(f"{scheme}://{host}:8000/v1").origin, PROXIES) is None


@pytest.mark.parametrize("host", ELSEWHERE)
def test_every_other_server_is(host):
    assert proxy_for(f"http://{host}:8000", PROXIES) == "http://proxy.test:3128"
    assert not is_loopback(host)


@pytest.mark.parametrize(("host", "reached"), [
    ("0.0.0.0", "127.0.0.1"), ("0", "127.0.0.1"), ("[::]", "[::1]"), ("[0:0::0]", "[::1]"), ("[::ffff:0.0.0.0]", "127.0.0.1"), ("127.1", "127.1"),
    ("[::ffff:127.0.0.1]", "[::ffff:127.0.0.1]"), ("engine.test", "engine.test"), ("10.0.0.0", "10.0.0.0"),
])  # fmt: skip
def test_an_address_to_bind_is_called_on_this_machine_and_every_other_as_it_was_written(host, reached):
    found = parse(f"http://{host}:8000/v1")
    assert found.origin == f"http://{reached}:8000" and found.shown() == f"http://{reached}:8000/v1"
    assert parse(f"https://{host}").origin == f"https://{reached}"
    assert called(host.strip("[]"), 8000) == f"http://{reached}:8000"
