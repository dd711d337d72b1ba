"""The accounting of CPU time: nothing twice, nothing lost, nothing from before the window."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.cputime import (
    OUTSIDE,
    Ledger,
    Machine,
    Stat,
    parse_machine,
    parse_pressure,
    parse_stat,
    summarise,
)

CLIENT = 10
SHELL = 20


def stat(pid: int, ticks: int, child_ticks: int = 0, *, ppid: int = 1, start: int | None = None) -> Stat:
    return Stat(pid, pid if start is None else start, ppid, f"p{pid}", ticks, child_ticks)


def used(ledger: Ledger) -> dict[int, int]:
    return {e.last.pid: ticks for e, ticks in ledger.used() if ticks}


def figures(ledger: Ledger, busy_s: float) -> dict[str, Any]:
    before = Machine(100.0, 1.0, 50.0, 0.0, 3.0, None)
    after = Machine(110.0, 1.5, 50.0 + busy_s, 2.0, 8.0, None)
    return summarise(before, after, ledger, cores=2, hz=100)


def test_recorded_stat_lines() -> None:
    line = b"5708 (a b) (c)) R 5706 5706 4488 0 -1 4194304 101 0 0 0 11 22 33 44 20 0 1 0 76470 3133440 393 18446744"
    assert parse_stat(line) == Stat(5708, 76470, 5706, "a b) (c)", 33, 77)
    assert parse_stat(b"") is None
    assert parse_stat(b"12 (cut off) R 1 2") is None


def test_recorded_machine_counters_leave_out_guest_and_iowait() -> None:
    text = "cpu  1000 200 300 99999 4444 50 60 70 900 90\ncpu0 1 2 3\n"
    assert parse_machine(text, 100) == (16.1, 0.7)
    assert parse_machine("", 100) is None
    assert parse_pressure("some avg10=2.29 avg60=0.64 avg300=0.39 total=5441540\nfull avg10=0.00 total=1\n") == 5.44154
    assert parse_pressure("") is None


def test_time_before_the_window_does_not_count_and_newcomers_count_in_full() -> None:
    ledger = Ledger(CLIENT)
    ledger.update([stat(CLIENT, 500), stat(SHELL, 900, 800)], set())
    ledger.update([stat(CLIENT, 510), stat(SHELL, 900, 800), stat(30, 40)], set())
    assert used(ledger) == {CLIENT: 10, 30: 40}


def test_a_child_that_ended_between_two_samples_counts_for_its_parent() -> None:
    ledger = Ledger(CLIENT)
    ledger.update([stat(SHELL, 5)], set())
    ledger.update([stat(SHELL, 5, 70)], set())
    assert used(ledger) == {SHELL: 70}


def test_an_ended_child_keeps_its_own_time_and_gives_only_the_rest_to_its_parent() -> None:
    ledger = Ledger(CLIENT)
    ledger.update([stat(SHELL, 0), stat(30, 1000, ppid=SHELL)], set())
    ledger.update([stat(SHELL, 0), stat(30, 1080, ppid=SHELL)], set())
    ledger.update([stat(SHELL, 0, 1090)], set())
    assert used(ledger) == {30: 80, SHELL: 10}


def test_an_orphans_lifetime_is_not_taken_for_work_of_init() -> None:
    ledger = Ledger(CLIENT)
    ledger.update([stat(1, 0, ppid=0), stat(SHELL, 0), stat(30, 9000, ppid=SHELL)], set())
    ledger.update([stat(1, 0, 9000, ppid=0)], set())
    assert used(ledger) == {}


def test_a_reused_pid_is_another_process() -> None:
    ledger = Ledger(CLIENT)
    ledger.update([stat(30, 500, start=1)], {30})
    ledger.update([stat(30, 7, start=900)], set())
    assert used(ledger) == {30: 7}
    assert [e.own for e, ticks in ledger.used() if ticks] == [False]


def test_descendants_of_own_are_own_even_as_orphans_but_children_of_the_client_are_not() -> None:
    ledger = Ledger(CLIENT)
    ledger.update([stat(CLIENT, 0), stat(30, 0, ppid=CLIENT), stat(31, 0, ppid=30), stat(32, 0, ppid=CLIENT)], {30})
    ledger.update([stat(CLIENT, 0), stat(31, 50, ppid=1), stat(32, 60, ppid=CLIENT)], set())
    assert {e.last.pid: e.own for e, _ in ledger.used()} == {CLIENT: True, 30: True, 31: True, 32: False}


def test_command_lines_are_wanted_once_for_foreign_processes_that_use_cpu() -> None:
    ledger = Ledger(CLIENT)
    ledger.update([stat(CLIENT, 0), stat(30, 0), stat(31, 0)], set())
    assert list(ledger.unnamed()) == []
    ledger.update([stat(CLIENT, 90), stat(30, 90), stat(31, 0)], set())
    (entry,) = ledger.unnamed()
    assert entry.last.pid == 30
    entry.command, entry.command_of = "x", entry.last.name
    assert list(ledger.unnamed()) == []


def test_summary_names_at_most_three_and_what_is_outside() -> None:
    ledger = Ledger(CLIENT)
    pids = range(30, 36)
    ledger.update([stat(CLIENT, 0), *(stat(p, 0) for p in pids)], set())
    ledger.update([stat(CLIENT, 50), *(stat(p, p) for p in pids)], set())
    seen = figures(ledger, busy_s=8.0)
    assert seen["busy_cores"] == 0.8
    assert seen["own_cores"] == 0.05 == seen["client_cores"]
    assert seen["foreign_cores"] == 0.75
    assert seen["steal_cores"] == 0.2
    assert seen["psi_some"] == 0.5
    assert seen["throttled_s"] is None
    assert seen["wall_s"] == 10.0
    assert [(p["pid"], p["cores"]) for p in seen["foreign"]] == [(None, 0.555), (35, 0.035), (34, 0.034)]
    assert seen["foreign"][0]["name"] == OUTSIDE
    assert json.loads(json.dumps(seen)) == seen


def test_a_small_remainder_is_nobody() -> None:
    ledger = Ledger(CLIENT)
    ledger.update([stat(CLIENT, 0)], set())
    ledger.update([stat(CLIENT, 900)], set())
    assert figures(ledger, busy_s=9.5)["foreign"] == []
    assert figures(ledger, busy_s=8.5)["foreign_cores"] == 0.0


class Machinery:
    """A process tree that accounts as Linux does: who waits for an ended child takes over its time."""

    def __init__(self) -> None:
        self.next_pid = 1
        self.alive: dict[int, Stat] = {}
        self.total = 0
        self.fork(0)

    def fork(self, parent: int) -> None:
        self.alive[self.next_pid] = stat(self.next_pid, 0, ppid=parent)
        self.next_pid += 1

    def act(self, kind: str, which: int, ticks: int) -> None:
        pid = sorted(self.alive)[which % len(self.alive)]
        one = self.alive[pid]
        if kind == "fork":
            self.fork(pid)
        elif kind == "burn":
            self.alive[pid] = one._replace(ticks=one.ticks + ticks)
            self.total += ticks
        elif kind == "end" and pid != 1:
            del self.alive[pid]
            heir = self.alive[one.ppid]
            self.alive[one.ppid] = heir._replace(child_ticks=heir.child_ticks + one.ticks + one.child_ticks)
            self.alive |= {p: s._replace(ppid=1) for p, s in self.alive.items() if s.ppid == pid}


actions = st.lists(
    st.tuples(st.sampled_from(["fork", "fork", "burn", "burn", "end", "sample"]), st.integers(0, 9), st.integers(1, 9)),
    max_size=60,
)


@given(actions, actions)
def test_every_tick_of_the_window_is_counted_once(before: Any, inside: Any) -> None:
    machinery, ledger = Machinery(), Ledger(CLIENT)
    for action in before:
        machinery.act(*action)
    ledger.update(machinery.alive.values(), set())
    start = machinery.total
    for kind, which, ticks in inside:
        if kind == "sample":
            ledger.update(machinery.alive.values(), set())
        else:
            machinery.act(kind, which, ticks)
    ledger.update(machinery.alive.values(), set())
    counted = [ticks for _, ticks in ledger.used()]
    assert sum(counted) == machinery.total - start
    assert min(counted) >= 0
