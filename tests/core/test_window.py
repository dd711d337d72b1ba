"""The measured window on loads worked out by hand: where it begins and ends, what is counted in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.metrics import measure
from pytest_kvcache.core.record import RequestRecord, Trace
from pytest_kvcache.core.window import truncation, window_of


def record(i, sent, first, last, n=5, **more):
    return RequestRecord(index=i, sent_s=sent, first_s=first, last_s=last, end_s=last, input_tokens=10, output_tokens=n, events=n, **more)


def trace(records, *, concurrency=None, tokens=()):
    """`tokens` are arrival times in seconds."""
    ms = sorted(int(t * 1000) for t in tokens)
    arrivals = {"ms": sorted(set(ms)), "n": [ms.count(v) for v in sorted(set(ms))]} if ms else {}
    return Trace(
        scenario="s", arm="base", run=1, workload="w", isl=10, osl=5, records=tuple(records), concurrency=concurrency, arrivals=arrivals
    )


def lockstep(streams, rounds, each=1.0, tokens=5):
    """A closed loop whose streams run in step: `tokens` tokens evenly in each round of `each` seconds; and their arrivals."""
    records, times = [], []
    for r in range(rounds):
        at = [r * each + each * (k + 1) / tokens for k in range(tokens)]
        records += [record(r * streams + s, r * each, at[0], at[-1], tokens) for s in range(streams)]
        times += at * streams
    return records, times


@pytest.mark.parametrize("arrivals_known", [True, False])
def test_a_closed_loop_is_measured_while_all_its_streams_are_busy(arrivals_known):
    records, times = lockstep(streams=4, rounds=6)
    found = window_of(trace(records, concurrency=4, tokens=[t - 0.0005 for t in times] if arrivals_known else ()))
    assert (found.start_s, found.end_s, found.whole) == (0.0, 5.0, False)
    assert found.output_tokens == pytest.approx(5 * 4 * 5)
    assert found.answered == 20
    assert found.open == pytest.approx(4)


@given(
    st.integers(1, 8), st.integers(1, 16), st.integers(3, 8), st.floats(0.003, 2.0), st.floats(0, 0.0003), st.randoms(use_true_random=False)
)
def test_the_rate_is_the_true_one_wherever_the_answers_end_within_a_millisecond(streams, tokens, rounds, each, gap, random):
    """Streams in step, whose answers end within `gap` of each other and go on after 0.05 to 0.3 ms."""
    records, times, starts = [], [], [0.0] * streams
    for r in range(rounds):
        for s in range(streams):
            at = [starts[s] + each * (k + 1) / tokens + gap * random.random() for k in range(tokens)]
            records.append(record(r * streams + s, starts[s], at[0], at[-1], tokens))
            times += at
            starts[s] = at[-1] + 0.00005 + 0.00025 * random.random()
    found = measure(trace(records, concurrency=streams, tokens=times))
    true = streams * (rounds - 1) / max(r.sent_s for r in records)
    assert found["req_s"] == pytest.approx(true)
    # Tokens of the next round that come within the same millisecond as the last send are counted too.
    early = streams * (1 + 0.001 * tokens / each) if each / tokens < 0.002 else 0
    assert true * tokens - 1e-6 <= found["output_tok_s"] <= true * tokens * (1 + early / (streams * (rounds - 1) * tokens)) + 1e-6


def test_streams_that_run_dry_do_not_lower_the_rate():
    records, times = lockstep(streams=4, rounds=6)
    straggler = record(24, 5.0, 5.2, 25.0)
    found = measure(trace([*records, straggler], concurrency=4, tokens=[*(t - 0.0005 for t in times), 5.2, 10, 15, 20, 25]))
    assert found["output_tok_s"] == pytest.approx(20)


def test_a_load_of_few_rounds_is_measured_whole():
    records, times = lockstep(streams=4, rounds=2)
    found = window_of(trace(records, concurrency=4, tokens=times))
    assert found.whole
    assert (found.start_s, found.end_s, found.output_tokens) == (0.0, 2.0, 40)


def test_idle_streams_show_in_the_mean_number_open():
    records, _ = lockstep(streams=4, rounds=6)
    lazy = [r for r in records if r.index % 4 != 3]
    assert window_of(trace(lazy, concurrency=4)).open == pytest.approx(3)


@given(st.lists(st.integers(0, 9_999), min_size=20, max_size=200), st.integers(1, 7))
def test_the_peak_is_never_below_the_mean_whatever_the_tokens_of_an_event(ms, per_event):
    last = 10.0
    n = per_event * len(ms)
    records = [record(0, 0.0, 0.0, last, n), *(record(i, 0.0, 0.0, last, 0) for i in range(1, 3)), record(3, last, last, last, 0)]
    found = window_of(trace(records, concurrency=1, tokens=[t / 1000 + 0.0001 for t in ms for _ in range(per_event)]))
    assert found.seconds == pytest.approx(last)
    assert found.peak_tok_s >= found.output_tokens / found.seconds - 1e-9


def poisson_like(n, latency):
    return [record(i, i * 0.1, i * 0.1 + 0.01, i * 0.1 + latency(i), scheduled_s=i * 0.1) for i in range(n)]


def test_an_open_loop_starts_after_its_transient():
    found = window_of(trace(poisson_like(200, lambda i: 0.5 if i >= 30 else 5.0 - i * 0.15)))
    assert 2.0 <= found.start_s <= 3.5
    assert found.end_s == pytest.approx(19.9, abs=0.002)
    assert found.unsteady == ""


def test_an_open_loop_that_falls_behind_is_not_steady():
    found = window_of(trace(poisson_like(200, lambda i: 0.5 + 0.2 * i)))
    assert found.unsteady


def test_a_short_open_loop_is_measured_whole():
    found = window_of(trace(poisson_like(10, lambda i: 0.5)))
    assert found.whole
    assert found.end_s == pytest.approx(1.4)


def test_an_open_loop_counts_from_the_schedule():
    late = [record(0, 3.0, 3.1, 3.5, scheduled_s=1.0)]
    found = measure(trace(late))
    assert found["ttft_ms.p50"] == pytest.approx(2100)
    assert found["e2e_ms.p50"] == pytest.approx(2500)
    assert window_of(trace(late)).start_s == 1.0


def test_nothing_answered_has_no_window():
    assert window_of(trace([RequestRecord(index=0, sent_s=0.0, end_s=0.1, outcome="http_status")])) is None


def test_everything_at_one_moment_has_no_rate():
    assert "output_tok_s" not in measure(trace([record(0, 1.0, 1.0, 1.0)]))


@pytest.mark.parametrize("n", [0, 1, 9])
def test_too_few_values_have_no_transient(n):
    assert truncation([1.0] * n) == 0


def test_a_level_series_keeps_all_but_noise_and_a_step_is_cut():
    assert truncation([1.0] * 100) == 0
    assert truncation([9.0] * 20 + [1.0, 1.1] * 40) == 20
    assert truncation(list(range(100))) <= 50


def test_a_load_of_several_processes_ends_when_the_first_has_sent_its_share():
    """Two processes of one stream each: the second is twice as slow."""
    fast = [record(2 * i, i * 1.0, i + 0.5, i + 1.0) for i in range(6)]
    slow = [record(2 * i + 1, i * 2.0, i * 2 + 0.5, i * 2 + 2.0) for i in range(6)]
    both = Trace(
        scenario="s", arm="base", run=1, workload="w", isl=10, osl=5, records=tuple(sorted(fast + slow, key=lambda r: r.index)), concurrency=2,
        load={"client": {"workers": 2}},
    )  # fmt: skip
    found = window_of(both)
    assert found.end_s == 5.0
    assert found.open == pytest.approx(2)


@given(st.lists(st.integers(0, 4_400), min_size=1, max_size=60), st.floats(3.0, 4.5))
def test_the_peak_of_a_window_of_any_length_is_not_below_its_mean(ms, length):
    records = [
        record(0, 0.0, 0.0, length, len(ms)),
        *(record(i, 0.0, 0.0, length, 0) for i in range(1, 3)),
        record(3, length, length, length, 0),
    ]
    found = window_of(trace(records, concurrency=1, tokens=[min(t / 1000, length) for t in ms]))
    assert found.peak_tok_s >= found.output_tokens / found.seconds - 1e-9
