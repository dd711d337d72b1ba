"""A process that the machine will not start at once, or not at all."""

import errno
import subprocess
import sys

import pytest

from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness import child

REFUSALS = [errno.EAGAIN, errno.ENOMEM, errno.EFAULT]


@pytest.fixture
def refuse(monkeypatch):
    """The next `times` starts fail with `number`."""
    real = subprocess.Popen
    monkeypatch.setattr(child, "PAUSES_S", (0.0, 0.0))

    def arm(number, times):
        left = [OSError(number, "no")] * times

        def popen(*args, **kwargs):
            if left:
                raise left.pop()
            return real(*args, **kwargs)

        monkeypatch.setattr(subprocess, "Popen", popen)
        return left

    return arm


@pytest.mark.parametrize("number", REFUSALS)
def test_a_passing_refusal_is_tried_again(refuse, number):
    left = refuse(number, 2)
    with child.start("it", [sys.executable, "-c", ""]) as process:
        assert process.wait() == 0
    assert not left


@pytest.mark.parametrize("number", REFUSALS)
def test_a_lasting_refusal_is_one_line(refuse, number):
    refuse(number, 9)
    with pytest.raises(UserError, match=r"could not start the load generator: no \(`python`\); see `ulimit -u`"):
        child.start("the load generator", ["python"])


def test_what_cannot_pass_is_not_tried_again(refuse):
    left = refuse(errno.EACCES, 2)
    with pytest.raises(UserError, match="could not start it: no"):
        child.start("it", ["python"])
    assert len(left) == 1
