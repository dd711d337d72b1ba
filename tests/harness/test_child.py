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
    with pytest.raises(UserError, match=r"^could not start the load generator: no \(`python`\); see `ulimit -u` and the free memory$"):
        child.start("the load generator", ["python"])


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ENOEXEC, errno.E2BIG])
def test_what_cannot_pass_is_not_tried_again_and_not_blamed_on_memory(refuse, number):
    left = refuse(number, 2)
    with pytest.raises(UserError, match=r"^could not start it: no \(`python`\); check that its path is right and that you may run it$"):
        child.start("it", ["python"])
    assert len(left) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none", "No such file or directory"),
        ("plain", "Permission denied"),
        ("plain/below", "Not a directory"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_command_that_cannot_be_run_is_named_in_one_line(tmp_path, name, why):
    (tmp_path / "plain").write_text("")
    with pytest.raises(UserError) as caught:
        child.start("it", [str(tmp_path / name)])
    shown = f"{tmp_path}/{name}".replace("\0", r"\x00")
    assert str(caught.value) == f"could not start it: {why} (`{shown}`); check that its path is right and that you may run it"
