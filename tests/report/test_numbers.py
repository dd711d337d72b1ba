"""How numbers are written: three digits, real minus signs, null as a dash."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pytest_kvcache.report import numbers


def ascii_of(text: str) -> str:
    return text.replace(numbers.MINUS, "-").replace(numbers.THIN, " ").replace(numbers.NONE, "none")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (41, "41"), (41.0, "41.0"), (23.37, "23.4"), (0.02131, "0.0213"), (99.96, "100"), (12345.6, "12 346"),
        (919824, "919 824"), (-919824, "-919 824"), (0.0, "0"), (-3.14159, "-3.14"), (1.5e-7, "1.50e-7"),
        (2e18, "2.00e18"),
        (None, "none"), (math.nan, "none"), (-math.inf, "none"), (True, "none"), ("41", "none"), (10**400, "none"),
    ],
)  # fmt: skip
def test_number_has_three_digits(value: Any, text: str) -> None:
    assert ascii_of(numbers.number(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-0.123, "-12.3 %"),
        (0.05, "+5.0 %"),
        (0.0, "0.0 %"),
        (-1e-9, "0.0 %"),
        (0.0002, "+0.02 %"),
        (2.5, "+250 %"),
        (None, "none"),
    ],
)
def test_percent_has_a_sign(value: Any, text: str) -> None:
    assert ascii_of(numbers.percent(value)) == text


@pytest.mark.parametrize(("value", "text"), [(0.15, "15 %"), (0.025, "2.5 %"), (-0.001, "0.1 %"), (None, "none")])
def test_share_has_neither_sign_nor_idle_zeros(value: Any, text: str) -> None:
    assert ascii_of(numbers.share(value)) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (-0.151, -0.094, "-15.1 to -9.4 %"),
        (None, 0.05, "none to +5.0 %"),
        (-0.05, None, "-5.0 to none %"),
        (None, None, "none"),
    ],
)
def test_interval(low: Any, high: Any, text: str) -> None:
    assert ascii_of(numbers.interval(low, high)) == text


@pytest.mark.parametrize(("value", "text"), [(0.8, "= 0.8"), (0.00012, "= 0.00012"), (1e-9, "< 0.0001"), (None, "none")])
def test_probability(value: Any, text: str) -> None:
    assert ascii_of(numbers.probability(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.2, "5.2 s"),
        (30.14, "30 s"),
        (59.96, "1 min 0 s"),
        (231.4, "3 min 51 s"),
        (3599.7, "1 h 0 min"),
        (7330, "2 h 2 min"),
        (None, "none"),
    ],
)
def test_duration_is_said_as_one_would(value: Any, text: str) -> None:
    assert ascii_of(numbers.duration(value)) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-11-29T20:37:00Z", "2026-11-29 20:37 UTC"),
        ("2026-11-29T20:37:00+01:00", "2026-11-29 20:37 UTC+01:00"),
        ("soon", "soon"),
    ],
)
def test_moment_is_to_the_minute_with_its_zone(text: str, shown: str) -> None:
    assert numbers.moment(text) == shown


def test_elide_keeps_both_ends() -> None:
    short = numbers.elide("isl128-osl32-c1-very-long", 11)

    assert len(short) == 11
    assert short.startswith("isl12")
    assert short.endswith("-long")


def test_clean_replaces_what_cannot_be_shown_and_keeps_the_rest() -> None:
    assert numbers.clean({"a\x00": ["b\u202e", 1.5, None, True]}) == {"a\ufffd": ["b\ufffd", 1.5, None, True]}
