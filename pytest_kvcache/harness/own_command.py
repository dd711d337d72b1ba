"""Whether a command of the user's own starts an engine as an arm asks for it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..core.framework import Framework, Launch
from ..core.spec import Arm, UserError

# Commands that start the engine where neither our variables nor our files are, unless they are told to pass them on.
ELSEWHERE = {"docker", "podman", "nerdctl", "kubectl", "ssh", "srun", "enroot", "apptainer", "singularity"}
# Commands that start another one, which their arguments name.
SHELLS = {"sh", "bash", "dash", "zsh"}
STARTERS = SHELLS | {"sudo", "doas", "env", "nice", "ionice", "chrt", "taskset", "numactl", "timeout", "stdbuf", "setsid", "nohup", "time"}


def check_command(framework: Framework, launch: Launch) -> None:
    """UserError when a command of the user's own would not pass on what an arm is told by: a variable, or a file."""
    words, name = " ".join(launch.command).split(), f"kv_command_{framework.name}"  # `docker run ...` of `sh -c` is one word
    programs = [Path(w).name for w in words]
    elsewhere = bool(ELSEWHERE & set(programs if {*programs[:1]} & STARTERS else programs[:2]))
    plain = framework.environ(replace(launch, arm=Arm(), log_level=""))  # what only says again where to listen is no matter there
    for variable, value in framework.environ(launch).items():
        if plain.get(variable) != value and (cure := _not_passed_on(variable, value, words, elsewhere)):
            raise UserError(f"arm {launch.arm.name}: {framework.name} is told it by the variable {variable}; {cure} in {name}")
    home = tempfile.gettempdir()
    if elsewhere and (framework.files(launch) or launch.arm.disk_offload_gib) and not any(home in w for w in words):
        raise UserError(f"{framework.name} reads a file below {home}; mount it in {name}: -v {home}:{home}")


def _not_passed_on(variable: str, value: str, words: Sequence[str], elsewhere: bool) -> str:
    """What cures a command that starts the engine with another value of a variable than ours; empty when it does not."""
    found = (re.search(rf"(?:^-e|^|\W){variable}(?:=[\"']*(.*?))?[\"']*$", w) for w in words)
    said = [f[1] for f in found if f]  # None where the variable is passed on by its name
    programs = {Path(w).name for w in words}
    ours = {None, value, *((f"${variable}", f"${{{variable}}}") if SHELLS & programs else ())}
    if elsewhere and not said:
        return f"add `-e {variable}`"
    if fixed := [s for s in said if s not in ours]:
        return f"it is to be {value}, and is set to {fixed[0]!r}: " + (f"write `-e {variable}`" if elsewhere else "leave that out")
    if "sudo" in programs and value not in said and not any(re.fullmatch(r"-[AbHknPS]*E[AbHknPS]*|--preserve-env\S*", w) for w in words):
        return "sudo does not pass it on: write `sudo -E`"
    return ""
