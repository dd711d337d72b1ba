"""Certificates of a client: a key that cannot be used is one line, and never a question on the terminal."""

import os
import pty
import subprocess
import sys

import pytest

from pytest_kvcache.core.address import Endpoint, parse, reached
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness.attached import Client

SCRIPT = """
import sys
from pytest_kvcache.core.load import Target
from pytest_kvcache.harness.tls import tls_context
try:
    tls_context(Target(base_url="https://h.test", endpoint="", cert_file=sys.argv[1], key_file=sys.argv[2] or None))
except OSError as e:
    print("refused:", e)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A certificate and its key, which wants a password; and both in one file."""
    folder = tmp_path_factory.mktemp("locked")
    cert, key, both = (folder / name for name in ("cert.pem", "key.pem", "both.pem"))
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:secret", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=me"],
        capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    both.write_text(cert.read_text() + key.read_text())
    return cert, key, both


def test_a_key_that_wants_a_password_is_refused_by_name_and_nobody_is_asked(pair):
    """On a terminal of its own, where OpenSSL would ask."""
    cert, key, both = map(str, pair)
    for words, named in (([cert, key], key), ([both, ""], both)):
        ours, theirs = pty.openpty()
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *words], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, start_new_session=True
        )  # fmt: skip
        os.close(theirs)
        os.close(ours)
        assert (
            done.stdout
            == f"refused: the key in {named} wants a password; name one without, as `openssl pkey -in {named} -out NEW` makes it\n"
        )


@pytest.mark.parametrize("files", [(0, 1), (1, 0), (2, None)])
def test_files_that_are_of_no_use_are_one_line(pair, files):
    cert, key = (None if i is None else str(pair[i]) for i in files)
    address = parse("https://h.test")
    with pytest.raises(UserError, match=r"^--kv-endpoint: kv_ca_file, kv_cert_file or kv_key_file cannot be read: [^\n]+$"):
        Client(Endpoint(address=address, server=reached(address, {}, cert_file=cert, key_file=key)))
