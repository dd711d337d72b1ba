"""Who used the CPU in a window: pure accounting over readings of /proc. `harness.device` does the reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

FIGURES = (
    "wall_s",
    "cores",
    "busy_cores",
    "own_cores",
    "foreign_cores",
    "steal_cores",
    "client_cores",
    "psi_some",
    "throttled_s",
)
OUTSIDE = "processes outside this container"
OUTSIDE_CORES = 0.1
"""Below this, what no visible process used is the difference between two ways of counting, not somebody."""
NOTABLE_TICKS = 2


class Stat(NamedTuple):
    """One process as /proc/<pid>/stat shows it; `child_ticks` belong to children that it has waited for."""

    pid: int
    start: int
    ppid: int
    name: str
    ticks: int
    child_ticks: int


class Machine(NamedTuple):
    """Counters of the machine at one moment, in seconds since some start; None where unknown."""

    wall_s: float
    client_s: float
    busy_s: float | None
    steal_s: float | None
    psi_s: float | None
    throttled_s: float | None


def parse_stat(raw: bytes) -> Stat | None:
    """One /proc/<pid>/stat; the name may contain spaces and brackets, so fields count from its last bracket."""
    head, found, tail = raw.rpartition(b")")
    pid, _, name = head.partition(b"(")
    f = tail.split()
    if not found or len(f) < 20:
        return None
    user, system, children_user, children_system = int(f[11]), int(f[12]), int(f[13]), int(f[14])
    label = name.decode(errors="replace")
    return Stat(int(pid), int(f[19]), int(f[1]), label, user + system, children_user + children_system)


def parse_machine(stat: str, hz: int) -> tuple[float, float] | None:
    """(busy, stolen) seconds over all CPUs from /proc/stat. `user` already holds guest time; iowait is idle."""
    fields = stat.split("\n", 1)[0].split()
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) for f in fields[1:9])
    return (user + nice + system + irq + softirq) / hz, steal / hz


def parse_pressure(text: str) -> float | None:
    """Seconds in which some task waited, from the `total=` microseconds of /proc/pressure/cpu."""
    for line in text.splitlines():
        if line.startswith("some ") and "total=" in line:
            return int(line.rpartition("total=")[2]) / 1e6
    return None


@dataclass(slots=True)
class Entry:
    """A process seen in the window. `family` is given by the caller or descends from such; `own` is also us."""

    last: Stat
    base_ticks: int
    base_child_ticks: int
    alive: bool = True
    family: bool = False
    own: bool = False
    command: str | None = None
    command_of: str = ""

    @property
    def used_ticks(self) -> int:
        return self.last.ticks - self.base_ticks

    @property
    def inherited_ticks(self) -> int:
        """What children that it waited for in the window had used, in their whole lives."""
        return max(0, self.last.child_ticks - self.base_child_ticks)


class Ledger:
    """Every process seen from the first update on, by pid and start time (pids are used again)."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.entries: dict[tuple[int, int], Entry] = {}

    def update(self, stats: Iterable[Stat], own: Set[int]) -> None:
        """Take one sample. What was not there in the first one started later, so all its time is in the window."""
        first = not self.entries
        for entry in self.entries.values():
            entry.alive = False
        for stat in stats:
            entry_now = self.entries.get(stat[:2])
            if entry_now is None:
                base = (stat.ticks, stat.child_ticks) if first else (0, 0)
                self.entries[stat[:2]] = Entry(stat, *base)
            else:
                entry_now.last, entry_now.alive = stat, True
        self._mark(own)

    def _mark(self, own: Set[int]) -> None:
        """Once ours, always ours, also when the parent has died; children of the client are not ours by birth."""
        alive = sorted((e for e in self.entries.values() if e.alive), key=lambda e: e.last.start)
        by_pid = {e.last.pid: e for e in alive}
        for entry in alive:
            parent = by_pid.get(entry.last.ppid)
            entry.family |= entry.last.pid in own or (parent is not None and parent.family)
            entry.own = entry.family or entry.last.pid == self.client

    def unnamed(self) -> Iterator[Entry]:
        """Foreign processes worth a name whose command line was not read yet, or that became another program."""
        for entry in self.entries.values():
            unread = entry.command is None or entry.command_of != entry.last.name
            notable = entry.used_ticks + entry.inherited_ticks >= NOTABLE_TICKS
            if entry.alive and unread and notable and not entry.own:
                yield entry

    def used(self) -> list[tuple[Entry, int]]:
        """Ticks each process used in the window, with those of children that came and went between two samples.

        When a process ends, all it ever used moves to whoever waited for it: the parent, or an ancestor of it when
        the parent died first. What the ledger saw of the ended one is taken off there, so that it is neither counted
        twice nor with time from before the window.
        """
        by_pid = {e.last.pid: e for e in sorted(self.entries.values(), key=lambda e: e.last.start)}
        inherited = {id(e): e.inherited_ticks for e in self.entries.values()}
        for ended in self.entries.values():
            left = 0 if ended.alive else ended.last.ticks + ended.last.child_ticks
            parent = by_pid.get(ended.last.ppid)
            while left and parent is not None:
                taken = min(left, inherited[id(parent)])
                inherited[id(parent)] -= taken
                left -= taken
                above = by_pid.get(parent.last.ppid)
                # Start times fall on the way up; a reused pid must not turn the way into a circle.
                parent = above if above is not parent and above and above.last.start <= parent.last.start else None
        return [(e, e.used_ticks + inherited[id(e)]) for e in self.entries.values()]


def _rate(after: float | None, before: float | None, wall_s: float) -> float | None:
    return None if after is None or before is None else round(max(0.0, after - before) / wall_s, 4)


def _strangers(used: list[tuple[Entry, float]], foreign_cores: float | None) -> list[dict[str, Any]]:
    """The three largest users of CPU that are not ours; what no visible process used is one of them."""
    rows: list[dict[str, Any]] = [
        {"pid": e.last.pid, "name": e.last.name, "cmdline": e.command or "", "cores": round(cores, 4)}
        for e, cores in used
        if not e.own and cores > 0
    ]
    hidden = (foreign_cores or 0.0) - sum(row["cores"] for row in rows)
    if hidden > OUTSIDE_CORES:
        rows.append({"pid": None, "name": OUTSIDE, "cmdline": "", "cores": round(hidden, 4)})
    return sorted(rows, key=lambda row: -float(row["cores"]))[:3]


def summarise(before: Machine, after: Machine, ledger: Ledger, *, cores: int, hz: int) -> dict[str, Any]:
    """The window as JSON-plain figures (`FIGURES`, in cores on average over the window) and `foreign` processes."""
    wall = max(after.wall_s - before.wall_s, 1e-9)
    used = [(e, ticks / hz / wall) for e, ticks in ledger.used()]
    own = sum(c for e, c in used if e.own)
    busy = _rate(after.busy_s, before.busy_s, wall)
    foreign = None if busy is None else round(max(0.0, busy - own), 4)
    psi = _rate(after.psi_s, before.psi_s, wall)
    throttled = _rate(after.throttled_s, before.throttled_s, 1.0)
    return {
        "wall_s": round(wall, 4),
        "cores": cores,
        "busy_cores": busy,
        "own_cores": round(own, 4),
        "foreign_cores": foreign,
        "steal_cores": _rate(after.steal_s, before.steal_s, wall),
        "client_cores": _rate(after.client_s, before.client_s, wall),
        "psi_some": None if psi is None else min(1.0, psi),
        "throttled_s": throttled,
        "foreign": _strangers(used, foreign),
    }
