"""Gates that could never fail or never pass are refused before anything is measured, with the test, the metric and the cure."""

import pytest


def with_gate(project, gate):
    suite = project.folder / "test_fixed.py"
    suite.write_text(suite.read_text().replace('"output_tok_s", "tpot_ms.p50"', gate))
    return project


@pytest.mark.parametrize(("gate", "words"), [
    ('Gate("output_tok_s", margin=0.8)', "Gate('output_tok_s'): margin=0.8 lets a loss of 80 % pass, it could hardly ever fail; at most 0.5"),
    ('Gate("tpot_ms.p50", margin=0.0005)', "Gate('tpot_ms.p50'): margin=0.0005 can never be certified: runs resolve 0.1 %; at least 0.001"),
    ('"ttft_ms.p99"', "Gate('ttft_ms.p99'): ttft_ms.p99 of 8 requests is only their largest value; gate a lower quantile, or ask for more (requests=500)"),
    ('Gate("output_tok_s", floor=-1)', "floor=-1 must be 0 or a change in the metric's own unit"),
])  # fmt: skip
@pytest.mark.parametrize("args", [(), ("--collect-only",), ("--kv-record=missing",)])
def test_a_gate_that_says_nothing_is_a_usage_error(kv_project, gate, words, args):
    result = with_gate(kv_project, gate).run(*args)
    assert words in result.out
    assert "Traceback" not in result.out
    assert result.starts == []
    if "floor" not in gate:  # that one is refused when the file is read
        assert result.code == 4
        assert "fixed_length/isl64-osl16-c1" in result.out


def test_a_floor_is_heeded_from_the_marker_to_the_verdict(recorded):
    """Everything takes half as long again: 10 ms of a token's 20 ms."""
    slow = {"seed": 1, "all_slow": 1.5, "cv": 0.005}
    assert set(recorded.run("-k", "fixed", **slow).verdicts.values()) == {"regression"}
    result = with_gate(recorded, 'Gate("tpot_ms.p50", floor=15.0)').run("-k", "fixed", **slow)
    assert set(result.verdicts.values()) == {"pass"}, result.out
    assert "a change below 15 is no loss, so that the margin is 7" in result.out
