"""What is reported beside what was written: TTFT, TPOT, ITL, slot gaps, also over TLS, and the traps of real servers."""

SCENARIOS = ("A1", "A64", "A256", "B256", "L1", "L64", "L256", "T1", "T2")


def test_accuracy(measured):
    assert measured["asked"] == measured["sent"] == measured["done"]
    assert measured["aborted"] == 0
    assert measured["tokens"] == measured["tokens_reported"]
