"""The cases of public bug reports, run on the product: streams on a virtual clock and over sockets, and loads."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

import pytest

from pytest_kvcache.core.load import Seen, Target
from pytest_kvcache.harness.loadgen import Workers

from . import load_case, sse_case
from .catalogue import Close, cases, problems
from .replay import Replay

pytestmark = pytest.mark.clock

SSE, LOADS = cases("sse"), cases("load")
SOCKET_MS = 15.0  # what the cases allow more over a real socket
STALL_MS = 500.0  # and to a stall
AT_ONCE, AHEAD = 4, 6  # cases over sockets that are played at once, and begun before their tests come


def judged(case, found, more_ms=0.0, passed_over=()):
    untimed = () if case.get("timing_checked", True) else sse_case.TIMES
    close = Close(case.get("tolerance_ms", 2.0) + more_ms)
    return problems(case, found, sse_case.TESTS, close, {*passed_over, *untimed})


@pytest.mark.parametrize("case", SSE)
def test_case_on_a_virtual_clock(case):
    found = sse_case.figures(case, sse_case.on_a_virtual_clock(case))
    assert not judged(case, found)


class Player:
    """Plays the cases of the tests that were selected, a few at once and a few ahead."""

    def __init__(self, plays, names):
        self.cases, self.names, self.begun = {name: case for name, (case, _) in plays.items()}, names, {}
        self.server = Replay({name: play for name, (_, play) in plays.items()})
        self.idle, self.ends = SimpleQueue(), ExitStack()

    def __enter__(self):
        self.ends.enter_context(self.server)
        for _ in range(AT_ONCE):
            self.idle.put(self.ends.enter_context(Workers()))
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.ends.callback(self.pool.shutdown, cancel_futures=True)
        return self

    def __exit__(self, *error):
        self.ends.close()

    def seen(self, name) -> Seen:
        at = self.names.index(name)
        for each in self.names[at : at + AHEAD]:
            if each not in self.begun:
                self.begun[each] = self.pool.submit(self._ask, each)
        found: Future = self.begun[name]
        return found.result()

    def _ask(self, name):
        case = self.cases[name]
        path = "/v1/completions" if case["request"]["endpoint"] == "completions" else "/v1/chat/completions"
        workers = self.idle.get()
        try:
            return workers.run(Target(base_url=self.server.url(name), endpoint=path), sse_case.load_of(case))
        finally:
            self.idle.put(workers)

    def late_ms(self, name, sent_ns):
        """How long the server, not the client, took too long: the case's clock begins when the request is sent."""
        return (self.server.late_ns[name] + self.server.asked_ns[name] - sent_ns) / 1e6


def plays():
    """Every case as its server writes it, and once more in chunks where a clean end allows that framing."""
    found = {}
    for case in (p.values[0] for p in SSE):
        play = sse_case.play_of(case)
        found[case["case"]] = case, play
        if play.how == "close":
            found[case["case"] + "-chunked"] = case, sse_case.chunked(case, play)
    return found


PLAYS = plays()


@pytest.fixture(scope="module")
def player(request):
    mine = [i.callspec.params["name"] for i in request.session.items if i.name.startswith("test_case_over_a_socket[")]
    with Player(PLAYS, mine) as found:
        yield found


@pytest.mark.parametrize("name", [pytest.param(name, id=f"case-{name}") for name in PLAYS])
def test_case_over_a_socket(name, player):
    case, play = PLAYS[name]
    seen = player.seen(name)
    (record,) = seen.records
    late = player.late_ms(name, seen.zero_ns + record.sent_s * 1e9)
    found = sse_case.figures(case, sse_case.Outcome(record=record, itl=seen.itl, arrivals=seen.arrivals))
    if isinstance(case["expected"].get("itl_ms"), list):  # the trace counts them, in whichever order they came
        case = case | {"expected": case["expected"] | {"itl_ms": sorted(case["expected"]["itl_ms"])}}
    assert not judged(case, found, SOCKET_MS + late, sse_case.NOT_IN_A_RECORD)
    if play.how == "stall":
        assert (record.end_s - record.sent_s) * 1e3 == pytest.approx(play.stall_ms, abs=STALL_MS + late)


@pytest.mark.parametrize("case", LOADS)
def test_case_load(case):
    assert not problems(case, load_case.figures(case), load_case.TESTS, Close(case.get("tolerance_ms", 0.1)))


OPEN = pytest.mark.skipif("KV_CASES_DIR" in os.environ, reason="the cases of another folder are run, not examined")


@OPEN
@pytest.mark.parametrize("case", SSE + LOADS)
def test_a_wrong_answer_is_told_from_a_right_one(case):
    """Every value that the case lists as a fault differs from the product's."""
    for wrong in case.get("wrong_answers", ()):
        one = case | {"expected": {wrong["field"]: wrong["value"]}, "wrong_answers": ()}
        found, tests = load_case.figures, load_case.TESTS
        if case["kind"] == "sse":
            found, tests = lambda c: sse_case.figures(c, sse_case.on_a_virtual_clock(c)), sse_case.TESTS
        assert problems(one, found(one), tests, Close(0.005)), wrong["cause"]


@OPEN
def test_every_field_of_a_case_is_known_or_refused():
    case = SSE[0].values[0]
    found = sse_case.figures(case, sse_case.on_a_virtual_clock(case))
    odd = case | {"expected": {"jitter_ms": 3}}
    assert problems(odd, found, sse_case.TESTS, Close(2.0)) == ["jitter_ms: this runner does not know the field, it expects 3"]
