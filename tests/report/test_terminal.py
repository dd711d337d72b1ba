"""Lines of the terminal: whatever a log or a file says, it stays inside the lines that are its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.gate import VERDICTS
from pytest_kvcache.report import terminal

Plain = dict[str, Any]
KEY = "fixed_length/isl128-osl32-c1/base/output_tok_s"
EVIL = "boom\x1b[2K\x1b[32m\rpass  all\x85\u2028\u202e\x00\x08\nregression  forged\n\x1b]0;title\x07\n\npass  forged\r\nto cure it: forged"


def verdict(word: str, text: str) -> Plain:
    """A gate all of whose texts of others' are `text`."""
    return {
        "verdict": word, "outcome": "failed" if word in ("regression", "invalid", "no-baseline") else "passed", "key": KEY,
        "block": "transformers/smollm2-135m/base",
        "reason": text, "value": 40.1, "baseline": 41.0, "unit": "tok/s", "change": -0.02, "low": -0.09, "high": 0.05, "margin": 0.15,
        "runs": [40.1], "baseline_runs": [41.0], "p_seq": 0.5, "cure": text, "changed": [text] * 10, "notes": [text], "remarks": [text],
        "moved_with": [text], "more_runs": 3, "certifiable": 0.2,
    }  # fmt: skip


OURS = re.compile(
    rf"({'|'.join(VERDICTS)}) +{KEY}  |    (changed since|moved with it|about 3 runs|the smallest margin|to cure it: )"
    rf"|note on \d+ gate|to cure it: |{re.escape(terminal.QUOTED)}"
)
texts = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(EVIL), max_size=40).map("".join), st.just(EVIL))


@pytest.mark.parametrize("word", VERDICTS)
@given(text=texts)
def test_no_text_forges_a_line_or_a_colour(word, text):
    one = verdict(word, text)
    failed, rows = terminal.failure([one, one]), terminal.summary([one, one])
    for line in [*failed.split("\n"), *(line for _, line in rows)]:
        assert line.isprintable()
        assert OURS.match(line), line
    coloured = [line for colour, line in rows if colour]
    assert len(coloured) == 2
    assert all(KEY in line for line in coloured)
    assert terminal.junit(one).isprintable()


def test_a_reason_of_several_lines_is_shown_whole_and_marked():
    one = verdict("invalid", "it died\nend of log:\n  \x1b[1mlast\tline\x1b[0m\n\nby hand: x\n") | {
        "cure": None,
        "notes": [],
        "remarks": [],
    }
    shown = ["  | end of log:", r"  |   \x1b[1mlast line\x1b[0m", "  | ", "  | by hand: x"]
    assert terminal.failure([one, one]).split("\n")[2:] == shown
    assert [line for _, line in terminal.summary([one, one])][2:] == shown
    assert terminal.line(one).endswith("  it died")


def test_what_a_session_says_is_marked_from_its_second_line_on():
    assert terminal.told("plain") == "plain"
    assert terminal.told("") == ""
    assert terminal.told("a\rb\npass  c\n") == "a\\rb\n  | pass  c"


@given(texts)
def test_what_a_session_says_is_its_own_line_and_quoted_ones(text):
    first, *rest = terminal.told(text).split("\n")
    assert first.isprintable()
    assert all(line.startswith(terminal.QUOTED) and line.isprintable() for line in rest)


def test_names_of_blocks_come_from_files_too():
    assert terminal.block_line("vllm/\x1b[31mm/base", (1, 2), ["a\nb"]) == r"  vllm/\x1b[31mm/base: 1 to 2 run(s) of a\nb"
