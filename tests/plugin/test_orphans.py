"""What an earlier session has left is told when the next one begins, with what ends it; nothing is ended."""

import os
import re
import subprocess
import sys

import pytest

from pytest_kvcache.harness.server import MARKER


@pytest.fixture
def left():
    """A process with the mark of a session that is over."""
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    with subprocess.Popen(["sleep", "120"], env={**os.environ, MARKER: f"20261130-120000-{over.pid:x}"}) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("args", [(), ("-n2",)])
def test_what_an_earlier_session_has_left_is_said_once_with_the_command_that_ends_it(kv_project, left, args):
    if args:
        pytest.importorskip("xdist")
    result = kv_project.run("test_other.py::test_plain", *args)
    assert result.code == 0, result.out
    (said,) = re.findall(r"left by an earlier session: (.*); to stop them: kill -9 ([\d ]+)$", result.out, re.MULTILINE)
    assert f"pid {left.pid} (sleep)" in said[0] and str(left.pid) in said[1].split()
    assert left.poll() is None, "somebody may want it"
