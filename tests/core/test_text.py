"""Text of others on a terminal: one line of it, whatever is in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.text import one_line


@given(st.text())
def test_every_text_is_one_printable_line(text):
    shown = one_line(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
    assert one_line(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain – ünï 中", "plain – ünï 中"),
        ("a\tb\N{NO-BREAK SPACE}c\N{THIN SPACE}d", "a b c d"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\rc\x0bd\x85e\u2028f", r"a\nb\rc\x0bd\x85e\u2028f"),
        ("\x00\x07\x08\x7f", r"\x00\x07\x08\x7f"),
        ("\u202eevil\ud800", r"\u202eevil\ud800"),
    ],
)
def test_what_a_terminal_would_act_on_is_an_escape(text, shown):
    assert one_line(text) == shown
