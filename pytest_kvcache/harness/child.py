"""Start a process of ours, and say so in one line where the machine does not let us."""

from __future__ import annotations

import errno
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from ..core.spec import UserError
from ..core.text import one_line

# A machine short of processes or memory for a moment. EFAULT: execve itself, seen once in thousands of starts under load.
PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EFAULT})
PAUSES_S = (0.1, 1.0)
SHORT_OF_IT = "see `ulimit -u` and the free memory"
CHECK_IT = "check that its path is right and that you may run it"


def start(what: str, argv: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen`, tried again after a moment where the reason may pass (nothing has run yet then).

    UserError, naming `what`, when it cannot be started.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return subprocess.Popen(argv, **how)
        except ValueError as e:  # a NUL in a word
            raise UserError(f"could not start {what}: {e} (`{one_line(argv[0])}`); {CHECK_IT}") from e
        except OSError as e:
            if e.errno not in PASSING or pause_s is None:
                advice = SHORT_OF_IT if e.errno in PASSING else CHECK_IT
                raise UserError(f"could not start {what}: {e.strerror} (`{one_line(argv[0])}`); {advice}") from e
            time.sleep(pause_s)
    raise AssertionError("not reached")
